"""Hints for a checkpoint whose names differ from the target's: which `rename=` or `spec=` fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from shardwise.kernel.manifest.manifest import FROZEN
from shardwise.kernel.state.name_lookup import is_below, rename_function
from shardwise.ports.binding import SavedNames
from shardwise.ports.module_binding import ELSEWHERE

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that DDP, torch.compile, FSDP1 and activation checkpointing add to names."""
_MOST_NAMES = 100
_MOST_PARTS = 4
Shapes = Mapping[str, tuple[int, ...] | None]
"""Names that the checkpoint lacks, with the shapes of their tensors; None for what has no shape."""
Fits = Callable[[str, str], bool]
"""Returns whether a name of the checkpoint has the shape of a missing name."""


def suggest(
    missing: Shapes,
    unexpected: Collection[str],
    unclaimed: Collection[str],
    saved: SavedNames,
    keys: Collection[str],
) -> str:
    """Return a text to put before other advice; it may be "".

    The text is a sentence about missing files, if there are any, and the first hint that fits,
    followed by "; ".

    Args:
        missing: the names of the target that the checkpoint lacks, in the order of the ranks.
        unexpected, unclaimed, keys: as for `suggest_renames`.
        saved: the contents of the checkpoint.
    """
    shape_of = {tensor.name: tensor.shape for tensor in saved.layout.tensors}

    def fits(name: str, saved_name: str) -> bool:
        return missing[name] is None or shape_of.get(saved_name) == missing[name]

    hint = (
        suggest_no_rename(missing, saved, fits)
        or suggest_step(unexpected, saved.all_names())
        or suggest_trainable(missing, unclaimed)
        or suggest_opened_object(missing, saved.all_names())
        or suggest_renames(missing, unexpected, unclaimed, keys, fits)
        or suggest_key(missing, unclaimed, fits)
    )
    return _describe_missing_files(saved, missing) + (f"{hint}; " if hint else "")


def suggest_step(unexpected: Collection[str], all_names: Iterable[str]) -> str:
    """Return a hint to step an optimizer whose state was kept by the owners of parameters, or "".

    Args:
        unexpected: names that only the checkpoint has.
        all_names: all names of the checkpoint.
    """
    for name in all_names:
        optimizer, _, key = name.rpartition(".")
        if key == ELSEWHERE and any(is_below(each, {optimizer}) for each in unexpected):
            return (
                f"each parameter's state was on the rank that owned it, and no rank has state of "
                f"all parameters here: call step() of {optimizer} once before the load, with "
                "gradients of zeros, so that each rank has that of the parameters that it owns"
            )
    return ""


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


def suggest_no_rename(missing: Collection[str], saved: SavedNames, fits: Fits) -> str:
    """Return a hint to leave out `rename=`, if the checkpoint has all missing names; or ""."""
    names = {*saved.all_names()}
    is_found = all(name in names and fits(name, name) for name in missing)
    return "without rename=, all that is missing would be found" if missing and is_found else ""


def suggest_renames(
    missing: Collection[str],
    unexpected: Collection[str],
    unclaimed: Collection[str],
    keys: Collection[str],
    fits: Fits,
) -> str:
    """Return a hint with the argument of `load` that finds missing names, or "".

    Two differences are detected: the names below a key of the state have another prefix in the
    checkpoint, or the names of the checkpoint contain parts that wrappers added. If several
    prefixes are equally likely, as of two layers of the same shapes, none is suggested.

    Args:
        missing: names of the target that the checkpoint lacks.
        unexpected: names below `keys` that only the checkpoint has.
        unclaimed: all names of the checkpoint that fill no target.
        keys: the keys of the state.
        fits: whether a name of the checkpoint has the shape of a missing name.

    Returns:
        For example `rename={'model': 'net'} would find all that is missing`.
    """
    saved_prefix_of = _find_changed_prefixes(missing, unclaimed, keys, fits)
    known = set(unclaimed)
    rename = rename_function(saved_prefix_of)
    renamed = [(name, new) for name in missing if (new := rename(name)) != name]
    found = sum(new in known and fits(name, new) for name, new in renamed)
    part, unwrapped = _spec_without_wrappers(missing, unexpected, fits)
    if not found and not unwrapped:
        return ""
    share = "all that is missing"
    if max(found, unwrapped) < len(missing):
        share = f"{max(found, unwrapped)} of the {len(missing)} missing names"
    if unwrapped > found:
        return f"{part} would find {share}"
    other_keys = _insertions_below_other_keys(saved_prefix_of, unexpected, keys)
    if other_keys or "" in saved_prefix_of.values():
        # Only a specification also renames the members of an optimizer's groups.
        both = saved_prefix_of | other_keys
        return f"{_format_spec({there: here for here, there in both.items()})} would find {share}"
    return f"rename={saved_prefix_of!r} would find {share}"


def suggest_trainable(missing: Collection[str], unclaimed: Iterable[str]) -> str:
    """Return a hint for a checkpoint of the trained part of a module only; "" for another one."""
    modules = {name.partition(f".{FROZEN}.")[0] for name in unclaimed if f".{FROZEN}." in name}
    for module in sorted(modules):
        if any(is_below(name, {module}) for name in missing):
            return (
                f"the checkpoint has only the trained part of {module!r}: load the base model, and "
                f"pass sw.trainable(…) as {module!r}"
            )
    return ""


def suggest_opened_object(missing: Collection[str], names: Collection[str]) -> str:
    """Return a hint to replace an object of the state with a dict of its parts; "" if none fits.

    The hint helps if the state has one value where the checkpoint has several names.
    """
    beginnings = {beginning for name in names for beginning, _ in _split_at_dots(name, 0)}
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


def suggest_key(missing: Collection[str], unclaimed: Iterable[str], fits: Fits) -> str:
    """Return a hint to put the state, such as `model.state_dict()`, below a key; "" if none fits.

    The hint helps if all missing names have the same additional key in the checkpoint.
    """
    if not missing:
        return ""
    keys_of: dict[str, set[str]] = {}
    for name in unclaimed:
        key, _, rest = name.partition(".")
        keys_of.setdefault(rest, set()).add(key)
    shared = set.intersection(*(keys_of.get(name, set()) for name in missing))
    fitting = [key for key in shared if all(fits(name, f"{key}.{name}") for name in missing)]
    if len(fitting) != 1:
        return ""
    return f'{{"{fitting[0]}": …}} as the state would find all that is missing'


def _key_of(name: str, keys: Iterable[str]) -> str:
    return next((key for key in keys if is_below(name, {key})), name)


def _find_changed_prefixes(
    missing: Iterable[str], unclaimed: Iterable[str], keys: Collection[str], fits: Fits
) -> dict[str, str]:
    """Return, for each prefix of missing names, the prefix of most of them in the checkpoint.

    Each missing name votes for the prefixes that would rename it to an unclaimed name of the same
    shape: `model.a.w` and the unclaimed `net.a.w` have the common end `a.w`, so there is a vote for
    `model` -> `net`.
    """
    missing_below: dict[str, list[str]] = {}
    for name in missing:
        missing_below.setdefault(_key_of(name, keys), []).append(name)
    cuts_of = {
        key: [each for name in names[:_MOST_NAMES] for each in _split_at_dots(name, len(key))]
        for key, names in missing_below.items()
    }
    rests = {rest for cuts in cuts_of.values() for _, rest in cuts}
    beginnings: dict[str, list[str]] = {}
    for name in unclaimed:
        for there, rest in [("", name), *_split_at_dots(name, 0)]:
            if rest in rests:
                beginnings.setdefault(rest, []).append(there)
    found: dict[str, str] = {}
    for key, cuts in cuts_of.items():
        votes = Counter(
            (here, there)
            for here, rest in cuts
            for there in beginnings.get(rest, [])[:_MOST_NAMES]
            if there != here and fits(f"{here}.{rest}", f"{there}.{rest}".removeprefix("."))
        )
        ranking = sorted((-count, *_simplicity(*pair), pair[0]) for pair, count in votes.items())
        is_ambiguous = len(ranking) > 1 and ranking[0][:3] == ranking[1][:3]
        if ranking and not is_ambiguous:
            count, _, _, there, here = ranking[0]
            if -2 * count > min(len(missing_below[key]), _MOST_NAMES):
                found[here] = there
    return found


def _split_at_dots(name: str, start: int) -> Iterator[tuple[str, str]]:
    """Yield the two parts of a name around each of its dots from position `start` on."""
    dot = name.find(".", start)
    while dot != -1:
        yield name[:dot], name[dot + 1 :]
        dot = name.find(".", dot + 1)


def _simplicity(here: str, there: str) -> tuple[int, bool, str]:
    """Return a sort key that is smaller for simpler renames."""
    return len(here), not there.startswith(f"{here}."), there


def _insertions_below_other_keys(
    saved_prefix_of: Mapping[str, str], unexpected: Iterable[str], keys: Iterable[str]
) -> dict[str, str]:
    """Return renames for other keys (such as optimizers) that add the same parts to the names."""
    inserted = {
        (here.removeprefix(_key_of(here, keys)), there.removeprefix(here))
        for here, there in saved_prefix_of.items()
        if there.startswith(f"{here}.")
    }
    explained = set(saved_prefix_of.values())
    renames: dict[str, str] = {}
    for name in unexpected:
        key = _key_of(name, keys)
        for inner, part in inserted:
            if name.startswith(f"{key}{inner}{part}.") and not is_below(name, explained):
                renames[f"{key}{inner}"] = f"{key}{inner}{part}"
    return renames


def _spec_without_wrappers(
    missing: Collection[str], unexpected: Iterable[str], fits: Fits
) -> tuple[str, int]:
    """Return a specification without the parts that wrappers add, and how many names it finds."""
    added: dict[str, None] = {}
    bare: set[str] = set()
    for name in unexpected:
        parts = name.split(".")
        wrappers = [i for i, part in enumerate(parts) if part in _WRAPPERS]
        if len(wrappers) == 1:
            part = parts.pop(wrappers[0])
            bare_name = ".".join(parts)
            if bare_name not in missing or fits(bare_name, name):
                added[part] = None
                bare.add(bare_name)
    return _format_spec({f"*.{part}": "*" for part in added}), len(bare.intersection(missing))


def _format_spec(prefix_of_saved: Mapping[str, str]) -> str:
    rules = [f"{there}.* -> {here}.*".removeprefix(".") for there, here in prefix_of_saved.items()]
    rest = [] if "" in prefix_of_saved else ["* -> *"]
    text = "\n".join([*rules, *rest])
    return f"spec=sw.spec({text!r})"
