"""Export a checkpoint: check the options, open it, select, plan the files, write."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec
import torch.distributed as dist

from shardwise.kernel.adapters.values import tensor_names_in_value
from shardwise.kernel.api import Place, open_place, resolved_group
from shardwise.kernel.checkpoint import Checkpoint
from shardwise.kernel.engine.compile_and_gc import pause_gc
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.root import Choice
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import StateError
from shardwise.kernel.events import Recorder, Sink
from shardwise.kernel.manifest.layout import Layout, encode_layout
from shardwise.kernel.opening import OpenOptions, agree_to_open
from shardwise.kernel.state.plain_values import describes_tensor
from shardwise.kernel.store import Files, open_store
from shardwise.parts.checks.compare import check_all_together
from shardwise.parts.convert.block_fp8 import (
    CONFIG,
    QuantizingSource,
    describe_quantization,
    is_in_block_fp8,
    quantize_tensors,
)
from shardwise.parts.convert.naming import name_as_published
from shardwise.parts.convert.plan import (
    ExportContents,
    ExportFiles,
    TargetTensor,
    describe_empty_model,
)
from shardwise.parts.convert.published import PublishedFiles, read_published_files
from shardwise.parts.convert.targets import TARGETS
from shardwise.parts.convert.write import ConversionReport, write_files
from shardwise.parts.quantized.pairs import REMEDY, find_quantized
from shardwise.ports.binding import Selection
from shardwise.ports.foreign import Specification

FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of an export: see `shardwise.export`."""

    target: str | os.PathLike[str]
    to: str
    only: Sequence[str]
    skip: Sequence[str]
    model_key: str
    dtype: str | None
    verify: bool
    max_file: int
    base: str | os.PathLike[str] | None
    has_spec: bool
    quantize: Sequence[str] = ()

    def settings_with(self, published: PublishedFiles | None) -> str:
        """Return the options and a digest of files as text, which must be equal on all ranks."""
        target, digest = open_store(self.target), "" if published is None else published.digest
        return (
            f"{target}, {self.to}, {self.only}, {self.skip}, {self.model_key}, {self.dtype}, "
            f"{self.max_file}, {self.quantize}, {digest}"
        )

    def check(self) -> None:
        """Check the values of all options.

        Raises:
            StateError: a value is invalid.
            StoreError: the target is not a path or URL.
        """
        open_store(self.target)
        if self.to not in TARGETS:
            raise StateError(f"to={self.to!r}: unknown format; choose one of {', '.join(TARGETS)}")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise StateError(f"dtype={self.dtype!r}: choose one of {', '.join(FLOATS)}")
        if type(self.max_file) is not int or self.max_file < 1:
            raise StateError(f"max_file={self.max_file!r}: expected a number of bytes, at least 1")
        if self.quantize and self.to != "hf":
            raise StateError("quantize=: only to='hf' writes block FP8: leave it out")
        if isinstance(self.quantize, str):
            raise StateError(f"quantize={self.quantize!r}: expected a list of patterns")
        if self.base is not None and self.to != "hf":
            raise StateError(f"base={str(self.base)!r}: it belongs to to='hf': leave it out")


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
    quantize: Sequence[str] = (),
    verify: bool = True,
    spec: Specification | None = None,
    skip_unknown: bool = False,
    format: str | None = None,  # noqa: A002 - the usual name
    max_file: int = 5 << 30,
    base: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | Group | None = None,
    on_event: Sink | None = None,
) -> ConversionReport:
    """Write a checkpoint in another format, and read it back. All ranks call it and share the work.

    Args:
        place: a checkpoint in any format, or the root of a run.
        target: a new directory.
        to: `"hf"` (safetensors), `"peft"` (adapters), `"dcp"` (torch.distributed.checkpoint),
            `"torch"` (torch.save), `"deepspeed-universal"` (for ZeRO 1 to 3), or `"native"`.
        only, skip: shell patterns of the names to write, as for `load`.
        model_key: the key of the model in the state, for formats that hold only a model; "" if the
            checkpoint is only a model.
        dtype: the dtype to convert the model's floats to; an error for quantized tensors.
        quantize: with `"hf"`, shell patterns of the names of weights to write in block FP8, such as
            `["*_proj.weight"]`.
        step, verify, spec, skip_unknown, format: as in `open`. `verify` compares all copies.
        max_file: the most bytes of tensors in a file.
        base: with `"hf"`, the directory of the Hugging Face model whose configuration and tokenizer
            are copied. They say how tensors with Megatron-Core's names are named there.
        group, on_event: as for `load`.

    Raises:
        CheckpointExistsError: the target holds something else, or another process writes there.
        CheckpointNotFoundError: there is no checkpoint, or `base` has no `config.json`.
        StateError: an option is invalid, or the format cannot hold a selected tensor.
        MismatchError: copies of a tensor differ, or the model does not fit its `config.json`.
        CorruptionError: the source is damaged, or a written file does not read back as written.
    """
    options = ExportOptions(target=target, to=to, only=only, skip=skip, model_key=model_key,
        dtype=dtype, verify=verify, max_file=max_file, base=base, quantize=quantize,
        has_spec=spec is not None)  # fmt: skip
    how = OpenOptions(spec=spec, skip_unknown=skip_unknown, format=format, step=step)
    recorder = Recorder(on_event)
    with pause_gc(), resolved_group(group) as ranks, ExitStack() as cleanup:
        with recorder.stage("open"):
            with Round(ranks, "opening a checkpoint") as all_ranks:
                options.check()
                published = None if base is None else read_published_files(base)
                store, settings = open_place(place), options.settings_with(published)
                check = agree_to_open(all_ranks, store, ranks, cleanup, how, settings)
            source, layout = check()
        return _write_export(options, source, layout, published, ranks, recorder)


def _write_export(
    options: ExportOptions,
    source: Files,
    layout: Layout,
    published: PublishedFiles | None,
    group: Group,
    recorder: Recorder,
) -> ConversionReport:
    """Write the selected tensors and values of a checkpoint. All ranks call it together.

    Args:
        published: the files to copy beside the weights of a model.

    Raises:
        CheckpointExistsError: the target holds something else, or another process writes there.
        StateError: nothing is selected, or the format cannot hold a name that is selected.
        MismatchError: the source stores a tensor several times, and the copies differ.
        CorruptionError: the source is damaged, or a written file does not read back as written.
    """
    lines: tuple[str, ...] = ()
    if options.to == "hf" and not options.has_spec:
        layout, lines = name_as_published(source, layout, published, options.model_key)
    selected, tensors = _select_contents(options, layout)
    digest = hashlib.blake2b(encode_layout(layout), digest_size=8)  # the same on all ranks
    digest.update(f"{source}: {options.settings_with(published)}".encode())
    save_id = digest.hexdigest()
    unskipped = Selection(skip=options.skip)
    objects = tuple(each for each in layout.objects if unskipped.selects(each.name))
    described = replace(layout, objects=objects)
    contents = ExportContents(
        selected, described, tensors, save_id, options.model_key, options.max_file
    )
    files = TARGETS[options.to](contents)
    files = replace(files, left_out=(*files.left_out, *lines))
    if options.to == "hf":
        files = _with_model_files(files, source, published, contents)
    checkpoint = Checkpoint(source, layout, verify=options.verify)
    reader = QuantizingSource(checkpoint, tensors)
    if options.verify:
        names = {part.name for file in files.tensor_files for part in file.tensor_parts()}
        check_all_together(source, layout, names - reader.computed, recorder, group)
    return write_files(files, reader, open_store(options.target), group, recorder)


def _with_model_files(
    files: ExportFiles,
    source: Files,
    published: PublishedFiles | None,
    contents: ExportContents,
) -> ExportFiles:
    """Add the files beside the weights of a model. They are written before the index of weights.

    These are the published files, and the configuration of a model in block FP8.
    """
    model = contents.model_tensors()
    further: Mapping[str, bytes] = {}
    lines: tuple[str, ...] = ()
    if published is not None:
        floats = [(each.dtype, each.part.size) for each in model if each.dtype in FLOATS]
        quantized = is_in_block_fp8(model) or bool(find_quantized([each.entry for each in model]))
        further, lines = published.describing(floats, quantized=quantized)
    described, more = describe_quantization(source, model, further.get(CONFIG))
    further = {**further, **described}
    return replace(
        files,
        make_index_files=lambda sums: {**further, **files.make_index_files(sums)},
        left_out=(*files.left_out, *lines, *more),
    )


def _select_contents(
    options: ExportOptions, layout: Layout
) -> tuple[Layout, tuple[TargetTensor, ...]]:
    """Return a layout with the selected values, and the selected tensors.

    A tied tensor gets separate bytes if the tensor that it is tied to is not selected, or is
    written in another dtype.
    """
    model_key, dtype = options.model_key, options.dtype
    selection = Selection(options.only, options.skip)
    if not layout.tensors:
        raise StateError(
            "nothing to write: the checkpoint has no tensors; choose another checkpoint"
        )
    tensors = [each for each in layout.tensors if selection.selects(each.name)]
    if not tensors:
        raise StateError(
            f"nothing to write: only={[*options.only]} and skip={[*options.skip]} select none of "
            f"the {len(layout.tensors)} tensors, for example not {layout.tensors[0].name}: "
            "change the patterns"
        )
    names = dict.fromkeys(each.name for each in tensors)
    start = f"{model_key}." if model_key else ""
    converted = dict.fromkeys(n for n in names if dtype is not None and n.startswith(start))
    if dtype is not None and not converted:
        raise StateError(f"dtype={dtype!r}: {describe_empty_model(model_key, names)}")
    quantized = _parts_of_quantized(layout)
    if refused := [name for name in converted if name in quantized]:
        raise StateError(
            f"dtype={dtype!r}: {len(refused)} tensors are parts of quantized tensors, for example "
            f"{refused[0]} with {quantized[refused[0]]}, and converting one part alone changes the "
            f"values: leave out dtype= to copy them as they are, or {REMEDY}"
        )
    selected = []
    for each in tensors:
        stays_tied = each.same_as in names and (
            (each.same_as in converted) == (each.name in converted)
        )
        entry = each if stays_tied else msgspec.structs.replace(each, same_as=None)
        is_float = each.name in converted and each.dtype in FLOATS
        selected.append(TargetTensor(each.name, entry, dtype if dtype and is_float else each.dtype))
    objects = tuple(each for each in layout.objects if selection.selects(each.name))
    return replace(layout, objects=objects), quantize_tensors(selected, options.quantize)


def _parts_of_quantized(layout: Layout) -> dict[str, str]:
    """Return the names of all parts of quantized tensors, and what each belongs to."""
    found = {**find_quantized(layout.tensors)}
    for each in layout.objects:
        if describes_tensor(each.value):
            class_name = str(each.value["class"]).rpartition(":")[2]
            parts = tensor_names_in_value(each.value)
            found |= dict.fromkeys(parts, f"the other parts of the {class_name} {each.name}")
    return found
