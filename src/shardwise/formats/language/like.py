"""Rules that follow others: `optimizer.*.{state} like *, model.* -> optimizer.*.{state}`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardwise.formats.language.expressions import Expression, Name
from shardwise.formats.language.rules import (
    Capture,
    Pattern,
    Rule,
    Skip,
    Target,
    Template,
    substitute,
)
from shardwise.formats.language.text import Text

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Like:
    """A statement `pattern like base, results -> target`.

    Attributes:
        rule: the pattern, the renamed target and further clauses of the statement.
        base: the name whose rule is followed, made from the pattern's captures.
        results: the pattern of the names that are renamed.
    """

    rule: Rule
    base: Template
    results: Pattern


def followed(rules: Sequence[Rule | Skip | Like], text: Text) -> tuple[Rule | Skip, ...]:
    """Replace each `like` by a copy of every rule that it follows.

    Raises:
        SpecError: a `like` has the wrong form, or follows no rule.
    """
    bases = [rule for rule in rules if not isinstance(rule, Like)]
    found: list[Rule | Skip] = []
    for rule in rules:
        if not isinstance(rule, Like):
            found.append(rule)
            continue
        derived = [new for base in bases if (new := _derive(rule, base, text)) is not None]
        if not derived:
            raise text.error(rule.rule.at, "there is no rule that this could be like")
        found.extend(derived)
    return tuple(found)


def _derive(like: Like, base: Rule | Skip, text: Text) -> Rule | Skip | None:
    own = _renamed(like.rule.pattern)
    hole = [i for i, part in enumerate(like.base.parts) if not isinstance(part, str)]
    star = like.base.parts[hole[0]] if len(hole) == 1 else None
    name = _own(star.name) if isinstance(star, Name) else None
    if Capture(name or "", star=True) not in own.parts:
        raise text.error(like.rule.at, "what is followed must be one `*` of the name")
    inner = _stripped(base.pattern.parts, _texts(like.base.parts, hole[0]))
    if inner is None:
        return None
    taken = set(own.captures()) & set(base.pattern.captures())
    if taken:
        both = " and ".join(sorted(taken))
        line = text.line(base.at)
        raise text.error(like.rule.at, f"{both} is captured here and in line {line}; rename one")
    pattern = Pattern(substitute(own.parts, {name or "": inner}))
    if isinstance(base, Skip):
        return Skip(pattern, like.rule.at)
    overridden = like.rule.targets[0].given is not None
    targets = [_target(like, target, text) for target in base.targets]
    kept = tuple(target for target in targets if target is not None)
    if len(kept) < len(targets):
        return None
    return replace(
        base,
        pattern=pattern,
        targets=kept,
        sizes=(*(() if overridden else base.sizes), *like.rule.sizes),
        dtype=like.rule.dtype or base.dtype,
        stored=None if overridden else base.stored,
        average=like.rule.average or base.average,
        flat=like.rule.flat or base.flat,
        on=base.on + like.rule.on,
        at=like.rule.at,
    )


def _renamed(pattern: Pattern) -> Pattern:
    """Rename a pattern's stars, because the followed rule has stars too."""
    parts: list[str | Capture] = []
    for part in pattern.parts:
        if isinstance(part, Capture) and part.star:
            parts.append(Capture(_own(part.name), star=True))
        else:
            parts.append(part)
    return Pattern(tuple(parts))


def _own(star: str) -> str:
    return star.replace("*", "*like")


def _texts(parts: Sequence[object], hole: int) -> tuple[str, str]:
    before = "".join(part for part in parts[:hole] if isinstance(part, str))
    return before, "".join(part for part in parts[hole + 1 :] if isinstance(part, str))


def _target(like: Like, target: Target, text: Text) -> Target | None:
    results = like.results.parts
    stars = [i for i, part in enumerate(results) if isinstance(part, Capture) and part.star]
    if len(stars) != 1 or sum(not isinstance(part, str) for part in results) != 1:
        raise text.error(like.rule.at, "the results that are renamed must have one `*`")
    (star,) = like.results.captures()
    inner = _stripped(target.name.parts, _texts(results, stars[0]))
    if inner is None:
        return None
    (renamed,) = like.rule.targets
    parts: list[str | Expression] = []
    for part in renamed.name.parts:
        parts.extend(inner if part == Name(star) else [part])
    given = target.given if renamed.given is None else renamed.given
    return Target(Template(tuple(parts)), given, renamed.at)


def _stripped(parts: tuple[T, ...], texts: tuple[str, str]) -> tuple[T | str, ...] | None:
    """Remove a prefix and a suffix from the parts; return None if they do not have both."""
    before, after = texts
    left: list[T | str] = list(parts)
    for end, text in ((0, before), (-1, after)):
        part = left[end]
        if not text:
            continue
        if not isinstance(part, str):
            return None
        if not (part.startswith(text) if end == 0 else part.endswith(text)):
            return None
        left[end] = part[len(text) :] if end == 0 else part[: len(part) - len(text)]
    return tuple(part for part in left if part != "")
