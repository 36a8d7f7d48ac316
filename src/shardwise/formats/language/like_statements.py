"""`like` statements, which copy rules: `optimizer.*.{s} like *, model.* -> optimizer.*.{s}`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.formats.language.arithmetic import Expression
from shardwise.formats.language.rules import Capture, Pattern, Rule, Target, Template
from shardwise.formats.language.scanner import SourceText


@dataclass(frozen=True, slots=True)
class LikeStatement:
    """A statement `pattern like star, results -> target`.

    Attributes:
        rule: the pattern, the target and the further clauses of the statement.
        original: the star of `pattern` that captures the name of an array, whose rule is copied.
        results: the pattern of the tensors' names that the statement renames: a text and a star.
    """

    rule: Rule
    original: Pattern
    results: Pattern


def expand_like_statements(
    statements: Sequence[Rule | LikeStatement], source: SourceText
) -> tuple[Rule, ...]:
    """Replace each `like` statement with renamed copies of other rules.

    Raises:
        SpecError: a `like` statement has the wrong form, or no rule matches it.
    """
    rules = [each for each in statements if isinstance(each, Rule)]
    expanded: list[Rule] = []
    for statement in statements:
        if isinstance(statement, Rule):
            expanded.append(statement)
            continue
        copies = list(_copy_rules(statement, rules, source))
        if not copies:
            raise source.error(
                statement.rule.position,
                "no other rule has an array and tensors with the names after `like`",
            )
        expanded += copies
    return tuple(expanded)


def _copy_rules(like: LikeStatement, rules: Sequence[Rule], source: SourceText) -> Iterator[Rule]:
    """Yield a copy of each rule, renamed by a `like` statement, if its tensors have such names."""
    position, (new_target,) = like.rule.position, like.rule.targets
    star = like.original.parts[0]
    is_star = isinstance(star, Capture) and star.star and star in like.rule.pattern.parts
    if not is_star or len(like.original.parts) > 1:
        raise source.error(
            position, "the name after `like` must contain one `*` of the name before it"
        )
    *texts, result_star = like.results.parts
    prefix = "".join(text for text in texts if isinstance(text, str))
    if len(texts) > 1 or not isinstance(result_star, Capture) or not result_star.star:
        raise source.error(
            position, "the name between `,` and `->` must contain exactly one `*`, at its end"
        )
    for rule in rules:
        names = set(rule.pattern.capture_names()) & set(like.rule.pattern.capture_names())
        if shared := {name for name in names if not name.startswith("*")}:
            raise source.error(
                position,
                f"{' and '.join(sorted(shared))} is captured here and in line "
                f"{source.line_number(rule.position)}; rename one",
            )
        named = [_rename(target, new_target, prefix, result_star.name) for target in rule.targets]
        targets = tuple(target for target in named if target is not None)
        if len(targets) < len(named):
            continue
        has_shape = new_target.shape is not None  # then it replaces the shape of the rule
        yield replace(
            rule,
            pattern=_insert(like.rule.pattern, star, rule.pattern),
            targets=targets,
            array_shape=None if has_shape else rule.array_shape,
            sizes=(*(() if has_shape else rule.sizes), *like.rule.sizes),
            coordinates=rule.coordinates + like.rule.coordinates,
            position=position,
        )


def _insert(pattern: Pattern, star: object, inner: Pattern) -> Pattern:
    """Return a pattern in which another replaces a star. Both can have further stars."""
    parts: list[str | Capture] = []
    for part in pattern.parts:
        if part == star:
            parts += inner.parts
        elif isinstance(part, Capture):
            parts.append(replace(part, name=part.name.replace("*", "*like")))
        else:
            parts.append(part)
    return Pattern(tuple(parts))


def _rename(target: Target, new: Target, prefix: str, star: str) -> Target | None:
    """Return a target with a new name; None if its name does not begin with the prefix."""
    first, *others = target.name.parts
    if prefix and not (isinstance(first, str) and first.startswith(prefix)):
        return None
    rest = (first[len(prefix) :] if isinstance(first, str) else first, *others)
    parts: list[str | Expression] = []
    for part in new.name.parts:
        parts += rest if part == Expression("name", 0, (star,)) else (part,)
    shape = target.shape if new.shape is None else new.shape
    return Target(Template(tuple(part for part in parts if part != "")), shape, new.position)
