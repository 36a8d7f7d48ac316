"""What can be wrong with a specification before anything is known of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection

from shardwise.errors import LayoutError
from shardwise.formats.language.axes import is_hole
from shardwise.formats.language.names import Capture
from shardwise.formats.language.numbers import Expression, Product, names_in, sizes_in
from shardwise.formats.language.rules import Rule, Spec, Target
from shardwise.formats.language.structure import check_terms, structure

KEYWORDS = frozenset(
    ["ranks", "let", "skip", "like", "where", "flat", "average", "over", "on", "as"]
)


def check_sense(spec: Spec) -> None:
    """Check that every name stands for something, and that each rule's two sides agree.

    Raises:
        SpecError: it points at the rule.
    """
    declared = [name for name, _ in spec.ranks] + [name for name, _ in spec.lets]
    for name in declared:
        if declared.count(name) > 1:
            raise spec.text.error(0, f"{name} is declared twice")
        if name in KEYWORDS:
            raise spec.text.error(0, f"{name} is a word of the language, and cannot be a name")
    for rule in spec.rules:
        for part in rule.pattern.parts:
            if isinstance(part, Capture) and part.name in declared:
                raise spec.text.error(rule.at, f"{part.name} is captured, but declared above")
        if isinstance(rule, Rule):
            _check_rule(spec, rule)
    for tie in spec.ties:
        for name in tie.name.names():
            if name not in tie.of.captures():
                raise spec.text.error(tie.at, f"{_shown(name)} is not captured on the right")


def _check_rule(spec: Spec, rule: Rule) -> None:
    constants = {name for name, _ in spec.lets}
    captures = frozenset(rule.pattern.captures())
    for axis in (*rule.flat, *rule.average, *(name for name, _ in rule.on)):
        if axis not in spec.rank_axes:
            raise spec.text.error(rule.at, f"{axis} is no axis of the ranks")
    for name, _ in rule.sizes:
        if name not in rule.axes() | captures:
            raise spec.text.error(rule.at, f"`where` gives {name} a size, which is no axis here")
    for _, value in rule.on:
        _check_names(spec, value, spec.rank_axes | constants, rule.at)
    stored = frozenset() if rule.stored is None else rule.axes()
    known = captures | spec.rank_axes | constants | stored
    for target in rule.targets:
        for part in target.name.parts:
            if not isinstance(part, str):
                _check_names(spec, part, known, target.at)
                if isinstance(part, Product) and part.ragged and part.axes[-1] not in captures:
                    raise spec.text.error(target.at, f"~{part.axes[-1]} must be captured")
        shape = rule.shape_of(target)
        if (shape.rest is None) != ((rule.stored or shape).rest is None):
            raise spec.text.error(target.at, "`...` must be on both sides, or on none")
    try:
        structures = [structure(spec, rule, target, 0) for target in rule.targets]
        check_terms(spec, rule, structures)
    except LayoutError as error:
        raise spec.text.error(_place(rule), str(error)) from error
    for target, own in zip(rule.targets, structures, strict=True):
        _check_shape(spec, rule, target, frozenset(own.listed))


def _place(rule: Rule) -> int:
    shapes = [shape for shape in rule.shapes() if shape.at]
    return shapes[0].at if shapes else rule.at


def _check_names(spec: Spec, value: Expression, known: Collection[str], at: int) -> None:
    for name in (*names_in(value), *sizes_in(value)):
        if name not in known:
            raise spec.text.error(at, f"nothing here is called {_shown(name)}")


def _check_shape(spec: Spec, rule: Rule, target: Target, listed: frozenset[str]) -> None:
    fail = spec.text.error
    names = {axis for axis in rule.axes() if not is_hole(axis)}
    for axis in (*rule.flat, *rule.average):
        if axis in names:
            raise fail(target.at, f"{axis} is an axis here, so nothing is divided over it again")
    own = Rule(pattern=rule.pattern, targets=(target,))
    if any(is_hole(axis) for axis in own.axes()):
        raise fail(target.at, "`_` stands for what no tensor has; use it on the left")
    if listed & own.axes():
        raise fail(target.at, f"{', '.join(listed)} tells tensors apart, and cannot be an axis too")
    if listed and rule.flat:
        raise fail(target.at, "what is flat cannot be divided into tensors by a number")


def _shown(name: str) -> str:
    return "`*`" if name.startswith("*") else name
