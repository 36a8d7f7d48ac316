"""`like` statements, which copy rules: `optimizer.*.{s} like *, model.* -> optimizer.*.{s}`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardwise.formats.language.arithmetic import Expression, Variable
from shardwise.formats.language.rules import (
    Capture,
    Pattern,
    Rule,
    Skip,
    Target,
    Template,
    substitute_captures,
)
from shardwise.formats.language.scanner import SourceText

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class LikeStatement:
    """A statement `pattern like name_pattern, results -> target`.

    Attributes:
        rule: the pattern, the target and the further clauses of the statement.
        name_pattern: the template of the name of an array, from the captures of `pattern`. The
            rule of this array is copied.
        results: the pattern of the tensors' names that the statement renames.
    """

    rule: Rule
    name_pattern: Template
    results: Pattern


def expand_like_statements(
    statements: Sequence[Rule | Skip | LikeStatement], source: SourceText
) -> tuple[Rule | Skip, ...]:
    """Replace each `like` statement with renamed copies of other rules.

    Raises:
        SpecError: a `like` statement has the wrong form, or no rule matches it.
    """
    rules = [each for each in statements if not isinstance(each, LikeStatement)]
    expanded: list[Rule | Skip] = []
    for statement in statements:
        if not isinstance(statement, LikeStatement):
            expanded.append(statement)
            continue
        copies = [
            copy for rule in rules if (copy := _copy_rule(statement, rule, source)) is not None
        ]
        if not copies:
            raise source.error(
                statement.rule.position,
                "no other rule has an array and tensors with the names after `like`",
            )
        expanded.extend(copies)
    return tuple(expanded)


def _copy_rule(like: LikeStatement, rule: Rule | Skip, source: SourceText) -> Rule | Skip | None:
    """Return a copy of a rule, renamed by a `like` statement; None if the rule has other names."""
    renamed_pattern = _rename_stars(like.rule.pattern)
    variable_indices = [
        i for i, part in enumerate(like.name_pattern.parts) if not isinstance(part, str)
    ]
    variable = like.name_pattern.parts[variable_indices[0]] if len(variable_indices) == 1 else None
    star = _rename_star(variable.name) if isinstance(variable, Variable) else None
    if star is None or Capture(star, star=True) not in renamed_pattern.parts:
        raise source.error(
            like.rule.position, "the name after `like` must contain one `*` of the name before it"
        )
    star_parts = _strip_text(
        rule.pattern.parts, _text_around(like.name_pattern.parts, variable_indices[0])
    )
    if star_parts is None:
        return None
    shared_captures = set(renamed_pattern.capture_names()) & set(rule.pattern.capture_names())
    if shared_captures:
        names, line = " and ".join(sorted(shared_captures)), source.line_number(rule.position)
        raise source.error(
            like.rule.position, f"{names} is captured here and in line {line}; rename one"
        )
    pattern = Pattern(substitute_captures(renamed_pattern.parts, {star: star_parts}))
    if isinstance(rule, Skip):
        return Skip(pattern, like.rule.position)
    targets = [_rename_target(like, target, source) for target in rule.targets]
    renamed_targets = tuple(target for target in targets if target is not None)
    if len(renamed_targets) < len(targets):
        return None
    has_shape = like.rule.targets[0].shape is not None  # then it replaces the shape of the rule
    return replace(
        rule,
        pattern=pattern,
        targets=renamed_targets,
        sizes=(*(() if has_shape else rule.sizes), *like.rule.sizes),
        dtype=like.rule.dtype or rule.dtype,
        array_shape=None if has_shape else rule.array_shape,
        average_axes=like.rule.average_axes or rule.average_axes,
        flat_axes=like.rule.flat_axes or rule.flat_axes,
        coordinates=rule.coordinates + like.rule.coordinates,
        position=like.rule.position,
    )


def _rename_stars(pattern: Pattern) -> Pattern:
    """Rename a pattern's stars, because the copied rule also has stars."""
    return Pattern(
        tuple(
            Capture(_rename_star(part.name), star=True)
            if isinstance(part, Capture) and part.star
            else part
            for part in pattern.parts
        )
    )


def _rename_star(name: str) -> str:
    return name.replace("*", "*like")


def _text_around(parts: Sequence[object], index: int) -> tuple[str, str]:
    """Return the literal text before and after a part."""
    before = "".join(part for part in parts[:index] if isinstance(part, str))
    return before, "".join(part for part in parts[index + 1 :] if isinstance(part, str))


def _rename_target(like: LikeStatement, target: Target, source: SourceText) -> Target | None:
    result_parts = like.results.parts
    star_indices = [
        i for i, part in enumerate(result_parts) if isinstance(part, Capture) and part.star
    ]
    if len(star_indices) != 1 or sum(not isinstance(part, str) for part in result_parts) != 1:
        raise source.error(
            like.rule.position, "the name between `,` and `->` must contain exactly one `*`"
        )
    (star,) = like.results.capture_names()
    star_parts = _strip_text(target.name.parts, _text_around(result_parts, star_indices[0]))
    if star_parts is None:
        return None
    (new_target,) = like.rule.targets
    parts: list[str | Expression] = []
    for part in new_target.name.parts:
        parts.extend(star_parts if part == Variable(star) else [part])
    shape = target.shape if new_target.shape is None else new_target.shape
    return Target(Template(tuple(parts)), shape, new_target.position)


def _strip_text(
    parts: tuple[Part, ...], prefix_and_suffix: tuple[str, str]
) -> tuple[Part | str, ...] | None:
    """Remove a prefix and a suffix from the parts; return None if they do not have both."""
    prefix, suffix = prefix_and_suffix
    stripped: list[Part | str] = list(parts)
    for end, text in ((0, prefix), (-1, suffix)):
        part = stripped[end]
        if not text:
            continue
        if not isinstance(part, str):
            return None
        if not (part.startswith(text) if end == 0 else part.endswith(text)):
            return None
        stripped[end] = part[len(text) :] if end == 0 else part[: len(part) - len(text)]
    return tuple(part for part in stripped if part != "")
