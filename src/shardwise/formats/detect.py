"""Detect the format of a foreign checkpoint: ask each reader in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import CheckpointNotFoundError, FormatError, StateError
from shardwise.formats.containers.pickle_errors import UnknownClassError
from shardwise.formats.file_tree import FileTree
from shardwise.formats.foreign import Foreign
from shardwise.formats.readers import (
    accelerate,
    bytecheckpoint,
    huggingface,
    lightning,
    megatron,
    torch_save,
    torchsnapshot,
)
from shardwise.formats.readers.dcp import reader as dcp
from shardwise.formats.readers.deepspeed import reader as deepspeed
from shardwise.formats.readers.deepspeed import universal as deepspeed_universal
from shardwise.formats.readers.fsdp_ranks import reader as fsdp_ranks
from shardwise.formats.readers.megatron_legacy import reader as megatron_legacy
from shardwise.manifest.names import MANIFEST

MOST_SUGGESTIONS = 8
"""The most directories that a message suggests to open instead."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A foreign format.

    Attributes:
        key: the name of the format as an option: "dcp" in `format="dcp"`.
        name: the name of the format in messages.
        recognise: a function that returns whether a tree looks like this format.
        read: a function that reads a tree.
        overrides: the keys of other formats to ignore if this format is recognised. Their readers
            recognise the same files.
    """

    key: str
    name: str
    recognise: Callable[[FileTree], bool]
    read: Callable[[FileTree], Foreign]
    overrides: tuple[str, ...] = ()


READERS: tuple[Reader, ...] = (
    Reader("megatron", megatron.FORMAT, megatron.recognise, megatron.read, ("dcp",)),
    Reader("bytecheckpoint", bytecheckpoint.FORMAT, bytecheckpoint.recognise, bytecheckpoint.read),
    Reader("torchsnapshot", torchsnapshot.FORMAT, torchsnapshot.recognise, torchsnapshot.read),
    Reader(
        "lightning",
        lightning.FORMAT,
        lightning.recognise,
        lightning.read,
        ("dcp", "torch", "torch-ranks"),
    ),
    Reader("dcp", dcp.FORMAT, dcp.recognise, dcp.read, ("torch",)),
    Reader(
        "deepspeed",
        deepspeed.FORMAT,
        deepspeed.recognise,
        deepspeed.read,
        # DeepSpeed's converter and trainers write other formats into the same directory.
        ("deepspeed-universal", "torch", "torch-ranks", "accelerate", "hf"),
    ),
    Reader(
        "deepspeed-universal",
        deepspeed_universal.FORMAT,
        deepspeed_universal.recognise,
        deepspeed_universal.read,
    ),
    Reader(
        "megatron-legacy", megatron_legacy.FORMAT, megatron_legacy.recognise, megatron_legacy.read
    ),
    Reader(
        "accelerate",
        accelerate.FORMAT,
        accelerate.recognise,
        accelerate.read,
        ("hf", "torch-ranks"),
    ),
    Reader(
        "hf-shards",
        huggingface.SHARDED_FORMAT,
        huggingface.recognise_sharded,
        huggingface.read_sharded,
        ("hf",),
    ),
    Reader("hf", huggingface.FORMAT, huggingface.recognise, huggingface.read),
    Reader(
        "fsdp-ranks", fsdp_ranks.FORMAT, fsdp_ranks.recognise, fsdp_ranks.read, ("torch-ranks",)
    ),
    Reader(
        "torch-ranks", torch_save.RANKS_FORMAT, torch_save.recognise_ranks, torch_save.read_ranks
    ),
    Reader("torch", torch_save.FORMAT, torch_save.recognise, torch_save.read),
)


def find_readers(tree: FileTree) -> list[Reader]:
    """Return the readers that recognise the files; several, if there are several checkpoints.

    Raises:
        CheckpointNotFoundError: the place does not exist.
    """
    found = [reader for reader in READERS if reader.recognise(tree)]
    overridden = {key for reader in found for key in reader.overrides}
    return [reader for reader in found if reader.key not in overridden]


def read_foreign(tree: FileTree, format: str | None = None) -> Foreign:  # noqa: A002 - as in `open`
    """Read the description of a foreign checkpoint. No tensor is read.

    Args:
        tree: the files.
        format: the key of a reader; None to detect the format.

    Raises:
        CheckpointNotFoundError: no reader recognises the files, or the reader of `format` does not.
        FormatError: the checkpoint is malformed.
        StateError: several readers recognise the files, or `format` is unknown.
    """
    if format is not None and format not in {reader.key for reader in READERS}:
        known = ", ".join(reader.key for reader in READERS)
        raise StateError(f"format={format!r}: unknown format; known formats are {known}")
    found = find_readers(tree)
    chosen = [
        reader
        for reader in READERS
        if (reader in found if format is None else reader.key == format and reader.recognise(tree))
    ]
    if not chosen:
        raise CheckpointNotFoundError(_describe_unrecognised(tree, found))
    if len(chosen) > 1:
        names = " and ".join(reader.name for reader in chosen)
        keys = " or ".join(reader.key for reader in chosen)
        raise StateError(
            f"{tree} contains checkpoints of several formats, {names}: choose one by "
            f"format={chosen[0].key!r} (on the command line --format {chosen[0].key}); keys: {keys}"
        )
    try:
        return chosen[0].read(tree)
    except FormatError as error:
        if tree.skip_unknown:
            _explain_by_unknown_classes(chosen[0], tree, error)
        if type(error) is not FormatError or tree.is_named_in(str(error)):
            raise
        raise FormatError(f"{tree}: {error}") from error


def _explain_by_unknown_classes(reader: Reader, tree: FileTree, error: FormatError) -> None:
    """Raise an error that names the unknown classes in the files; return if there are none."""
    try:
        reader.read(FileTree(tree.store))
    except UnknownClassError as unknown:
        raise UnknownClassError(
            f"{tree}: what skip_unknown=True leaves is not {reader.name}, because the files need "
            f"their objects of {unknown.names}: load them with the library of these classes, and "
            f"save tensors and plain values only ({error})",
            unknown.names,
        ) from error
    except FormatError:
        return


def _describe_unrecognised(tree: FileTree, found: list[Reader]) -> str:
    if found:
        names = " and ".join(f"{reader.name} (format={reader.key!r})" for reader in found)
        return (
            f"{tree}: the checkpoint does not have the given format, but that of {names}: pass "
            "this format, or leave out format="
        )
    known = ", ".join(reader.name for reader in READERS)
    contents = ""
    if tree.single_file is None:
        files = ", ".join(list(tree.sizes)[:5]) or "no file"
        contents = f": it contains {files}{', …' if len(tree.sizes) > 5 else ''}"
    return (
        f"{tree} is not a checkpoint of a known format ({known}){contents}"
        f"{_suggest_checkpoints_below(tree)}"
    )


def _has_manifest(tree: FileTree) -> bool:
    """Return whether a tree is a checkpoint of shardwise, or the root of a run."""
    return any(name.rpartition("/")[2] == MANIFEST for name in tree.sizes)


def _suggest_checkpoints_below(tree: FileTree) -> str:
    """Return a sentence that suggests what to open, for example checkpoints one level below."""
    names = (
        []
        if tree.single_file is not None
        else sorted({name.partition("/")[0] for name in tree.sizes})
    )
    subtrees = [tree.subtree(name) for name in names[-MOST_SUGGESTIONS:]]
    recognised = [tree for tree in subtrees if _has_manifest(tree) or find_readers(tree)]
    if not recognised:
        return ". Check the path, or describe the files by a specification (spec=)"
    names = [subtree.store.name for subtree in recognised]
    if sum(subtree.single_file is not None for subtree in recognised) > 1:
        return (
            f". Open one of {', '.join(names)}. If these files are parts of one checkpoint, "
            "read all of them with a specification (spec=)"
        )
    return f". Open a checkpoint below: {', '.join(names)}"
