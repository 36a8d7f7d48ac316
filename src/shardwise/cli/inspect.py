"""`shardwise inspect`: what a checkpoint holds, and where it lies."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.contents import below, contents, show_header, show_tree
from shardwise.cli.named import find, show
from shardwise.cli.outline import leaves, tree
from shardwise.cli.places import checkpoint_at, trusted_pieces
from shardwise.cli.terminal import output, print_json


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The directory of a checkpoint.")],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A name in it, or the start of names.")
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str | None,
        typer.Option(metavar="FORMAT", help="Which, if foreign checkpoints of several are there."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Leave nothing out: collapse no layers, list all boxes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what the checkpoint at PATH holds: its names as a tree, or one NAME in full.

    Layers that are alike are shown once. Of a tensor, the boxes that it is stored in are drawn,
    with the ranks that wrote them. Reads the manifest, not the data.

    With --json: {"path", "step", "saved_at", "save_id", "world_size", "bytes", "metrics",
    "files": [{"name", "rank", "bytes"}], "tensors": [{"name", "dtype", "shape", "bytes", "boxes",
    "same_as"}], "values": [{"name", "value"}], "per_rank": [names]}, where "boxes" counts them;
    with a NAME only what is below it. Of the NAME of one tensor: {"path", "name", "dtype",
    "shape", "bytes", "same_as", "boxes": [{"offset", "shape", "rank", "file", "bytes"}]}; of one
    value: {"path", "name", "value"}; of a value of each rank: {"path", "name", "values"}.
    """
    saved = checkpoint_at(path, format)
    pieces = trusted_pieces(saved)
    if name is not None:
        found = find(saved, pieces, name)
        if found is not None:
            print_json(found) if as_json else show(found, output(), everything=everything)
            return
        saved = below(saved, name)
    if as_json:
        print_json(contents(saved))
    else:
        console = output()
        if name is None:
            show_header(saved, console)
        show_tree(tree(leaves(saved.manifest), collapse=not everything), console)
