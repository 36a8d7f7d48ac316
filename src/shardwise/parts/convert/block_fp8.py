"""Write weights in block FP8, with the scales and the configuration that transformers reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, Protocol

import msgspec
import torch

from shardwise.kernel.boxes import Box
from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.store import Files
from shardwise.parts.convert.plan import TargetTensor
from shardwise.parts.formats.file_tree import ForeignFiles
from shardwise.parts.quantized.schemes import BLOCK_SIZE

CONFIG = "config.json"
FP8 = "float8_e4m3fn"
SCALES = "_scale_inv"
_SIZE = BLOCK_SIZE[0]
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_QUANTIZATION = "quantization_config"
_WEIGHT = ".weight"
Request = tuple[str, Box, torch.Tensor]


class Source(Protocol):
    """What an export reads from; a `Checkpoint` is one."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parts of the source that are not read, with the reason; one line each."""

    def read_parts(self, parts: Iterable[Request], *, cast: bool = False) -> None:
        """Read boxes of tensors into existing tensors; see `Checkpoint.read_parts`."""


def quantize_tensors(
    tensors: Sequence[TargetTensor], patterns: Sequence[str]
) -> tuple[TargetTensor, ...]:
    """Return the tensors to write, where those that match a pattern become FP8 with scales.

    Raises:
        StateError: a pattern matches nothing, or a tensor that cannot be written in block FP8.
    """
    for pattern in patterns:
        if not any(fnmatchcase(each.entry.name, pattern) for each in tensors):
            raise StateError(f"quantize={pattern!r}: no tensor that is written matches it")
    found = []
    for each in tensors:
        name, shape = each.entry.name, each.entry.shape
        if each.entry.same_as is None and any(fnmatchcase(name, p) for p in patterns):
            if each.entry.dtype not in _FLOATS or len(shape) < 2 or 0 in shape:
                raise StateError(
                    f"quantize=: {name} has the dtype {each.entry.dtype} and the shape "
                    f"{list(shape)}: only matrices of floats can be written in block FP8; correct "
                    "the patterns"
                )
            if shape[-2] % _SIZE or shape[-1] % _SIZE:
                raise StateError(
                    f"quantize=: {name} has the shape {list(shape)}, but transformers reads only "
                    f"whole blocks of {_SIZE} x {_SIZE}: correct the patterns"
                )
            grid = (*shape[:-2], shape[-2] // _SIZE, shape[-1] // _SIZE)
            scales = TensorEntry(f"{name}{SCALES}", "float32", grid)
            found.append(TargetTensor(each.name, each.entry, FP8))
            found.append(TargetTensor(f"{each.name}{SCALES}", scales, "float32"))
        else:
            found.append(each)
    return tuple(found)


class QuantizingSource:
    """A source whose weights can be read in block FP8, with their scales under further names.

    The numbers and scales are those of transformers. Rows of blocks are computed one by one, so
    memory does not grow with the tensor.

    Args:
        source: the source of the floats.
        tensors: the result of `quantize_tensors`.
    """

    def __init__(self, source: Source, tensors: Sequence[TargetTensor]) -> None:
        self._source, self.left_out = source, source.left_out
        self._quantized = {
            each.entry.name: each.entry
            for each in tensors
            if each.dtype == FP8 and each.entry.dtype != FP8
        }
        self._scaled_by = {f"{name}{SCALES}": name for name in self._quantized}
        self._last: tuple[object, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def computed(self) -> set[str]:
        """The names that only this source has."""
        return set(self._scaled_by)

    def read_parts(self, parts: Iterable[Request], *, cast: bool = False) -> None:
        """Read boxes of tensors into existing tensors.

        Raises:
            StateError: a weight that is quantized has values that are NaN or infinite.
            CorruptionError: bytes differ from the saved bytes.
        """
        plain = []
        for name, box, out in parts:
            if name in self._quantized:
                self._fill(self._quantized[name], box, out, _SIZE, 0)
            elif name in self._scaled_by:
                self._fill(self._quantized[self._scaled_by[name]], box, out, 1, 1)
            else:
                plain.append((name, box, out))
        self._source.read_parts(plain, cast=cast)

    def _fill(self, entry: TensorEntry, box: Box, out: torch.Tensor, rows: int, which: int) -> None:
        """Fill a box of the numbers or of the scales.

        Args:
            rows: how many rows of this tensor a row of blocks has.
            which: 0 for the numbers, 1 for the scales.
        """
        *outer, low, _ = (range(o, s) for o, s in zip(box.offset, box.stop, strict=True))
        first = box.offset[-1]
        for at in product(*outer):
            target = out[tuple(i - o for i, o in zip(at, box.offset[:-2], strict=True))]
            for block in range(low.start // rows, -(-low.stop // rows)):
                computed = self._row_of_blocks(entry, at, block)[which]
                start, stop = max(low.start, block * rows), min(low.stop, (block + 1) * rows)
                part = computed[start - block * rows : stop - block * rows]
                target[start - low.start : stop - low.start] = part[:, first : box.stop[-1]]

    def _row_of_blocks(
        self, entry: TensorEntry, at: tuple[int, ...], block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row of blocks: the numbers `(128, columns)`, and the scales `(1, blocks)`."""
        key = entry.name, at, block
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        columns = entry.shape[-1]
        shape = (*[1] * len(at), _SIZE, columns)
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        part = Box((*at, block * _SIZE, 0), shape)
        self._source.read_parts([(entry.name, part, values)], cast=True)
        tiles = values.view(_SIZE, columns // _SIZE, _SIZE)
        largest = tiles.abs().amax((0, 2))
        if not torch.isfinite(largest).all():
            raise StateError(
                f"{entry.name}: values in rows {block * _SIZE} to {(block + 1) * _SIZE} are NaN or "
                "infinite, so they have no scale: leave the tensor out of quantize="
            )
        most = torch.finfo(torch.float8_e4m3fn).max
        ones = torch.ones_like(largest)
        factors = torch.where(largest > 0, most / torch.where(largest > 0, largest, ones), ones)
        scaled = (tiles * factors[:, None]).clamp(-most, most)
        computed = scaled.to(torch.float8_e4m3fn).view(_SIZE, columns), (1.0 / factors)[None]
        self._last = key, computed
        return computed


def describe_quantization(
    source: Files, model: Sequence[TargetTensor], base: bytes | None = None
) -> tuple[Mapping[str, bytes], tuple[str, ...]]:
    """Return `config.json` for a model in block FP8, and lines.

    It is that of the base, or of the source, with a description of the quantization.

    A file that describes the tensors already is copied as it is. If the source has none, a line
    for the report says what the configuration must have.

    Args:
        source: the files of the source.
        model: the tensors of the model, with names relative to it.
        base: `config.json` of the base, if there is one.
    """
    names = {each.name for each in model}
    quantized = {n for n in names if f"{n}{SCALES}" in names}
    if not quantized:
        return {}, ()
    modules = (
        each.name.removesuffix(_WEIGHT)
        for each in model
        if each.name.endswith(_WEIGHT) and len(each.entry.shape) == 2
        if each.name not in quantized
    )
    description = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [*BLOCK_SIZE],
        "modules_to_not_convert": sorted(modules),
    }
    if base is not None:
        config = msgspec.json.decode(base, type=dict[str, Any])
        if _QUANTIZATION in config:
            return {}, ()
        return {CONFIG: _with_description(config, description)}, ()
    if not isinstance(source, ForeignFiles) or CONFIG not in source.tree.sizes:
        text = msgspec.json.encode({_QUANTIZATION: description}).decode()
        return {}, (f"{CONFIG}: the source has none; that of the model needs {text}",)
    config = source.tree.read_json(CONFIG, dict[str, Any], "the configuration of a model")
    if _QUANTIZATION in config:
        return {CONFIG: source.tree.read(CONFIG, limit=_LARGEST)}, ()
    return {CONFIG: _with_description(config, description)}, ()


def _with_description(config: Mapping[str, Any], description: Mapping[str, Any]) -> bytes:
    content = msgspec.json.encode({**config, _QUANTIZATION: description})
    return msgspec.json.format(content, indent=2) + b"\n"


def is_in_block_fp8(model: Sequence[TargetTensor]) -> bool:
    """Return whether some weights of a model have the scales of block FP8."""
    names = {each.name for each in model}
    return any(f"{name}{SCALES}" in names for name in names)


_LARGEST = 64 << 20
"""The most bytes of a configuration."""
