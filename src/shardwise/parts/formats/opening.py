"""Open a foreign checkpoint: detect its format, and read and check the layout of its files.

Each reader is asked in turn whether it recognises the files. Entry points name the readers of
shardwise, and the readers of other packages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

from shardwise.kernel.errors import (
    CheckpointNotFoundError,
    FormatError,
    MismatchError,
    ShardwiseError,
    StateError,
)
from shardwise.kernel.manifest.layout import Layout, decode_layout
from shardwise.kernel.manifest.manifest import MANIFEST
from shardwise.kernel.manifest.validate import validate_layout
from shardwise.kernel.plugins import (
    SWITCH,
    PluginError,
    failure_of,
    find_plugin,
    find_plugins,
    ignore_failure,
    load_plugin,
    package_of,
)
from shardwise.kernel.store import Store, name_of
from shardwise.parts.formats.containers.pickle_values import UnknownClassError
from shardwise.parts.formats.file_tree import FileTree, ForeignFiles
from shardwise.parts.formats.reader import Builder, Reader

if TYPE_CHECKING:
    from shardwise.parts.formats.specification import Specification

MOST_SUGGESTIONS = 8
"""The most directories that a message suggests to open instead."""


GROUP = "shardwise.readers"
"""The group of entry points by which other packages add readers."""


def _built_in(key: str, module: str, name: str = "READER") -> EntryPoint:
    return EntryPoint(key, f"shardwise.parts.formats.readers.{module}:{name}", GROUP)


_BUILT_IN = (
    _built_in("megatron", "megatron"),
    _built_in("bytecheckpoint", "bytecheckpoint"),
    _built_in("lightning", "lightning"),
    _built_in("dcp", "dcp.reader"),
    _built_in("deepspeed", "deepspeed.reader"),
    _built_in("deepspeed-universal", "deepspeed.universal"),
    _built_in("accelerate", "accelerate"),
    _built_in("hf-shards", "huggingface", "SHARDED_READER"),
    _built_in("hf", "huggingface"),
    _built_in("fsdp-ranks", "fsdp_ranks.reader"),
    _built_in("torch-ranks", "torch_save", "RANKS_READER"),
    _built_in("torch", "torch_save"),
)


_PARTS_OF_NAMES = {
    "megatron": (".metadata",),
    "bytecheckpoint": (".metadata",),
    "dcp": (".metadata", ".distcp"),
    "deepspeed": ("_states.pt", "latest"),
    "deepspeed-universal": ("zero/",),
    "accelerate": ("optimizer", "model"),
    "hf-shards": ("shard-",),
    "fsdp-ranks": ("_world_size_",),
}
"""For each reader, texts in the names of its files. If no file name contains one of these texts,
the reader is not asked, and not even imported."""


_OF_PACKAGES = {
    "megatron-legacy": (
        "legacy Megatron-LM",
        "shardwise-legacy",
        re.compile(
            r"((iter_\d+|release)/)?(mp_rank_\d+(_\d+)*/)?"
            r"(model_optim_rng|distrib_optim|model_rng)\.pt"
        ),
    ),
    "torchsnapshot": ("torchsnapshot", "shardwise-legacy", re.compile(r"\.snapshot_metadata")),
}
"""The formats that known packages read: the name, the package, and the names of files. They are
recognised without the package, so that nothing is saved into such a checkpoint, and no training
starts anew beside it."""


def load_readers(tree: FileTree | None = None) -> Mapping[str, Reader]:
    """Import all readers, and return them by their keys, such as `dcp` in `format="dcp"`.

    Readers of other packages that cannot be used are left out, with a warning.

    Args:
        tree: leave out readers of shardwise that cannot recognise files with these names.

    Raises:
        CheckpointNotFoundError: the place of the files does not exist.
    """
    names = None if tree is None else "\n".join(tree.sizes)
    readers = {
        point.name: _load_reader(point)
        for point in _BUILT_IN
        if names is None or any(part in names for part in _PARTS_OF_NAMES.get(point.name, ("",)))
    }
    for key in dict.fromkeys(point.name for point in find_plugins(GROUP)):
        try:
            readers[key] = _reader_of_plugin(key)
        except StateError as error:  # noqa: PERF203 - few plug-ins
            ignore_failure(error)
    for key in _OF_PACKAGES:
        readers.setdefault(key, _reader_without_package(key))
    return readers


def _reader_without_package(key: str) -> Reader:
    """Return a reader that recognises a format, and says which package reads it."""
    name, package, files = _OF_PACKAGES[key]

    def recognise(tree: FileTree) -> bool:
        return tree.single_file is None and any(map(files.fullmatch, tree.sizes))

    def read(tree: FileTree, builder: Builder) -> None:
        if find_plugin(GROUP, key) is not None:
            _reader_of_plugin(key)  # raises why the installed package cannot be used
        raise FormatError(
            f"{tree} is a checkpoint of {name}, which the package {package} reads: in a clone of "
            f"shardwise, run pip install -e packages/{package}; or, if it is installed, let "
            f"{SWITCH} name it"
        )

    return Reader(name, recognise, read)


@lru_cache
def _load_reader(point: EntryPoint) -> Reader:
    reader = load_plugin(point)
    if not isinstance(reader, Reader):
        raise StateError(
            f"the package {package_of(point)} provides {GROUP} {point.name!r}, but {point.value} "
            f"is a {type(reader).__name__}: name a Reader(name, recognise, read)"
        )
    return reader


def _reader_of_plugin(key: str) -> Reader:
    """Return the reader of another package.

    Raises:
        StateError: it cannot be imported, or has the key of another reader.
    """
    point = find_plugin(GROUP, key)
    if point is None:
        known = ", ".join(load_readers())
        raise StateError(f"format={key!r}: unknown format; known formats are {known}")
    if any(each.name == key for each in _BUILT_IN):
        raise StateError(
            f"{point.value} of the package {package_of(point)} is registered as a reader of "
            f"{key!r}, which shardwise reads itself: rename the entry point, or uninstall the "
            "package"
        )
    return _load_reader(point)


def _reader_of(key: str) -> Reader:
    """Return a reader by its key. Readers of other packages need not work for this."""
    for point in _BUILT_IN:
        if point.name == key:
            return _load_reader(point)
    return load_readers()[key] if key in load_readers() else _reader_of_plugin(key)


def _recognises(key: str, reader: Reader, tree: FileTree) -> bool:
    """Return whether a reader recognises the files.

    Raises:
        StateError: the reader has a bug. The error names its package, if it is not shardwise.
    """
    try:
        return reader.recognise(tree)
    except (ShardwiseError, OSError):
        raise
    except (Exception, SystemExit) as error:
        point = find_plugin(GROUP, key)
        if point is not None:
            raise failure_of(point, error) from error
        raise StateError(
            f"{tree}: the reader {key!r} failed to recognise the files: {type(error).__name__}: "
            f"{error}; pass format="
        ) from error


def find_readers(tree: FileTree) -> dict[str, Reader]:
    """Return the readers that recognise the files; several, if there are several checkpoints.

    Readers of other packages that fail are left out, with a warning.

    Raises:
        CheckpointNotFoundError: the place does not exist.
    """
    found = {}
    for key, reader in load_readers(tree).items():
        try:
            if _recognises(key, reader, tree):
                found[key] = reader
        except PluginError as error:  # noqa: PERF203 - few plug-ins
            ignore_failure(error)
    overridden = {key for reader in found.values() for key in reader.overrides}
    return {key: reader for key, reader in found.items() if key not in overridden}


def _failures_of_plugins(tree: FileTree) -> str:
    """Return why readers of other packages could not look at the files, one sentence for each."""
    failures = []
    for key in dict.fromkeys(point.name for point in find_plugins(GROUP)):
        try:
            _recognises(key, _reader_of_plugin(key), tree)
        except ShardwiseError as error:  # noqa: PERF203 - few plug-ins
            failures.append(f". Not asked: {error}")
    return "".join(failures)


def formats_at(store: Store) -> str:
    """Return the names of the foreign formats at a place; "" if there is none."""
    try:
        return " and ".join(reader.name for reader in find_readers(FileTree(store)).values())
    except (FormatError, OSError):  # a read of the checkpoint reports the error
        return ""


def read_layout(
    store: Store,
    *,
    spec: Specification | None,
    skip_unknown: bool,
    format: str | None,  # noqa: A002 - the usual name
) -> Layout:
    """Return the layout of a foreign checkpoint. `check_layout` checks it.

    Args:
        store: the place of the checkpoint.
        spec, skip_unknown, format: as for `shardwise.open`.

    Raises:
        CheckpointNotFoundError: no known format is recognised.
        FormatError: the checkpoint is malformed.
        MismatchError: the specification does not fit the checkpoint.
    """
    tree = FileTree(store, skip_unknown=skip_unknown)
    try:
        if spec is None or spec.files is None:
            return read_foreign(tree, format)
        return spec.read(tree)
    except FormatError as error:
        if type(error) is not FormatError or tree.is_named_in(str(error)):
            raise
        raise FormatError(f"{tree}: {error}") from error
    except MismatchError as error:
        if tree.is_named_in(str(error)):
            raise
        raise MismatchError(f"{tree}: {error.summary}", error.problems) from error


def check_layout(store: Store, layout: Layout | bytes) -> tuple[ForeignFiles, Layout]:
    """Check the layout of a foreign checkpoint, and return it with the files.

    Args:
        store: the place of the checkpoint.
        layout: the layout, which another rank may have encoded.

    Raises:
        FormatError: the layout is inconsistent.
    """
    try:
        layout = validate_layout(decode_layout(layout) if isinstance(layout, bytes) else layout)
    except FormatError as error:
        raise FormatError(
            f"{store}: {error}; copy the checkpoint again from an intact source, or open another "
            "one"
        ) from error
    missing = (f"{name}: {file} is missing" for name, file in layout.missing_files.items())
    files = ForeignFiles(FileTree(store), layout.files)
    return files, replace(layout, left_out=(*layout.left_out, *missing))


def read_foreign(tree: FileTree, format: str | None = None) -> Layout:  # noqa: A002 - as in `open`
    """Read the layout of a foreign checkpoint. No tensor is read.

    Args:
        tree: the files.
        format: the key of a reader; None to detect the format.

    Raises:
        CheckpointNotFoundError: no reader recognises the files, or the reader of `format` does not.
        FormatError: the checkpoint is malformed.
        StateError: several readers recognise the files, or `format` is unknown.
    """
    chosen: dict[str, Reader] = {}
    if format is not None:
        named = _reader_of(format)
        chosen = {format: named} if _recognises(format, named, tree) else {}
    if not chosen:
        chosen = find_readers(tree)
        if format is not None or not chosen:
            raise CheckpointNotFoundError(_describe_unrecognised(tree, chosen))
    (key, reader), *others = chosen.items()
    if others:
        names = " and ".join(each.name for each in chosen.values())
        keys = " or ".join(chosen)
        raise StateError(
            f"{tree} contains checkpoints of several formats, {names}: choose one by "
            f"format={key!r}; keys: {keys}"
        )
    try:
        return _read(reader, tree)
    except FormatError as error:
        if tree.skip_unknown:
            _explain_by_unknown_classes(reader, tree, error)
        raise


def _read(reader: Reader, tree: FileTree) -> Layout:
    builder = Builder(tree)
    reader.read(tree, builder)
    return builder.build(reader.name)


def _explain_by_unknown_classes(reader: Reader, tree: FileTree, error: FormatError) -> None:
    """Raise an error that names the unknown classes in the files; return if there are none."""
    try:
        _read(reader, FileTree(tree.store))
    except UnknownClassError as unknown:
        raise UnknownClassError(
            f"{tree}: {reader.name} cannot be read with skip_unknown=True, because it needs the "
            f"skipped objects of {unknown.names}: load them with the library of these classes, and "
            f"save tensors and plain values only ({error})",
            unknown.names,
        ) from error
    except FormatError:
        return


def _describe_unrecognised(tree: FileTree, found: Mapping[str, Reader]) -> str:
    if found:
        names = " and ".join(f"{reader.name} (format={key!r})" for key, reader in found.items())
        return (
            f"{tree}: the checkpoint does not have the given format, but that of {names}: pass "
            "this format, or leave out format="
        )
    known = ", ".join(reader.name for reader in load_readers().values())
    contents = ""
    if tree.single_file is None:
        files = ", ".join(list(tree.sizes)[:5]) or "no file"
        contents = f": it contains {files}{', …' if len(tree.sizes) > 5 else ''}"
    return (
        f"{tree} is not a checkpoint of a known format ({known}){contents}"
        f"{_suggest_checkpoints_below(tree)}{_failures_of_plugins(tree)}"
    )


def _suggest_checkpoints_below(tree: FileTree) -> str:
    """Return a sentence that suggests what to open, for example checkpoints one level below."""
    names = (
        []
        if tree.single_file is not None
        else sorted({name.partition("/")[0] for name in tree.sizes})
    )
    subtrees = [FileTree(tree.store.at(name)) for name in names[-MOST_SUGGESTIONS:]]
    recognised = [
        each
        for each in subtrees
        if any(name.rpartition("/")[2] == MANIFEST for name in each.sizes) or find_readers(each)
    ]
    if not recognised:
        return ". Check the path, or describe the files by a specification (spec=)"
    shown = ", ".join(name_of(subtree.store) for subtree in recognised)
    are_all = len(names) <= MOST_SUGGESTIONS
    if sum(subtree.single_file is not None for subtree in recognised) > 1:
        one = f"one of {shown}" if are_all else f"one of the files there, for example {shown}"
        return (
            f". Open {one}. If these files are parts of one checkpoint, read all of them with a "
            "specification (spec=)"
        )
    return f". Open a checkpoint below{': ' if are_all else ', for example '}{shown}"
