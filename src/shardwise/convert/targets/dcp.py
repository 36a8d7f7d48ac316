"""PyTorch DCP: data files whose items are files of torch.save, and `.metadata`."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.convert.plan import Chosen, Part, Sums, Target, cut, split
from shardwise.convert.targets.archive import Growing
from shardwise.convert.targets.nested import Nested, nested
from shardwise.convert.targets.torch_file import add_torch_file
from shardwise.errors import StateError
from shardwise.formats.readers.dcp.metadata import METADATA, Item

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

Path = tuple[str | int, ...]


def dcp_target(chosen: Chosen) -> Target:
    """Plan the files of a DCP checkpoint. Tensors larger than `max_file` are cut.

    Optimizers have both the names of `get_optimizer_state_dict` with flattening and without.
    """
    state = nested(chosen)
    left_out = list(state.left_out)
    leaves = _by_name(state)
    tensors = {name: cut(leaf.value, chosen.max_file) for name, leaf in leaves.items() if leaf.part}
    parts = dict.fromkeys(part for cut_up in tensors.values() for part in cut_up)
    files = [Growing("__0_0.distcp")]
    placed: dict[Part | str, Item] = {}
    for name, leaf in leaves.items():
        if leaf.part:
            continue
        try:
            placed[name] = _add(files[0], leaf.value, name)
        except StateError as error:
            left_out.append(str(error))
    for number, held in enumerate(split(parts, lambda part: part.size, chosen.max_file)):
        if number:
            files.append(Growing(f"__{number}_0.distcp"))
        placed |= {part: _add(files[number], part, part.name) for part in held}
    paths = {name: leaf.path for name, leaf in leaves.items() if leaf.part or name in placed}

    def finals(_: Mapping[str, Sums]) -> Mapping[str, bytes]:
        return {METADATA: pickle.dumps(_metadata(paths, tensors, placed))}

    return Target(tuple(file.output() for file in files), finals, tuple(left_out))


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor or value, and its path in the state."""

    path: Path
    value: Any

    @property
    def part(self) -> bool:
        """Whether the leaf is a tensor."""
        return isinstance(self.value, Part)


def _by_name(state: Nested) -> dict[str, _Leaf]:
    """Return the leaves of a state by their dotted paths.

    Raises:
        StateError: two leaves have the same name.
    """
    held = dict(state.parts)
    for root, optimizer in state.optimizers.items():
        held |= {(root, key): value for key, value in optimizer.flattened().items()}
    found: dict[str, _Leaf] = {}
    for above, whole in held.items():
        for path, value in _leaves(above, whole):
            name = ".".join(map(str, path))
            if name in found:
                raise StateError(
                    f"{name}: two values get this name in DCP: leave one of them out with skip="
                )
            found[name] = _Leaf(path, value)
    return found


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield leaves as DCP flattens a state: dicts, and lists that contain tensors or dicts."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves((*path, str(key)), each)
    elif isinstance(value, list) and not _is_leaf(value):
        for number, each in enumerate(value):
            yield from _leaves((*path, number), each)
    else:
        yield path, value


def _is_leaf(value: Any) -> bool:
    if isinstance(value, (Mapping, Part)):
        return False
    return not isinstance(value, list) or all(map(_is_leaf, value))


def _add(file: Growing, value: Any, name: str) -> Item:
    file.align()
    start = file.size
    add_torch_file(file, value, name)
    return Item(file.name, start, file.size - start)


def _metadata(
    paths: Mapping[str, Path],
    tensors: Mapping[str, Sequence[Part]],
    placed: Mapping[Part | str, Item],
) -> Metadata:
    """Return the metadata as torch builds it."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
    )

    entries: dict[str, Any] = {}
    places = {}
    for name in paths:
        if name not in tensors:
            entries[name] = BytesStorageMetadata()
            item = placed[name]
            places[MetadataIndex(name)] = _StorageInfo(item.file, item.offset, item.length)
            continue
        entries[name] = _tensor(tensors[name])
        for number, part in enumerate(tensors[name]):
            item = placed[part]
            index = MetadataIndex(name, part.box.offset, number)
            places[index] = _StorageInfo(item.file, item.offset, item.length)
    return Metadata(
        entries,
        planner_data=dict(paths),
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _tensor(parts: Sequence[Part]) -> TensorStorageMetadata:
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    shape = parts[-1].box.stop
    chunks = [
        ChunkStorageMetadata(torch.Size(part.box.offset), torch.Size(part.box.shape))
        for part in parts
    ]
    dtype: torch.dtype = getattr(torch, parts[0].dtype)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
