"""Match the names, shapes and dtypes of checkpoint and target before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import MismatchError
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.state.local_state import LocalState, TensorLeaf
from shardwise.kernel.state.name_lookup import SavedNames, Selection, is_below
from shardwise.kernel.state.plain_values import is_empty

log = logging.getLogger("shardwise")
# Where a name or mismatch is first: the rank, its position there, and the shape of the tensor. The
# shape is None for plain values, for padded tensors, and for mismatches.
Place = tuple[int, int, tuple[int, ...] | None]


@prepare_decoding
class MatchReport(msgspec.Struct, array_like=True):
    """What a rank found when it matched its targets with a checkpoint.

    Attributes:
        missing: the names of the target that the checkpoint lacks.
        problems: the mismatches; one line for each name.
        unused_patterns: the patterns of `only` and `skip` that match no name.
        wanted: the modules and optimizers that have targets, and "" if there is any target.
        filled: those of `wanted` of which the checkpoint has a name.
        bits: two bits for each name of the checkpoint. First, one bit for each name: whether the
            name is accounted for, because it fills a target, or because `only` or `skip` excludes
            it. Then, one bit for each name: whether it starts with a key of the state, as `model.a`
            does with `model`.
    """

    missing: dict[str, Place]
    problems: dict[str, Place]
    unused_patterns: list[str]
    wanted: list[str]
    filled: list[str]
    bits: bytes


def match_targets(
    targets: LocalState, saved: SavedNames, *, cast: bool
) -> tuple[list[TensorLeaf], list[str], list[str]]:
    """Match this rank's targets with the names of a checkpoint.

    If several names of the target share the same memory (tied weights), the checkpoint needs to
    have only one of these names.

    Args:
        targets: the selected targets.
        saved: the contents of the checkpoint.
        cast: allow tensors with different dtypes.

    Returns:
        The tensors to fill, the names that the checkpoint lacks, and a line for each mismatch.
    """
    leaves, absent, missing, problems = [], [], [], [*targets.problems]
    filled_ties: set[object] = set()
    for leaf in targets.tensors:
        entry = saved.tensor(leaf.name)
        if entry is None:
            absent.append(leaf)
            continue
        if leaf.padded:
            leaf = leaf.without_padding(entry.shape)
        problem = _describe_mismatch(leaf, entry, saved, cast=cast)
        if problem is None:
            leaves.append(leaf)
            filled_ties.add(leaf.tie_key)
        else:
            problems.append(problem)
    kinds: dict[str, str] = {}
    for leaf in absent:
        if leaf.tie_key is None or leaf.tie_key not in filled_ties:
            kinds[leaf.name] = "a tensor"
    kinds |= dict.fromkeys([*targets.objects, *targets.grouped], "a plain value")
    kinds |= dict.fromkeys(targets.per_rank, "a per-rank value")
    for name, kind in kinds.items():
        saved_kind = saved.kind(name)
        if saved_kind is None:
            # A rank that has an empty dict, where others have values, has nothing to load.
            is_placeholder = is_empty(targets.objects.get(name, 0)) and saved.has_below(name)
            if not is_placeholder:
                missing.append(name)
        elif saved_kind != kind:
            problems.append(f"{name}: {saved_kind} in the checkpoint, {kind} in the target")
    return leaves, missing, problems


def make_report(
    targets: LocalState,
    saved: SavedNames,
    selection: Selection,
    names_by_owner: Mapping[str, Collection[str]],
    keys: Iterable[str],
    missing: list[str],
    problems: list[str],
    rank: int,
) -> MatchReport:
    """Return what `agree_on_match` needs of this rank.

    Args:
        targets: the selected targets.
        saved: the contents of the checkpoint.
        selection: the names that are loaded. Other names are never unexpected.
        names_by_owner: the selected names of each module and optimizer.
        keys: the keys of the state. Names of the checkpoint below these keys are unexpected if they
            fill no target on any rank.
        missing, problems: as returned by `match_targets`.
        rank: this rank.
    """
    names, saved_names = [*targets.names()], saved.all_names()
    wanted, filled = [], []
    for owner, own in {**names_by_owner, "": names}.items():
        if own:
            wanted.append(owner)
        if set(own).difference(missing):
            filled.append(owner)
    claimed = set(map(saved.saved_name, [*names, *targets.unselected]))
    saved_keys = set(map(saved.saved_name, keys))
    is_claimed = [name in claimed or not selection.selects(name) for name in saved_names]
    is_under_keys = [is_below(name, saved_keys) for name in saved_names]
    shapes = {leaf.name: leaf.shape for leaf in targets.tensors if missing and not leaf.padded}
    return MatchReport(
        {name: (rank, at, shapes.get(name)) for at, name in enumerate(missing)},
        {line: (rank, at, None) for at, line in enumerate(problems)},
        selection.unused_patterns([*names, *targets.unselected, *saved_names]),
        wanted,
        filled,
        np.packbits(np.array([*is_claimed, *is_under_keys], bool)).tobytes(),
    )


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
    if (reason := saved.quantized.why_not_cast(entry.name, leaf.dtype)) is not None:
        return f"{dtypes}; {reason}"
    is_converted = cast or saved.quantized.converts(entry.name)
    return None if is_converted else f"{dtypes} (cast=True converts)"


def agree_on_match(
    all_ranks: Round,
    report: MatchReport,
    path: str,
    saved: SavedNames,
    keys: Collection[str],
    *,
    strict: bool,
) -> list[str]:
    """Decide whether the targets of all ranks match, before any target is written.

    Args:
        all_ranks: the round that ends with this call.
        report: the report of this rank.
        path: the path of the checkpoint, for errors.
        saved: the contents of the checkpoint.
        keys: the keys of the state.
        strict: raise if names are missing or unexpected.

    Returns:
        The unexpected names.

    Raises:
        MismatchError: a target does not match; names are missing or unexpected, and `strict` is
            set; or the checkpoint has no name of a module or optimizer.
    """
    conclude = partial(_conclude, path=path, saved=saved, keys=keys, strict=strict)
    return all_ranks.all_reduce(report, MatchReport, _combine_reports, conclude, list[str])


def _combine_reports(reports: Sequence[MatchReport]) -> MatchReport:
    """Return the report of some ranks together."""
    missing: dict[str, Place] = {}
    problems: dict[str, Place] = {}
    bits = np.zeros(len(reports[0].bits), np.uint8)
    for report in reports:
        for own, lines in ((missing, report.missing), (problems, report.problems)):
            for line, place in lines.items():
                own[line] = min(place, own.get(line, place))
        bits |= np.frombuffer(report.bits, np.uint8)
    unused = set.intersection(*({*each.unused_patterns} for each in reports))
    return MatchReport(
        missing,
        problems,
        sorted(unused),
        sorted({owner for each in reports for owner in each.wanted}),
        sorted({owner for each in reports for owner in each.filled}),
        bits.tobytes(),
    )


def _conclude(
    report: MatchReport,
    path: str,
    saved: SavedNames,
    keys: Collection[str],
    *,
    strict: bool,
) -> list[str]:
    """Return the unexpected names, given the combined report of all ranks.

    Raises:
        MismatchError: as for `agree_on_match`.
    """
    # In the order of the ranks.
    problems = dict.fromkeys(sorted(report.problems, key=report.problems.__getitem__))
    missing = {
        name: report.missing[name][2]
        for name in sorted(report.missing, key=report.missing.__getitem__)
    }
    unclaimed, unexpected = _find_unclaimed(report, saved)
    if not strict:
        problems |= dict.fromkeys(_describe_unfilled({*report.wanted} - {*report.filled}))
        if missing or unexpected:
            absent = [*map(saved.saved_name, missing)]
            problems |= dict.fromkeys(saved.quantized.refuse_unscaled(absent, unclaimed))
    elif missing or unexpected:
        problems |= dict.fromkeys(_describe_missing(saved, missing))
        problems |= dict.fromkeys(f"{name}: in the checkpoint only" for name in unexpected)
    for pattern in report.unused_patterns:
        problems[f"{pattern!r} in only= or skip=: no name matches it"] = None
    if problems:
        suggest = load_built_in("shardwise.checks", "names")  # only errors need it
        remedies = suggest(missing, unexpected, unclaimed, saved, keys)
        if strict and (missing or unexpected):
            remedies += "strict=False accepts missing and unexpected names; "
        raise MismatchError(
            f"{path} and the target do not fit; nothing was written. {remedies}rename=, only= and "
            "skip= choose and map names:",
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


def _find_unclaimed(report: MatchReport, saved: SavedNames) -> tuple[list[str], list[str]]:
    """Return the names of the checkpoint that no rank claims; and those of them that are
    unexpected."""
    bits = np.frombuffer(report.bits, np.uint8)
    names = np.array([*saved.all_names()], object)
    claimed, under_keys = np.unpackbits(bits, count=2 * len(names)).reshape(2, -1)
    is_unclaimed = claimed == 0
    return names[is_unclaimed].tolist(), names[is_unclaimed & (under_keys == 1)].tolist()


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
            f"left out: {reason_of[root]}"
            if is_left_out
            else saved.quantized.why_absent(saved.saved_name(name)) or "not in the checkpoint"
        )


def _describe_unfilled(unfilled: Collection[str]) -> list[str]:
    """Return a line for each module and optimizer of which no rank would fill anything."""
    if unfilled == {""}:
        return ["the checkpoint has none of the target's names"]
    return [
        f"{owner}: the checkpoint has none of its names; skip=[{owner + '.*'!r}] leaves it "
        "unchanged"
        for owner in sorted(unfilled)
        if owner
    ]


def _count_names(names: Collection[str]) -> str:
    few = ", ".join([*names][:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} ({few})" if names else "0"
