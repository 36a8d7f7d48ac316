"""What renaming would make a target fit whose names a checkpoint has in another form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from shardwise.state.selection import is_below

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that wrappers of modules add to names: DDP, torch.compile, FSDP1, checkpointing."""
_MOST_TRIED = 100


def fitting_renames(
    missing: Collection[str],
    unexpected: Collection[str],
    names: Collection[str],
    targets: Collection[str],
) -> str:
    """The argument that would help, if all names that are missing have one other beginning in the
    checkpoint, or it has the parts in them that wrappers add; "" if that is not so.

    Args:
        missing: names of the target that the checkpoint does not have.
        unexpected: names below `targets` that only the checkpoint has.
        names: all of the checkpoint.
        targets: the keys of the state.
    """
    known = set(names)
    lost: dict[str, list[str]] = {}
    for name in missing:
        lost.setdefault(_key_of(name, targets), []).append(name)
    here_to_there: dict[str, str] = {}
    for key, each in lost.items():
        found = next(_beginnings(key, each, known), None)
        if found is None:
            return _without_wrappers(missing, unexpected)
        here_to_there[found[0]] = found[1]
    if not here_to_there:
        return ""
    followers = _followers(here_to_there, unexpected, targets)
    if followers or "" in here_to_there.values():
        # Names within the groups of an optimizer are renamed by a specification alone.
        return _specification({there: here for here, there in (here_to_there | followers).items()})
    return f"rename={here_to_there!r}"


def _key_of(name: str, targets: Iterable[str]) -> str:
    return next((key for key in targets if is_below(name, {key})), name)


def _beginnings(key: str, lost: Sequence[str], known: set[str]) -> Iterator[tuple[str, str]]:
    """Beginnings of all of these names, and what the checkpoint has in their place."""
    first, at = lost[0], len(key)
    while 0 < at < len(first):
        here, rest = first[: at + 1], first[at + 1 :]
        if not all(name.startswith(here) for name in lost):
            return
        others = [name[: -len(rest)] for name in known if f".{name}".endswith(f".{rest}")]
        others.sort(key=lambda there: (not there.startswith(here), there))
        for there in others[:_MOST_TRIED]:
            if there != here and all(there + name[len(here) :] in known for name in lost):
                yield here[:-1], there[:-1]
        at = first.find(".", at + 1)


def _followers(
    here_to_there: Mapping[str, str], unexpected: Iterable[str], targets: Iterable[str]
) -> dict[str, str]:
    """Other keys of the state, as of optimizers, below which is what was inserted below these."""
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


def _without_wrappers(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """For names within which wrappers have added a part."""
    added: dict[str, None] = {}
    bare: set[str] = set()
    for name in unexpected:
        parts = name.split(".")
        at = [i for i, part in enumerate(parts) if part in _WRAPPERS]
        if len(at) == 1:
            added[parts.pop(at[0])] = None
            bare.add(".".join(parts))
    if not added or not bare.issuperset(missing):
        return ""
    return _specification({f"*.{part}": "*" for part in added})


def _specification(there_to_here: Mapping[str, str]) -> str:
    rules = [f"{there}.* -> {here}.*".removeprefix(".") for there, here in there_to_here.items()]
    rest = [] if "" in there_to_here else ["* -> *"]
    text = "\n".join([*rules, *rest])
    return f"spec=sw.spec({text!r})"
