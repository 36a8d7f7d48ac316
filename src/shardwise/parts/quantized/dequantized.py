"""`sw.load(..., dequantize=True)`: a checkpoint as if its block-scaled tensors were plain ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from shardwise.kernel.errors import FormatError, MismatchError
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.parts.quantized.memory import ScaledMemory, stored_box
from shardwise.parts.quantized.numbers import Scratch
from shardwise.parts.quantized.pairs import OF_INPUTS, RECOPY, StoredQuantized
from shardwise.parts.quantized.scales import FragmentScales
from shardwise.parts.quantized.schemes import FP8, BlockScaled, find_block_scaled
from shardwise.ports.binding import Fragment, SavedNames, TensorLeaf

KEPT_BYTES = 64 << 20
"""The most bytes of scales that a load keeps. Further ones are read again when they are needed."""
_READ_BYTES = 16 << 20
_MOST_LISTED = 5


class Dequantized(SavedNames):
    """The contents of a checkpoint. Block-scaled tensors look like plain ones of float32.

    The names of their scales are hidden, and in MXFP4 those of the packed numbers, too. The layout
    is that of the stored tensors, so plans and reads know nothing of this.

    Args:
        saved: the contents as they are stored.
    """

    def __init__(self, saved: SavedNames) -> None:
        super().__init__(saved.layout, saved.saved_name)
        found = find_block_scaled(saved.layout)
        self._scaled = {each.name: each for each in found if not each.problem}
        self._hidden = _find_hidden(self._scaled.values(), saved.layout)
        self.dequantized: list[str] = []

    def tensor(self, name: str) -> TensorEntry | None:
        """Return the entry of a tensor; None if the checkpoint has no tensor of this name."""
        scaled = self._scaled.get(self.saved_name(name))
        if scaled is None:
            return super().tensor(name)
        return TensorEntry(scaled.name, "float32", scaled.shape, None)

    def stored_index(self, name: str) -> int:
        """Return the index of the tensor that stores the numbers: this one, or its tied tensor."""
        scaled = self._scaled.get(self.saved_name(name))
        if scaled is None:
            return super().stored_index(name)
        return self._tensors[scaled.data.same_as or scaled.data.name]

    def all_names(self) -> list[str]:
        """Return the names in the checkpoint, without those that are hidden."""
        stored = [name for name in super().all_names() if name not in self._hidden]
        return [*stored, *(name for name in self._scaled if name not in self._tensors)]

    @cached_property
    def quantized(self) -> DequantizedNames:
        """The quantized tensors of the checkpoint."""
        return DequantizedNames(self.layout, self._scaled)

    def as_stored(
        self, leaves: Sequence[TensorLeaf], read: Callable[[Sequence[TensorLeaf]], int]
    ) -> Sequence[TensorLeaf]:
        """Return leaves whose fragments are boxes of the stored tensors.

        The scales of these boxes are read and checked first.

        Raises:
            FormatError: scales are NaN, infinite, zero or negative.
            MismatchError: names of one memory are separate tensors in the checkpoint.
        """

        def count(scales: Sequence[TensorLeaf]) -> None:
            self.scale_bytes += read(scales)

        self._refuse_ties(leaves)
        scratch = Scratch()
        converted, scales = [], []
        for leaf in leaves:
            scaled = self._scaled.get(self.saved_name(leaf.name))
            if scaled is not None:
                self.dequantized.append(leaf.name)
                leaf, own = _convert(leaf, scaled, count, scratch)
                scales += own
            converted.append(leaf)
        _read_and_check(scales, count)
        return converted

    def _refuse_ties(self, leaves: Sequence[TensorLeaf]) -> None:
        """Refuse names that share memory, if the checkpoint has separate quantized tensors."""
        first_names: dict[object, str] = {}
        problems = []
        for leaf in leaves:
            first = leaf.name
            if leaf.tie_key is not None:
                first = first_names.setdefault(leaf.tie_key, leaf.name)
            is_scaled = any(self.saved_name(each) in self._scaled for each in (first, leaf.name))
            if is_scaled and self.stored_index(first) != self.stored_index(leaf.name):
                problems.append(f"{first} and {leaf.name}")
        if problems:
            raise MismatchError(
                "names that share memory in the target are separate quantized tensors in the "
                "checkpoint; nothing was written. Load into tensors that are not tied, or leave "
                "out one name with skip=:",
                problems,
            )


def _find_hidden(scaled: Iterable[BlockScaled], layout: Layout) -> set[str]:
    """Return the names that a dequantized checkpoint does not show."""
    names = {entry.name for entry in layout.tensors}
    hidden: set[str] = set()
    for each in scaled:
        hidden.add(each.scales.name)
        if each.data.name != each.name:
            hidden.add(each.data.name)
        module = each.name.rpartition(".")[0]
        hidden |= {f"{module}.{last}" for last in OF_INPUTS} & names
    return hidden


def _convert(
    leaf: TensorLeaf,
    scaled: BlockScaled,
    read: Callable[[Sequence[TensorLeaf]], object],
    scratch: Scratch,
) -> tuple[TensorLeaf, list[FragmentScales]]:
    """Return a leaf in boxes of the stored numbers, and the scales of its fragments."""
    fragments, scales = [], []
    for fragment in leaf.fragments:
        box = stored_box(scaled, fragment.box)
        scales.append(FragmentScales(scaled, box, read))
        memory = ScaledMemory(scaled, fragment, scales[-1], scratch)
        fragments.append(Fragment(box, fragment.data, memory))
    return replace(leaf, shape=scaled.data.shape, fragments=tuple(fragments)), scales


def _read_and_check(
    scales: Sequence[FragmentScales], read: Callable[[Sequence[TensorLeaf]], object]
) -> None:
    """Read all scales in batches, and check them. Keep the first `KEPT_BYTES`."""
    problems: dict[str, None] = {}
    kept, first = 0, 0
    while first < len(scales):
        last, nbytes = first, 0
        while last < len(scales) and (last == first or nbytes + scales[last].nbytes <= _READ_BYTES):
            nbytes += scales[last].nbytes
            last += 1
        batch = scales[first:last]
        read([each.leaf() for each in batch])
        for each in batch:
            if (problem := each.find_problem()) is not None:
                problems[problem] = None
            kept += each.nbytes
            if kept > KEPT_BYTES:
                each.drop()
        first = last
    if problems:
        more = f", and {len(problems) - _MOST_LISTED} more" if len(problems) > _MOST_LISTED else ""
        raise FormatError(
            f"{'; '.join([*problems][:_MOST_LISTED])}{more}: the values cannot be computed, and "
            "nothing was written; copy the checkpoint again from an intact source, or leave the "
            "tensors out with skip="
        )


class DequantizedNames(StoredQuantized):
    """The quantized tensors of a checkpoint that a load dequantizes where it can.

    Args:
        layout: the checkpoint.
        scaled: the tensors that it computes, by name.
    """

    def __init__(self, layout: Layout, scaled: Collection[str]) -> None:
        super().__init__(layout)
        self._converted = scaled

    def converts(self, name: str) -> bool:
        """Return whether a load computes the values of a tensor with its scales."""
        return name in self._converted

    def why_not_cast(self, name: str, dtype: torch.dtype) -> str | None:
        """Return why a tensor cannot be converted to a dtype; None if it can be."""
        if self.converts(name):
            if dtype.is_floating_point and dtype.itemsize >= 2:
                return None
            return (
                "dequantize=True computes bfloat16, float16, float32 or float64: leave it out to "
                "load the tensor and its scales as they are stored"
            )
        scaled = self._block_scaled.get(name)
        if scaled is not None and scaled.problem:
            return f"{scaled.problem}: {RECOPY}"
        if self._dtypes.get(name) in FP8 and name not in self._partners:
            return (
                f"the checkpoint lacks its scales, {name}_scale_inv or {name}_scale: {RECOPY}; if "
                "the values need no scales, load them with cast=True instead of dequantize=True"
            )
        return super().why_not_cast(name, dtype)
