"""`shardwise convert` and `shardwise export`: a checkpoint written anew in another format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.terminal import output, print_json, progress
from shardwise.events import Event

Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any known format.")]
Folder = Annotated[str, typer.Argument(metavar="DST", help="A new directory.")]
To = Annotated[str, typer.Option(metavar="FORMAT", help="What to write.")]
Only = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Write only names that match it.")
]
Skip = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Leave out names that match it.")
]
Root = Annotated[str, typer.Option(metavar="NAME", help="What the model is below.")]
DType = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Convert the model's floats to it.")
]
Index = Annotated[
    str | None, typer.Option(metavar="FILE", help="Where to keep what was found of SRC.")
]
Memory = Annotated[str, typer.Option(metavar="SIZE", help="Bound on the memory of each process.")]
File = Annotated[str, typer.Option(metavar="SIZE", help="Bound on the tensors in a file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def convert(
    source: Source,
    target: Folder,
    to: To = "native",
    only: Only = None,
    skip: Skip = None,
    root: Root = "model",
    dtype: DType = None,
    index: Index = None,
    max_memory: Memory = "1G",
    max_file: File = "5G",
    as_json: AsJson = False,
) -> None:
    """Write the checkpoint SRC anew, as DST: native, or hf (safetensors of Hugging Face).

    If it is broken off, the same command goes on with it. To share the work among processes, run
    it by torchrun: torchrun --nproc-per-node 4 -m shardwise convert SRC DST. All that was written
    is read again at the end.

    With --json: {"path", "files", "bytes_written", "resumed", "left_out", "seconds"}; bytes,
    resumed files and seconds are those of rank 0.
    """
    from shardwise.exporting import export as write

    with _ranks() as is_first, ExitStack() as bars:
        advance = []

        def on_event(event: Event) -> None:
            if event.stage == "plan":
                advance.append(bars.enter_context(progress(event.bytes)))
            elif advance:
                advance[0](event.stage, event.bytes)

        report = write(
            source,
            target,
            to=to,
            only=only or (),
            skip=skip or (),
            root=root,
            dtype=dtype,
            index=index,
            max_memory=_bytes(max_memory),
            max_file=_bytes(max_file),
            on_event=on_event if is_first else None,
        )
    if not is_first:
        return
    if as_json:
        print_json(report)
        return
    console = output()
    for line in report.left_out:
        console.print(Text(f"– left out: {wording.printable(line)}", "yellow"))
    files = wording.count(report.files, "file")
    resumed = f", {report.resumed} of them from before" if report.resumed else ""
    console.print(Text.assemble(("✓ ", "green"), f"{report.path}  {files}{resumed}"))


def export(
    source: Source,
    target: Folder,
    to: To = "hf",
    only: Only = None,
    skip: Skip = None,
    root: Root = "model",
    dtype: DType = None,
    index: Index = None,
    max_memory: Memory = "1G",
    max_file: File = "5G",
    as_json: AsJson = False,
) -> None:
    """Write the model of the checkpoint SRC to DST, for other programs to read.

    The same as convert, but for the format that is written if none is named.
    """
    convert(source, target, to, only, skip, root, dtype, index, max_memory, max_file, as_json)


@contextmanager
def _ranks() -> Iterator[bool]:
    """The processes that torchrun has started, if it has; yields whether this is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size: 500M, 5G")
    return int(float(match.group(1)) * 2 ** UNITS[match.group(2).upper()])
