"""Match the names, shapes and dtypes of checkpoint and target before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.decoding import prepare_decoding
from shardwise.engine.rounds import Round
from shardwise.errors import MismatchError
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.quantized import REMEDY
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import LocalState, TensorLeaf
from shardwise.state.selection import Selection, is_below

log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class Matched:
    """The result of matching this rank's targets with a checkpoint. Names are the target's.

    Attributes:
        leaves: the tensors to fill.
        objects: the names of plain values to set.
        per_rank: the names of per-rank values to set.
        missing: the names that the checkpoint lacks.
        problems: the mismatches; one line for each name.
        claimed: the names of the checkpoint that are accounted for, because they fill a target or
            because `only` or `skip` excludes them.
        unused_patterns: the patterns of `only` and `skip` that match no name.
        counts: for each module and optimizer, the number of its names, and how many of them the
            checkpoint has. The key "" counts the whole target.
    """

    leaves: list[TensorLeaf] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    per_rank: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    unused_patterns: list[str] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)


def match_targets(
    targets: LocalState,
    saved: SavedNames,
    selection: Selection,
    names_by_owner: Mapping[str, Collection[str]],
    *,
    cast: bool,
) -> Matched:
    """Match this rank's targets with the names of a checkpoint.

    If several names of the target share the same memory (tied weights), the checkpoint needs to
    have only one of these names.

    Args:
        targets: the selected targets.
        saved: the contents of the checkpoint.
        selection: the names that are loaded.
        names_by_owner: the selected names of each module and optimizer.
        cast: allow tensors with different dtypes.
    """
    found = Matched(problems=list(targets.problems))
    absent = []
    for leaf in targets.tensors:
        entry = saved.tensor(leaf.name)
        if entry is None:
            absent.append(leaf)
            continue
        found.claimed.add(entry.name)
        leaf = leaf.without_padding(entry.shape)
        problem = _describe_mismatch(leaf, entry, saved, cast=cast)
        if problem is None:
            found.leaves.append(leaf)
        else:
            found.problems.append(problem)
    filled = {leaf.tie_key for leaf in found.leaves if leaf.tie_key is not None}
    for leaf in absent:
        if leaf.tie_key not in filled:
            _add_missing(found, leaf.name, "a tensor", saved)
    for name in [*targets.objects, *targets.grouped]:
        if saved.has_object(name):
            found.objects.append(name)
        else:
            _add_missing(found, name, "a plain value", saved)
    for name in targets.per_rank:
        if saved.has_per_rank(name):
            found.per_rank.append(name)
        else:
            _add_missing(found, name, "a per-rank value", saved)
    claimed = [*found.objects, *found.per_rank, *targets.unselected]
    found.claimed.update(saved.saved_name(name) for name in claimed)
    all_names = [*targets.names(), *targets.unselected, *saved.all_names()]
    found.unused_patterns.extend(selection.unused_patterns(all_names))
    missing = set(found.missing)
    for owner, names in {**names_by_owner, "": [*targets.names()]}.items():
        found.counts[owner] = len(names), sum(name not in missing for name in names)
    return found


def _add_missing(found: Matched, name: str, target_kind: str, saved: SavedNames) -> None:
    """Add a target that the checkpoint lacks, or has as a value of another kind."""
    saved_kind = saved.kind(name)
    if saved_kind is None:
        found.missing.append(name)
        return
    found.claimed.add(saved.saved_name(name))
    found.problems.append(f"{name}: {saved_kind} in the checkpoint, {target_kind} in the target")


def _describe_mismatch(
    leaf: TensorLeaf, entry: TensorEntry, saved: SavedNames, *, cast: bool
) -> str | None:
    """Return how shape or dtype differ; None if the tensor fits."""
    dtype = str(leaf.dtype).removeprefix("torch.")
    if entry.shape != leaf.shape:
        shapes = f"{list(entry.shape)} in the checkpoint, {list(leaf.shape)} in the target"
        hint = ""
        if leaf.padded:
            hint = " (a specification can cut the padding of a vocabulary)"
        elif len(entry.shape) == len(leaf.shape):
            hint = " (resize= of sw.load copies what both have)"
        return f"{leaf.name}: shape {shapes}{hint}"
    if entry.dtype == dtype:
        return None
    dtypes = f"{leaf.name}: {entry.dtype} in the checkpoint, {dtype} in the target"
    if (partner := saved.quantized.get(entry.name)) is not None:
        return f"{dtypes}; it is quantized together with {partner}: {REMEDY}"
    return None if cast else f"{dtypes} (cast=True converts)"


def agree_on_match(
    all_ranks: Round,
    path: str,
    found: Matched,
    saved: SavedNames,
    selection: Selection,
    keys: Collection[str],
    *,
    strict: bool,
) -> tuple[str, ...]:
    """Combine what matches on each rank, before any target is written. Call it last in a round.

    Args:
        all_ranks: the round.
        path: the path of the checkpoint, for errors.
        found: what matches on this rank.
        saved: the contents of the checkpoint.
        selection: the names that are loaded. Other names are never unexpected.
        keys: the keys of the state. Names of the checkpoint below these keys are unexpected if they
            fill no target on any rank.
        strict: raise if names are missing or unexpected.

    Returns:
        The unexpected names.

    Raises:
        MismatchError: a target does not match; names are missing or unexpected, and `strict` is
            set; or the checkpoint has no name of a module or optimizer. The same error on all
            ranks.
    """
    names = list(saved.all_names())
    saved_keys = {saved.saved_name(key) for key in keys}
    claimed = np.array([n in found.claimed or not selection.selects(n) for n in names], bool)
    under_state_keys = np.array([is_below(n, saved_keys) for n in names], bool)
    message = _MatchMessage(
        np.packbits(claimed).tobytes(),
        np.packbits(under_state_keys).tobytes(),
        found.missing,
        found.problems,
        found.unused_patterns,
        found.counts,
    )
    unexpected = all_ranks.all_reduce(
        message,
        _MatchMessage,
        lambda messages: _combine(messages, path, saved, names, keys, strict=strict),
        list[str],
    )
    return tuple(unexpected)


@prepare_decoding
class _MatchMessage(msgspec.Struct, array_like=True):
    """A rank's message about its targets.

    Attributes:
        claimed: one bit for each name of the checkpoint: whether this rank claims the name.
        under_state_keys: one bit for each name of the checkpoint: whether the name starts with a
            key of the state, as `model.a` does with `model`.
        missing, problems, unused_patterns, counts: as for `Matched`.
    """

    claimed: bytes
    under_state_keys: bytes
    missing: list[str]
    problems: list[str]
    unused_patterns: list[str]
    counts: dict[str, tuple[int, int]]


def _combine(
    messages: Sequence[_MatchMessage],
    path: str,
    saved: SavedNames,
    names: list[str],
    keys: Collection[str],
    *,
    strict: bool,
) -> list[str]:
    """Combine the results of all ranks on rank 0, and return the unexpected names."""
    claimed = np.zeros(len(names), bool)
    under_state_keys = np.zeros(len(names), bool)
    problems: dict[str, None] = {}
    missing: dict[str, None] = {}
    for message in messages:
        claimed |= _unpack_bits(message.claimed, len(names))
        under_state_keys |= _unpack_bits(message.under_state_keys, len(names))
        problems |= dict.fromkeys(message.problems)
        missing |= dict.fromkeys(message.missing)
        if strict:
            problems |= dict.fromkeys(_describe_missing(saved, message.missing))
    unexpected = [names[i] for i in np.flatnonzero(under_state_keys & ~claimed).tolist()]
    if strict:
        problems |= dict.fromkeys(f"{name}: in the checkpoint only" for name in unexpected)
    else:
        problems |= dict.fromkeys(_describe_unfilled([message.counts for message in messages]))
    for pattern in sorted(
        set.intersection(*(set(message.unused_patterns) for message in messages))
    ):
        problems[f"{pattern!r} in only= or skip=: no name matches it"] = None
    if problems:
        unclaimed = [names[i] for i in np.flatnonzero(~claimed).tolist()]
        from shardwise.engine.rename_hints import suggest  # only errors need it

        hint = suggest(missing, unexpected, unclaimed, names, keys)
        accepts = ""
        if strict and (missing or unexpected):
            accepts = "strict=False accepts missing and unexpected names; "
        raise MismatchError(
            f"{path} and the target do not fit; nothing was written. "
            f"{_describe_missing_files(saved, missing)}{hint}{'; ' if hint else ''}{accepts}"
            "rename=, only= and skip= choose and map names:",
            list(problems),
        )
    if missing or unexpected:
        log.warning(
            "load(strict=False): names that the checkpoint lacks, whose values stay unchanged: %s; "
            "names that only the checkpoint has: %s",
            _count_names(missing),
            _count_names(unexpected),
        )
    return unexpected


def _unpack_bits(bits: bytes, count: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool)


def _describe_missing(saved: SavedNames, missing: Iterable[str]) -> Iterator[str]:
    """Yield a line for each missing name; with the reason if it was left out."""
    parts = (line.partition(": ") for line in saved.layout.left_out)
    reason_of = {name.removesuffix(".*"): reason for name, _, reason in parts if reason}
    for name in missing:
        root = saved.saved_name(name)
        while root and root not in reason_of:
            root = root.rpartition(".")[0]
        is_left_out = root and root not in saved.layout.missing_files
        yield f"{name}: " + (
            f"left out: {reason_of[root]}" if is_left_out else "not in the checkpoint"
        )


def _describe_missing_files(saved: SavedNames, missing: Iterable[str]) -> str:
    """Return a sentence about the missing files that would contain missing names, or ""."""
    file_of = saved.layout.missing_files
    names = [saved.saved_name(name) for name in missing]
    roots = [root for root in file_of if any(is_below(name, {root}) for name in names)]
    if not roots:
        return ""
    files = list(dict.fromkeys(file_of[root] for root in roots))
    verb, them = ("is", "it") if len(files) == 1 else ("are", "them")
    contents = " and ".join(roots)
    return f"{', '.join(files)} {verb} missing, which would contain {contents}: copy {them} too. "


def _describe_unfilled(counts: Iterable[Mapping[str, tuple[int, int]]]) -> list[str]:
    """Return a line for each module and optimizer of which no rank would fill anything."""
    wanted: set[str] = set()
    filled: set[str] = set()
    for counts_of_rank in counts:
        wanted |= {owner for owner, (total, _) in counts_of_rank.items() if total}
        filled |= {owner for owner, (_, found) in counts_of_rank.items() if found}
    unfilled = sorted(wanted - filled)
    if unfilled == [""]:
        return ["the checkpoint has none of the target's names"]
    return [
        f"{owner}: the checkpoint has none of its names; skip=[{owner + '.*'!r}] leaves it "
        "unchanged"
        for owner in unfilled
        if owner
    ]


def _count_names(names: Collection[str]) -> str:
    few = ", ".join([*names][:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} ({few})" if names else "0"
