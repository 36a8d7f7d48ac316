"""The parser of specifications: recursive descent over the grammar of docs/language.md."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from shardwise.formats.language.arithmetic import (
    AxisSize,
    BinaryOperation,
    CombinedIndex,
    Expression,
    ListElement,
    Number,
    Operator,
    Variable,
)
from shardwise.formats.language.check_spec import check_spec
from shardwise.formats.language.like_statements import LikeStatement, expand_like_statements
from shardwise.formats.language.rules import (
    Capture,
    DeclaredValue,
    Pattern,
    Rule,
    Skip,
    Spec,
    Target,
    Template,
    Tie,
)
from shardwise.formats.language.scanner import NAME, Scanner, SourceText
from shardwise.formats.language.shapes import (
    Axis,
    AxisExpression,
    AxisProduct,
    AxisSum,
    Shape,
    ShapeDim,
)
from shardwise.manifest.dtypes import DTYPES

STATEMENT_KEYWORD = re.compile(r"(ranks|let|skip)(?=\s|\Z)")
CLAUSE_KEYWORDS = ("where", "flat", "average", "on", "as")
KEYWORDS = frozenset(["ranks", "let", "skip", "like", "over", *CLAUSE_KEYWORDS])
LONGEST_TEXT = 2**20
MOST_DEPTH = 32
MOST_DIMS = 32
SUM_OPERATORS: tuple[Operator, ...] = ("+", "-")
PRODUCT_OPERATORS: tuple[Operator, ...] = ("*", "//", "%")


@dataclass(slots=True)
class _Statements:
    ranks: list[tuple[str, int | None]] = field(default_factory=list)
    lets: list[tuple[str, DeclaredValue | None]] = field(default_factory=list)
    rules: list[Rule | Skip | LikeStatement] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)


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
    statements = _Statements()
    for start, end in source_text.statement_ranges():
        scanner = Scanner(source_text, start, end)
        _read_statement(scanner, statements)
        if not scanner.at_end:
            scanner.fail("expected the end of the line; indent a line that continues a statement")
    spec = Spec(
        ranks=tuple(statements.ranks),
        lets=tuple(statements.lets),
        rules=expand_like_statements(statements.rules, source_text),
        ties=tuple(statements.ties),
        source=source_text,
    )
    check_spec(spec)
    return spec


def _read_statement(scanner: Scanner, statements: _Statements) -> None:
    position = scanner.position
    match scanner.match(STATEMENT_KEYWORD):
        case "ranks":
            while not scanner.at_end:
                name = _read_new_name(scanner, statements, "the name of an axis of the ranks")
                size = _read_rank_count(scanner) if scanner.accept("=") else None
                statements.ranks.append((name, size))
        case "let":
            while True:
                name = _read_new_name(scanner, statements, "a name to declare")
                value = _read_value(scanner) if scanner.accept("=") else None
                statements.lets.append((name, value))
                if not scanner.accept(","):
                    break
        case "skip":
            while not scanner.at_end:
                statements.rules.append(Skip(_read_pattern(scanner), position))
        case _:
            _read_rule_or_tie(scanner, statements, position)


def _read_new_name(scanner: Scanner, statements: _Statements, expected: str) -> str:
    """Read a name that `ranks` or `let` declares."""
    position = scanner.position
    name = scanner.read_name(expected)
    if any(name == declared for declared, _ in (*statements.ranks, *statements.lets)):
        scanner.fail(f"{name} is declared twice; remove one declaration", position)
    if name in KEYWORDS:
        scanner.fail(f"{name} is a word of the language and cannot be a name", position)
    return name


def _read_rank_count(scanner: Scanner) -> int:
    position = scanner.position
    return scanner.read_number() or scanner.fail("expected a number of ranks, at least 1", position)


def _read_rule_or_tie(scanner: Scanner, statements: _Statements, position: int) -> None:
    pattern = _read_pattern(scanner)
    if scanner.accept("="):
        name = Template(tuple(p if isinstance(p, str) else Variable(p.name) for p in pattern.parts))
        target = _read_pattern(scanner)
        unless_stored = scanner.accept("unless")
        if unless_stored:
            scanner.expect("stored", "as in `head = embed unless stored`")
        statements.ties.append(Tie(name, target, unless_stored, position))
    elif scanner.accept("like"):
        name_pattern = _read_template(scanner)
        scanner.expect(",", "and how results are renamed, as in `like *, model.* -> optimizer.*`")
        results = _read_pattern(scanner)
        scanner.expect("->", "and what results are renamed to")
        new_name = _read_target(scanner)
        rule = Rule(pattern=pattern, targets=(new_name,), position=position)
        statements.rules.append(LikeStatement(_read_clauses(scanner, rule), name_pattern, results))
    else:
        array_shape = _read_shape(scanner) if scanner.next_is("[") else None
        scanner.expect("->", "and the name of a global tensor")
        targets = [_read_target(scanner)]
        while scanner.accept(","):
            targets.append(_read_target(scanner))
        rule = Rule(
            pattern=pattern, array_shape=array_shape, targets=tuple(targets), position=position
        )
        statements.rules.append(_read_clauses(scanner, rule))


def _read_target(scanner: Scanner) -> Target:
    position = scanner.position
    name = _read_template(scanner)
    return Target(name, _read_shape(scanner) if scanner.next_is("[") else None, position)


def _read_clauses(scanner: Scanner, rule: Rule) -> Rule:
    """Read the clauses at the end of a rule; return the rule with them."""
    while not scanner.at_end:
        if scanner.accept("where"):
            sizes = list(rule.sizes)
            while True:
                name = scanner.read_name("the name of an axis")
                scanner.expect("=", f"and the size of {name}")
                sizes.append((name, _read_value(scanner)))
                if not scanner.accept(","):
                    break
            rule = replace(rule, sizes=tuple(sizes))
        elif scanner.accept("flat"):
            scanner.expect("over", "and axes of the ranks")
            rule = replace(rule, flat_axes=_read_axis_names(scanner))
        elif scanner.accept("average"):
            scanner.expect("over", "and axes of the ranks")
            rule = replace(rule, average_axes=_read_axis_names(scanner))
        elif scanner.accept("on"):
            coordinates: list[tuple[str, Expression]] = list(rule.coordinates)
            while True:
                name = scanner.read_name("an axis of the ranks")
                scanner.expect("=", "and the coordinate of the ranks that the rule applies to")
                coordinates.append((name, _read_expression(scanner)))
                if not scanner.accept(","):
                    break
            rule = replace(rule, coordinates=tuple(coordinates))
        elif scanner.accept("as"):
            position = scanner.position
            dtype = scanner.read_name("a dtype")
            if dtype not in DTYPES:
                scanner.fail(f"unknown dtype {dtype}; expected for example bfloat16", position)
            rule = replace(rule, dtype=dtype)
        else:
            scanner.fail("expected `where`, `flat over`, `average over`, `on`, `as` or the end")
    return rule


def _read_axis_names(scanner: Scanner) -> tuple[str, ...]:
    axes = [scanner.read_name("an axis of the ranks")]
    while True:
        name = None if _next_is_clause(scanner) else scanner.match(NAME)
        if name is None:
            return tuple(axes)
        axes.append(name)


def _next_is_clause(scanner: Scanner) -> bool:
    return any(scanner.next_is(keyword) for keyword in CLAUSE_KEYWORDS)


def _read_pattern(scanner: Scanner) -> Pattern:
    parts: list[str | Capture] = []
    star_count = 0
    for word in scanner.read_name_parts("a name, or a pattern of names"):
        if word == "*":
            parts.append(Capture(f"*{star_count}", star=True))
            star_count += 1
        elif word == "{":
            name = scanner.read_name("a name for the captured text")
            parts.append(Capture(name, star=scanner.accept("*")))
            scanner.read_closing_brace()
        else:
            parts.append(word[1:])
    return Pattern(tuple(parts))


def _read_template(scanner: Scanner) -> Template:
    parts: list[str | Expression] = []
    star_count = 0
    for word in scanner.read_name_parts("a name"):
        if word == "*":
            parts.append(Variable(f"*{star_count}"))
            star_count += 1
        elif word == "{":
            parts.append(_read_expression(scanner))
            scanner.accept("*")
            scanner.read_closing_brace()
        else:
            parts.append(word[1:])
    return Template(tuple(parts))


def _read_value(scanner: Scanner) -> DeclaredValue:
    """Read the value after `=`: an expression, or a list of them."""
    if not scanner.accept("["):
        return _read_expression(scanner)
    items = [_read_expression(scanner)]
    while scanner.accept(","):
        items.append(_read_expression(scanner))
    scanner.expect("]", "at the end of the list")
    return tuple(items)


def _read_expression(scanner: Scanner, depth: int = 0) -> Expression:
    """Read arithmetic: a sum of products of atoms."""
    if depth > MOST_DEPTH:
        scanner.fail(f"parentheses are nested more than {MOST_DEPTH} deep")
    return _read_operations(scanner, depth, SUM_OPERATORS)


def _read_operations(scanner: Scanner, depth: int, operators: tuple[Operator, ...]) -> Expression:
    def read_operand() -> Expression:
        if operators is SUM_OPERATORS:
            return _read_operations(scanner, depth, PRODUCT_OPERATORS)
        return _read_atom(scanner, depth)

    left = read_operand()
    while True:
        for operator in operators:
            # In `{rest*}` the star belongs to the capture.
            ends = scanner.next_is("->") or scanner.next_is("*}")
            if not ends and scanner.accept(operator):
                left = BinaryOperation(operator, left, read_operand())
                break
        else:
            return left


def _read_atom(scanner: Scanner, depth: int) -> Expression:
    number = scanner.read_number()
    if number is not None:
        return Number(number)
    if scanner.accept("("):
        inner = _read_expression(scanner, depth + 1)
        scanner.expect(")", "to close `(`")
        return inner
    if scanner.accept("|"):
        name = scanner.read_name("the name of an axis")
        scanner.expect("|", f"after `|{name}`")
        return AxisSize(name)
    axes, ragged = [scanner.read_name("a number, a name, `|axis|` or `(`")], False
    if scanner.accept("["):
        index = _read_expression(scanner, depth + 1)
        scanner.expect("]", "after the position in the list")
        return ListElement(axes[0], index)
    while not ragged and not _next_is_clause(scanner):
        ragged = scanner.accept("~")
        next_axis = scanner.read_name("the ragged axis") if ragged else scanner.match(NAME)
        if next_axis is None:
            break
        axes.append(next_axis)
    return CombinedIndex(tuple(axes), ragged) if len(axes) > 1 else Variable(axes[0])


def _read_shape(scanner: Scanner) -> Shape:
    """Read the dimensions of an array: `[(tp f) h]`."""
    position = scanner.position
    scanner.expect("[", "and the dimensions of the array")
    dims: list[ShapeDim] = []
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
        limit = None
        if scanner.accept("["):
            scanner.expect(":", "and how many elements the tensor has, as in `(tp v)[:vocab]`")
            limit = _read_expression(scanner)
            scanner.expect("]", "after the number of elements")
        dims.append(ShapeDim(axes, limit))
    return Shape(tuple(dims), ellipsis, position)


def _read_factor(scanner: Scanner, literal_counts: Counter[str], depth: int) -> AxisExpression:
    """Read an axis, a number, or a sum of products in parentheses.

    Args:
        literal_counts: for each number and `_`, its count in the shape so far.
    """
    position = scanner.position
    if depth > MOST_DEPTH:
        scanner.fail(f"parentheses are nested more than {MOST_DEPTH} deep")
    if scanner.accept("("):
        return _read_sum(scanner, literal_counts, depth)
    number = scanner.read_number()
    if number == 1:
        return AxisProduct(())
    if number is not None:
        return Axis(_unique_literal(str(number), literal_counts), size=number, position=position)
    ragged = scanner.accept("~")
    name = scanner.read_name("an axis, a number or `(`")
    if name == "_":
        name = _unique_literal(name, literal_counts)
    return Axis(name, ragged, position=position)


def _unique_literal(text: str, literal_counts: Counter[str]) -> str:
    """Return a name that distinguishes a literal from equal literals: `128'0`, `128'1`."""
    literal_counts[text] += 1
    return f"{text}'{literal_counts[text] - 1}"


def _read_sum(scanner: Scanner, literal_counts: Counter[str], depth: int) -> AxisExpression:
    parts: list[AxisExpression] = []
    factors: list[AxisExpression] = []
    while True:
        factors.append(_read_factor(scanner, literal_counts, depth + 1))
        if scanner.next_is("+") or scanner.next_is(")"):
            parts.append(factors[0] if len(factors) == 1 else AxisProduct(tuple(factors)))
            factors = []
            if scanner.accept(")"):
                return parts[0] if len(parts) == 1 else AxisSum(tuple(parts))
            scanner.accept("+")
