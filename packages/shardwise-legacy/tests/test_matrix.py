"""Both formats, into every parallelism of torch: equal to what their frameworks have.

`tests/formats/matrix` of shardwise does the same for the formats that shardwise reads itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.breadth import mostly_long
from tests.formats.conftest import GOLDEN_OR_LIVE
from tests.formats.foreign_goldens import opened, unpacked
from tests.formats.matrix.sources import stored_settings
from tests.formats.matrix.targets import KINDS, load_each, uncovered
from tests.formats.matrix.wanted import Wanted, of_names
from tests.tools.gang import Gang

pytestmark = pytest.mark.timeout(400)
GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).parents[3] / "docs" / "formats.md"
CASES = ("float32", "distributed-bfloat16", "interleaved", "experts")
MODULES = ("fsdp", "plain")
"""The modules of the snapshot."""
Made = tuple[Path, Wanted]


def of_megatron(megatron: Any, case: str) -> Made:
    tensors = {name: each for name, each in megatron.wanted(case).items() if name[:7] != "module."}
    if case in ("float32", "interleaved"):  # the last stage's output layer is the embedding
        tensors = {name: each for name, each in tensors.items() if ".output_layer." not in name}
    place = megatron.place(case, 4)
    assert opened(place).format == "legacy Megatron-LM"
    return place, of_names(tensors, stored_settings(place), ())


def of_torchsnapshot(folder: Path, module: str) -> Made:
    """One of two modules. The files lack the names of the optimizer's parameters."""
    assert opened(folder).format == "torchsnapshot"
    tensors = torch.load(folder / "expected.pt")
    mine = {name: each for name, each in tensors.items() if name.startswith(f"{module}.")}
    as_model = {f"model.{name.removeprefix(module)[1:]}": each for name, each in mine.items()}
    return folder, replace(of_names(as_model, {}, ()), rename={"model": module})


@pytest.fixture(scope="module")
def saved(megatron: Any, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, Wanted]]:
    """Of each checkpoint its place, and what is wanted of it, in a file and here."""
    snapshot = unpacked("torchsnapshot", tmp_path_factory.mktemp("snapshot"), golden=GOLDEN)
    made = [of_megatron(megatron, case) for case in CASES]
    made += [of_torchsnapshot(snapshot, module) for module in MODULES]
    folder = tmp_path_factory.mktemp("wanted")
    for number, (_, wanted) in enumerate(made):
        torch.save(wanted, folder / f"{number}.pt")
    return [
        (str(place), str(folder / f"{number}.pt"), wanted)
        for number, (place, wanted) in enumerate(made)
    ]


@pytest.mark.parametrize("megatron", [GOLDEN_OR_LIVE[0]], indirect=True)
@pytest.mark.parametrize("kind", mostly_long(KINDS, ["interleaved", "hsdp_tp"]))
def test_they_load_into_every_parallelism(
    gang: Gang, saved: list[tuple[str, str, Wanted]], kind: str
) -> None:
    """Parameters, moments and hyperparameters."""
    places = [(place, file) for place, file, _ in saved]
    ranks = gang.run(load_each, kind, places, world=KINDS[kind])
    for number, (place, _, wanted) in enumerate(saved):
        held = [each[number] for each in ranks]
        assert uncovered(wanted.tensors(), held) == [], f"{place} to {kind}"


def test_the_page_says_how_many_cells_there_are() -> None:
    said = re.search(r"\*\*(\d+) cells\*\* \(`packages/", PAGE.read_text())
    assert said is not None
    assert int(said[1]) == (len(CASES) + len(MODULES)) * len(KINDS)
