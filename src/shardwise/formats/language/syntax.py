"""The parser of specifications: recursive descent over the grammar of docs/language.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.formats.language.axes import Axis, Chain, Dim, Node, Shape, Sum
from shardwise.formats.language.expressions import (
    Expression,
    Item,
    Name,
    Number,
    Operation,
    Operator,
    Product,
    SizeOf,
)
from shardwise.formats.language.like import Like, followed
from shardwise.formats.language.rules import (
    Capture,
    Declared,
    Pattern,
    Rule,
    Skip,
    Spec,
    Target,
    Template,
    Tie,
)
from shardwise.formats.language.structure import check_sense
from shardwise.formats.language.text import NAME, Cursor, Text
from shardwise.manifest.dtypes import DTYPES

KEYWORD = re.compile(r"(ranks|let|skip)(?=\s|\Z)")
LITERAL = re.compile(r'[^\s,\[\]{}*"]+')
QUOTED = re.compile(r'"[^"\n]*"')
LONGEST_TEXT = 2**20


@dataclass(slots=True)
class _Found:
    ranks: list[tuple[str, int | None]]
    lets: list[tuple[str, Declared | None]]
    rules: list[Rule | Skip | Like]
    ties: list[Tie]


def parse(text: str, source: str = "specification") -> Spec:
    """Parse a specification.

    Args:
        source: its name in errors, for example the path of its file.

    Raises:
        SpecError: the text has an error; the message shows the line and a caret.
    """
    whole = Text(text, source)
    if len(text) > LONGEST_TEXT:
        raise whole.error(0, f"the specification is longer than {LONGEST_TEXT} characters")
    found = _Found([], [], [], [])
    for start, stop in whole.statements():
        cursor = Cursor(whole, start, stop)
        _statement(cursor, found)
        if not cursor.done:
            cursor.fail("expected the end of the line; a line that goes on is indented")
    spec = Spec(
        ranks=tuple(found.ranks),
        lets=tuple(found.lets),
        rules=followed(found.rules, whole),
        ties=tuple(found.ties),
        text=whole,
    )
    check_sense(spec)
    return spec


def _statement(cursor: Cursor, found: _Found) -> None:
    at = cursor.at
    match cursor.match(KEYWORD):
        case "ranks":
            while not cursor.done:
                name = cursor.name("the name of an axis of the ranks")
                found.ranks.append((name, _size(cursor) if cursor.take("=") else None))
        case "let":
            while True:
                name = cursor.name("a name to declare")
                found.lets.append((name, declared(cursor) if cursor.take("=") else None))
                if not cursor.take(","):
                    break
        case "skip":
            while not cursor.done:
                found.rules.append(Skip(_pattern(cursor), at))
        case _:
            _mapping(cursor, found, at)


def _size(cursor: Cursor) -> int:
    at = cursor.at
    return cursor.number() or cursor.fail("expected a number of ranks, at least 1", at)


def _mapping(cursor: Cursor, found: _Found, at: int) -> None:
    pattern = _pattern(cursor)
    if cursor.take("="):
        name = Template(tuple(p if isinstance(p, str) else Name(p.name) for p in pattern.parts))
        of = _pattern(cursor)
        unless = bool(cursor.take("unless"))
        if unless:
            cursor.expect("stored", "as in `head = embed unless stored`")
        found.ties.append(Tie(name, of, unless, at))
    elif cursor.take("like"):
        base = _template(cursor)
        cursor.expect(",", "and how results are renamed, as in `like *, model.* -> optimizer.*`")
        results = _pattern(cursor)
        cursor.expect("->", "and what results are renamed to")
        target = _target(cursor)
        rule = Rule(pattern=pattern, targets=(target,), at=at)
        found.rules.append(Like(_modified(cursor, rule), base, results))
    else:
        stored = shape(cursor) if cursor.sees("[") else None
        cursor.expect("->", "and the name of a global tensor")
        targets = [_target(cursor)]
        while cursor.take(","):
            targets.append(_target(cursor))
        rule = Rule(pattern=pattern, stored=stored, targets=tuple(targets), at=at)
        found.rules.append(_modified(cursor, rule))


def _target(cursor: Cursor) -> Target:
    at = cursor.at
    name = _template(cursor)
    return Target(name, shape(cursor) if cursor.sees("[") else None, at)


def _modified(cursor: Cursor, rule: Rule) -> Rule:
    while not cursor.done:
        if cursor.take("where"):
            sizes = list(rule.sizes)
            while True:
                name = cursor.name("the name of an axis")
                cursor.expect("=", f"and how many {name} there are")
                sizes.append((name, declared(cursor)))
                if not cursor.take(","):
                    break
            rule = replace(rule, sizes=tuple(sizes))
        elif cursor.take("flat"):
            cursor.expect("over", "and axes of the ranks")
            rule = replace(rule, flat=_axes(cursor))
        elif cursor.take("average"):
            cursor.expect("over", "and axes of the ranks")
            rule = replace(rule, average=_axes(cursor))
        elif cursor.take("on"):
            on: list[tuple[str, Expression]] = list(rule.on)
            while True:
                name = cursor.name("an axis of the ranks")
                cursor.expect("=", "and the coordinate of the ranks that have it")
                on.append((name, expression(cursor)))
                if not cursor.take(","):
                    break
            rule = replace(rule, on=tuple(on))
        elif cursor.take("as"):
            at = cursor.at
            dtype = cursor.name("a dtype")
            if dtype not in DTYPES:
                cursor.fail(f"{dtype} is no dtype of torch; expected for example bfloat16", at)
            rule = replace(rule, dtype=dtype)
        else:
            cursor.fail("expected `where`, `flat over`, `average over`, `on`, `as` or the end")
    return rule


def _axes(cursor: Cursor) -> tuple[str, ...]:
    axes = [cursor.name("an axis of the ranks")]
    while True:
        name = None if _is_keyword(cursor) else cursor.match(NAME)
        if name is None:
            return tuple(axes)
        axes.append(name)


def _pattern(cursor: Cursor) -> Pattern:
    parts: list[str | Capture] = []
    stars = 0
    for word in _word(cursor, "a name, or a pattern of names"):
        if word == "*":
            parts.append(Capture(f"*{stars}", star=True))
            stars += 1
        elif word == "{":
            name = cursor.name("the name of what is captured")
            parts.append(Capture(name, star=cursor.take("*")))
            _close(cursor)
        else:
            parts.append(word[1:])
    return Pattern(tuple(parts))


def _template(cursor: Cursor) -> Template:
    parts: list[str | Expression] = []
    stars = 0
    for word in _word(cursor, "a name"):
        if word == "*":
            parts.append(Name(f"*{stars}"))
            stars += 1
        elif word == "{":
            parts.append(expression(cursor))
            cursor.take("*")
            _close(cursor)
        else:
            parts.append(word[1:])
    return Template(tuple(parts))


def _word(cursor: Cursor, what: str) -> Iterator[str]:
    """Yield the parts of a name up to a space or comma: `*`, `{`, or `"` followed by a text.

    After `{`, the caller reads up to and including `}` before it takes the next part.
    """
    begin, text = cursor.at, cursor.text.text
    while True:
        if cursor.at < cursor.stop and text[cursor.at] in "*{":
            cursor.at += 1
            yield text[cursor.at - 1]
            continue
        quoted = QUOTED.match(text, cursor.at, cursor.stop)
        found = quoted or LITERAL.match(text, cursor.at, cursor.stop)
        if found is None:
            break
        cursor.at = found.end()
        yield '"' + (found.group()[1:-1] if quoted else found.group())
    if cursor.at == begin:
        cursor.fail(f"expected {what}")
    cursor.skip_space()


def _close(cursor: Cursor) -> None:
    # `expect` would also skip the space that ends the word.
    if cursor.text.text[cursor.at : min(cursor.at + 1, cursor.stop)] != "}":
        cursor.fail("expected `}`")
    cursor.at += 1


MOST_DEPTH = 32
MOST_DIMS = 32
SUMS: tuple[Operator, ...] = ("+", "-")
PRODUCTS: tuple[Operator, ...] = ("*", "//", "%")


def declared(cursor: Cursor) -> Declared:
    """Read the value after `=`: an expression, or a list of them."""
    if not cursor.take("["):
        return expression(cursor)
    items = [expression(cursor)]
    while cursor.take(","):
        items.append(expression(cursor))
    cursor.expect("]", "at the end of the list")
    return tuple(items)


def expression(cursor: Cursor, depth: int = 0) -> Expression:
    """Read arithmetic: a sum of products of atoms."""
    if depth > MOST_DEPTH:
        cursor.fail("too many parentheses")
    return _operations(cursor, depth, SUMS)


def _operations(cursor: Cursor, depth: int, operators: tuple[Operator, ...]) -> Expression:
    def operand() -> Expression:
        if operators is SUMS:
            return _operations(cursor, depth, PRODUCTS)
        return _atom(cursor, depth)

    left = operand()
    while True:
        for operator in operators:
            if not cursor.sees("->") and not _ends_capture(cursor) and cursor.take(operator):
                left = Operation(operator, left, operand())
                break
        else:
            return left


def _ends_capture(cursor: Cursor) -> bool:
    # In `{rest*}` the star belongs to the capture.
    return cursor.sees("*}")


def _atom(cursor: Cursor, depth: int) -> Expression:
    number = cursor.number()
    if number is not None:
        return Number(number)
    if cursor.take("("):
        inner = expression(cursor, depth + 1)
        cursor.expect(")", "to close `(`")
        return inner
    if cursor.take("|"):
        name = cursor.name("the axis whose size is meant")
        cursor.expect("|", f"after `|{name}`")
        return SizeOf(name)
    axes, ragged = [cursor.name("a number, a name, `|axis|` or `(`")], False
    if cursor.take("["):
        index = expression(cursor, depth + 1)
        cursor.expect("]", "after the position in the list")
        return Item(axes[0], index)
    while not ragged and not _is_keyword(cursor):
        ragged = cursor.take("~")
        found = cursor.name("the ragged axis") if ragged else cursor.match(NAME)
        if found is None:
            break
        axes.append(found)
    return Product(tuple(axes), ragged) if len(axes) > 1 else Name(axes[0])


def _is_keyword(cursor: Cursor) -> bool:
    return any(cursor.sees(word) for word in ("where", "flat", "average", "on", "as"))


def shape(cursor: Cursor) -> Shape:
    """Read an axis expression: `[(tp f) h]`."""
    at = cursor.at
    cursor.expect("[", "and the dimensions of the array")
    dims: list[Dim] = []
    rest = None
    literals: Counter[str] = Counter()
    while not cursor.take("]"):
        if cursor.done:
            cursor.fail("expected `]` at the end of the dimensions")
        if len(dims) > MOST_DIMS:
            cursor.fail(f"too many dimensions; at most {MOST_DIMS}")
        if cursor.sees("..."):
            if rest is not None:
                cursor.fail("`...` can stand for dimensions only once")
            cursor.take("...")
            rest = len(dims)
            continue
        node = _factor(cursor, literals, 0)
        limit = None
        if cursor.take("["):
            cursor.expect(":", "and how many elements the tensor has, as in `(tp v)[:vocab]`")
            limit = expression(cursor)
            cursor.expect("]", "after the number of elements")
        dims.append(Dim(node, limit))
    return Shape(tuple(dims), rest, at)


def _factor(cursor: Cursor, literals: Counter[str], depth: int) -> Node:
    at = cursor.at
    if depth > MOST_DEPTH:
        cursor.fail("too many parentheses")
    if cursor.take("("):
        return _sum(cursor, literals, depth)
    number = cursor.number()
    if number is not None:
        return (
            Chain(()) if number == 1 else Axis(_counted(str(number), literals), size=number, at=at)
        )
    ragged = cursor.take("~")
    name = cursor.name("an axis, a number or `(`")
    return Axis(_counted(name, literals) if name == "_" else name, ragged, at=at)


def _counted(name: str, literals: Counter[str]) -> str:
    literals[name] += 1
    return f"{name}'{literals[name] - 1}"


def _sum(cursor: Cursor, literals: Counter[str], depth: int) -> Node:
    parts: list[Node] = []
    factors: list[Node] = []
    while True:
        factors.append(_factor(cursor, literals, depth + 1))
        if cursor.sees("+") or cursor.sees(")"):
            parts.append(factors[0] if len(factors) == 1 else Chain(tuple(factors)))
            factors = []
            if cursor.take(")"):
                return parts[0] if len(parts) == 1 else Sum(tuple(parts))
            cursor.take("+")
