"""What DeepSpeed's AutoTP saved, of a model with grouped queries: put together again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.formats.conftest import GOLDEN_OR_LIVE, require_deepspeed, run
from tests.formats.foreign_goldens import unpacked

pytestmark = pytest.mark.timeout(400)
STAGES = (1, 3)


@pytest.fixture(scope="module", params=GOLDEN_OR_LIVE)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("autotp")
    if request.param == "golden":
        return unpacked("deepspeed_autotp", directory) / "deepspeed-autotp"
    require_deepspeed()
    run("autotp_deepspeed.py", str(directory), *map(str, STAGES), ranks=2)
    return directory


@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_moments_are_those_of_one_process(saved: Path, stage: int) -> None:
    """Weights to the bit; gradients of ranks are summed in another order."""
    wanted = torch.load(saved / "expected.pt")
    tensors = sw.open(saved / f"zero{stage}").tensors()
    for name, weight in wanted["weights"].items():
        assert torch.equal(tensors[f"model.{name}"][...], weight), name
    for name, moment in wanted["moments"].items():
        found = tensors[f"optimizer.{name}.exp_avg"][...]
        torch.testing.assert_close(found, moment, rtol=1e-3, atol=1e-7)
