"""Suggestions of `rename=` or `spec=` for a checkpoint whose names differ from the target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from shardwise.plan.lookup import renaming
from shardwise.state.selection import is_below

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that DDP, torch.compile, FSDP1 and activation checkpointing add to names."""
_MOST_TRIED = 100
_MOST_PARTS = 4


def fitting_renames(
    missing: Collection[str],
    unexpected: Collection[str],
    unclaimed: Collection[str],
    targets: Collection[str],
) -> str:
    """Return a hint: the argument of `load` that finds missing names, and how many it finds.

    Two differences are detected: the names below a key of the state have another prefix in the
    checkpoint, or the names of the checkpoint contain parts that wrappers added. If neither
    explains a missing name, the hint is "".

    Args:
        missing: names of the target that the checkpoint does not have.
        unexpected: names below `targets` that only the checkpoint has.
        unclaimed: all names of the checkpoint that fill nothing.
        targets: the keys of the state.
    """
    here_to_there = _changed_prefixes(missing, unclaimed, targets)
    known = set(unclaimed)
    rename = renaming(here_to_there)
    found = sum(rename(name) != name and rename(name) in known for name in missing)
    part, unwrapped = _without_wrappers(missing, unexpected)
    if not found and not unwrapped:
        return ""
    of = "all that is missing"
    if max(found, unwrapped) < len(missing):
        of = f"{max(found, unwrapped)} of the {len(missing)} missing names"
    if unwrapped > found:
        return f"{part} would find {of}"
    followers = _same_insertions(here_to_there, unexpected, targets)
    if followers or "" in here_to_there.values():
        # Only a specification also renames the members of an optimizer's groups.
        both = here_to_there | followers
        return f"{_specification({there: here for here, there in both.items()})} would find {of}"
    return f"rename={here_to_there!r} would find {of}"


def opening_up(missing: Collection[str], names: Collection[str]) -> str:
    """Return a hint to replace an object of the state by a dict of its parts; "" if none fits.

    The hint helps if the state has one value where the checkpoint has several names.
    """
    beginnings = {beginning for name in names for beginning, _ in _cuts(name, 0)}
    for name in missing:
        if name in beginnings:
            inner = [each[len(name) + 1 :] for each in names if each.startswith(f"{name}.")]
            parts = dict.fromkeys(each.partition(".")[0] for each in inner)
            shown = ", ".join(f'"{part}": …' for part in list(parts)[:_MOST_PARTS])
            return (
                f"{name!r} is one value in the state, but the checkpoint has names below it: "
                f'put its parts into the state: {{"{name}": {{{shown}}}}}'
            )
    return ""


def _key_of(name: str, targets: Iterable[str]) -> str:
    return next((key for key in targets if is_below(name, {key})), name)


def _changed_prefixes(
    missing: Iterable[str], unclaimed: Iterable[str], targets: Collection[str]
) -> dict[str, str]:
    """Return, by prefix of missing names, the prefix that most of them have in the checkpoint."""
    lost: dict[str, list[str]] = {}
    for name in missing:
        lost.setdefault(_key_of(name, targets), []).append(name)
    cut = {
        key: [each for name in names[:_MOST_TRIED] for each in _cuts(name, len(key))]
        for key, names in lost.items()
    }
    rests = {rest for cuts in cut.values() for _, rest in cuts}
    beginnings: dict[str, list[str]] = {}
    for name in unclaimed:
        for there, rest in [("", name), *_cuts(name, 0)]:
            if rest in rests:
                beginnings.setdefault(rest, []).append(there)
    found: dict[str, str] = {}
    for key, cuts in cut.items():
        votes = Counter(
            (here, there)
            for here, rest in cuts
            for there in beginnings.get(rest, [])[:_MOST_TRIED]
            if there != here
        )
        if votes:
            here, there = min(votes, key=lambda pair: (-votes[pair], *_likelihood(*pair)))
            if 2 * votes[here, there] > min(len(lost[key]), _MOST_TRIED):
                found[here] = there
    return found


def _cuts(name: str, least: int) -> Iterator[tuple[str, str]]:
    """Yield the two parts of a name around each of its dots from position `least` on."""
    at = name.find(".", least)
    while at != -1:
        yield name[:at], name[at + 1 :]
        at = name.find(".", at + 1)


def _likelihood(here: str, there: str) -> tuple[int, bool, str]:
    return len(here), not there.startswith(f"{here}."), there


def _same_insertions(
    here_to_there: Mapping[str, str], unexpected: Iterable[str], targets: Iterable[str]
) -> dict[str, str]:
    """Return renames for other keys, such as optimizers, whose names have the same parts added."""
    inserted = {
        (here.removeprefix(_key_of(here, targets)), there.removeprefix(here))
        for here, there in here_to_there.items()
        if there.startswith(f"{here}.")
    }
    explained = set(here_to_there.values())
    followers: dict[str, str] = {}
    for name in unexpected:
        key = _key_of(name, targets)
        for inner, part in inserted:
            if name.startswith(f"{key}{inner}{part}.") and not is_below(name, explained):
                followers[f"{key}{inner}"] = f"{key}{inner}{part}"
    return followers


def _without_wrappers(missing: Iterable[str], unexpected: Iterable[str]) -> tuple[str, int]:
    """Return a specification without the parts that wrappers add, and how many names it finds."""
    added: dict[str, None] = {}
    bare: set[str] = set()
    for name in unexpected:
        parts = name.split(".")
        at = [i for i, part in enumerate(parts) if part in _WRAPPERS]
        if len(at) == 1:
            added[parts.pop(at[0])] = None
            bare.add(".".join(parts))
    return _specification({f"*.{part}": "*" for part in added}), len(bare.intersection(missing))


def _specification(there_to_here: Mapping[str, str]) -> str:
    rules = [f"{there}.* -> {here}.*".removeprefix(".") for there, here in there_to_here.items()]
    rest = [] if "" in there_to_here else ["* -> *"]
    text = "\n".join([*rules, *rest])
    return f"spec=sw.spec({text!r})"
