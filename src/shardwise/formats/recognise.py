"""Which format a place is of: the readers, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import CheckpointNotFoundError
from shardwise.formats.foreign import Foreign
from shardwise.formats.readers import bytecheckpoint, huggingface, torchsave, torchsnapshot
from shardwise.formats.readers.dcp import reader as dcp
from shardwise.formats.readers.deepspeed import native as deepspeed
from shardwise.formats.readers.deepspeed import universal as deepspeed_universal
from shardwise.formats.readers.megatron import reader as megatron
from shardwise.formats.readers.megatron_legacy import reader as megatron_legacy
from shardwise.formats.tree import Tree

MOST_HINTS = 8


@dataclass(frozen=True, slots=True)
class Reader:
    """A format: what it is called, whether a place looks like it, and how it is read."""

    name: str
    recognise: Callable[[Tree], bool]
    read: Callable[[Tree], Foreign]


READERS: tuple[Reader, ...] = (
    Reader(megatron.FORMAT, megatron.recognise, megatron.read),
    Reader(bytecheckpoint.FORMAT, bytecheckpoint.recognise, bytecheckpoint.read),
    Reader(torchsnapshot.FORMAT, torchsnapshot.recognise, torchsnapshot.read),
    Reader(dcp.FORMAT, dcp.recognise, dcp.read),
    Reader(deepspeed.FORMAT, deepspeed.recognise, deepspeed.read),
    Reader(deepspeed_universal.FORMAT, deepspeed_universal.recognise, deepspeed_universal.read),
    Reader(megatron_legacy.FORMAT, megatron_legacy.recognise, megatron_legacy.read),
    Reader(huggingface.FORMAT, huggingface.recognise, huggingface.read),
    Reader(torchsave.FORMAT, torchsave.recognise, torchsave.read),
)


def read_foreign(tree: Tree) -> Foreign:
    """Read what is at a place, by the first format that recognises it. No tensor is read.

    Raises:
        CheckpointNotFoundError: no format does.
        FormatError: the one that does finds it malformed.
    """
    for reader in READERS:
        if reader.recognise(tree):
            return reader.read(tree)
    known = ", ".join(reader.name for reader in READERS)
    found = ", ".join(list(tree.sizes)[:5]) or "no file"
    raise CheckpointNotFoundError(
        f"{tree} is of no format that is known here ({known}): it has {found}"
        f"{', …' if len(tree.sizes) > 5 else ''}{_below(tree)}"
    )


def _below(tree: Tree) -> str:
    """What may have been meant: what is of a known format one step below."""
    names = [] if tree.only is not None else sorted({name.partition("/")[0] for name in tree.sizes})
    trees = [Tree(tree.path / name) for name in names[-MOST_HINTS:]]
    meant = [each for each in trees if any(reader.recognise(each) for reader in READERS)]
    if not meant:
        return ""
    return f". Open what is below: {', '.join(each.path.name for each in meant)}"
