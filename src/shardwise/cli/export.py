"""`shardwise export`: a checkpoint, written in another format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.terminal import Advance, AsJson, output, print_json, progress
from shardwise.events import Event, Sink

if TYPE_CHECKING:
    from shardwise.convert.conversion import ConversionReport
    from shardwise.formats.specification import Specification

FORMATS = ("hf", "dcp", "torch", "deepspeed-universal", "native")
FLOATS = ("float64", "float32", "float16", "bfloat16")
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
LEAST_MEMORY = 16 << 20


def option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint, or a directory of checkpoints.")
]
Step = Annotated[
    int | None, option("N", "The step, if SRC is a run's directory. Default: the newest.")
]
Folder = Annotated[str, typer.Argument(metavar="DST", help="The directory to write; a new one.")]
To = Annotated[str, option("FORMAT", "The format: hf, dcp, torch, deepspeed-universal or native.")]
Only = Annotated[
    list[str] | None, option("PATTERN", "Write only names that match: 'model.*'. Repeatable.")
]
Skip = Annotated[
    list[str] | None, option("PATTERN", "Leave out names that match: 'optimizer.*'. Repeatable.")
]
Root = Annotated[str, option("NAME", "Where the model is in SRC: names below it are the model's.")]
DType = Annotated[
    str | None,
    option("DTYPE", "Convert the model's floats: bfloat16, float16, float32 or float64."),
]
Spec = Annotated[
    str | None,
    option("FILE", "A layout specification of SRC: a file, or a built-in name."),
]
Files = Annotated[str | None, option("PATTERN", "With --spec: the ranks' files, as r{tp}.pt.")]
Let = Annotated[
    list[str] | None, option("NAME=N", "With --spec: a number that it declares. Repeatable.")
]
SkipUnknown = Annotated[
    bool,
    typer.Option("--skip-unknown", help="Leave out values in pickles whose classes are unknown."),
]
Format = Annotated[str | None, option("FORMAT", "The format to read, if SRC has several.")]
Index = Annotated[
    str | None, option("FILE", "Keep in FILE what is found of SRC, to open it faster next time.")
]
Config = Annotated[str | None, option("FILE", "With --to hf: the model's config.json, to copy.")]
Memory = Annotated[str, option("SIZE", "How much memory each process may use.")]
File = Annotated[str, option("SIZE", "How large each file may get.")]


def export(
    source: Source,
    target: Folder,
    to: To = "hf",
    step: Step = None,
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
    """Write a checkpoint in another format.

    \b
    --to hf                   Hugging Face safetensors: the model alone.
    --to dcp                  PyTorch DCP: model, optimizer and values.
    --to torch                One file, as torch.save writes it.
    --to deepspeed-universal  For DeepSpeed, ZeRO 1, 2 and 3.
    --to native               shardwise's own format. Not needed for loading:
                              other formats are loaded where they are.

    SRC stays as it is. What is written is read again and compared. If the command is interrupted,
    run it again: it goes on where it stopped.

    To share the work: torchrun --nproc-per-node 4 -m shardwise export SRC DST
    """
    from shardwise import exporting

    check_option("--to", to, FORMATS)
    check_option("--dtype", dtype or FLOATS[0], FLOATS)
    with ranks() as is_first, shown() as on_event:
        report = exporting.export(
            source,
            target,
            to=to,
            step="newest" if step is None else step,
            only=only or (),
            skip=skip or (),
            root=root,
            dtype=dtype,
            config=config,
            spec=_specification(spec, files, let or []),
            skip_unknown=skip_unknown,
            format=format,
            index=index,
            max_memory=size_option("--max-memory", max_memory, LEAST_MEMORY),
            max_file=size_option("--max-file", max_file, 1),
            on_event=on_event if is_first else None,
        )
    if is_first:
        show_report(report, as_json=as_json)


def show_report(report: ConversionReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    console = output()
    for line in report.left_out:
        console.print(Text(f"– left out: {wording.printable(line)}", "yellow"))
    files = wording.count(report.files, "file")
    resumed = f", {report.resumed} of them written before" if report.resumed else ""
    written = Text.assemble(("✓ ", "green"), f"{report.path}  {files}{resumed}")
    console.print(written, soft_wrap=True)


@contextmanager
def shown() -> Iterator[Sink]:
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
def ranks() -> Iterator[bool]:
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
            raise typer.BadParameter("--files and --let are used with --spec: give one")
        return None
    sizes = {}
    for each in let:
        name, _, number = each.partition("=")
        if not number.isdecimal():
            raise typer.BadParameter(f"--let {each}: NAME=N is needed, such as vocab=3")
        sizes[name] = int(number)
    return specification(spec, files=files, **sizes)


def check_option(option: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise typer.BadParameter(f"{option} {given}: one of {', '.join(known)} is needed")


def size_option(option: str, text: str, least: int) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{option} {text}: a size is needed, such as 500M or 5G")
    size = int(float(match.group(1)) * 2 ** UNITS[match.group(2).upper()])
    if size < least:
        raise typer.BadParameter(f"{option} {text}: at least {wording.size(least)} is needed")
    return size
