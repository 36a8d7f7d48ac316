"""`shardwise export`: write a checkpoint in another format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.text import Text

import shardwise as sw
from shardwise.kernel.events import format_count
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.terminal import AsJson, print_json, progress, stdout_console

UNIT_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint, or the root of a run: its newest one.")
]
Target = Annotated[str, typer.Argument(metavar="DST", help="The new directory to write.")]
Step = Annotated[int | None, _option("N", "The step, if SRC is a root. Default: the newest.")]
To = Annotated[
    str, _option("FORMAT", "The format: hf, peft, dcp, torch, deepspeed-universal or native.")
]
Only = Annotated[
    list[str] | None, _option("PATTERN", "Write only names that match: 'model.*'. Repeatable.")
]
Skip = Annotated[
    list[str] | None, _option("PATTERN", "Leave out names that match: 'optimizer.*'. Repeatable.")
]
ModelKey = Annotated[str, _option("KEY", "The key of the model in the checkpoint.")]
DType = Annotated[
    str | None,
    _option("DTYPE", "Convert the model's floats: bfloat16, float16, float32 or float64."),
]
Quantize = Annotated[
    list[str] | None,
    _option("PATTERN", "With --to hf: write these weights in block FP8. Repeatable."),
]
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
Base = Annotated[
    str | None, _option("DIR", "With --to hf: the Hugging Face model that was trained.")
]
MaxFile = Annotated[str, _option("SIZE", "Size limit for the tensors in each file.")]


def export(
    source: Source,
    target: Target,
    to: To = "hf",
    step: Step = None,
    only: Only = None,
    skip: Skip = None,
    model_key: ModelKey = "model",
    dtype: DType = None,
    quantize: Quantize = None,
    spec: Spec = None,
    files: RankFiles = None,
    let: Let = None,
    skip_unknown: SkipUnknown = False,
    format: Format = None,  # noqa: A002 - the option's name
    base: Base = None,
    max_file: MaxFile = "5G",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format.

    \b
    --to hf                   Hugging Face safetensors: the model alone.
                              --base adds its configuration and tokenizer, and
                              names Megatron-Core's tensors as in that model.
    --to peft                 The adapters of a model of PEFT.
    --to dcp                  PyTorch DCP: model, optimizer and values.
    --to torch                One file, as torch.save writes it.
    --to deepspeed-universal  For DeepSpeed, ZeRO 1, 2 and 3.
    --to native               shardwise's own format. Not needed for loading:
                              other formats are loaded in place.

    SRC does not change. All files are read back after they are written, and compared.

    \b
    To share the work among processes:
      torchrun --nproc-per-node 4 -m shardwise export SRC DST
    """
    options: dict[str, Any] = {
        "to": to,
        "step": "newest" if step is None else step,
        "only": only or (),
        "skip": skip or (),
        "model_key": model_key,
        "dtype": dtype,
        "quantize": quantize or (),
        "spec": _make_specification(spec, files, let or []),
        "skip_unknown": skip_unknown,
        "format": format,
        "base": base,
        "max_file": _parse_size("--max-file", max_file),
    }
    with _join_process_group() as is_rank_0, progress() as on_event:
        report = sw.export(source, target, **options, on_event=on_event if is_rank_0 else None)
    if is_rank_0 and as_json:
        print_json(report)
    elif is_rank_0:
        _show_report(report)


def _show_report(report: sw.ConversionReport) -> None:
    console = stdout_console()
    for line in report.left_out:
        console.print(Text(f"– left out: {fmt.printable(line)}", "yellow"))
    files = format_count(report.files, "file")
    written = Text.assemble(("✓ ", "green"), f"{report.path}  {files}")
    console.print(written, soft_wrap=True)


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


def _make_specification(spec: str | None, files: str | None, let: list[str]) -> Any:
    if spec is None:
        if files or let:
            raise typer.BadParameter("--files and --let belong to --spec: pass --spec FILE too")
        return None
    values: dict[str, Any] = {}
    for assignment in let:
        name, _, value = assignment.partition("=")
        if not value.isdecimal():
            raise typer.BadParameter(f"--let {assignment}: expected NAME=N, for example vocab=3")
        values[name] = int(value)
    return sw.spec(spec, files=files, **values)


def _parse_size(option: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{option} {text}: expected a size, for example 500M or 5G")
    return int(float(match.group(1)) * 2 ** UNIT_SHIFTS[match.group(2).upper()])
