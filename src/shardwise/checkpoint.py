"""A checkpoint opened for reading by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardwise.adapters.optimizers import GROUPS
from shardwise.adapters.values import tensor_names_in_value
from shardwise.engine.buffers import Arena
from shardwise.engine.compare import compare_sample
from shardwise.engine.load import fill, plan_filling
from shardwise.engine.opened import Opened
from shardwise.engine.slices import read_selected
from shardwise.engine.verify import VerifyReport, verify_all
from shardwise.errors import StateError
from shardwise.events import Recorder, Sink
from shardwise.layout import Box, selected
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Manifest, TensorEntry
from shardwise.notebook import checkpoint_html, draw_boxes, tensor_html
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import Fragment, TensorLeaf
from shardwise.state.objects import decode
from shardwise.state.selection import Selection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IndexArray: TypeAlias = Sequence[int] | npt.NDArray[Any] | torch.Tensor
IndexPart: TypeAlias = SupportsIndex | slice | EllipsisType | IndexArray
Index: TypeAlias = IndexPart | tuple[IndexPart, ...]


class SavedTensor:
    """A tensor in a checkpoint. `name`, `shape` and `dtype` are known without reading its data.

    `saved[10:20]`, `saved.tensor()`, `numpy.asarray(saved)` and `torch.as_tensor(saved)` read it.
    """

    def __init__(self, checkpoint: Checkpoint, entry: TensorEntry) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self.name = entry.name
        self.shape = torch.Size(entry.shape)
        self.dtype: torch.dtype = getattr(torch, entry.dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return self.shape.numel() * DTYPES[self._entry.dtype].itemsize

    def __repr__(self) -> str:
        return f"SavedTensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def _repr_html_(self) -> str:
        return tensor_html(self._entry, self._checkpoint.boxes(self.name))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name}: a 0-d tensor has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Read a part, indexed like a torch tensor; `[...]` reads all of it.

        The index consists of integers, slices with steps, `...`, and at most one list, array or
        mask of one dimension. Only the selected elements are read, plus gaps of at most 64 KiB
        between them. Beyond the result, this takes at most 64 MiB of host memory, or what the
        index selects of one row of the first dimension if that is more.

        Raises:
            IndexError: the index does not fit the shape.
            CorruptionError: bytes differ from those that were saved.
        """
        parts = index if isinstance(index, tuple) else (index,)
        plain = tuple(part.cpu() if isinstance(part, torch.Tensor) else part for part in parts)
        along = selected(plain, self.shape)
        out = read_selected(self._entry, along, self._checkpoint._fill)
        return out[
            tuple(
                torch.from_numpy(each.then) if isinstance(each.then, np.ndarray) else each.then
                for each in along
            )
        ]

    def tensor(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Read the whole tensor; convert it to `dtype` if given."""
        return self[...].to(device, dtype or self.dtype)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Read the whole tensor as a NumPy array.

        Raises:
            ValueError: `copy` is False; reading always makes a new array.
            TypeError: NumPy lacks the dtype (for example bfloat16), and `dtype` is not given.
        """
        if copy is False:
            raise ValueError(
                f"{self.name}: reading makes a new array, so copy=False is not possible"
            )
        try:
            torch.empty(0, dtype=self.dtype, device="cpu").numpy()
            known = self.dtype
        except TypeError as error:
            if dtype is None:
                raise TypeError(
                    f"{self.name}: numpy has no dtype {self.dtype}: pass a dtype, for example "
                    "numpy.float32, or use .tensor()"
                ) from error
            known = torch.complex64 if self.dtype.is_complex else torch.float32
        array: npt.NDArray[Any] = self.tensor(dtype=known).numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> object:
        """Read the whole tensor, for `torch.as_tensor`, `numpy.from_dlpack` and others."""
        return self[...].__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the CPU, because tensors are read into host memory."""
        return 1, 0


class Checkpoint(Mapping[str, Any]):
    """A checkpoint as a mapping from names to tensors (`SavedTensor`, read lazily) and values.

    Attributes:
        manifest: the parsed manifest.
        metrics: the metrics that were saved; None for values that were not finite.
        verified: whether reads check checksums.
    """

    def __init__(self, opened: Opened, *, verify: bool) -> None:
        self._opened = opened
        self._saved = SavedState(opened.manifest)
        self._arena = Arena()
        self._compared: set[int] = set()
        self.manifest: Manifest = opened.manifest
        self.metrics = opened.manifest.metrics
        self.verified = verify

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path} step={self.step} names={len(self)}>"

    def _repr_html_(self) -> str:
        return checkpoint_html(self.path, self.manifest)

    @property
    def path(self) -> str:
        """The path of the checkpoint."""
        return str(self._opened.store)

    @property
    def step(self) -> int | None:
        """The training step, if the checkpoint has one."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the checkpoint."""
        return self.manifest.world_size

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parts of a foreign checkpoint that have no name here, with the reason; one line each."""
        return self._opened.left_out

    def __getitem__(self, name: str) -> Any:
        """A `SavedTensor`, or a plain value.

        Raises:
            KeyError: the checkpoint has no such name; the message suggests similar ones.
        """
        entry = self._saved.tensor(name)
        if entry is not None:
            return SavedTensor(self, entry)
        if not self._saved.has_object(name):
            raise self._unknown(name)
        return self._read([name])[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            self._saved.tensor(name) is not None or self._saved.has_object(name)
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Return the tensor or value of this name, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._saved.all_names() if name not in self.manifest.per_rank)

    def __len__(self) -> int:
        return len(self.manifest.tensors) + len(self.manifest.objects)

    def tensors(self) -> dict[str, SavedTensor]:
        """Return all tensors, by name."""
        return {entry.name: SavedTensor(self, entry) for entry in self.manifest.tensors}

    def state_dict(self, key: str) -> dict[str, Any]:
        """Read everything below a key of the state, with that key removed from the names.

        The result fits `load_state_dict` of the module or scheduler that was saved under the key.

        Raises:
            KeyError: nothing is below this key; the message suggests similar ones.
            StateError: the key is an optimizer's, whose state is stored by parameter name, or its
                value is not a dict.
            CorruptionError: bytes differ from those that were saved.
        """
        if key in self:
            value = self[key]
            if not isinstance(value, dict):
                raise StateError(f"{key}: the value is a {type(value).__name__}, not a dict")
            return value
        start = f"{key}."
        names = [name for name in self if name.startswith(start)]
        if not names:
            raise self._unknown(key)
        if f"{start}{GROUPS}" in names:
            raise StateError(
                f"{key}: the key belongs to an optimizer; load an optimizer with sw.load"
            )
        return {name.removeprefix(start): value for name, value in self._read(names).items()}

    def to_dict(self, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> dict[str, Any]:
        """Read everything as nested dicts: `model.0.weight` is `["model"]["0"]["weight"]`.

        Args:
            only, skip: shell patterns of names, as for `load`.

        Raises:
            StateError: a value was saved as pickle, or `only` or `skip` is not a list.
            CorruptionError: bytes differ from those that were saved.
        """
        selection = Selection.by(only, skip)
        found = self._read([name for name in self if selection.chooses(name)])
        nested: dict[str, Any] = {}
        for name, value in found.items():
            *above, last = _keys(name, found)
            here = nested
            for key in above:
                here = here.setdefault(key, {})
            here[last] = value
        return nested

    def boxes(self, name: str) -> list[tuple[Box, int]]:
        """Return the boxes that a tensor is stored in, each with the rank that wrote the box.

        Raises:
            KeyError: there is no tensor of this name; the message suggests similar ones.
        """
        ndim = len(self._tensor(name).shape)
        pieces = self._opened.pieces
        rows = np.flatnonzero(pieces.tensor == self._saved.stored_index(name)).tolist()
        return [
            (
                Box(
                    tuple(pieces.offset[row, :ndim].tolist()),
                    tuple(pieces.shape[row, :ndim].tolist()),
                ),
                self.manifest.files[int(pieces.file[row])].rank,
            )
            for row in rows
        ]

    def plot(self, name: str, axes: Axes | None = None) -> Axes:
        """Draw the boxes that a tensor is stored in, each with the number of its rank or file.

        If more than two dimensions are split, the plot shows the first two.

        Args:
            axes: the matplotlib axes to draw on. Default: new ones.

        Raises:
            KeyError: there is no tensor of this name; the message suggests similar ones.
            ImportError: matplotlib is not installed.
        """
        entry = self._tensor(name)
        title = f"{name}: {entry.dtype} {list(entry.shape)}"
        noun = "file" if self._opened.foreign is not None else "rank"
        return draw_boxes(title, entry.shape, self.boxes(name), noun, axes)

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor into `out`, which has the box's shape and the tensor's dtype.

        Raises:
            KeyError: there is no tensor of this name; the message suggests similar ones.
            StateError: the box is not inside the tensor, or `out` has another shape or dtype.
            CorruptionError: bytes differ from those that were saved.
            MismatchError: a foreign checkpoint stores the tensor several times, and the copies
                differ. A sample is compared when the tensor is first read.
        """
        entry = self._tensor(name)
        whole = Box.whole(entry.shape)
        if len(box.shape) != len(entry.shape) or not whole.contains(box):
            raise StateError(f"{name}: {box} is not inside a tensor of shape {list(entry.shape)}")
        if tuple(out.shape) != box.shape or str(out.dtype) != f"torch.{entry.dtype}":
            raise StateError(
                f"{name}: the box {box} has dtype {entry.dtype} and shape {list(box.shape)}, but "
                f"out has {out.dtype} and {list(out.shape)}"
            )
        self._fill([TensorLeaf(name, out.dtype, entry.shape, (Fragment(box, out),))])

    def verify(self, on_event: Sink | None = None) -> VerifyReport:
        """Check every byte of every file against its checksum.

        In foreign checkpoints, only zip archives have checksums (`torch.save` and DCP write them).
        The report counts the tensor bytes that have none. If the checkpoint stores a tensor
        several times, all bytes of the copies are compared.

        Args:
            on_event: called after each file.

        Raises:
            CorruptionError: a file is missing or truncated, or bytes differ from those that were
                saved.
            MismatchError: copies of a tensor differ; the message names all such tensors.
        """
        return verify_all(self._opened, self._arena, Recorder(on_event))

    def _read(self, names: Sequence[str]) -> dict[str, Any]:
        """Read tensors and plain values; tied tensors share memory."""
        values = {name: self._saved.object(name) for name in names if self._saved.has_object(name)}
        inside = {each for value in values.values() for each in tensor_names_in_value(value)}
        wanted = [name for name in names if name not in values and name not in inside]
        tensors: dict[int, torch.Tensor] = {}
        leaves = []
        for name in [*wanted, *sorted(inside)]:
            entry = self._saved.tensor(name)
            if entry is None:
                raise StateError(f"{name}: a plain value refers to this tensor, which is missing")
            number = self._saved.stored_index(name)
            if number not in tensors:
                dtype: torch.dtype = getattr(torch, entry.dtype)
                data = tensors[number] = torch.empty(entry.shape, dtype=dtype, device="cpu")
                if data.numel():
                    whole = Fragment(Box.whole(entry.shape), data)
                    leaves.append(TensorLeaf(name, dtype, entry.shape, (whole,)))
        self._fill(leaves)

        def read(name: str) -> torch.Tensor:
            return tensors[self._saved.stored_index(name)]

        found = {name: decode(value, name, read) for name, value in values.items()}
        found |= {name: read(name) for name in wanted}
        return {name: found[name] for name in names if name in found}

    def _fill(self, leaves: Sequence[TensorLeaf]) -> None:
        numbers = {self._saved.stored_index(leaf.name) for leaf in leaves} - self._compared
        if self.verified and numbers:
            compare_sample(self._opened, self._arena, Recorder(), numbers)
            self._compared |= numbers
        filling = plan_filling(leaves, self._saved, self._opened, self._arena)
        fill(filling, self._opened, self._arena, verify=self.verified)

    def _tensor(self, name: str) -> TensorEntry:
        entry = self._saved.tensor(name)
        if entry is None:
            raise self._unknown(name)
        return entry

    def _unknown(self, name: str) -> KeyError:
        """Return the error for an unknown name, with a suggestion."""
        if self._saved.below(name):
            hint = f"; other names begin with it: state_dict({name!r}) reads them"
        elif name in self.manifest.per_rank:
            hint = "; its value differs between ranks, so only sw.load restores it"
        else:
            near = " or ".join(map(repr, self._saved.near(name)))
            hint = f"; did you mean {near}?" if near else ""
        return KeyError(f"{name!r} is not in {self.path}{hint}")


def _keys(name: str, names: Collection[str]) -> list[str]:
    """Return the keys of nested dicts for a name, split at dots except within a value's key."""
    keys = [""]
    parts = name.split(".")
    for i, part in enumerate(parts):
        keys[-1] = f"{keys[-1]}.{part}" if keys[-1] else part
        if i + 1 < len(parts) and ".".join(parts[: i + 1]) not in names:
            keys.append("")
    return keys
