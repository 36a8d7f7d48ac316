"""`shardwise export`: write a checkpoint in another format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli.terminal import Advance, AsJson, print_json, progress, stdout_console
from shardwise.events import Event, Sink

if TYPE_CHECKING:
    from shardwise.convert.write import ConversionReport
    from shardwise.formats.specification import Specification

FORMATS = ("hf", "dcp", "torch", "deepspeed-universal", "native")
FLOATS = ("float64", "float32", "float16", "bfloat16")
UNIT_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
MIN_MEMORY = 16 << 20


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint, or the root of a run: its newest one.")
]
Target = Annotated[str, typer.Argument(metavar="DST", help="The new directory to write.")]
Step = Annotated[int | None, _option("N", "The step, if SRC is a root. Default: the newest.")]
To = Annotated[str, _option("FORMAT", "The format: hf, dcp, torch, deepspeed-universal or native.")]
Only = Annotated[
    list[str] | None, _option("PATTERN", "Write only names that match: 'model.*'. Repeatable.")
]
Skip = Annotated[
    list[str] | None, _option("PATTERN", "Leave out names that match: 'optimizer.*'. Repeatable.")
]
Root = Annotated[str, _option("NAME", "The key of the model in the checkpoint.")]
DType = Annotated[
    str | None,
    _option("DTYPE", "Convert the model's floats: bfloat16, float16, float32 or float64."),
]
Config = Annotated[str | None, _option("FILE", "With --to hf: the config.json to copy.")]
Spec = Annotated[
    str | None, _option("FILE", "A layout specification of SRC: a file, or a built-in name.")
]
RankFiles = Annotated[
    str | None, _option("PATTERN", "With --spec: the files of the ranks, for example r{tp}.pt.")
]
Let = Annotated[
    list[str] | None,
    _option("NAME=N", "With --spec: the value of a name that it declares. Repeatable."),
]
SkipUnknown = Annotated[
    bool, typer.Option("--skip-unknown", help="Leave out pickled values of unknown classes.")
]
Format = Annotated[str | None, _option("FORMAT", "The format to read, if SRC has several formats.")]
Index = Annotated[
    str | None, _option("FILE", "Keep an index of SRC in FILE, to open it faster next time.")
]
MaxMemory = Annotated[str, _option("SIZE", "Memory limit for each process, such as 500M.")]
MaxFile = Annotated[str, _option("SIZE", "Size limit for the tensors in each file.")]


def export(
    source: Source,
    target: Target,
    to: To = "hf",
    step: Step = None,
    only: Only = None,
    skip: Skip = None,
    root: Root = "model",
    dtype: DType = None,
    config: Config = None,
    spec: Spec = None,
    files: RankFiles = None,
    let: Let = None,
    skip_unknown: SkipUnknown = False,
    format: Format = None,  # noqa: A002 - the option's name
    index: Index = None,
    max_memory: MaxMemory = "1G",
    max_file: MaxFile = "5G",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format.

    \b
    --to hf                   Hugging Face safetensors: the model alone.
    --to dcp                  PyTorch DCP: model, optimizer and values.
    --to torch                One file, as torch.save writes it.
    --to deepspeed-universal  For DeepSpeed, ZeRO 1, 2 and 3.
    --to native               shardwise's own format. Not needed for loading:
                              other formats are loaded in place.

    SRC does not change. All files are read back after they are written, and compared. To resume an
    interrupted export, run the same command again.

    \b
    To share the work among processes:
      torchrun --nproc-per-node 4 -m shardwise export SRC DST
    """
    _check_choice("--to", to, FORMATS)
    _check_choice("--dtype", dtype or FLOATS[0], FLOATS)
    options: dict[str, Any] = {
        "to": to,
        "step": "newest" if step is None else step,
        "only": only or (),
        "skip": skip or (),
        "root": root,
        "dtype": dtype,
        "config": config,
        "spec": _make_specification(spec, files, let or []),
        "skip_unknown": skip_unknown,
        "format": format,
        "index": index,
        "max_memory": _parse_size("--max-memory", max_memory, MIN_MEMORY),
        "max_file": _parse_size("--max-file", max_file, 1),
    }
    _run_export(source, target, options, as_json=as_json)


def _run_export(source: str, target: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Export together with the other processes of torchrun, if any. Rank 0 prints the report."""
    from shardwise import exporting

    with _join_process_group() as is_rank_0, _progress_of_events() as on_event:
        report = exporting.export(
            source, target, **options, on_event=on_event if is_rank_0 else None
        )
    if is_rank_0 and as_json:
        print_json(report)
    elif is_rank_0:
        _show_report(report)


def _show_report(report: ConversionReport) -> None:
    console = stdout_console()
    for line in report.left_out:
        console.print(Text(f"– left out: {fmt.printable(line)}", "yellow"))
    files = fmt.count(report.files, "file")
    resumed = f", {report.resumed} written by an earlier run" if report.resumed else ""
    written = Text.assemble(("✓ ", "green"), f"{report.path}  {files}{resumed}")
    console.print(written, soft_wrap=True)


@contextmanager
def _progress_of_events() -> Iterator[Sink]:
    """Yield an event handler that shows a progress bar, once the number of bytes is known."""
    with ExitStack() as bars:
        advance: Advance | None = None

        def on_event(event: Event) -> None:
            nonlocal advance
            if event.stage == "plan":
                advance = bars.enter_context(progress(event.bytes))
            elif advance is not None:
                advance(event.stage, event.bytes)

        yield on_event


@contextmanager
def _join_process_group() -> Iterator[bool]:
    """If torchrun started this process, join its process group. Yield whether this is rank 0."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def _make_specification(
    spec: str | None, files: str | None, let: list[str]
) -> Specification | None:
    from shardwise.formats.specification import spec as specification

    if spec is None:
        if files or let:
            raise typer.BadParameter("--files and --let belong to --spec: pass --spec FILE too")
        return None
    values = {}
    for assignment in let:
        name, _, value = assignment.partition("=")
        if not value.isdecimal():
            raise typer.BadParameter(f"--let {assignment}: expected NAME=N, for example vocab=3")
        values[name] = int(value)
    return specification(spec, files=files, **values)


def _check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise typer.BadParameter(f"{option} {value}: choose one of {', '.join(allowed)}")


def _parse_size(option: str, text: str, minimum: int) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{option} {text}: expected a size, for example 500M or 5G")
    size = int(float(match.group(1)) * 2 ** UNIT_SHIFTS[match.group(2).upper()])
    if size < minimum:
        raise typer.BadParameter(f"{option} {text}: must be at least {fmt.format_bytes(minimum)}")
    return size
