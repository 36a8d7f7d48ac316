"""`Checkpoint`: a mapping from names to the tensors and values of an open checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise.kernel.adapters.optimizer_groups import GROUPS
from shardwise.kernel.adapters.values import tensor_names_in_value
from shardwise.kernel.boxes import Box
from shardwise.kernel.engine.buffers import Arena
from shardwise.kernel.engine.group import SoloGroup
from shardwise.kernel.engine.load import plan_reads
from shardwise.kernel.engine.per_rank_values import read_per_rank
from shardwise.kernel.errors import StateError
from shardwise.kernel.events import Recorder, Sink
from shardwise.kernel.manifest.checksums import FileChecksums
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import FROZEN, TensorEntry
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.saved_tensor import SavedTensor
from shardwise.kernel.state.local_state import Fragment, TensorLeaf, copy_overlapping
from shardwise.kernel.state.name_lookup import SavedNames, Selection
from shardwise.kernel.state.plain_values import decode
from shardwise.kernel.state.tensors import tensor_leaf
from shardwise.kernel.store import Files, TieredFiles
from shardwise.ports import foreign
from shardwise.ports.checks import GROUP as CHECKS

if TYPE_CHECKING:
    from shardwise.ports.checks import Comparison, VerifyReport


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint: a mapping from names to tensors and plain values.

    Tensors are `SavedTensor`s, which read their data when they are indexed or converted. In file
    systems with locks, retention keeps the checkpoint as long as this object, or a tensor of it, is
    referenced.

    Example:

        checkpoint = sw.open("checkpoints/3")
        list(checkpoint)                          # all names
        checkpoint["model.norm.weight"][:10]      # reads ten elements
        model.load_state_dict(checkpoint.state_dict("model"))

    Attributes:
        layout: the names, dtypes and shapes of the tensors, the plain values and the files.
        metrics: the saved metrics; None for metrics that were not finite.
        verifies_reads: whether reads check checksums.
    """

    def __init__(
        self,
        store: Files,
        layout: Layout,
        *,
        verify: bool,
        allow_pickle: bool = False,
        lock: ExitStack | None = None,
    ) -> None:
        self._store = store
        self._allow_pickle = allow_pickle
        if lock is not None:
            weakref.finalize(self, lock.close)
        self._saved = SavedNames(layout)
        self._arena = Arena(traits=store.traits)
        self.layout = layout
        self.metrics = layout.metrics
        self.verifies_reads = verify

    def __repr__(self) -> str:
        trained = f", the trained part of {', '.join(self.frozen)}" if self.frozen else ""
        return f"<Checkpoint {self.path} step={self.step} names={len(self)}{trained}>"

    @property
    def path(self) -> str:
        """The path of the checkpoint."""
        return str(self._store)

    @property
    def step(self) -> int | None:
        """The training step, if the checkpoint has one."""
        return self.layout.step

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the checkpoint."""
        return self.layout.world_size

    @property
    def frozen(self) -> Mapping[str, tuple[str, ...]]:
        """For each module of which the checkpoint has only the trained part, its frozen tensors.

        The keys are names of modules, such as "model". Only `trainable` makes such checkpoints.
        """
        return self.layout.frozen

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parts of a foreign checkpoint that were not read, with the reason; one line each."""
        return self.layout.left_out

    def __getitem__(self, name: str) -> Any:
        """Return the `SavedTensor` or plain value of this name.

        Raises:
            KeyError: the checkpoint has no such name. The message suggests similar names.
            StateError: the value was saved as pickle.
        """
        entry = self._saved.tensor(name)
        if entry is not None:
            return self._saved_tensor(entry)
        if not self._saved.has_object(name):
            raise self._unknown_name_error(name)
        return self._read([name])[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            self._saved.tensor(name) is not None or self._saved.has_object(name)
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Return the tensor or value of this name, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._saved.all_names() if name not in self.layout.per_rank)

    def __len__(self) -> int:
        return len(self.layout.tensors) + len(self.layout.objects)

    def tensors(self) -> dict[str, SavedTensor]:
        """Return all tensors, by name."""
        return {entry.name: self._saved_tensor(entry) for entry in self.layout.tensors}

    def state_dict(self, key: str) -> dict[str, Any]:
        """Read all tensors and values below a key of the state, and remove the key from the names.

        The result fits `load_state_dict` of the module or scheduler that was saved under the key.

        Raises:
            KeyError: the checkpoint has no names below this key. The message suggests similar keys.
            StateError: the key is an optimizer's, whose state is stored by parameter name, or its
                value is not a dict.
            CorruptionError: bytes differ from the saved bytes.
        """
        if key in self:
            value = self[key]
            if not isinstance(value, dict):
                raise StateError(
                    f"{key}: the value is a {type(value).__name__}, not a dict: read it with "
                    f"checkpoint[{key!r}]"
                )
            return value
        start = f"{key}."
        names = [name for name in self if name.startswith(start)]
        if not names:
            raise self._unknown_name_error(key)
        names = [name for name in names if not name.startswith(f"{start}{FROZEN}.")]
        if f"{start}{GROUPS}" in names:
            raise StateError(
                f"{key}: the key belongs to an optimizer; load an optimizer with sw.load"
            )
        return {name.removeprefix(start): value for name, value in self._read(names).items()}

    def to_dict(self, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> dict[str, Any]:
        """Read all tensors and values as nested dicts.

        The name `model.0.weight` becomes `["model"]["0"]["weight"]`. Tensors are on the CPU.

        Args:
            only: shell patterns of the names to read. Default: all.
            skip: shell patterns of the names to leave out.

        Raises:
            StateError: a value was saved as pickle, or `only` or `skip` is not a list.
            CorruptionError: bytes differ from the saved bytes.
        """
        selection = Selection(only, skip)
        found = self._read([name for name in self if selection.selects(name)])
        nested: dict[str, Any] = {}
        for name, value in found.items():
            *parent_keys, last = _nested_keys(name, found)
            parent = nested
            for key in parent_keys:
                parent = parent.setdefault(key, {})
            parent[last] = value
        return nested

    def boxes(self, name: str) -> list[tuple[Box, int]]:
        """Return the boxes that a tensor is stored in, each with the rank that wrote the box.

        In a foreign checkpoint, each box comes with the index of its file in `layout.files`.

        Raises:
            KeyError: there is no tensor of this name. The message suggests similar names.
        """
        ndim = len(self._tensor(name).shape)
        pieces = self.layout.pieces_of(self._saved.stored_index(name))
        found = []
        for row in range(len(pieces)):
            offset, shape = (tuple(c[row, :ndim].tolist()) for c in (pieces.offset, pieces.shape))
            file = int(pieces.file[row])
            entry = self.layout.files[file].entry
            found.append((Box(offset, shape), file if entry is None else entry.rank))
        return found

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor into an existing tensor.

        Args:
            name: the name of the tensor.
            box: the box to read.
            out: a tensor on any device, with the shape of the box and the saved dtype.

        Raises:
            KeyError: there is no tensor of this name. The message suggests similar names.
            StateError: the box is not inside of the tensor, or `out` has another shape or dtype.
            CorruptionError: bytes differ from the saved bytes.
        """
        self.read_parts([(name, box, out)])

    def read_parts(
        self, parts: Iterable[tuple[str, Box, torch.Tensor]], *, cast: bool = False
    ) -> None:
        """Read boxes of tensors into existing tensors, all together.

        Args:
            parts: the name of each tensor, the box to read, and a tensor with the shape of the box,
                on any device.
            cast: convert values whose dtype differs from the saved dtype. Otherwise, such a dtype
                is an error.

        Raises:
            KeyError, StateError, CorruptionError: as for `read_into`.
        """
        leaves = []
        for name, box, out in parts:
            entry = self._tensor(name)
            whole = Box.whole(entry.shape)
            if len(box.shape) != len(entry.shape) or not whole.contains(box):
                raise StateError(
                    f"{name}: the box {box} is not inside of the tensor, which has shape "
                    f"{list(entry.shape)}"
                )
            is_same_dtype = cast or str(out.dtype) == f"torch.{entry.dtype}"
            if tuple(out.shape) != box.shape or not is_same_dtype:
                raise StateError(
                    f"{name}: the box {box} has dtype {entry.dtype} and shape {list(box.shape)}, "
                    f"but out has {out.dtype} and {list(out.shape)}: pass a tensor of that dtype "
                    "and shape"
                )
            leaf = tensor_leaf(name, out)
            fragments = tuple(Fragment(box, each.data) for each in leaf.fragments)
            leaves.append(replace(leaf, shape=entry.shape, fragments=fragments, tie_key=None))
        self._read_leaves(copy_overlapping(leaves))

    def verify(self, on_event: Sink | None = None) -> VerifyReport:
        """Check every byte of every file against its checksum.

        For a root with a mirror, the files in the root are verified. Those in the mirror are
        verified only if the root lacks the checkpoint.

        In foreign checkpoints, only zip archives have checksums (`torch.save` and DCP write such
        archives). The report counts the tensor bytes without checksums. If the checkpoint stores a
        tensor several times, all bytes of the copies are compared.

        Args:
            on_event: called with an `Event` after each file, and within large files.

        Raises:
            CorruptionError: a file is missing or truncated, or bytes differ from those that were
                saved.
            MismatchError: copies of a tensor differ. The message names all such tensors.
        """
        report = self.find_damage(on_event)
        load_built_in(CHECKS, "refuse_damage")(report)
        return report

    def find_damage(self, on_event: Sink | None = None) -> VerifyReport:
        """Check what `verify` checks, but list the damage in the report instead of raising.

        Args:
            on_event: as for `verify`.
        """
        store = self._store
        checksums: Iterable[FileChecksums] = ()
        if isinstance(store, TieredFiles):
            store = store.tier_to_verify()
        if self.layout.format != "shardwise":
            checksums = foreign.checksums_of(store, self.layout)
        find = load_built_in(CHECKS, "find_damage")
        found: VerifyReport = find(store, self.layout, checksums, self._arena, Recorder(on_event))
        return found

    def compare(self, other: Checkpoint, on_event: Sink | None = None) -> Comparison:
        """Compare the names, dtypes, shapes, plain values, and every byte of the tensors.

        The checkpoints may be of different formats, and sharded differently. Memory use does not
        grow with their size.

        Example:

            print(sw.open("runs/a").compare(sw.open("runs/b")).tensors)

        Args:
            other: the other checkpoint. The `Comparison` calls it B, and this one A.
            on_event: called with an `Event` after each batch of tensors.

        Raises:
            CorruptionError: a checkpoint is damaged.
        """
        a, b = (self._store, self.layout), (other._store, other.layout)
        compare = load_built_in(CHECKS, "compare")
        found: Comparison = compare(a, b, self._arena, Recorder(on_event))
        return found

    def as_json(self, name: str) -> Any:
        """Return a plain value in the JSON form of the manifest.

        For a per-rank value, return a list with the value of each rank.

        Use it to look at pickled values without unpickling them.

        Raises:
            KeyError: there is no value of this name. The message suggests similar names.
            CorruptionError: the values differ from the saved ones.
        """
        if name in self.layout.per_rank:
            values = read_per_rank(
                self._store, self.layout, [name], SoloGroup(), verify=self.verifies_reads
            )
            return [*values[name]]
        if not self._saved.has_object(name):
            raise self._unknown_name_error(name)
        return self._saved.object(name)

    def _read(self, names: Sequence[str]) -> dict[str, Any]:
        """Read tensors and plain values by name. Tied tensors share memory."""
        values = {name: self._saved.object(name) for name in names if self._saved.has_object(name)}
        value_with = {each: n for n, v in values.items() for each in tensor_names_in_value(v)}
        wanted = [name for name in names if name not in values and name not in value_with]
        tensors: dict[int, torch.Tensor] = {}
        leaves = []
        for name in [*wanted, *sorted(value_with)]:
            entry = self._saved.tensor(name)
            if entry is None:
                raise StateError(
                    f"{value_with[name]}: this plain value in {self.path} contains the tensor "
                    f"{name}, which is missing there: leave the value out with "
                    f"skip=[{value_with[name]!r}]"
                )
            index = self._saved.stored_index(name)
            if index not in tensors:
                dtype: torch.dtype = getattr(torch, entry.dtype)
                data = tensors[index] = torch.empty(entry.shape, dtype=dtype, device="cpu")
                if data.numel():
                    whole = Fragment(Box.whole(entry.shape), data)
                    leaves.append(TensorLeaf(name, dtype, entry.shape, (whole,)))
        self._read_leaves(leaves)

        def read(name: str) -> torch.Tensor:
            return tensors[self._saved.stored_index(name)]

        found = {
            name: decode(value, name, read, allow_pickle=self._allow_pickle)
            for name, value in values.items()
        }
        found |= {name: read(name) for name in wanted}
        return {name: found[name] for name in names if name in found}

    def _read_leaves(self, leaves: Sequence[TensorLeaf]) -> None:
        reads = plan_reads(
            leaves, self._saved, self._store, self._arena, verify=self.verifies_reads
        )
        reads.fill_alone()

    def _saved_tensor(self, entry: TensorEntry) -> SavedTensor:
        return SavedTensor(entry, self._read_leaves, partial(self.boxes, entry.name))

    def _tensor(self, name: str) -> TensorEntry:
        entry = self._saved.tensor(name)
        if entry is None:
            raise self._unknown_name_error(name)
        return entry

    def _unknown_name_error(self, name: str) -> KeyError:
        """Return the error for an unknown name, which suggests similar names."""
        if self._saved.names_below(name):
            hint = f"; other names begin with it: state_dict({name!r}) reads them"
        elif name in self.layout.per_rank:
            hint = "; its value differs between ranks, so only sw.load restores it"
        else:
            near = " or ".join(map(repr, self._saved.similar_names(name)))
            hint = f"; did you mean {near}?" if near else ""
        return KeyError(f"{name!r} is not in {self.path}{hint}")


def _nested_keys(name: str, names: Collection[str]) -> list[str]:
    """Return the keys of nested dicts for a name, split at dots except within a value's key.

    For example, if `a.b` is one of the names itself, `a.b.c` has the keys `["a", "b.c"]`.
    """
    keys = [""]
    parts = name.split(".")
    for i, part in enumerate(parts):
        keys[-1] = f"{keys[-1]}.{part}" if keys[-1] else part
        if i + 1 < len(parts) and ".".join(parts[: i + 1]) not in names:
            keys.append("")
    return keys
