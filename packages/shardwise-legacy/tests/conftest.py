"""Fixtures of these tests. Those of shardwise's own tests, such as `gang`, come from there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.conftest import gang, pytest_collection_modifyitems  # noqa: F401
from tests.formats.conftest import GOLDEN_OR_LIVE, PROGRAMS, Checkpoints, run
from tests.formats.foreign_goldens import unpacked

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"


class MegatronCases(Checkpoints):
    """Checkpoints of Megatron-LM on four ranks, and what the ranks had when they saved them."""

    def wanted(self, case: str) -> dict[str, torch.Tensor]:
        """Return what the checkpoint is to have, by our names, of what the ranks had."""
        expected: dict[str, torch.Tensor] = self.expected(case, 4)
        found = {}
        for full, tensor in expected.items():
            name, key = full.split("|")
            if key == "weight":
                trained = expected.get(f"{name}|param", tensor).dtype == tensor.dtype
                found[f"{'model' if trained else 'module'}.{name}"] = tensor
            elif key == "param":
                found[f"model.{name}"] = tensor
            else:
                found[f"optimizer.{name}.{key}"] = tensor
        return found


@pytest.fixture(scope="session", params=GOLDEN_OR_LIVE)
def megatron(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> MegatronCases:
    """Legacy checkpoints of Megatron-LM on four ranks, with models that Megatron-Core trained.

    The expected values have the keys `<parameter>|<key>`: the weight, its master weight (`param`),
    and optimizer state. The cases `llama` and `experts` also have `<case>.logits.pt`: the logits,
    and those after the training continued.

    The golden checkpoints are in `golden/megatron_legacy.tar.xz`.
    """
    directory = tmp_path_factory.mktemp("megatron")
    if request.param == "golden":
        return MegatronCases(
            unpacked("megatron_legacy", directory, golden=GOLDEN) / "megatron-legacy"
        )
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: pip install '.[frameworks]'")
    (directory / "4").mkdir()
    run(str(PROGRAMS / "train_megatron.py"), str(directory / "4"), ranks=4)
    return MegatronCases(directory)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot that torchsnapshot took on two ranks, and `expected.pt`, what it restored."""
    return unpacked("torchsnapshot", tmp_path / "snapshot", golden=GOLDEN)
