"""The parser of specifications: recursive descent over the grammar of docs/language.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from shardwise.parts.formats.language.arithmetic import Expression
from shardwise.parts.formats.language.rules import Pattern, Rule, Spec, Target, Tie, check_spec
from shardwise.parts.formats.language.scanner import NAME, Scanner, SourceText
from shardwise.parts.formats.language.shapes import (
    Axis,
    AxisExpression,
    AxisGroup,
    Shape,
    axes_in,
    is_unused,
)

Item = TypeVar("Item")

STATEMENT_KEYWORD = re.compile(r"(ranks|let|skip)(?=\s|\Z)")
CLAUSE_KEYWORDS = ("where", "on")
KEYWORDS = frozenset(["ranks", "let", "skip", "like", *CLAUSE_KEYWORDS])
LONGEST_TEXT = 2**20
MOST_DEPTH = 32
MOST_DIMS = 32
OPERATORS = (("+", "-"), ("*", "//", "%"))
"""Operators of sums, and of the products in them."""


def parse(text: str, source: str = "specification") -> Spec:
    """Parse a specification.

    Args:
        text: the text.
        source: the name of the text in errors, for example the path of its file.

    Raises:
        SpecError: the text has an error; the message shows the line and a caret.
    """
    source_text = SourceText(text, source)
    if len(text) > LONGEST_TEXT:
        raise source_text.error(0, f"the specification is longer than {LONGEST_TEXT} characters")
    declared: dict[str, Expression | None] = {}
    ranks: list[str] = []
    statements: list[Rule | Tie] = []
    for start, end in source_text.statement_ranges():
        scanner = Scanner(source_text, start, end)
        position = scanner.position
        match scanner.match(STATEMENT_KEYWORD):
            case "ranks":
                while not scanner.at_end:
                    ranks.append(_read_declaration(scanner, declared))
            case "let":
                _read_lets(scanner, declared)
            case "skip":
                while not scanner.at_end:
                    pattern = _read_pattern(scanner, "a name, or a pattern of names")
                    statements.append(Rule(pattern=pattern, position=position))
            case _:
                statements.append(_read_rule_or_tie(scanner, position))
        if not scanner.at_end:
            scanner.fail("expected the end of the line; indent a line that continues a statement")
    spec = Spec(
        tuple(ranks),
        {name: value for name, value in declared.items() if name not in ranks},
        _expand_like([each for each in statements if isinstance(each, Rule)], source_text),
        tuple(each for each in statements if isinstance(each, Tie)),
        source_text,
    )
    check_spec(spec)
    return spec


def _read_declaration(scanner: Scanner, declared: dict[str, Expression | None]) -> str:
    """Read a name that `ranks` or `let` declares."""
    position = scanner.position
    name = scanner.read_name("a name to declare")
    if name in declared:
        scanner.fail(f"{name} is declared twice; remove one declaration", position)
    if name in KEYWORDS:
        scanner.fail(f"{name} is a word of the language and cannot be a name", position)
    declared[name] = None
    return name


def _read_lets(scanner: Scanner, declared: dict[str, Expression | None]) -> None:
    for name in _read_list(scanner, lambda: _read_declaration(scanner, declared)):
        declared[name] = _read_expression(scanner) if scanner.accept("=") else None


def _read_list(scanner: Scanner, read: Callable[[], Item]) -> Iterator[Item]:
    """Yield items that are separated by commas.

    After each item, the caller may read more text from the scanner, such as `= 3`.
    """
    yield read()
    while scanner.accept(","):
        yield read()


def _read_rule_or_tie(scanner: Scanner, position: int) -> Rule | Tie:
    pattern = _read_pattern(scanner, "a name, or a pattern of names")
    if scanner.accept("="):
        target = _read_pattern(scanner, "a name, or a pattern of names")
        unless_stored = scanner.accept("unless")
        if unless_stored:
            scanner.expect("stored", "as in `head = embed unless stored`")
        return Tie(pattern, target, unless_stored, position)
    if scanner.accept("like"):
        original = _read_pattern(scanner, "a name, or a pattern of names")
        scanner.expect(",", "and how results are renamed, as in `like *, model.* -> optimizer.*`")
        results = _read_pattern(scanner, "a name, or a pattern of names")
        scanner.expect("->", "and what results are renamed to")
        rule = Rule(
            pattern=pattern,
            targets=(_read_target(scanner),),
            position=position,
            like=(original, results),
        )
    else:
        array_shape = _read_shape(scanner) if scanner.next_is("[") else None
        scanner.expect("->", "and the name of a global tensor")
        targets = tuple(_read_list(scanner, lambda: _read_target(scanner)))
        rule = Rule(pattern=pattern, array_shape=array_shape, targets=targets, position=position)
    return _read_clauses(scanner, rule)


def _read_target(scanner: Scanner) -> Target:
    position = scanner.position
    name = _read_pattern(scanner, "a name", of_tensor=True)
    return Target(name, _read_shape(scanner) if scanner.next_is("[") else None, position)


def _read_clauses(scanner: Scanner, rule: Rule) -> Rule:
    """Read the clauses at the end of a rule; return the rule with them."""

    def read_pair() -> tuple[str, Expression]:
        name = scanner.read_name("the name of an axis")
        scanner.expect("=", "and a number")
        return name, _read_expression(scanner)

    while not scanner.at_end:
        if scanner.accept("where"):
            rule = replace(rule, sizes=(*rule.sizes, *_read_list(scanner, read_pair)))
        elif scanner.accept("on"):
            rule = replace(rule, conditions=(*rule.conditions, *_read_list(scanner, read_pair)))
        else:
            scanner.fail("expected `where`, `on` or the end")
    return rule


def _read_pattern(scanner: Scanner, expected: str, *, of_tensor: bool = False) -> Pattern:
    """Read a pattern of names.

    Args:
        expected: a description of the pattern, for the message of an error.
        of_tensor: whether the pattern may contain arithmetic, as that of a tensor's name.
    """
    parts: list[str | Expression] = []
    stars = 0
    for word in scanner.read_name_parts(expected):
        if word == "*":
            parts.append(Expression("text", 0, (f"*{stars}",)))
            stars += 1
        elif word == "{":
            if of_tensor:
                part = _read_expression(scanner)
            else:
                part = Expression("name", 0, (scanner.read_name("a name for the captured text"),))
            has_star = scanner.accept("*")
            parts.append(replace(part, kind="text") if has_star and part.is_name else part)
            scanner.read_closing_brace()
        else:
            parts.append(word[1:])
    return Pattern(tuple(parts))


def _read_expression(scanner: Scanner, depth: int = 0, level: int = 0) -> Expression:
    """Read arithmetic: a sum (level 0) of products (level 1) of atoms."""
    if depth > MOST_DEPTH:
        scanner.fail(f"parentheses are nested more than {MOST_DEPTH} deep")
    if level == len(OPERATORS):
        return _read_atom(scanner, depth)
    left = _read_expression(scanner, depth, level + 1)
    # In `{rest*}` the star belongs to the capture.
    while not (scanner.next_is("->") or scanner.next_is("*}")):
        operator = next((each for each in OPERATORS[level] if scanner.accept(each)), None)
        if operator is None:
            break
        right = _read_expression(scanner, depth, level + 1)
        left = Expression(operator, operands=(left, right))
    return left


def _read_atom(scanner: Scanner, depth: int) -> Expression:
    number = scanner.read_number()
    if number is not None:
        return Expression("number", number)
    if scanner.accept("("):
        inner = _read_expression(scanner, depth + 1)
        scanner.expect(")", "to close `(`")
        return inner
    if scanner.accept("|"):
        name = scanner.read_name("the name of an axis")
        scanner.expect("|", f"after `|{name}`")
        return Expression("size", 0, (name,))
    axes = [scanner.read_name("a number, a name, `|axis|` or `(`")]
    kind = "name"
    while kind != "ragged" and not any(map(scanner.next_is, CLAUSE_KEYWORDS)):
        is_ragged = scanner.accept("~")
        next_axis = scanner.read_name("the ragged axis") if is_ragged else scanner.match(NAME)
        if next_axis is None:
            break
        axes.append(next_axis)
        kind = "ragged" if is_ragged else "index"
    return Expression(kind, 0, tuple(axes))


def _read_shape(scanner: Scanner) -> Shape:
    """Read the dimensions of an array: `[(tp f) h]`."""
    position = scanner.position
    scanner.expect("[", "and the dimensions of the array")
    dims: list[AxisExpression] = []
    ellipsis = None
    literal_counts: Counter[str] = Counter()
    while not scanner.accept("]"):
        if scanner.at_end:
            scanner.fail("expected `]` at the end of the dimensions")
        if len(dims) > MOST_DIMS:
            scanner.fail(f"too many dimensions; at most {MOST_DIMS} are supported")
        if scanner.next_is("..."):
            if ellipsis is not None:
                scanner.fail("`...` can stand for dimensions only once")
            scanner.accept("...")
            ellipsis = len(dims)
            continue
        axes = _read_factor(scanner, literal_counts, 0)
        if scanner.accept("["):
            scanner.expect(":", "and how many elements the tensor has, as in `(tp v)[:vocab]`")
            limit = _read_expression(scanner)
            scanner.expect("]", "after the number of elements")
            parts = axes if isinstance(axes, AxisGroup) else AxisGroup((axes,))
            axes = replace(parts, limit=limit)
        dims.append(axes)
    return Shape(tuple(dims), ellipsis, position)


def _read_factor(scanner: Scanner, literal_counts: Counter[str], depth: int) -> AxisExpression:
    """Read an axis, a number, or a sum of products in parentheses.

    Args:
        literal_counts: for each number and `_`, its count in the shape so far.
    """
    if depth > MOST_DEPTH:
        scanner.fail(f"parentheses are nested more than {MOST_DEPTH} deep")
    if scanner.accept("("):
        return _read_sum(scanner, literal_counts, depth)
    number = scanner.read_number()
    if number == 1:
        return AxisGroup(())
    is_ragged = number is None and scanner.accept("~")
    name = scanner.read_name("an axis, a number or `(`") if number is None else str(number)
    if number is not None or name == "_":  # `128'0` is another axis than `128'1`
        literal_counts[name] += 1
        name = f"{name}'{literal_counts[name] - 1}"
    return Axis(name, is_ragged, size=number)


def _read_sum(scanner: Scanner, literal_counts: Counter[str], depth: int) -> AxisExpression:
    parts: list[AxisExpression] = []
    factors: list[AxisExpression] = []
    while True:
        factors.append(_read_factor(scanner, literal_counts, depth + 1))
        if scanner.next_is("+") or scanner.next_is(")"):
            parts.append(factors[0] if len(factors) == 1 else AxisGroup(tuple(factors)))
            factors = []
            if scanner.accept(")"):
                break
            scanner.accept("+")
    if len(parts) == 1:
        return parts[0]
    if not any(is_unused(axis.name) for part in parts for axis in axes_in(part)):
        parts = [
            replace(part, size=1) if isinstance(part, Axis) and part.size is None else part
            for part in parts
        ]
    return AxisGroup(tuple(parts), is_sum=True)


def _expand_like(rules: Sequence[Rule], source: SourceText) -> tuple[Rule, ...]:
    """Replace each `like` statement with renamed copies of other rules.

    For example: `optimizer.*.{s} like *, model.* -> optimizer.*.{s}`. The copies of a statement are
    copied by the statements after it.

    Raises:
        SpecError: a `like` statement has the wrong form, or no rule matches it.
    """
    originals = [each for each in rules if each.like is None]
    expanded: list[Rule] = []
    all_copies: list[Rule] = []
    for rule in rules:
        if rule.like is None:
            expanded.append(rule)
            continue
        copies = list(_copy_rules(rule, *rule.like, [*originals, *all_copies], source))
        if not copies:
            raise source.error(
                rule.position, "no other rule has an array and tensors with the names after `like`"
            )
        expanded += copies
        all_copies += [copy for copy in copies if copy.targets]
    return tuple(expanded)


def _copy_rules(
    like: Rule, original: Pattern, results: Pattern, rules: Sequence[Rule], source: SourceText
) -> Iterator[Rule]:
    """Yield renamed copies of rules for a `like` statement.

    A rule is copied if the names of all its tensors begin as `results` does.
    """
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
        named = [_rename(target, new_target, prefix, result_star.names) for target in rule.targets]
        targets = tuple(target for target in named if target is not None)
        if len(targets) < len(named):
            continue
        names = set(rule.pattern.variables()) & set(like.pattern.variables())
        if shared := {name for name in names if not name.startswith("*")}:
            raise source.error(
                position,
                f"{' and '.join(sorted(shared))} is captured here and in line "
                f"{source.line_number(rule.position)}; rename one",
            )
        has_shape = new_target.shape is not None  # then it replaces the shape of the rule
        if has_shape and _splits_array(rule):
            continue  # an array of another shape lacks the axis that is in the name
        yield replace(
            rule,
            pattern=_insert(like.pattern, star, rule.pattern),
            targets=targets,
            array_shape=None if has_shape else rule.array_shape,
            sizes=(*(() if has_shape else rule.sizes), *like.sizes),
            conditions=rule.conditions + like.conditions,
            position=position,
        )


def _splits_array(rule: Rule) -> bool:
    """Return whether the names of a rule's tensors have an axis of the array, such as `{e}`."""
    dims = rule.array_shape.dims if rule.array_shape is not None else ()
    axes = {axis.name for dim in dims for axis in axes_in(dim)} - {*rule.pattern.variables()}
    return any(axes & {*target.name.variables()} for target in rule.targets)


def _is_star(part: object) -> bool:
    return isinstance(part, Expression) and part.kind == "text"


def _insert(pattern: Pattern, star: object, inner: Pattern) -> Pattern:
    """Return `pattern` with the pattern `inner` in place of `star`.

    Other stars of `pattern` are renamed, so that they differ from the stars of `inner`.
    """
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
