"""Plan the files of PyTorch DCP checkpoints: `.metadata`, and data files in torch.save format."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.kernel.errors import StateError
from shardwise.parts.convert.plan import (
    ExportContents,
    ExportFiles,
    OutputFile,
    TensorPart,
    divide_among_files,
    split_rows,
)
from shardwise.parts.convert.targets.nested import NestedState, nest_state
from shardwise.parts.convert.targets.torch_file import ALIGNMENT, add_torch_file

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"
Path = tuple[str | int, ...]


def plan_dcp_files(contents: ExportContents) -> ExportFiles:
    """Plan the files of a DCP checkpoint. Tensors larger than `max_file` are cut.

    `.metadata` lists an optimizer's hyperparameters twice, under flattened names and under nested
    ones. Which of them a program loads depends on its options of `get_optimizer_state_dict`.
    """
    state = nest_state(contents)
    left_out = list(state.left_out)
    leaves = _leaves_by_name(state)
    tensors = {
        name: split_rows(value, contents.max_file)
        for name, (_, value) in leaves.items()
        if isinstance(value, TensorPart)
    }
    parts = dict.fromkeys(part for row_parts in tensors.values() for part in row_parts)
    files = [OutputFile("__0_0.distcp")]
    stored_items: dict[TensorPart | str, _StorageInfo] = {}
    for name, (_, value) in leaves.items():
        if name in tensors:
            continue
        try:
            stored_items[name] = _add_value(files[0], value, name)
        except StateError as error:
            left_out.append(str(error))
    for index, file_parts in enumerate(
        divide_among_files(parts, lambda part: part.size, contents.max_file)
    ):
        if index:
            files.append(OutputFile(f"__{index}_0.distcp"))
        stored_items |= {part: _add_value(files[index], part, part.name) for part in file_parts}
    paths = {
        name: path for name, (path, _) in leaves.items() if name in tensors or name in stored_items
    }
    final_files = {METADATA: pickle.dumps(_make_metadata(paths, tensors, stored_items))}
    return ExportFiles(tuple(files), lambda sums: final_files, tuple(left_out))


def _leaves_by_name(state: NestedState) -> dict[str, tuple[Path, Any]]:
    """Return the path and value of each leaf of a state, by its dotted path.

    Raises:
        StateError: two leaves have the same name.
    """
    values = dict(state.parts)
    for optimizer_name, optimizer in state.optimizers.items():
        values |= {(optimizer_name, key): value for key, value in optimizer.named_entries().items()}
    found: dict[str, tuple[Path, Any]] = {}
    for parent_path, parent in values.items():
        for path, value in _iterate_leaves(parent_path, parent):
            name = ".".join(map(str, path))
            if name in found:
                raise StateError(
                    f"{name}: two values of the checkpoint get this name in DCP: leave one of them "
                    "out with skip="
                )
            found[name] = path, value
    return found


def _iterate_leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a state. DCP flattens dicts, and lists that contain tensors or dicts."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _iterate_leaves((*path, str(key)), each)
    elif isinstance(value, list) and not _is_leaf(value):
        for index, each in enumerate(value):
            yield from _iterate_leaves((*path, index), each)
    else:
        yield path, value


def _is_leaf(value: Any) -> bool:
    if isinstance(value, (Mapping, TensorPart)):
        return False
    return not isinstance(value, list) or all(map(_is_leaf, value))


def _add_value(file: OutputFile, value: Any, name: str) -> _StorageInfo:
    """Append a value to a file, and return where it is."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    file.align(ALIGNMENT)
    start = file.size
    add_torch_file(file, value, name)
    return _StorageInfo(file.name, start, file.size - start)


def _make_metadata(
    paths: Mapping[str, Path],
    tensors: Mapping[str, Sequence[TensorPart]],
    stored_items: Mapping[TensorPart | str, _StorageInfo],
) -> Metadata:
    """Return the same metadata object as torch writes to `.metadata`."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
    )

    entries: dict[str, Any] = {}
    storage = {}
    for name in paths:
        if name not in tensors:
            entries[name] = BytesStorageMetadata()
            storage[MetadataIndex(name)] = stored_items[name]
            continue
        entries[name] = _make_tensor_metadata(tensors[name])
        for index, part in enumerate(tensors[name]):
            storage[MetadataIndex(name, part.box.offset, index)] = stored_items[part]
    return Metadata(
        entries,
        planner_data=dict(paths),
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _make_tensor_metadata(parts: Sequence[TensorPart]) -> TensorStorageMetadata:
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
