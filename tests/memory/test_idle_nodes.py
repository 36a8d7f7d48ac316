"""Nodes that no rank is on any more: found, though only others know of them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from shardwise.memory.network.assembling import Held, ask_around
from shardwise.memory.node import notes
from shardwise.memory.node.home import Home, write_note
from shardwise.memory.node.notes import Card, Draft
from shardwise.memory.node.place import Place
from tests.memory.test_server import RUN, TOKEN, serve

SAVE = "0" * 16


@pytest.mark.parametrize("name", [notes.draft(SAVE), notes.terms(SAVE)])
def test_nodes_are_found_that_only_others_know(tmp_path: Path, name: str) -> None:
    """A run that comes back to a node which was idle knows of the last nodes only in part."""
    with ExitStack() as served:
        homes = {node: Home(tmp_path / node) for node in ("b", "c")}
        ports = {node: served.enter_context(serve(home.path)).port for node, home in homes.items()}
        cards = {node: Card(node, f"http://127.0.0.1:{ports[node]}", TOKEN) for node in homes}
        nowhere = Card("c", "http://127.0.0.1:1", TOKEN)  # where its agent was before
        together = draft([Card("a", "", ""), cards["b"], cards["c"]])
        for home in homes.values():
            place = Place(home.run(RUN), 3)
            place.path.mkdir(parents=True)
            write_note(place.path / name, together)
        held = [Held("a", {}, [cards["b"], nowhere])]
        found, known = ask_around(held, {"a": Card("a", "", "")}, RUN, None)
    assert [each.node for each in found] == ["a", "b", "c"]
    assert all(list(each.steps) == [3] for each in found[1:])
    assert known["c"] == cards["c"]


def draft(nodes: list[Card]) -> Draft:
    """Of step 3, on these nodes."""
    return Draft(save_id=SAVE, step=3, manifest="", files=[], nodes=nodes, leader="a", root="")
