"""`export`: write a checkpoint of any format in another format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

import torch.distributed as dist

from shardwise.api import Place, open_place, resolved_group
from shardwise.convert.export import ExportOptions, write_export
from shardwise.convert.write import ConversionReport
from shardwise.engine.compile_and_gc import pause_gc
from shardwise.engine.group import Group
from shardwise.engine.rounds import Round
from shardwise.events import Recorder, Sink
from shardwise.formats.specification import Specification
from shardwise.opening import OpenOptions, agree_on_place, open_any
from shardwise.retention import Choice


def export(
    place: Place,
    target: str | os.PathLike[str],
    *,
    to: str = "hf",
    step: Choice = "newest",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    model_key: str = "model",
    dtype: str | None = None,
    verify: bool = True,
    spec: Specification | None = None,
    skip_unknown: bool = False,
    format: str | None = None,  # noqa: A002 - the usual name
    max_file: int = 5 << 30,
    group: dist.ProcessGroup | Group | None = None,
    on_event: Sink | None = None,
) -> ConversionReport:
    """Write a checkpoint in another format. All ranks call this function and share the work.

    Written files are read back and compared.

    Args:
        place: a checkpoint in any format, or the root of a run.
        target: a new directory.
        to: `"hf"` (safetensors), `"dcp"` (torch.distributed.checkpoint), `"torch"` (one file of
            torch.save), `"deepspeed-universal"` (for ZeRO 1, 2 and 3), or `"native"`.
        only, skip: shell patterns of the names to write, as for `load`.
        model_key: the key of the model in the state, for formats that hold only a model; "" if the
            checkpoint is only a model.
        dtype: the dtype to convert the model's floats to; an error for quantized tensors.
        step, verify, spec, skip_unknown, format: as in `open`. `verify` compares all copies.
        max_file: the most bytes of tensors in a file.
        group, on_event: as for `load`.

    Raises:
        CheckpointExistsError: the target holds something else, or another process writes there.
        StateError: an option is invalid, or the format cannot hold a selected tensor.
        MismatchError: the source stores a tensor several times, and the copies differ.
        CorruptionError: the source is damaged, or a written file does not read back as written.
    """
    options = ExportOptions(target=target, to=to, only=only, skip=skip, model_key=model_key,
        dtype=dtype, verify=verify, max_file=max_file)  # fmt: skip
    how = OpenOptions(spec=spec, skip_unknown=skip_unknown, format=format, step=step)
    recorder = Recorder(on_event)
    with pause_gc(), resolved_group(group) as ranks, ExitStack() as cleanup:
        with recorder.stage("open"):
            with Round(ranks, "beginning an export") as all_ranks:
                options.check()
                store = open_place(place)
                agree_on_place(all_ranks, store, how, options.settings)
            source, layout = open_any(store, ranks, cleanup, how)
        return write_export(options, source, layout, ranks, recorder)
