"""`shardwise convert` and `shardwise export`: a checkpoint written anew in another format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.terminal import Advance, output, print_json, progress
from shardwise.events import Event, Sink

if TYPE_CHECKING:
    from shardwise.convert.conversion import ConversionReport
    from shardwise.formats.specification import Specification

Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any known format.")]
Folder = Annotated[str, typer.Argument(metavar="DST", help="A new directory.")]
To = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT", help="native, hf, dcp, torch, or deepspeed-universal: what to write."
    ),
]
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
Spec = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="What SRC's tensors mean; or the name of one that ships."),
]
Files = Annotated[
    str | None, typer.Option(metavar="PATTERN", help="How files of ranks are named: r{tp}.pt.")
]
Let = Annotated[
    list[str] | None, typer.Option(metavar="NAME=N", help="A number that the spec declares.")
]
SkipUnknown = Annotated[
    bool, typer.Option("--skip-unknown", help="Leave out values in pickles of unknown classes.")
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT", help="Which of SRC, if checkpoints of several formats are there."
    ),
]
Index = Annotated[
    str | None, typer.Option(metavar="FILE", help="Where to keep what was found of SRC.")
]
Config = Annotated[
    str | None, typer.Option(metavar="FILE", help="The model's config.json, copied beside hf.")
]
Memory = Annotated[str, typer.Option(metavar="SIZE", help="Bound on the memory of each process.")]
File = Annotated[str, typer.Option(metavar="SIZE", help="Bound on the tensors in a file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

DEFAULTS = {"convert": "native", "export": "hf"}
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def convert(
    context: typer.Context,
    source: Source,
    target: Folder,
    to: To = None,
    only: Only = None,
    skip: Skip = None,
    root: Root = "model",
    dtype: DType = None,
    config: Config = None,
    spec: Spec = None,
    files: Files = None,
    let: Let = None,
    skip_unknown: SkipUnknown = False,
    format: Format = None,  # noqa: A002 - the option's name
    index: Index = None,
    max_memory: Memory = "1G",
    max_file: File = "5G",
    as_json: AsJson = False,
) -> None:
    """Write the checkpoint SRC anew, as DST.

    Formats are native, which is what convert writes if --to does not say; hf (safetensors of
    Hugging Face), which is what export writes then; dcp (torch.distributed.checkpoint); torch (one
    file of torch.save); and deepspeed-universal (for ZeRO 1, 2 and 3).

    If it is broken off, the same command goes on with it. To share the work, run it by torchrun:
    torchrun --nproc-per-node 4 -m shardwise convert SRC DST. All that was written is read again
    at the end.

    With --json: {"path", "files", "bytes_written", "resumed", "left_out", "seconds"}; bytes,
    resumed files and seconds are those of rank 0.
    """
    from shardwise.exporting import export

    with _ranks() as is_first, _shown() as on_event:
        report = export(
            source,
            target,
            to=to or DEFAULTS[str(context.info_name)],
            only=only or (),
            skip=skip or (),
            root=root,
            dtype=dtype,
            config=config,
            spec=_specification(spec, files, let or []),
            skip_unknown=skip_unknown,
            format=format,
            index=index,
            max_memory=_bytes(max_memory),
            max_file=_bytes(max_file),
            on_event=on_event if is_first else None,
        )
    if is_first:
        _report(report, as_json=as_json)


def _report(report: ConversionReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    console = output()
    for line in report.left_out:
        console.print(Text(f"– left out: {wording.printable(line)}", "yellow"))
    files = wording.count(report.files, "file")
    resumed = f", {report.resumed} of them from before" if report.resumed else ""
    console.print(Text.assemble(("✓ ", "green"), f"{report.path}  {files}{resumed}"))


@contextmanager
def _shown() -> Iterator[Sink]:
    """A bar of how far the conversion is, once it is known how much there is to do."""
    with ExitStack() as bars:
        advance: list[Advance] = []

        def on_event(event: Event) -> None:
            if event.stage == "plan":
                advance.append(bars.enter_context(progress(event.bytes)))
            elif advance:
                advance[0](event.stage, event.bytes)

        yield on_event


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


def _specification(spec: str | None, files: str | None, let: list[str]) -> Specification | None:
    from shardwise.formats.specification import spec as specification

    if spec is None:
        if files or let:
            raise typer.BadParameter("--files and --let belong to a --spec")
        return None
    sizes = {}
    for each in let:
        name, _, number = each.partition("=")
        if not number.isdecimal():
            raise typer.BadParameter(f"--let {each}: NAME=N is needed")
        sizes[name] = int(number)
    return specification(spec, files=files, **sizes)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size: 500M, 5G")
    return int(float(match.group(1)) * 2 ** UNITS[match.group(2).upper()])
