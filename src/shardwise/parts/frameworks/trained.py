"""Remember which parameters were trained or changed, also if they are frozen now.

The memory is in the modules that own the parameters. So it outlives the objects that
`sw.trainable` returns, and wrappers such as DDP and torch.compile; and copies of a module have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from shardwise.kernel.errors import StateError
from shardwise.parts.frameworks.fsdp1 import has_fsdp1
from shardwise.ports.binding import Parameter
from shardwise.ports.module_binding import detach_checked, is_dtensor, view_for_numpy

_SEEN, _VALUES = "_shardwise_seen", "_shardwise_values"
_KEPT = True
"""The record of a tensor that differs from the base, or may differ from it."""
_Record = dict[str, object]


class TrainingHistory:
    """What this process has seen of the tensors of modules.

    A tensor is *kept* if it was seen to require gradients; or if its values changed after it was
    first seen; or if `keep` got its name. All ranks that hold parts of a tensor agree on this.

    Args:
        modules: the parts of a model.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._records: dict[int, list[tuple[_Record, str]]] = {}
        unknown: list[tuple[_Record, str, nn.Parameter, bool]] = []
        for module in modules:
            is_sharded = has_fsdp1([module])
            for owner in module.modules():
                for key, parameter in owner._parameters.items():
                    if parameter is not None:
                        record: _Record = vars(owner).setdefault(_SEEN, {})
                        self._records.setdefault(id(parameter), []).append((record, key))
                        if parameter.requires_grad:
                            record[key] = _KEPT
                        elif not _is_known(record.get(key), parameter):
                            unknown.append((record, key, parameter, is_sharded))
        sums = _sums_of([None if each[3] else each[2] for each in unknown])
        for (record, key, parameter, _), total in zip(unknown, sums, strict=True):
            now = (id(parameter), _version_of(parameter), _kind_of(parameter), total)
            record[key] = _KEPT if _differs(record.get(key), now) else now

    def is_kept(self, name: str, tensor: torch.Tensor | None) -> bool:
        """Return whether a tensor of this name is kept.

        Args:
            name: the name below the model.
            tensor: the parameter of this name; None for a buffer.
        """
        records = self._records.get(id(tensor), [])
        return any(record.get(key) is _KEPT for record, key in records) or (
            self._values().get(name) is _KEPT
        )

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        """Keep a tensor from now on; see `is_kept` for the arguments."""
        for record, key in self._records.get(id(tensor), []):
            record[key] = _KEPT
        if id(tensor) not in self._records:
            self._values()[name] = _KEPT

    def forget(self, name: str, tensor: torch.Tensor | None) -> None:
        """Take the present values of a tensor for the base; see `is_kept` for the arguments."""
        for record, key in self._records.get(id(tensor), []):
            record.pop(key, None)
        self._values().pop(name, None)

    def keep_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep all parameters for which an optimizer has state, such as moments."""
        for parameter, state in optimizer.state.items():
            if not isinstance(state, Mapping) or state:  # shared state may be a tensor
                for record, key in self._records.get(id(parameter), []):
                    record[key] = _KEPT

    def has_changed(self, name: str, values: Mapping[str, str], kind: str) -> bool:
        """Return whether elements of a frozen tensor differ from those at the first save.

        Args:
            name: the name below the model.
            values: the elements that this rank holds, as text, by their positions.
            kind: the dtype and the shape.
        """
        first = self._values().get(name)
        if not (isinstance(first, tuple) and first[0] == kind):
            self._values()[name] = kind, dict(values)
            return False
        return any(first[1].get(key, value) != value for key, value in values.items())

    def _values(self) -> _Record:
        found: _Record = vars(self._modules[0]).setdefault(_VALUES, {})
        return found


def tensors_by_name(parameters: Iterable[Parameter]) -> dict[str, torch.Tensor]:
    """Return parameters by all their names."""
    return {name: each.tensor for each in parameters for name in each.names}


def _is_known(record: object, parameter: nn.Parameter) -> bool:
    """Return whether a frozen parameter has no values, or has not changed since it was recorded."""
    if record is _KEPT or parameter.is_meta:
        return True
    now = id(parameter), _version_of(parameter)
    return isinstance(record, tuple) and record[:2] == now


def _differs(before: object, now: tuple[int, int, str, int | None]) -> bool:
    """Return whether the values of a parameter differ from the recorded ones.

    torch counts the changes in place of a parameter. Some of them write the same values, as when
    DDP sends all parameters to all ranks, so the sums of the values decide, if both are known.
    """
    if not isinstance(before, tuple) or before[2] != now[2]:
        return False
    if before[3] is None or now[3] is None:
        return bool(before[0] == now[0])
    return bool(before[3] != now[3])


def _kind_of(parameter: nn.Parameter) -> str:
    return f"{parameter.dtype} {list(parameter.shape)}"


def _version_of(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version


def _sums_of(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    """Return a sum of the bytes of each tensor; None for a tensor of which ranks hold parts."""
    found: list[int | None] = [None] * len(tensors)
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        total = None if tensor is None else _sum_of(tensor)
        if total is not None:
            by_device.setdefault(total.device, []).append((index, total))
    for items in by_device.values():  # one copy for each device
        totals = torch.stack([total for _, total in items]).tolist()
        for (index, _), total_value in zip(items, totals, strict=True):
            found[index] = total_value
    return found


def _sum_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the sum of a tensor's bytes, as integers of at most 8 bytes, modulo 2⁶⁴."""
    is_partitioned = hasattr(tensor, "ds_id")  # by ZeRO 3
    if is_dtensor(tensor) or is_partitioned or tensor.is_meta or tensor.layout != torch.strided:
        return None
    try:
        data = detach_checked("", tensor)
        if data.is_quantized or data.is_nested:
            return None
        numbers = view_for_numpy(data.resolve_conj().resolve_neg().contiguous()).reshape(-1)
        size = numbers.element_size()
        is_aligned = not (numbers.numel() * size % 8 or numbers.storage_offset() * size % 8)
        return numbers.view(torch.int64 if is_aligned else torch.uint8).sum(dtype=torch.int64)
    except StateError:  # it wraps other tensors
        flatten = getattr(tensor, "__tensor_flatten__", None)
        inner = [getattr(tensor, each) for each in (() if flatten is None else flatten()[0])]
        sums = [_sum_of(each) for each in inner if isinstance(each, torch.Tensor)]
        total: torch.Tensor | None = None
        for each in sums:
            if each is None:
                return None
            total = each if total is None else 3 * total + each
        return total
