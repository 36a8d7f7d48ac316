"""Finds quantized tensors: integers or small floats that have a meaning only with their scales."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.parts.quantized.schemes import FP8, find_block_scaled

_DATA = ("", "_packed", "_blocks", "_qdata", "_data")
_PARTS = (
    *("_scale_inv", "_scale", "_scales", "_scale_2", "_global_scale", "_zero_point", "_shape"),
    *(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
)
"""Ends of names: DeepSeek's FP8 has `weight` and `weight_scale_inv`, MXFP4 has `_blocks` and
`_scales`, compressed-tensors has `weight_packed` and `weight_scale`, bitsandbytes `.absmax`."""
OF_INPUTS = ("input_scale", "input_global_scale")
"""Scales of the inputs of a layer, which its weights do not need."""
_PARTS_OF_MODULES = {
    **dict.fromkeys(("scales", "qzeros", "g_idx"), "qweight"),  # GPTQ and AWQ
    **dict.fromkeys(("SCB", "scale", "qscale_weight", *OF_INPUTS), "weight"),
}
REMEDY = (
    "dequantize the model with the library that wrote it, for example from_pretrained(..., "
    "quantization_config=FineGrainedFP8Config(dequantize=True)) of transformers for block FP8, and "
    "save the result"
)
"""What to do instead of converting a quantized tensor."""
RECOPY = "copy the checkpoint again from an intact source"


def find_quantized(tensors: Iterable[TensorEntry]) -> Mapping[str, str]:
    """Return the names of all tensors that belong to a quantized tensor.

    Returns:
        For the name of each scale and zero point, the name of the quantized tensor; for the name of
        each quantized tensor, that of one of its scales.
    """
    dtypes = {each.name: each.dtype for each in tensors}
    partners: dict[str, str] = {}
    for name in dtypes:
        for data in _possible_data(name):
            if _may_be_quantized(dtypes.get(data, "bool")):
                partners[name] = data
                partners.setdefault(data, name)
    return partners


def _may_be_quantized(dtype: str) -> bool:
    return dtype == "int32" or (DTYPES[dtype].itemsize == 1 and dtype != "bool")


def _possible_data(name: str) -> list[str]:
    """Return the names that the quantized tensor of a scale or zero point may have."""
    module, _, last = name.rpartition(".")
    data = _PARTS_OF_MODULES.get(last)
    names = [] if data is None else [f"{module}.{data}" if module else data]
    for end in _PARTS:
        if name.endswith(end):
            names += [name.removesuffix(end) + data for data in _DATA]
    return names


class StoredQuantized:
    """The quantized tensors of a checkpoint that a load copies as they are stored.

    Args:
        layout: the checkpoint.
    """

    def __init__(self, layout: Layout) -> None:
        self._partners = find_quantized(layout.tensors)
        self._dtypes = {each.name: each.dtype for each in layout.tensors}
        self._block_scaled = {each.data.name: each for each in find_block_scaled(layout)}
        self._by_name = {each.name: each for each in self._block_scaled.values()}

    def converts(self, name: str) -> bool:
        """Return False."""
        return False

    def why_not_cast(self, name: str, dtype: torch.dtype) -> str | None:
        """Return why a quantized tensor must not be cast; None for any other tensor."""
        partner = self._partners.get(name)
        scaled = self._block_scaled.get(name)
        if partner is None:
            return self._why_unscaled(name)
        together = f"it is quantized together with {partner}"
        if scaled is None:
            return f"{together}: {REMEDY}"
        together = f"it is quantized together with {scaled.scales.name}"
        if scaled.problem:
            return f"{together}, but {scaled.problem}: {REMEDY}"
        return f"{together}: dequantize=True computes the values with the scales"

    def _why_unscaled(self, name: str) -> str | None:
        """Return why FP8 without scales must not be cast, where other tensors have scales."""
        if self._dtypes.get(name) not in FP8 or not self._block_scaled:
            return None
        other = next(iter(self._block_scaled.values()))
        return (
            f"the checkpoint lacks the scales of {name}, but has {other.scales.name}: {RECOPY}, "
            "or leave the tensor out with skip="
        )

    def why_absent(self, name: str) -> str | None:
        """Return how a tensor is stored that the checkpoint has only quantized."""
        scaled = self._by_name.get(name)
        if scaled is not None and scaled.name != scaled.data.name:
            together = f"stored as {scaled.data.name} and {scaled.scales.name}"
            how = scaled.problem or "dequantize=True computes the values"
            return f"{together}: {how}"
        if self._dtypes.get(f"{name}_blocks") == "uint8" and scaled is None:
            return f"stored as {name}_blocks, but its scales {name}_scales are missing: {RECOPY}"
        return describe_parts(name, self._partners)

    def refuse_unscaled(self, missing: Collection[str], unused: Collection[str]) -> Iterator[str]:
        """Yield a line for each tensor that would be left out or loaded without its scales."""
        for name in missing:
            if reason := self.why_absent(name):
                yield f"{name}: {reason}"
        left_out = set(unused)
        for name in unused:
            data = self._partners.get(name)
            is_of_inputs = name.rpartition(".")[2] in OF_INPUTS
            if data is not None and data not in left_out and not is_of_inputs:
                yield (
                    f"{name}: left over, but {data} has no meaning without it: load both into the "
                    "state, or leave out both with skip="
                )


def describe_parts(name: str, partners: Mapping[str, str]) -> str | None:
    """Return how a tensor is stored that has only parts under other names; None if it has none.

    Args:
        partners: the result of `find_quantized`.
    """
    module, _, last = name.rpartition(".")
    stems = [f"{name}{end}" for end in _DATA if end]
    if last == "weight":
        stems.append(f"{module}.qweight" if module else "qweight")
    parts = [each for each in stems if each in partners]
    if not parts:
        return None
    return f"stored as {parts[0]} and {partners[parts[0]]}: {REMEDY}"
