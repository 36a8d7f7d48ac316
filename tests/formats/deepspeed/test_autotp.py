"""What DeepSpeed's AutoTP saved, of a model with grouped queries: put together again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.formats.conftest import GOLDEN_OR_LIVE, require_deepspeed, run
from tests.formats.foreign_goldens import unpacked

pytestmark = pytest.mark.timeout(400)
CASES = [("autotp", 1), ("autotp", 3), ("autotp-one-head", 1), ("autotp-one-head", 2)]
"""DeepSpeed itself fails with one head under ZeRO 3: a rank has nothing of some parameters."""


@pytest.fixture(scope="module", params=GOLDEN_OR_LIVE)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("autotp")
    if request.param == "golden":
        return unpacked("deepspeed_autotp", directory)
    require_deepspeed()
    for name, heads in (("autotp", 2), ("autotp-one-head", 1)):
        place = directory / f"deepspeed-{name}"
        stages = [str(stage) for case, stage in CASES if case == name]
        run("autotp_deepspeed.py", str(place), str(heads), *stages, ranks=2)
    return directory


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_weights_and_moments_are_those_of_one_process(saved: Path, name: str, stage: int) -> None:
    """Weights to the bit; gradients of ranks are summed in another order.

    With one head of keys and values, the second rank has no part of the attention.
    """
    place = saved / f"deepspeed-{name}"
    wanted = torch.load(place / "expected.pt")
    found = sw.open(place / f"zero{stage}")
    tensors = found.tensors()
    assert {len(group["members"]) for group in found["optimizer.param_groups"]} == {21}
    for name, weight in wanted["weights"].items():
        assert torch.equal(tensors[f"model.{name}"][...], weight), name
    for name, moment in wanted["moments"].items():
        found = tensors[f"optimizer.{name}.exp_avg"][...]
        torch.testing.assert_close(found, moment, rtol=1e-3, atol=1e-7)
