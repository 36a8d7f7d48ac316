"""What the language understands, and how it says what it does not."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw


def parse(text: str) -> Any:
    """The rules of a specification; a text without a rule or a line would be a name."""
    return sw.spec(text if "->" in text or "\n" in text else f"{text}\n").rules


def test_statements_begin_at_the_margin_and_go_on_where_indented() -> None:
    spec = parse("""
        # a comment
        ranks tp pp

        a.{i}  [(tp f)]   # another
            -> x.{pp i} [(tp f)],
        # and one in between

               y.{i}
               where f = 4
        skip b *.c# "d # e"
    """)
    assert spec.ranks == ("tp", "pp")
    rule, *skips = spec.rules
    assert [str(target.name.parts[0]) for target in rule.targets] == ["x.", "y."]
    assert [str(skip.pattern) for skip in skips if not skip.targets] == ["b", "*.c#", "d # e"]


def test_captures() -> None:
    (rule,) = parse("a.*.{x}.{rest*} -> *.{x}.{rest}").rules
    assert str(rule.pattern) == "a.*.{x}.{rest*}"
    match = rule.pattern.compile(())
    assert match("a.b.c.d.e") == {"*0": "b.c", "x": "d", "rest": "e"}
    assert match("a.b.c") is None
    assert parse("a.{i}.{i} -> b").rules[0].pattern.compile(())("a.1.2") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks tp tp", "1:10: tp is declared twice"),
        ("let where = 1", "1:5: where is a word of the language"),
        ("a -> b [h", "1:10: expected `]` at the end of the dimensions"),
        ("a b", "1:3: expected `->` and the name of a global tensor"),
        ("a ->", "1:5: expected a name"),
        ("a -> b.{i}", "1:6: unknown name i"),
        ("a -> b.*", "1:6: unknown name `*`"),
        ("a -> b [h h]", "the axis h occurs twice"),
        ("a -> b [(h + h)]", "two parts of a sum have the same axes"),
        (
            "a [x y] -> b [x]",
            "1:3: [x] uses the part `x`, but the array has only `x y`",
        ),
        ("a [(x + y)] -> b [x]", "no tensor takes `y`; call a part that no tensor needs `_`"),
        ("a -> b [(x + _)]", "`_` is a part of an array that no tensor takes"),
        ("a -> b [~f]", "~f must come after the axes of ranks that divide it"),
        ("a -> b [... ...]", "1:13: `...` can stand for dimensions only once"),
        ("a [...] -> b [h]", "`...` must be on both sides"),
        ("a -> b where q = 1", "`where` gives q a size, but this rule has no such axis"),
        ("ranks tp\na.{tp} -> b", "tp is captured here, but declared"),
        ("a -> b on pp = 0", "pp is not an axis of the ranks, and neither captured nor declared"),
        ("a.{i} -> b on j = 0", "j is not an axis of the ranks"),
        ("a [(x h)] -> b [((y + z) h)]", "uses the part `h y`, but the array has only `h x`"),
        ("a [((x + w) h)] -> b [((x + z) h)]", "no tensor takes `h w`"),
        (
            "w.{s} -> l.w\nx.{s}.{p*} like {p*}, l.* -> m.*",
            "s is captured here and in line 1; rename one",
        ),
        (
            "o.* like *, m.* -> o.*",
            "no other rule has an array and tensors with the names after `like`",
        ),
        ("a -> m.a\no like a, m.* -> o.*", "the name after `like` must contain one `*`"),
        ("a -> b [" + "(" * 99, "parentheses are nested more than 32 deep"),
        ("a -> b [h] ]", "1:12: expected `where`"),
        ("a -> b.{99999999999999999999}", "the number is too large"),
        ("a.{i -> b", "expected `}`"),
        ("a = b.*c\nhead.* = c", "`*` is used on the left of this tie, but not captured on"),
    ],
)
def test_what_makes_no_sense_is_pointed_at(text: str, message: str) -> None:
    with pytest.raises(sw.SpecError) as error:
        parse(text)
    assert message in str(error.value)


def test_errors_show_the_line_and_a_caret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.spec").write_text("ranks tp\n  # so\nlayers.w -> w [(tp f ? h]\n", encoding="utf-8")
    with pytest.raises(sw.SpecError) as error:
        sw.spec("my.spec")
    assert str(error.value) == (
        "my.spec:3:22: expected an axis, a number or `(`\n"
        "  layers.w -> w [(tp f ? h]\n"
        "                       ^"
    )
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.line, again.column, str(again)) == (3, 22, str(error.value))


@given(st.text("a{}[]()*->+=~_|.,: \n1#\"'", max_size=60))
def test_any_text_is_understood_or_refused(text: str) -> None:
    with contextlib.suppress(sw.SpecError):
        parse(text)
