"""Universal checkpoints that were exported: DeepSpeed goes on from them, at any stage of ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.formats.comparing import assert_same
from tests.formats.conftest import Checkpoints, run
from tests.formats.programs.small_model import Model, optimizer_of

pytestmark = pytest.mark.timeout(400)
INTO = {
    "zero2-bfloat16": "zero3-bfloat16",
    "zero3-sub-groups": "zero1-bfloat16",
    "plain": "zero1-bfloat16-optimizer",
}
"""For each source, the case of train_deepspeed.py that it is loaded into."""


def plain() -> tuple[dict[str, Any], dict[str, Any]]:
    """A training without DeepSpeed; and what it has."""
    torch.manual_seed(3)
    model = Model()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(3):
        model(torch.randint(0, 13, (4,))).square().mean().backward()
        optimizer.step()
        scheduler.step()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    moments = {
        f"{name}.{key}": optimizer.state[each][key]
        for name, each in trained.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "note": "hello"}
    return state, {"parameters": trained, "moments": moments, "groups": groups}


@pytest.fixture(scope="module")
def universal(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A universal checkpoint of each source, and what DeepSpeed had when it had loaded it."""
    root = tmp_path_factory.mktemp("universal")
    state, _ = plain()
    sw.save(root / "source", state, step=3)
    for source in INTO:
        place = root / "source" if source == "plain" else checkpoints.place(source)
        sw.export(place, root / source, to="deepspeed-universal")
    run("load_universal.py", str(root), *(f"{a}={b}" for a, b in INTO.items()), ranks=2)
    return root


@pytest.mark.parametrize("source", INTO)
def test_deepspeed_has_what_was_saved(
    universal: Path, checkpoints: Checkpoints, source: str
) -> None:
    expected = plain()[1] if source == "plain" else checkpoints.expected(source)
    loaded = torch.load(universal / f"{source}.loaded.pt", weights_only=True)
    for kind in ("parameters", "moments"):
        assert_same(loaded[kind], expected[kind])
    assert loaded["client"]["note"] == "hello"
    assert (loaded["steps"], loaded["epoch"]) == (3, 3)
    assert set(loaded["state"]) == {3.0}
    wanted = [group["lr"] for group in expected["groups"]]
    if INTO[source].startswith("zero3"):  # where DeepSpeed gives all groups the first one's
        wanted = wanted[:1] * len(wanted)
    assert [group["lr"] for group in loaded["groups"]] == wanted


@pytest.mark.parametrize("source", ["zero2-bfloat16", "zero3-sub-groups"])
def test_it_is_read_in_place_again(universal: Path, checkpoints: Checkpoints, source: str) -> None:
    before, after = sw.open(checkpoints.place(source)), sw.open(universal / source)
    assert not after.left_out
    for name, tensor in before.tensors().items():
        assert_same(after.tensors()[name][...], tensor[...])
    assert after["optimizer.param_groups"] == before["optimizer.param_groups"]
    assert after["scheduler"] == before["scheduler"]
    lost = {name for name in before if name not in after}
    assert all(name.startswith("deepspeed.") for name in lost)


def test_what_has_no_atom_is_told_or_refused(tmp_path: Path) -> None:
    state, _ = plain()
    sw.save(tmp_path / "source", state)
    with pytest.raises(ValueError, match="0 optimizers"):
        sw.export(tmp_path / "source", tmp_path / "a", to="deepspeed-universal", skip=["opti*"])
    skipped = ["model.first.weight"]
    with pytest.raises(ValueError, match=r"first.weight: the optimizer has this parameter"):
        sw.export(tmp_path / "source", tmp_path / "b", to="deepspeed-universal", skip=skipped)
    state["optimizer"].state[state["model"].scale]["rows"] = torch.ones(2)
    sw.save(tmp_path / "other", state)
    report = sw.export(tmp_path / "other", tmp_path / "c", to="deepspeed-universal")
    assert report.left_out == ("scale.rows: its shape differs from that of its parameter",)
    assert (tmp_path / "c" / "latest_universal").read_text() == "universal"
