"""`shardwise average` and `shardwise merge-lora`: one checkpoint, made of several."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.export import (
    FLOATS,
    FORMATS,
    LEAST_MEMORY,
    Config,
    DType,
    File,
    Folder,
    Memory,
    Only,
    Root,
    Skip,
    To,
    check_option,
    option,
    ranks,
    show_report,
    shown,
    size_option,
)
from shardwise.cli.terminal import AsJson

Places = Annotated[
    list[str], typer.Argument(metavar="SRC...", help="Two checkpoints or more, of any formats.")
]
Weight = Annotated[
    list[float] | None, option("N", "The weight of a SRC, in their order. Repeat it for each.")
]
TakeFirst = Annotated[
    list[str] | None, option("PATTERN", "Take what matches from the first SRC. Repeatable.")
]
Base = Annotated[str, typer.Argument(metavar="BASE", help="The model, of any format.")]
Adapter = Annotated[
    str, typer.Argument(metavar="ADAPTER", help="What PEFT saved, or a checkpoint of LoRA tensors.")
]
Alpha = Annotated[float | None, option("N", "The scaling is N / rank. Default: PEFT's lora_alpha.")]


def average(
    places: Places,
    target: Folder,
    weight: Weight = None,
    take_first: TakeFirst = None,
    to: To = "native",
    only: Only = None,
    skip: Skip = None,
    root: Root = "model",
    dtype: DType = None,
    config: Config = None,
    max_memory: Memory = "1G",
    max_file: File = "5G",
    as_json: AsJson = False,
) -> None:
    """Write the average of several checkpoints.

    Averages floating-point tensors. All others must be equal in all checkpoints; plain values
    that differ are left out. Formats for --to are those of `shardwise export`.

    If the command is interrupted, run it again: it goes on where it stopped.

    Example: shardwise average RUN/step-00000100 RUN/step-00000200 MEAN --only 'model.*'
    """
    from shardwise import surgery

    check_option("--to", to, FORMATS)
    check_option("--dtype", dtype or FLOATS[0], FLOATS)
    with ranks() as is_first, shown() as on_event:
        report = surgery.average(
            places,
            target,
            weights=weight or None,
            take_first=take_first or (),
            to=to,
            only=only or (),
            skip=skip or (),
            root=root,
            dtype=dtype,
            config=config,
            max_memory=size_option("--max-memory", max_memory, LEAST_MEMORY),
            max_file=size_option("--max-file", max_file, 1),
            on_event=on_event if is_first else None,
        )
    if is_first:
        show_report(report, as_json=as_json)


def merge_lora(
    base: Base,
    adapter: Adapter,
    target: Folder,
    alpha: Alpha = None,
    to: To = "native",
    only: Only = None,
    skip: Skip = None,
    root: Root = "model",
    dtype: DType = None,
    config: Config = None,
    max_memory: Memory = "1G",
    max_file: File = "5G",
    as_json: AsJson = False,
) -> None:
    """Write a model with a LoRA adapter merged into its weights.

    ADAPTER is a directory that PEFT saved, or a checkpoint whose names end in lora_A and lora_B.
    BASE stays as it is. Formats for --to are those of `shardwise export`.

    If the command is interrupted, run it again: it goes on where it stopped.

    Example: shardwise merge-lora llama adapter merged --to hf --config llama/config.json
    """
    from shardwise import surgery

    check_option("--to", to, FORMATS)
    check_option("--dtype", dtype or FLOATS[0], FLOATS)
    with ranks() as is_first, shown() as on_event:
        report = surgery.merge_lora(
            base,
            adapter,
            target,
            alpha=alpha,
            to=to,
            only=only or (),
            skip=skip or (),
            root=root,
            dtype=dtype,
            config=config,
            max_memory=size_option("--max-memory", max_memory, LEAST_MEMORY),
            max_file=size_option("--max-file", max_file, 1),
            on_event=on_event if is_first else None,
        )
    if is_first:
        show_report(report, as_json=as_json)
