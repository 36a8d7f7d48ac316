"""DeepSpeed's own Muon under ZeRO 1 and 2: ranks have the momentum of whole matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.formats.conftest import GOLDEN_OR_LIVE, require_deepspeed, run
from tests.formats.foreign_goldens import unpacked

CASES = [
    *((2, "zero1-muon"), (2, "zero2-muon-bfloat16"), (2, "zero2-muon-offload")),
    *((2, "zero2-muon-aligned"), (4, "zero1-muon"), (4, "zero2-muon-bfloat16")),
]
LEFT_OUT = [(2, "zero2-muon-elastic")]
MATRICES = ("embedding.weight", "first.weight", "second.weight")


@pytest.fixture(scope="module", params=GOLDEN_OR_LIVE)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of DeepSpeed 0.19.8, and what it restores from them."""
    place = tmp_path_factory.mktemp("deepspeed-muon")
    if request.param == "golden":
        return unpacked("deepspeed_muon", place) / "deepspeed-muon"
    require_deepspeed()
    for ranks in (2, 4):
        (place / str(ranks)).mkdir()
        names = [name for n, name in CASES + LEFT_OUT if n == ranks]
        run("train_deepspeed.py", str(place / str(ranks)), *names, ranks=ranks)
    return place


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_the_momentum_is_what_deepspeed_restores(saved: Path, ranks: int, case: str) -> None:
    place = saved / str(ranks) / case
    found = sw.open(place)
    assert not found.left_out
    expected = torch.load(place.with_name(f"{case}.expected.pt"), weights_only=True)["moments"]
    names = [f"{name}.momentum_buffer" for name in MATRICES]
    assert sorted(expected) == ([] if "offload" in case else names)
    out = {name: torch.zeros(found[f"optimizer.{name}"].shape) for name in names}
    sw.load(place, {"optimizer": dict(out)}, cast=True, strict=False)
    for name in names:
        read = found.tensors()[f"optimizer.{name}"][...]
        assert torch.equal(read.float(), out[name])
        assert out[name].count_nonzero() > out[name].numel() // 2
        if name in expected:
            assert torch.equal(out[name], expected[name].float())


@pytest.mark.parametrize(("ranks", "case"), LEFT_OUT)
def test_what_deepspeed_cut_off_is_told(saved: Path, ranks: int, case: str) -> None:
    place = saved / str(ranks) / case
    found = sw.open(place)
    assert f"optimizer.{MATRICES[0]}.momentum_buffer" not in found
    assert f"model.{MATRICES[0]}" in found
    assert any("elastic_checkpoint" in line and "Muon" in line for line in found.left_out)
    wanted = {"optimizer": {f"{MATRICES[0]}.momentum_buffer": torch.zeros(13, 5)}}
    with pytest.raises(sw.MismatchError, match=r"momentum_buffer"):
        sw.load(place, wanted)
