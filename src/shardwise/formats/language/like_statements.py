"""`like` statements, which copy rules: `optimizer.*.{s} like *, model.* -> optimizer.*.{s}`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.formats.language.arithmetic import Expression
from shardwise.formats.language.rules import Pattern, Rule, Target
from shardwise.formats.language.scanner import SourceText


def expand_like(rules: Sequence[Rule], source: SourceText) -> tuple[Rule, ...]:
    """Replace each `like` statement with renamed copies of other rules.

    Raises:
        SpecError: a `like` statement has the wrong form, or no rule matches it.
    """
    originals = [each for each in rules if each.like is None]
    expanded: list[Rule] = []
    for rule in rules:
        if rule.like is None:
            expanded.append(rule)
            continue
        copies = list(_copy_rules(rule, *rule.like, originals, source))
        if not copies:
            raise source.error(
                rule.position, "no other rule has an array and tensors with the names after `like`"
            )
        expanded += copies
    return tuple(expanded)


def _copy_rules(
    like: Rule, original: Pattern, results: Pattern, rules: Sequence[Rule], source: SourceText
) -> Iterator[Rule]:
    """Yield a copy of each rule, renamed by a `like` statement, if its tensors have such names."""
    position, (new_target,) = like.position, like.targets
    star = original.parts[0]
    if len(original.parts) > 1 or not _is_star(star) or star not in like.pattern.parts:
        raise source.error(
            position, "the name after `like` must contain one `*` of the name before it"
        )
    *texts, result_star = results.parts
    if len(texts) > 1 or not isinstance(result_star, Expression) or not _is_star(result_star):
        raise source.error(
            position, "the name between `,` and `->` must contain exactly one `*`, at its end"
        )
    prefix = "".join(text for text in texts if isinstance(text, str))
    for rule in rules:
        names = set(rule.pattern.variables()) & set(like.pattern.variables())
        if shared := {name for name in names if not name.startswith("*")}:
            raise source.error(
                position,
                f"{' and '.join(sorted(shared))} is captured here and in line "
                f"{source.line_number(rule.position)}; rename one",
            )
        named = [_rename(target, new_target, prefix, result_star.names) for target in rule.targets]
        targets = tuple(target for target in named if target is not None)
        if len(targets) < len(named):
            continue
        has_shape = new_target.shape is not None  # then it replaces the shape of the rule
        yield replace(
            rule,
            pattern=_insert(like.pattern, star, rule.pattern),
            targets=targets,
            array_shape=None if has_shape else rule.array_shape,
            sizes=(*(() if has_shape else rule.sizes), *like.sizes),
            coordinates=rule.coordinates + like.coordinates,
            position=position,
        )


def _is_star(part: object) -> bool:
    return isinstance(part, Expression) and part.kind == "text"


def _insert(pattern: Pattern, star: object, inner: Pattern) -> Pattern:
    """Return a pattern in which another replaces a star. Both can have further stars."""
    parts: list[str | Expression] = []
    for part in pattern.parts:
        if part == star:
            parts += inner.parts
        elif isinstance(part, Expression):
            parts.append(replace(part, names=(part.names[0].replace("*", "*like"),)))
        else:
            parts.append(part)
    return Pattern(tuple(parts))


def _rename(target: Target, new: Target, prefix: str, star: tuple[str, ...]) -> Target | None:
    """Return a target with a new name; None if its name does not begin with the prefix."""
    first, *others = target.name.parts
    if prefix and not (isinstance(first, str) and first.startswith(prefix)):
        return None
    rest = (first[len(prefix) :] if isinstance(first, str) else first, *others)
    parts: list[str | Expression] = []
    for part in new.name.parts:
        is_star = isinstance(part, Expression) and part.is_name and part.names == star
        parts += rest if is_star else (part,)
    shape = target.shape if new.shape is None else new.shape
    return Target(Pattern(tuple(part for part in parts if part != "")), shape, new.position)
