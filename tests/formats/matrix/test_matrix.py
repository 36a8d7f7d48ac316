"""Every format that is read, into every parallelism of torch: equal to what its framework has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.breadth import OLD_TORCH, mostly_long
from tests.formats.foreign_goldens import formats_read, opened
from tests.formats.matrix.sources import SOURCES
from tests.formats.matrix.targets import KINDS, load_each, uncovered
from tests.formats.matrix.wanted import Wanted
from tests.tools.gang import Gang

pytestmark = pytest.mark.timeout(400)  # the first test waits for all checkpoints to be made
PAGE = Path(__file__).parents[3] / "docs" / "formats.md"
CELLS = len(SOURCES) * len(KINDS)
Saved = list[tuple[str, str, Wanted]]


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of each source its place, and what is wanted of it, in a file and here."""
    made: Saved = []
    for source in SOURCES:
        folder = tmp_path_factory.mktemp(source.name)
        place, wanted = source.make(request, folder)
        assert opened(place).format == source.format
        file = tmp_path_factory.mktemp("wanted") / "wanted.pt"
        torch.save(wanted, file)
        made.append((str(place), str(file), wanted))
    return made


@pytest.mark.parametrize(
    "kind",  # tests/formats/test_dcp.py loads one format under two others
    mostly_long(KINDS, ["interleaved", "tp"]),
)
def test_it_loads_from_every_format(gang: Gang, saved: Saved, kind: str) -> None:
    """Parameters, buffers, moments and hyperparameters."""
    places = [(place, file) for place, file, _ in saved]
    ranks = gang.run(load_each, kind, places, world=KINDS[kind])
    for number, (place, _, wanted) in enumerate(saved):
        held = [each[number] for each in ranks]
        assert uncovered(wanted.tensors(), held) == [], f"{place} to {kind}"


def test_every_format_that_is_read_is_in_it() -> None:
    assert {source.format for source in SOURCES} == formats_read()


@pytest.mark.skipif(OLD_TORCH, reason="a source is left out")
def test_the_page_says_how_many_cells_there_are() -> None:
    print(f"{len(SOURCES)} sources × {len(KINDS)} parallelisms: {CELLS} cells")
    said = re.search(r"\*\*(\d+) cells\*\*", PAGE.read_text())
    assert said is not None
    assert int(said[1]) == CELLS
