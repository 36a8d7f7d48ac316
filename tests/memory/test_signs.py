"""When an agent sees that there is something to do: not sooner than it is good, and no later."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.memory import records
from shardwise.memory.agent import signs
from shardwise.memory.agent.attempts import Seen
from shardwise.memory.home import Home, Place, new_run
from shardwise.memory.ranks import RankLock

SAVE = "0" * 16
FILES = [f"r{rank:05d}-{SAVE}.safetensors" for rank in (0, 1)]
COPYING = {
    FILES[0],
    records.staged(FILES[0]),
    records.request("persist", SAVE),
    records.copying(FILES[1]),
}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A snapshot of a node with two ranks."""
    return Place(Home(tmp_path).run(new_run()), 1)


def due(place: Place, names: set[str]) -> tuple[list[str], list[str]]:
    """What is to have its checksums taken, and what is to be copied to storage."""
    seen = Seen(place, {place.step: frozenset(names)})
    return signs.of_sealing(seen), signs.of_copying(seen)


def test_nothing_is_begun_while_another_rank_copies(place: Place) -> None:
    presence = RankLock(place.run, 1)
    assert due(place, COPYING) == ([], [])
    assert due(place, COPYING - {records.copying(FILES[1])}) == ([FILES[0]], [SAVE])
    presence.end()


def test_a_note_without_its_file_is_nothing_to_do(place: Place) -> None:
    """The trainer was killed before it moved the file to its place."""
    assert due(place, {records.staged(FILES[0])}) == ([], [])


def test_a_rank_that_was_lost_as_it_copied_is_not_waited_for(place: Place) -> None:
    """The agent that leads would wait for this node's part, and rescue nothing meanwhile."""
    RankLock(place.run, 1).leave()
    assert due(place, COPYING) == ([FILES[0]], [SAVE])


def test_a_rank_that_is_stuck_as_it_copies_is_not_waited_for_once_the_commit_has_failed(
    place: Place,
) -> None:
    presence = RankLock(place.run, 1)
    assert due(place, {*COPYING, records.outcome("commit", SAVE)}) == ([FILES[0]], [SAVE])
    presence.end()
