"""Find the memory of a tensor: some subclasses of `torch.Tensor` have none of their own."""

from __future__ import annotations

import sys

import torch

from shardwise.errors import StateError

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_instance(value: object, module: str, name: str) -> bool:
    """Return whether a value is of the class `name` of a module.

    The module is not imported: if nobody has imported it, there are no instances.
    """
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and isinstance(value, found)


def with_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values, detached, whose memory holds them.

    The result of a functional collective is waited for. All other tensors share their memory with
    the result.

    Args:
        name: the name of the tensor, for the error message.
        tensor: any tensor but a DTensor.

    Raises:
        StateError: the tensor wraps other tensors, or has no values.
    """
    if type(tensor) in _PLAIN:
        return tensor.detach()
    while is_instance(tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
    if type(tensor) not in _PLAIN and _has_no_memory(tensor):
        raise StateError(f"{name}: {_why_without_memory(tensor)}")
    return tensor.detach()


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor on a device has no address, though its storage was not freed."""
    if tensor.is_meta or not tensor.numel():
        return False
    try:
        return not tensor.data_ptr() and bool(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return True


def _why_without_memory(tensor: torch.Tensor) -> str:
    found = type(tensor)
    class_name = f"{found.__module__}.{found.__qualname__}"
    if is_instance(tensor, "torch._subclasses.fake_tensor", "FakeTensor"):
        return f"a {class_name} has no values: create the tensor outside of FakeTensorMode"
    parts = ""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = f" ({', '.join(flatten()[0])})"
    return (
        f"a {class_name} has no memory of its own, because it wraps other tensors{parts}: put "
        "its parts into the state, or a plain tensor, for example .dequantize()"
    )
