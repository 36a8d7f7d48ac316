"""Sparse, jagged and quantized tensors of PyTorch: their components, and tensors made of them.

Example: a sparse tensor in the layout COO has the components `indices` and `values`, and says
whether it is coalesced. A load may find another number of values than the live tensor has. So it
builds a new tensor, and `put` gives its contents to the live tensor, which stays the same object.

The class of such a tensor, in a checkpoint, is `torch:` and the name of its layout or of its scheme
of quantization, such as `torch:sparse_coo`. No such class exists in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.kernel.errors import StateError
from shardwise.ports.tensor_classes import Shape, TensorClass

_PREFIX = "torch:"
_JAGGED = "jagged"
_COO = "sparse_coo"
_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
"""The methods that return the indices of the compressed and of the plain dimension, by layout."""
_PER_TENSOR = "per_tensor_affine"
_PER_CHANNEL = ("per_channel_affine", "per_channel_affine_float_qparams")
_NUMBERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
"""The dtypes of the stored numbers, by quantized dtypes with one number in each element."""
_KINDS = frozenset((_JAGGED, _COO, *_COMPRESSED, _PER_TENSOR, *_PER_CHANNEL))
QUANTIZED_DTYPES = frozenset(str(each).removeprefix("torch.") for each in _NUMBERS)
_CHANGING = ("is_coalesced", "scale", "zero_point", "min_seqlen", "max_seqlen")
"""What may differ between a save and a load, because a load sets it."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def rule(class_name: str) -> TensorClass | None:
    """Return the rule of a layout or a scheme of quantization: its components are never split."""
    if not is_built_anew(class_name):
        return None
    return TensorClass(lambda outer, inner, context: {}, not_compared=_CHANGING)


def is_built_anew(class_name: object) -> bool:
    """Return whether a class is one of this module."""
    return isinstance(class_name, str) and class_name.removeprefix(_PREFIX) in _KINDS


def needs_components(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a layout or dtype that this module knows, or of none known."""
    return tensor.layout is not torch.strided or tensor.is_quantized


def shape_of(tensor: torch.Tensor) -> Shape:
    """Return the shape of a tensor, with -1 for the dimension that is ragged."""
    ragged = getattr(tensor, "_ragged_idx", None) if tensor.layout is torch.jagged else None
    return tuple(-1 if dim == ragged else int(n) for dim, n in enumerate(tensor.shape))


def components(name: str, tensor: Any) -> tuple[str, Mapping[str, torch.Tensor], dict[str, Any]]:
    """Return the class of a tensor, its components, which share its memory, and its context.

    Args:
        name: the full name of the tensor, for error messages.
        tensor: a tensor of which `needs_components` is true.

    Raises:
        StateError: this kind of tensor cannot be saved.
    """
    if tensor.is_meta:
        raise StateError(
            f"{name}: a {_kind_of(tensor)} tensor on the meta device has no values, and the number "
            "of its values is unknown: create it on a real device"
        )
    kind, found, context = _kind_of(tensor), {}, {}
    if kind == _COO:
        found = {"indices": tensor._indices(), "values": tensor._values()}
        context = {"is_coalesced": tensor.is_coalesced(), "dense_dim": tensor.dense_dim()}
    elif kind in _COMPRESSED:
        compressed, plain = _COMPRESSED[kind]
        local = tensor.detach()
        found = {key: getattr(local, key)() for key in (compressed, plain, "values")}
        blocks = found["values"].shape[found[plain].dim() :][:2] if "_bs" in kind else ()
        context = {"index_dtype": found[plain].dtype, "blocksize": [*blocks]}
        context |= {"dense_dim": tensor.dense_dim()}
    elif kind == _JAGGED and hasattr(tensor, "_metadata_cache"):
        found, context = _jagged_components(tensor)
    elif kind in _KINDS and tensor.dtype in _NUMBERS:
        found, context = _quantized_components(kind, tensor)
    else:
        raise StateError(
            f"{name}: a {kind} tensor of {tensor.dtype} cannot be saved: save {name}."
            + ("dequantize()" if tensor.is_quantized else "to_dense()")
        )
    for key, each in found.items():
        if type(each) not in _PLAIN or needs_components(each):
            raise StateError(
                f"{name}: the {key} of a {kind} tensor are a {type(each).__name__}, which cannot "
                "be saved as part of it: save its components as items of the state"
            )
    return _PREFIX + kind, {key: each.detach() for key, each in found.items()}, context


def _kind_of(tensor: torch.Tensor) -> str:
    kind = tensor.qscheme() if tensor.is_quantized else tensor.layout
    return str(kind).removeprefix("torch.")


def _jagged_components(tensor: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    found = {"values": tensor._values, "offsets": tensor._offsets}
    if tensor._lengths is not None:
        found["lengths"] = tensor._lengths
    # torch keeps each bound as the first size of an empty tensor.
    cached = {key: each.shape[0] for key, each in tensor._metadata_cache.items() if each.dim()}
    bounds = {key: cached.get(key) for key in ("min_seqlen", "max_seqlen")}
    return found, {"ragged_dim": tensor._ragged_idx, **bounds}


def _quantized_components(
    kind: str, tensor: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    numbers = torch.empty(0, dtype=_NUMBERS[tensor.dtype], device=tensor.device)
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    numbers.set_(tensor.untyped_storage(), *place)  # int_repr() would copy
    if kind == _PER_TENSOR:
        return {"int_repr": numbers}, {
            "scale": tensor.q_scale(),
            "zero_point": tensor.q_zero_point(),
        }
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    found = {"int_repr": numbers, "scales": scales, "zero_points": zero_points}
    return found, {"axis": tensor.q_per_channel_axis()}


def put_together(
    name: str, class_name: str, context: object, inner: Mapping[str, Any], shape: Shape
) -> torch.Tensor:
    """Return a new tensor of the components. The input is not trusted.

    Args:
        name: the full name of the tensor, for error messages.
        class_name: its class.
        context: its context.
        inner: its components.
        shape: its shape, with -1 for the dimension that is ragged.

    Raises:
        StateError: the components do not fit together.
    """
    kind = class_name.removeprefix(_PREFIX)
    try:
        if not isinstance(context, dict) or any(
            type(each) not in _PLAIN for each in inner.values()
        ):
            raise TypeError("a component is not a tensor")
        if kind == _COO:
            made = _make_coo(context, inner, shape)
        elif kind in _COMPRESSED:
            made = _make_compressed(kind, inner, shape)
        elif kind == _JAGGED:
            made = _make_jagged(context, inner)
        else:
            return _make_quantized(kind, context, inner)
        _require(components(name, made)[2] == context, f"they do not fit {context}")
        return made
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(
            f"{name}: the saved components do not make a {kind} tensor of shape {[*shape]}: "
            f"{error}: load another checkpoint, or leave it out with skip="
        ) from error


def _require(fits: object, problem: str) -> None:
    if not fits:
        raise ValueError(problem)


def _is_within(indices: torch.Tensor, stop: int) -> bool:
    return not indices.numel() or bool((indices >= 0).all() & (indices < stop).all())


def _make_coo(context: Mapping[str, Any], inner: Mapping[str, Any], shape: Shape) -> torch.Tensor:
    indices, values, is_coalesced = inner["indices"], inner["values"], context["is_coalesced"]
    _require(type(is_coalesced) is bool, "is_coalesced is not true or false")
    _require(indices.dtype == torch.int64, f"indices are {indices.dtype}")
    made = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
    # The order of the indices is not checked: it is what was saved.
    return made._coalesced_(is_coalesced)


def _make_compressed(kind: str, inner: Mapping[str, Any], shape: Shape) -> torch.Tensor:
    """Make a CSR, CSC, BSR or BSC tensor.

    torch can check it, but would refuse columns in any other than ascending order, which it accepts
    in a tensor by default. So this checks only that all indices are within the tensor.
    """
    compressed, plain = (inner[key] for key in _COMPRESSED[kind])
    values, batch = inner["values"], plain.dim() - 1
    _require(plain.dtype == compressed.dtype, "the dtypes of the indices differ")
    _require(plain.dtype in (torch.int32, torch.int64), f"indices are {plain.dtype}")
    _require(batch >= 0 and len(shape) >= batch + 2, "too few dimensions")
    n, blocks = plain.shape[-1], (1, 1)
    if "_bs" in kind:
        blocks = (values.shape[batch + 1], values.shape[batch + 2])
    _require(min(blocks) > 0, "a block is empty")
    of_values = (n, *(blocks if "_bs" in kind else ()), *shape[batch + 2 :])
    leading = tuple(shape[:batch])
    rows, columns = (size // block for size, block in zip(shape[batch:], blocks, strict=False))
    _require(
        (rows * blocks[0], columns * blocks[1]) == tuple(shape[batch : batch + 2]),
        "the blocks do not fill the shape",
    )
    major, minor = (columns, rows) if kind in ("sparse_csc", "sparse_bsc") else (rows, columns)
    _require(
        tuple(plain.shape[:-1]) == leading
        and tuple(compressed.shape) == (*leading, major + 1)
        and tuple(values.shape) == (*leading, *of_values),
        "the shapes of the components differ",
    )
    steps = compressed.diff(dim=-1)
    _require(_is_within(steps, n + 1), "the compressed indices do not ascend")
    ends = compressed[..., 0], compressed[..., -1]
    _require(bool((ends[0] == 0).all() & (ends[1] == n).all()), "the compressed indices end wrong")
    _require(_is_within(plain, minor), "an index is outside of the shape")
    layout: torch.layout = getattr(torch, kind)
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size=shape, layout=layout, check_invariants=False
    )


def _make_jagged(context: Mapping[str, Any], inner: Mapping[str, Any]) -> torch.Tensor:
    values, offsets, lengths = inner["values"], inner["offsets"], inner.get("lengths")
    ragged = context["ragged_dim"]
    _require(type(ragged) is int and 1 <= ragged <= values.dim(), f"the ragged dimension {ragged}")
    for each in (offsets, lengths):
        is_1d = each is None or (each.dim() == 1 and each.dtype in (torch.int32, torch.int64))
        _require(is_1d, "offsets or lengths are no list of integers")
    _require(offsets.numel() > 0, "there are no offsets")
    sizes = offsets.diff() if lengths is None else lengths
    _require(len(sizes) == len(offsets) - 1, "the numbers of offsets and lengths differ")
    n = values.shape[ragged - 1]
    _require(_is_within(sizes, n + 1) and _is_within(offsets, n + 1), "an offset is outside")
    _require(_is_within(offsets[:-1] + sizes, n + 1), "a length reaches over the end")
    least, most = context["min_seqlen"], context["max_seqlen"]
    _require(
        least is None or (type(least) is int and least >= 0), "the bounds of lengths are wrong"
    )
    _require(most is None or (type(most) is int and most >= 0), "the bounds of lengths are wrong")
    if len(sizes):
        low, high = int(sizes.min()), int(sizes.max())
        _require(least is None or least <= low, "a length is below the bound")
        _require(most is None or most >= high, "a length is above the bound")
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, ragged, min_seqlen=least, max_seqlen=most
    )


def _make_quantized(
    kind: str, context: Mapping[str, Any], inner: Mapping[str, Any]
) -> torch.Tensor:
    numbers = inner["int_repr"]
    _require(numbers.dtype in _NUMBERS.values(), f"int_repr is {numbers.dtype}")
    if kind == _PER_TENSOR:
        scale, zero_point = context["scale"], context["zero_point"]
        _require(type(scale) is float and type(zero_point) is int, "no scale or zero point")
        _require(-(2**31) <= zero_point < 2**31, f"the zero point {zero_point}")
        made: torch.Tensor = torch._make_per_tensor_quantized_tensor(numbers, scale, zero_point)
        return made
    axis, parameters = context["axis"], (inner["scales"], inner["zero_points"])
    _require(type(axis) is int and 0 <= axis < numbers.dim(), f"the axis {axis}")
    for each in parameters:
        _require(tuple(each.shape) == (numbers.shape[axis],), "not one scale for each channel")
    made = torch._make_per_channel_quantized_tensor(numbers, *parameters, axis)
    _require(_kind_of(made) == kind, f"they make a {_kind_of(made)} tensor")
    return made


def with_offsets_of(like: Any, made: Any) -> Any:
    """Return a jagged tensor with the offsets of another one, if they are equal.

    torch adds jagged tensors only if they share their offsets. Other tensors are returned as they
    are.
    """
    if _kind_of(made) != _JAGGED or _kind_of(like) != _JAGGED:
        return made
    pairs = [(each._offsets, each._lengths) for each in (like, made)]
    (offsets, lengths), (new_offsets, new_lengths) = pairs
    same_lengths = lengths is None if new_lengths is None else _are_equal(lengths, new_lengths)
    if made._ragged_idx != like._ragged_idx or not _are_equal(offsets, new_offsets):
        return made
    if not same_lengths:
        return made
    bounds = {key: each for key, each in _jagged_components(made)[1].items() if "seqlen" in key}
    return torch.nested.nested_tensor_from_jagged(
        made._values, offsets, lengths, made._ragged_idx, **bounds
    )


def put(name: str, live: Any, made: Any) -> None:
    """Give a live tensor the contents of a new one. It stays the same object.

    Tensors that share components with the live one keep the old components. If the new tensor has
    the indices or offsets of the live one, only values are copied.

    Raises:
        StateError: torch cannot exchange the contents of the live tensor.
    """
    kind = _kind_of(live)
    if kind != _JAGGED and kind not in _COMPRESSED:
        live.data = made
        return
    old, new = (components(name, each)[1] for each in (live, made))
    is_same = old.keys() == new.keys() and old["values"].shape == new["values"].shape
    if is_same and all(_are_equal(old[key], new[key]) for key in new if key != "values"):
        old["values"].copy_(new["values"])
        if kind == _JAGGED:
            live._metadata_cache = made._metadata_cache
        return
    if isinstance(live, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=live.requires_grad)
    elif live.requires_grad:
        made.requires_grad_()
    made.__dict__.update({key: each for key, each in vars(live).items() if key not in vars(made)})
    try:
        torch.utils.swap_tensors(live, made)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise StateError(
            f"{name}: the checkpoint has another number of values, so this {kind} tensor must be "
            f"replaced, but something refers to it: {error}: load before the first forward pass, "
            "into a new model. The load is incomplete: other tensors are loaded"
        ) from error


def _are_equal(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and a.dtype == b.dtype and torch.equal(a, b)
