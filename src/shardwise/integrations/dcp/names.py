"""Translate names between DCP (`optim.state.0.weight.step`) and shardwise (`optim.0.weight.step`).

A state that is saved through the functions of DCP gets the same names as the contents of files that
DCP itself has written. The value `dcp_metadata` of the checkpoint records what DCP needs and these
names lack: the path of each name in the nested state, and the hyperparameters of optimizers as DCP
flattened them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import product
from typing import Any, TypeAlias

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

import shardwise as sw
import shardwise.parts.formats.reader as port
from shardwise import FormatError, StateError

Path: TypeAlias = tuple[str | int, ...]
DCP_METADATA = "dcp_metadata"
GROUPS = "param_groups"
_PATHS, _NAMES, _VALUES, _BYTES_IO = "paths", "names", "values", "bytes_io"
_ARRAYS = "arrays"
_METADATA_CLASSES = [
    f"{Metadata.__module__}.{each.__name__}"
    for each in (Metadata, MetadataIndex, BytesStorageMetadata)
]
_TENSOR = port.StoredArray("", 0, "uint8", (), ())
"""Stands for each tensor of a state."""
_MOST_LIST_ITEMS = 1 << 20
"""The most items that all lists of a state may have together, by the indices in the saved paths."""


def name_state(
    tensors: Collection[str],
    values: Mapping[str, object],
    values_with_tensors: Collection[str],
    arrays: Collection[str],
    paths: Mapping[str, Path],
) -> tuple[dict[str, str], dict[str, object]]:
    """Return the names that a checkpoint uses for a state that DCP has flattened.

    All arguments have the names of DCP.

    Args:
        tensors: the names of the tensors.
        values: the plain values without tensors.
        values_with_tensors: the names of the values with tensors inside.
        arrays: the names of the values that are NumPy arrays, which are stored as tensors.
        paths: the path of each name in the nested state. A name without a path was not flattened.

    Returns:
        A dict from DCP's name of each tensor to its name in the checkpoint; and the values to save,
        by name. They include `dcp_metadata`, and do not include `values_with_tensors`.

    Raises:
        StateError: a name is taken.
    """
    bytes_io_positions = {name: v.tell() for name, v in values.items() if isinstance(v, BytesIO)}
    values = {n: v.getvalue() if isinstance(v, BytesIO) else v for n, v in values.items()}
    path_of = {n: paths.get(n, (n,)) for n in (*tensors, *values, *values_with_tensors, *arrays)}
    others = [path_of[name] for name in (*values_with_tensors, *arrays)]
    leaves = [(path, _TENSOR) for path in (*(path_of[name] for name in tensors), *others)]
    nested = port.nest([*leaves, *((path_of[name], value) for name, value in values.items())])
    named = port.name_leaves(nested, others)
    tensor_names = {name: named.names[path_of[name]] for name in tensors}
    named_values = {named.names[path]: value for path, value in named.values.items()}
    groups = {
        name: [
            {"members": list(group.names), "value": dict(group.hyperparameters)}
            for group in optimizer.groups
        ]
        for name, optimizer in named.optimizers.items()
    }
    if DCP_METADATA in (*tensor_names.values(), *named_values, *values_with_tensors, *arrays):
        raise StateError(
            f"{DCP_METADATA!r}: shardwise stores DCP's names under this key: rename the key"
        )
    separate = {}
    for name, value in values.items():
        place = _locate(path_of[name], named_values)
        if place is None or _find(named_values[place.object_name], place.keys) is not value:
            separate[name] = value
    is_nested = any(path != (name,) for name, path in paths.items())
    metadata = {
        _PATHS: {name: list(path) for name, path in paths.items()} if is_nested else {},
        _NAMES: {name: saved for name, saved in tensor_names.items() if name != saved},
        _VALUES: separate,
        _BYTES_IO: bytes_io_positions,
        _ARRAYS: dict.fromkeys(arrays),
    }
    return tensor_names, {**named_values, **groups, DCP_METADATA: metadata}


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """The place of a value in a checkpoint.

    Attributes:
        object_name: the object that contains the value; or, for a NumPy array, its tensor.
        keys: the keys that lead to the value.
        bytes_io_position: for a value that was a `BytesIO`, its position.
    """

    object_name: str
    keys: Path = ()
    bytes_io_position: int | None = None

    def find(self, value: object, path: str) -> object:
        """Return the value, given the whole object and the path of the checkpoint.

        Raises:
            FormatError: the object lacks one of the keys.
        """
        found = _find(value, self.keys)
        if found is _ABSENT:
            raise FormatError(
                f"{path}: {self.object_name} lacks {'.'.join(map(str, self.keys))}, which "
                f"{DCP_METADATA} names: a faulty program wrote the checkpoint; load another one"
            )
        if self.bytes_io_position is None or not isinstance(found, bytes):
            return found
        stream = BytesIO(found)
        stream.seek(self.bytes_io_position)
        return stream


@dataclass(frozen=True, slots=True)
class DcpNames:
    """The tensors and values of a checkpoint under the names of DCP.

    Attributes:
        tensors: the name in the checkpoint of each tensor.
        values: the place of each value.
        paths: the path of each name in the nested state.
    """

    tensors: Mapping[str, str]
    values: Mapping[str, ValuePlace]
    paths: Mapping[str, Path]


def names_in_checkpoint(checkpoint: sw.Checkpoint) -> DcpNames:
    """Return the names that DCP uses for the contents of a checkpoint of any format.

    If DCP did not save the checkpoint, tensors of optimizers get the names that torch's
    `get_optimizer_state_dict` gives them, and dicts of plain values are flattened.

    Raises:
        FormatError: the value `dcp_metadata` is invalid.
        StateError: this value contains pickle, and the checkpoint was opened without
            `allow_pickle`.
    """
    tensors = list(checkpoint.tensors())
    if DCP_METADATA in checkpoint:
        objects = [name for name in _value_names(checkpoint) if name != DCP_METADATA]
        try:
            return _names_by_metadata(checkpoint[DCP_METADATA], tensors, objects)
        except FormatError as error:
            raise FormatError(f"{checkpoint.path}: {error}") from error
    return _names_without_metadata(checkpoint)


def names_in_dcp_files(names: DcpNames, path: str, checkpoint: sw.Checkpoint) -> DcpNames:
    """Add the names that the files of DCP themselves use.

    They may lack the prefix `model.` or `optimizer.` of the names in the checkpoint, and name the
    hyperparameters of each parameter. A NumPy array, which the checkpoint stores as a tensor, is a
    value in DCP.

    Args:
        names: the result of `names_in_checkpoint`.
        path: the path or URL of the files.
        checkpoint: the checkpoint.
    """
    tensors, values = dict(names.tensors), dict(names.values)
    objects = {name: ValuePlace(name) for name in _value_names(checkpoint)}
    other_values = {**_hyperparameters_by_parameter(checkpoint), **values, **objects}
    tree = port.FileTree(path, skip_unknown=True)
    metadata = tree.load_pickle(".metadata", classes=_METADATA_CLASSES)
    for name, described in metadata.fields["state_dict_metadata"].items():
        # A value has BytesStorageMetadata. The metadata of a tensor is an unknown object here.
        is_value = isinstance(described, port.PickledInstance)
        if is_value and tensors.get(name) == name:
            values[name] = ValuePlace(tensors.pop(name))
        if name in tensors or name in values:
            continue
        for full_name in (name, f"model.{name}", f"optimizer.{name}"):
            if full_name in names.tensors:
                tensors[name] = names.tensors[full_name]
                break
            if full_name in other_values:
                values[name] = other_values[full_name]
                break
    return DcpNames(tensors, values, {name: (name,) for name in (*tensors, *values)})


def _value_names(checkpoint: sw.Checkpoint) -> list[str]:
    tensors = checkpoint.tensors()
    return [name for name in checkpoint if name not in tensors]


def _groups_of_optimizers(checkpoint: sw.Checkpoint) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the name, the index and the content of each param group."""
    for name in _value_names(checkpoint):
        if name.rpartition(".")[2] == GROUPS:
            groups = checkpoint.as_json(name)
            for i, group in enumerate(groups if isinstance(groups, list) else ()):
                if isinstance(group, dict) and isinstance(group.get("value"), dict):
                    yield name, i, group


def _hyperparameters_by_parameter(checkpoint: sw.Checkpoint) -> dict[str, ValuePlace]:
    """Return the hyperparameters by the names that `flatten_optimizer_state_dict=True` gives."""
    found = {}
    for name, i, group in _groups_of_optimizers(checkpoint):
        members = group.get("members")
        for key, member in product(group["value"], members if type(members) is list else ()):
            found[f"{name}.{member}.{key}"] = ValuePlace(name, (i, "value", key))
    return found


def _names_by_metadata(
    metadata: object, tensors: Collection[str], objects: Collection[str]
) -> DcpNames:
    paths = {name: _checked_path(name, path) for name, path in _part(metadata, _PATHS).items()}
    _check_lists(paths.values())
    renamed = {name: str(saved) for name, saved in _part(metadata, _NAMES).items()}
    separate, bytes_io_positions = _part(metadata, _VALUES), _part(metadata, _BYTES_IO)
    arrays = _part({_ARRAYS: {}, **metadata}, _ARRAYS) if isinstance(metadata, dict) else {}
    dcp_name = {saved: name for name, saved in renamed.items()}
    by_dcp_name = {dcp_name.get(name, name): name for name in tensors}
    names = paths or dict.fromkeys((*by_dcp_name, *objects, *separate))
    found_tensors: dict[str, str] = {}
    values: dict[str, ValuePlace] = {}
    for name in names:
        place = _locate(paths.get(name, (name,)), objects)
        if name in separate:
            values[name] = ValuePlace(DCP_METADATA, (_VALUES, name))
        elif name in by_dcp_name and name in arrays:
            values[name] = ValuePlace(by_dcp_name[name])
        elif name in by_dcp_name:
            found_tensors[name] = by_dcp_name[name]
        elif place is not None:
            values[name] = place
        else:
            raise _invalid_metadata_error(f"the checkpoint lacks {name}")
    for name, position in bytes_io_positions.items():
        if name not in values or not isinstance(position, int) or position < 0:
            raise _invalid_metadata_error(f"{name} is no BytesIO")
        values[name] = replace(values[name], bytes_io_position=position)
    return DcpNames(found_tensors, values, {name: paths.get(name, (name,)) for name in names})


def _names_without_metadata(checkpoint: sw.Checkpoint) -> DcpNames:
    values: dict[str, ValuePlace] = {}
    for name, i, group in _groups_of_optimizers(checkpoint):
        values[f"{name}.{i}.params"] = ValuePlace(name, (i, "members"))
        for key in group["value"]:
            values[f"{name}.{i}.{key}"] = ValuePlace(name, (i, "value", key))
    with_groups = {place.object_name for place in values.values()}
    tensors = list(checkpoint.tensors())
    for name in _value_names(checkpoint):
        if name not in with_groups:
            has_tensors = any(each.startswith(f"{name}.") for each in tensors)
            values |= {name: ValuePlace(name)} if has_tensors else _parts_of_value(checkpoint, name)
    optimizers = [name.removesuffix(f".{GROUPS}") for name in with_groups]
    named = {_with_state_key(name, optimizers): name for name in tensors}
    return DcpNames(named, values, {name: (name,) for name in (*named, *values)})


def _with_state_key(name: str, optimizers: Iterable[str]) -> str:
    """Return `optimizer.state.<parameter>.<key>` for a tensor of an optimizer."""
    for optimizer in optimizers:
        if name.startswith(f"{optimizer}."):
            return f"{optimizer}.state{name[len(optimizer) :]}"
    return name


def _parts_of_value(checkpoint: sw.Checkpoint, name: str) -> dict[str, ValuePlace]:
    """Return the parts of a value by the names that DCP gives them."""
    try:
        value = checkpoint[name]
    except StateError:  # a load of the value reports the error
        return {name: ValuePlace(name)}
    planner = DefaultSavePlanner()
    planner.set_up_planner({name: value})
    return {part: ValuePlace(name, tuple(path[1:])) for part, path in planner.mappings.items()}


_ABSENT = object()


def _find(value: object, keys: Path) -> object:
    """Return the part of a value that the keys lead to; `_ABSENT` if there is none."""
    for key in keys:
        if isinstance(value, list) and type(key) is int and 0 <= key < len(value):
            value = value[key]
        elif isinstance(value, dict):  # DCP turns all keys into text
            texts = (key,) if key in value else [each for each in value if str(each) == key]
            value = value[texts[0]] if texts else _ABSENT
        else:
            return _ABSENT
    return value


def _locate(path: Path, objects: Collection[str]) -> ValuePlace | None:
    """Return the place of the value at a path of the nested state; None if it has no object."""
    for count in range(len(path), 0, -1):
        name = ".".join(map(str, path[:count]))
        if name in objects:
            return ValuePlace(name, path[count:])
    return None


def _part(metadata: object, key: str) -> dict[str, object]:
    part = metadata.get(key) if isinstance(metadata, dict) else None
    if not isinstance(part, dict) or not all(isinstance(each, str) for each in part):
        raise _invalid_metadata_error(f"it has no dict {key!r}")
    return part


def _checked_path(name: str, path: object) -> Path:
    parts = path if isinstance(path, list) else []
    if not parts or not all(type(part) is str or _is_index(part) for part in parts):
        raise _invalid_metadata_error(f"the path of {name} is {str(path)[:60]}, not a list of keys")
    return tuple(parts)


def _is_index(part: object) -> bool:
    return type(part) is int and 0 <= part < _MOST_LIST_ITEMS


def _check_lists(paths: Iterable[Path]) -> None:
    """Refuse indices that would make torch allocate long lists."""
    length: dict[Path, int] = {}
    for path in paths:
        for i, part in enumerate(path):
            if isinstance(part, int):
                length[path[:i]] = max(length.get(path[:i], 0), part + 1)
    if sum(length.values()) > _MOST_LIST_ITEMS:
        raise _invalid_metadata_error(f"its lists have more than {_MOST_LIST_ITEMS} items")


def _invalid_metadata_error(problem: str) -> FormatError:
    return FormatError(
        f"the value {DCP_METADATA!r} is invalid: {problem}: a faulty program wrote the checkpoint; "
        "load another one"
    )
