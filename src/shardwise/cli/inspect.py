"""`shardwise inspect`: what a checkpoint holds, and where it lies."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.contents import below, contents, show_header, show_tree
from shardwise.cli.named import find, show
from shardwise.cli.outline import leaves, tree
from shardwise.cli.places import checkpoint_at, trusted_pieces
from shardwise.cli.terminal import AsJson, output, print_json


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint, or a directory of checkpoints.")
    ],
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A tensor or value, or the beginning of their names."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The step, if PATH is a run's directory. Default: the newest."
        ),
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str | None,
        typer.Option(metavar="FORMAT", help="The format to read, if PATH has several: hf, dcp, …"),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every layer and every part of a tensor.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds.

    Without NAME: a tree of all names, with dtypes, shapes and sizes. Layers that are the same are
    shown once.

    With the NAME of a tensor: the parts (boxes) that it is stored in, and the ranks that wrote
    them. With the NAME of a value: the value. With the beginning of names, such as model.layers:
    the tree below it.

    Tensor data is not read, so this is fast for checkpoints of any size.
    """
    saved = checkpoint_at(path, format, step)
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
