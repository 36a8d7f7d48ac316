"""docs/language.md: all specifications on it are understood, and all of its pictures are true."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from tests.formats.language.rankfiles import Array, numbered, read, write

PAGE = (Path(__file__).parents[3] / "docs" / "language.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S)
PAIRS = [
    (text, picture)
    for (kind, text), (other, picture) in itertools.pairwise(BLOCKS)
    if (kind, other) == ("spec", "picture")
]


def arrays_of(lines: list[str]) -> dict[str, Array]:
    """Names, each with the rows of numbers below it; a single row has one dimension."""
    rows: dict[str, list[list[int]]] = {}
    for line in filter(None, map(str.strip, lines)):
        if re.fullmatch(r"[\d ]+", line):
            rows[list(rows)[-1]].append([int(word) for word in line.split()])
        else:
            rows[line] = []
    found = {name: np.array(own, np.int64) for name, own in rows.items()}
    return {name: own[0] if len(own) == 1 else own for name, own in found.items()}


def drawn(picture: str) -> tuple[dict[tuple[int, ...], dict[str, Array]], dict[str, Array]]:
    """What each rank has, and what it makes up."""
    columns = list(zip(*(line.split("|") for line in picture.splitlines()), strict=True))
    left, *right = columns
    heads = re.finditer(r"\w+=\d+(?: \w+=\d+)*", left[0])
    edges = [head.start() for head in heads]
    ranks = {}
    for begin, end in zip(edges, [*edges[1:], None], strict=True):
        head, *lines = (line[begin:end] for line in left)
        coordinate = tuple(int(word.split("=")[1]) for word in head.split())
        ranks[coordinate] = arrays_of(lines)
    whole: dict[str, Array] = {}
    for column in right:
        whole |= arrays_of(list(column))
    return ranks, whole


def test_the_page_has_pictures() -> None:
    assert len(PAIRS) == sum(kind == "picture" for kind, _ in BLOCKS) >= 14
    assert not [picture for _, picture in PAIRS if len(drawn(picture)[0]) < 2]


@pytest.mark.parametrize(("text", "picture"), PAIRS)
def test_pictures_are_true(text: str, picture: str) -> None:
    ranks, whole = drawn(picture)
    sizes = np.max(list(ranks), axis=0) + 1
    (line,) = re.findall(r"^ranks (.*)$", text, re.MULTILINE)
    axes = dict(zip(line.split(), sizes.tolist(), strict=True))
    assert {name: t.tolist() for name, t in read(text, axes, ranks).items()} == {
        name: array.tolist() for name, array in whole.items()
    }


def test_code_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text, picture = next(pair for pair in PAIRS if "vocab" in pair[0])
    Path("my.spec").write_text(text, encoding="utf-8")
    for (rank,), arrays in drawn(picture)[0].items():
        Path("ranks").mkdir(exist_ok=True)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        torch.save(tensors, f"ranks/rank{rank}.pt")
    (code,) = [own for kind, own in BLOCKS if kind == "python"]
    exec(compile(code, "docs/language.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([3, 2])\n"


def test_the_error_on_the_page_is_the_one_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.spec").write_text("ranks tp\n  # so\nlayers.w -> w [(tp f ? h]\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected an axis") as error:
        sw.spec("my.spec")
    assert f"```\n{error.value}\n```" in PAGE


def test_the_problems_on_the_page_are_those_that_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ranks tp\ncut -> cut [(tp f) h]\nodd -> odd [(tp (gate + up) f) h]"
    ranks = {
        (0,): {"odd": numbered(5, 2), "cut": numbered(3, 2), "other": numbered(1)},
        (1,): {"odd": numbered(5, 2)},
    }
    monkeypatch.chdir(tmp_path)
    Path("my.spec").write_text(text, encoding="utf-8")
    folder = Path("checkpoints/step_100")
    folder.mkdir(parents=True)
    spec = sw.spec("my.spec", files=write(folder, {"tp": 2}, ranks))
    with pytest.raises(sw.MismatchError) as error:
        sw.open(folder, spec=spec)
    assert f"```\n{error.value}\n```" in PAGE
