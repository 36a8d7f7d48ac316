"""Finds quantized tensors: integers or small floats that have a meaning only with their scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import TensorEntry

_DATA = ("", "_packed", "_blocks", "_qdata", "_data")
_PARTS = (
    *("_scale_inv", "_scale", "_scales", "_scale_2", "_global_scale", "_zero_point", "_shape"),
    *(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
)
"""Ends of names: DeepSeek's FP8 has `weight` and `weight_scale_inv`, MXFP4 has `_blocks` and
`_scales`, compressed-tensors has `weight_packed` and `weight_scale`, bitsandbytes `.absmax`."""
_PARTS_OF_MODULES = {
    **dict.fromkeys(("scales", "qzeros", "g_idx"), "qweight"),  # GPTQ and AWQ
    **dict.fromkeys(("SCB", "input_scale", "input_global_scale"), "weight"),
}
REMEDY = (
    "dequantize the model with the library that wrote it, for example from_pretrained(..., "
    "quantization_config=FineGrainedFP8Config(dequantize=True)) of transformers for block FP8, and "
    "save the result"
)
"""What to do instead of converting a quantized tensor."""


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
