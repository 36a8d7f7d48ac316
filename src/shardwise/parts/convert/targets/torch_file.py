"""Plan files as torch.save writes them: zip archives with a pickle and the bytes of tensors.

An archive is planned before the bytes of its tensors are known, so the checksum of a tensor follows
its bytes, as in torch's archives. The central directory at the end lists all checksums.
"""

from __future__ import annotations

import _codecs
import io
import math
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias
from zipfile import ZIP64_LIMIT, ZipFile, ZipInfo

import numpy as np
import torch

from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.checksums import crc32
from shardwise.parts.convert.plan import (
    BytesFromChecksums,
    ExportContents,
    ExportFiles,
    OutputFile,
    RangeChecksums,
    TensorPart,
    size_of,
)
from shardwise.parts.convert.targets.nested import nest_state
from shardwise.parts.formats.containers.torch_values import STORAGE_DTYPES

NumpyArray: TypeAlias = "np.ndarray[Any, Any]"
FILE_NAME = "checkpoint.pt"
_ARCHIVE_FOLDER = "archive"
_VERSION = b"3\n"
_PROTOCOL = 2
_TYPED_STORAGES = {
    dtype: getattr(torch, f"{storage_type}Storage")
    for storage_type, dtype in STORAGE_DTYPES.items()
}
_REBUILD_TENSOR = torch._utils._rebuild_tensor_v2
_REBUILD_WITH_DTYPE = torch._utils._rebuild_tensor_v3
_ALLOWED_NAMES = frozenset(
    {
        *_TYPED_STORAGES.values(),
        *(torch.UntypedStorage, torch.Size, torch.device, _REBUILD_TENSOR, _REBUILD_WITH_DTYPE),
        *(OrderedDict, Counter, bytearray, complex, _codecs.encode),
    }
)
_ALLOWED_TYPES = frozenset(
    {OrderedDict, Counter, torch.Size, torch.device, torch.dtype, bytearray, complex}
)
"""Types that `torch.load(weights_only=True)` loads, in addition to plain Python values."""
_TYPES_PICKLED_BY_NAME = (type, FunctionType, BuiltinFunctionType)


def plan_torch_file(contents: ExportContents) -> ExportFiles:
    """Plan one file that `torch.load(weights_only=True)` reads, with nested state_dicts.

    Values that torch loads only with `weights_only=False` are left out.
    """
    state = nest_state(contents)
    left_out = list(state.left_out)
    state_dict: dict[str, Any] = {}
    for path, value in state.parts.items():
        reason = unloadable_reason(value, ".".join(path))
        if reason:
            left_out.append(reason)
            continue
        *above, key = path
        container = state_dict.setdefault(above[0], {}) if above else state_dict
        container[key] = value
    for name, optimizer in state.optimizers.items():
        state_dict[name] = optimizer.indexed_state_dict()
        left_out += [
            f"{name}.{each}: not in any param group"
            for each in optimizer.parameters_without_group()
        ]
    file = OutputFile(FILE_NAME)
    add_torch_file(file, state_dict, FILE_NAME)
    return ExportFiles((file,), lambda sums: {}, tuple(left_out))


def unloadable_reason(value: Any, name: str) -> str:
    """Return the reason why torch would not load a value; empty if torch would load it."""
    if isinstance(value, TensorPart):
        return ""
    try:
        pickle_for_torch(value, name)
    except StateError as error:
        return str(error)
    return ""


def add_torch_file(file: OutputFile, value: Any, name: str) -> None:
    """Pad a file to the alignment, then append a value in the format of torch.save.

    Args:
        name: name of the value, for error messages.

    Raises:
        StateError: the value contains an object that `torch.load(weights_only=True)` refuses.
    """
    pickled, storages = pickle_for_torch(value, name)
    file.align(ALIGNMENT)
    archive = ArchiveBuilder(file)
    archive.add(f"{_ARCHIVE_FOLDER}/data.pkl", pickled)
    archive.add(f"{_ARCHIVE_FOLDER}/byteorder", b"little")
    for index, storage in enumerate(storages):
        archive.add(f"{_ARCHIVE_FOLDER}/data/{index}", storage)
    archive.add(f"{_ARCHIVE_FOLDER}/version", _VERSION)
    archive.close()


def pickle_for_torch(value: object, name: str) -> tuple[bytes, list[TensorPart | bytes]]:
    """Pickle a value so that `torch.load(weights_only=True)` reads it.

    Equal `TensorPart`s become tensors that share a storage. NumPy scalars become Python numbers,
    and NumPy arrays become tensors.

    Args:
        name: name of the value, for error messages.

    Returns:
        The pickle, and the contents of its storages, to which the pickle refers by index.

    Raises:
        StateError: the value contains an object that `torch.load(weights_only=True)` refuses.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(_convert_from_numpy(value))
    except StateError as error:
        raise StateError(f"{name}: {error}") from error
    except RecursionError as error:
        raise StateError(
            f"{name}: nested too deeply to be pickled: leave it out with skip="
        ) from error
    return file.getvalue(), pickler.storages


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage that a pickle refers to.

    Attributes:
        storage_type: torch's class for storages of this dtype.
        index: its index among the storages of the pickle.
        elements: the number of elements.
    """

    storage_type: type
    index: int
    elements: int


class _Pickler(pickle.Pickler):
    """Writes pickles as torch does, and refuses types that `weights_only=True` does not load."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: list[TensorPart | bytes] = []
        self._storage_indices: dict[TensorPart, int] = {}

    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, _Storage):
            return "storage", obj.storage_type, str(obj.index), "cpu", obj.elements
        return None

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, TensorPart):
            index = self._storage_indices.get(obj)
            if index is None:
                index = self._storage_indices[obj] = self._add_storage(obj)
            return _reduce_tensor(index, obj.dtype, obj.box.shape, obj.size)
        if isinstance(obj, torch.Tensor):
            data = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            dtype = str(obj.dtype).removeprefix("torch.")
            return _reduce_tensor(self._add_storage(data), dtype, tuple(obj.shape), len(data))
        if type(obj) in _ALLOWED_TYPES or (
            isinstance(obj, _TYPES_PICKLED_BY_NAME) and obj in _ALLOWED_NAMES
        ):
            return NotImplemented
        raise StateError(
            f"torch.load reads a {type(obj).__name__} only with weights_only=False: save it as "
            "plain values, or leave it out with skip="
        )

    def _add_storage(self, data: TensorPart | bytes) -> int:
        self.storages.append(data)
        return len(self.storages) - 1


def _reduce_tensor(index: int, dtype: str, shape: tuple[int, ...], size: int) -> tuple[Any, ...]:
    """Return the function and arguments that rebuild a tensor of a whole storage."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if dtype in _TYPED_STORAGES:
        storage = _Storage(_TYPED_STORAGES[dtype], index, math.prod(shape))
        return _REBUILD_TENSOR, (storage, 0, shape, stride, False, OrderedDict())
    storage = _Storage(torch.UntypedStorage, index, size)
    torch_dtype = getattr(torch, dtype)
    return _REBUILD_WITH_DTYPE, (storage, 0, shape, stride, False, OrderedDict(), torch_dtype)


def _convert_from_numpy(value: object) -> object:
    container_type = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _tensor_of_array(value)
    if container_type in (dict, OrderedDict):
        pairs = ((_convert_from_numpy(k), _convert_from_numpy(v)) for k, v in value.items())  # type: ignore[attr-defined]
        return container_type(pairs)
    if container_type in (list, tuple):
        return container_type(map(_convert_from_numpy, value))  # type: ignore[call-overload]
    return value


def _tensor_of_array(array: NumpyArray) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).copy()).reshape(array.shape)
    except TypeError as error:
        raise StateError(
            f"torch has no dtype for NumPy's {array.dtype}: convert the array before the save, or "
            "leave it out with skip="
        ) from error


ALIGNMENT = 64
_DESCRIPTOR_MARK = b"PK\x07\x08"
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_PADDING_FIELD = struct.Struct("<2sH")
_FLAG_UTF8, _FLAG_DATA_DESCRIPTOR = 0x800, 8
"""Flags of an entry: its name is UTF-8; its checksum follows its content."""

_Entry = tuple[ZipInfo, int | None]
"""An entry of an archive, and the index of its checksum in `RangeChecksums`; None if the entry has
its checksum already, as `ZipInfo.CRC`."""


class ArchiveBuilder:
    """Plans a zip archive at the end of a file. Offsets count from the start of the archive.

    The checksums of tensors are known only once their bytes are written. So they follow the bytes,
    in a data descriptor.
    """

    def __init__(self, file: OutputFile) -> None:
        self._file = file
        self._start = file.size
        self._entries: list[_Entry] = []

    def add(self, name: str, content: bytes | TensorPart) -> None:
        """Append an entry. Its content is aligned if the start of the archive is aligned.

        The checksum of bytes is in the header before them; that of a tensor is in a descriptor
        after it. The central directory repeats both.
        """
        file, size = self._file, size_of(content)
        is_large = size > ZIP64_LIMIT
        entry = ZipInfo(name)
        entry.create_system = 0
        entry.header_offset = file.size - self._start
        entry.file_size = entry.compress_size = size
        has_descriptor = isinstance(content, TensorPart) and size > 0
        entry.flag_bits = _FLAG_UTF8 | (_FLAG_DATA_DESCRIPTOR if has_descriptor else 0)
        entry.CRC = crc32(content) if isinstance(content, bytes) else 0
        end = entry.header_offset + len(entry.FileHeader(is_large)) + _PADDING_FIELD.size
        padding = -end % ALIGNMENT
        entry.extra = _PADDING_FIELD.pack(b"FB", padding) + b"Z" * padding
        file.add(entry.FileHeader(is_large))
        entry.extra = b""  # the directory does not repeat the padding
        if isinstance(content, TensorPart) and has_descriptor:
            checksum_index = file.add_with_checksum(content)
            file.add(_make_descriptor(checksum_index, size))
            self._entries.append((entry, checksum_index))
        else:
            file.add(content)
            self._entries.append((entry, None))

    def close(self) -> None:
        """Append the central directory, and the records that say where it is."""
        encode = partial(_encode_directory, self._entries, self._file.size - self._start)
        self._file.add(BytesFromChecksums(len(encode(None)), encode))


def _make_descriptor(checksum_index: int, size: int) -> BytesFromChecksums:
    layout = _DESCRIPTOR64 if size > ZIP64_LIMIT else _DESCRIPTOR
    return BytesFromChecksums(
        layout.size, lambda sums: layout.pack(_DESCRIPTOR_MARK, sums[checksum_index], size, size)
    )


def _encode_directory(entries: Sequence[_Entry], start: int, sums: RangeChecksums | None) -> bytes:
    """Return the central directory and the records at the end of an archive.

    Args:
        entries: the entries.
        start: the offset of the directory in the archive.
        sums: the checksums; None for a placeholder of the same size.
    """
    end = _EndOfFile(start)
    with ZipFile(end, "w") as archive:  # writes the directory when it is closed
        for entry, checksum_index in entries:
            if sums is not None and checksum_index is not None:
                entry.CRC = sums[checksum_index]
            archive.filelist.append(entry)
    return end.getvalue()


class _EndOfFile(io.BytesIO):
    """The bytes of a file from an offset on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def tell(self) -> int:
        return self._start + super().tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._start + super().seek(offset - (0 if whence else self._start), whence)
