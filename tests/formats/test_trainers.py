"""What accelerate, transformers' Trainer and Lightning put beside a model, as they lay it out.

The layouts are those of accelerate 1.15 and Lightning 2.6.6, of which what they wrote was opened
when the tests were written, and of transformers 5.23 and torchtitan 0.3, by their source.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwise as sw
from tests.formats.deepspeed.test_missing_files import write as write_deepspeed

Trained = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def trained(steps: int = 3) -> Trained:
    """All parameters have shapes of their own, but for two."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.LayerNorm(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def assert_loads(place: Path, expected: Trained) -> None:
    """Into a module, its optimizer and its scheduler."""
    model, optimizer, scheduler = trained(0)
    sw.load(place, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    wanted_model, wanted_optimizer, wanted_scheduler = expected
    for one, other in zip(model.parameters(), wanted_model.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in wanted_optimizer.state[other].items():
            assert torch.equal(optimizer.state[one][key], value)
    assert optimizer.param_groups[0]["lr"] == wanted_optimizer.param_groups[0]["lr"]
    assert scheduler.state_dict() == wanted_scheduler.state_dict()


def lightning_state(module: nn.Module, rest: Trained) -> dict[str, Any]:
    return {
        "epoch": 1,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"kth_value": torch.tensor(1.5)}},
        "optimizer_states": [rest[1].state_dict()],
        "lr_schedulers": [rest[2].state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 5},
    }


@pytest.mark.parametrize("name", ["last.ckpt", "epoch=0-step=10.ckpt", "run 1, Länge.ckpt"])
def test_a_file_of_lightning(tmp_path: Path, name: str) -> None:
    """Its default name has equals signs."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        pytest.skip(f"files cannot have this name here: {error}")
    saved = trained()
    torch.save(lightning_state(saved[0], saved), tmp_path / name)
    assert_loads(tmp_path / name, saved)
    found = sw.open(tmp_path / name)
    found.verify()
    assert (found.step, found["epoch"]) == (3, 1)
    assert found["hyper_parameters"] == {"width": 5}
    assert found["callbacks"]["ModelCheckpoint{'monitor': None}"]["kth_value"] == 1.5  # type: ignore[index]


def test_a_module_within_that_of_lightning(tmp_path: Path) -> None:
    saved = trained()
    whole = nn.Module()
    whole.network = saved[0]
    state = lightning_state(whole, saved)
    del state["optimizer_states"]
    torch.save(state, tmp_path / "last.ckpt")
    model = trained(0)[0]
    with pytest.raises(sw.MismatchError, match=r"rename=\{'model': 'model.network'\}"):
        sw.load(tmp_path / "last.ckpt", {"model": model})
    sw.load(tmp_path / "last.ckpt", {"model": model}, rename={"model": "model.network"})
    assert torch.equal(model[0].weight, saved[0][0].weight)  # type: ignore[index]


@pytest.mark.parametrize("count", [1, 2])
def test_a_directory_of_lightning(tmp_path: Path, count: int) -> None:
    """Of several optimizers the first has no number."""
    model, optimizer, scheduler = trained()
    named = torch.optim.AdamW(model.named_parameters())
    named.load_state_dict(optimizer.state_dict())
    place = tmp_path / "step.ckpt"
    optimizers = {f"optimizer_{i}": named.state_dict() for i in range(count)}
    dcp.save({"state_dict": model.state_dict(), **optimizers}, checkpoint_id=place, no_dist=True)
    rest = lightning_state(model, (model, optimizer, scheduler))
    del rest["state_dict"], rest["optimizer_states"]
    torch.save(rest, place / "meta.pt")
    assert_loads(place, (model, optimizer, scheduler))
    assert ("optimizer_1.param_groups" in sw.open(place)) == (count == 2)
    with sw.Checkpointer(tmp_path / "run", memory=None, start_from=place) as checkpointer:
        assert checkpointer.restore({"model": trained(0)[0]}) == 3
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.step == 3


def test_a_directory_of_fabric_has_the_names_of_its_user(tmp_path: Path) -> None:
    model = trained()[0]
    dcp.save({"net": model.state_dict()}, checkpoint_id=tmp_path / "fabric", no_dist=True)
    torch.save({"iteration": 7}, tmp_path / "fabric" / "meta.pt")
    state = {"net": trained(0)[0], "iteration": 0}
    sw.load(tmp_path / "fabric", state)
    assert state["iteration"] == 7


def test_a_directory_of_accelerate(tmp_path: Path) -> None:
    """With DCP for what FSDP has sharded."""
    model, optimizer, scheduler = trained()
    named = torch.optim.AdamW(model.named_parameters())
    named.load_state_dict(optimizer.state_dict())
    for folder, saved in (
        ("pytorch_model_fsdp_0", {"model": model.state_dict()}),
        ("optimizer_0", {"optimizer": named.state_dict()}),
    ):
        dcp.save(saved, checkpoint_id=tmp_path / folder, no_dist=True)
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.bin")
    torch.save({"n": 3}, tmp_path / "custom_checkpoint_0.pkl")
    for rank in range(2):
        torch.save({"step": 3}, tmp_path / f"random_states_{rank}.pkl")
    assert_loads(tmp_path, (model, optimizer, scheduler))
    found = sw.open(tmp_path)
    assert found["custom_checkpoint_0"] == {"n": 3}
    assert found.world_size == 2
    assert [line.partition(":")[0] for line in found.left_out] == [
        "random_states_0.pkl",
        "random_states_1.pkl",
    ]
    assert found.verify().bytes_checked > 0


@pytest.mark.parametrize("safe", [True, False])
def test_a_directory_of_the_trainer(tmp_path: Path, safe: bool) -> None:
    model, optimizer, scheduler = trained()
    weights = model.state_dict()
    if safe:
        safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    else:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    torch.save({"python": (3, (1, 2), None)}, tmp_path / "rng_state.pth")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 30, "epoch": 0.5}))
    found = sw.open(tmp_path)
    assert found.step == 30
    assert found["trainer_state"] == {"global_step": 30, "epoch": 0.5}
    assert {"model.0.weight", "optimizer.param_groups", "scheduler"} <= set(found)
    assert_loads(tmp_path, (model, optimizer, scheduler))


def test_a_directory_of_the_trainer_under_deepspeed(tmp_path: Path) -> None:
    """The weights that it gathers for others do not count; what else it leaves is told."""
    write_deepspeed(tmp_path)
    safetensors.torch.save_file({"w": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 10}))
    found = sw.open(tmp_path)
    assert {"model.w", "optimizer.w.exp_avg"} <= set(found)
    assert not found.tensors()["model.w"][...].any()
    assert [line.split(":")[0] for line in found.left_out] == [
        "the file model.safetensors",
        "the file trainer_state.json",
    ]
    weights = sw.open(tmp_path, format="hf")
    assert list(weights) == ["model.w"]
    assert weights.tensors()["model.w"][...].all()


def test_a_step_of_torchtitan(tmp_path: Path) -> None:
    """The model lies at the top, beside an optimizer that is flat, and bytes of the loader."""
    model, optimizer, _ = trained()
    state: dict[str, Any] = {}
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    for name, parameter in model.named_parameters():
        state |= {f"state.{name}.{k}": v for k, v in optimizer.state[parameter].items()}
        state |= {f"param_groups.{name}.{k}": v for k, v in settings.items()}
    saved = {
        **model.state_dict(),
        "optimizer": state,
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": b"bytes", "world_size": 1},
        "train_state": {"step": 3, "ntokens_seen": 96},
    }
    dcp.save(saved, checkpoint_id=tmp_path / "step-3", no_dist=True)
    other, its_optimizer, _ = trained(0)
    sw.load(tmp_path / "step-3", {"model": other, "optimizer": its_optimizer})
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)
        moment = optimizer.state[one]["exp_avg"]
        assert torch.equal(its_optimizer.state[another]["exp_avg"], moment)
    assert its_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    found = sw.open(tmp_path / "step-3")
    assert found["lr_scheduler"] == {"last_epoch": 3}
    assert found["train_state"] == {"step": 3, "ntokens_seen": 96}
    with pytest.raises(sw.CheckpointNotFoundError, match=r"Open a checkpoint below: step-3$"):
        sw.open(tmp_path)


def test_weights_that_ranks_wrote_are_refused(tmp_path: Path) -> None:
    torch.save(trained()[1].state_dict(), tmp_path / "optimizer.bin")
    torch.save({"_flat_param": torch.ones(3)}, tmp_path / "pytorch_model_fsdp_rank0.bin")
    with pytest.raises(sw.FormatError, match="SHARDED_STATE_DICT"):
        sw.open(tmp_path)


def assert_lacks(
    caplog: pytest.LogCaptureFixture, place: Path, file: str, names: dict[str, Any], missing: str
) -> sw.Checkpoint:
    """Opening says that a file is missing, and so does a load that wants what is in it."""
    with caplog.at_level("WARNING", logger="shardwise"):
        found = sw.open(place)
    assert any(file in message for message in caplog.messages), caplog.messages
    assert any(line.startswith(f"{missing}: {file}") for line in found.left_out), found.left_out
    for strict in (True, False):
        with pytest.raises(sw.MismatchError, match=f"{file}.* is missing") as caught:
            sw.load(place, names, strict=strict)
        assert caught.value.problems
    return found


def trainer_directory(place: Path, saved: Trained) -> None:
    model, optimizer, scheduler = saved
    safetensors.torch.save_file(model.state_dict(), place / "model.safetensors")
    torch.save(optimizer.state_dict(), place / "optimizer.pt")
    torch.save(scheduler.state_dict(), place / "scheduler.pt")
    torch.save({"python": (3, (1, 2), None)}, place / "rng_state.pth")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": 30, "epoch": 0.5}))


@pytest.mark.parametrize("others", [[], ["scheduler.pt", "rng_state.pth"], ["trainer_state.json"]])
def test_a_trainer_without_its_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, others: list[str]
) -> None:
    saved = trained()
    trainer_directory(tmp_path, saved)
    for name in ("optimizer.pt", *others):
        (tmp_path / name).unlink()
    model, optimizer, _ = trained(0)
    names = {"model": model, "optimizer": optimizer}
    found = assert_lacks(caplog, tmp_path, "optimizer.pt", names, "optimizer")
    assert found.step == (None if "trainer_state.json" in others else 30)
    sw.load(tmp_path, {"model": model})
    assert torch.equal(model[0].weight, saved[0][0].weight)  # type: ignore[index]


def test_a_trainer_without_its_scheduler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_directory(tmp_path, trained())
    (tmp_path / "scheduler.pt").unlink()
    found = sw.open(tmp_path)
    assert "scheduler: scheduler.pt is missing" in found.left_out
    with pytest.raises(sw.MismatchError, match=r"scheduler\.pt is missing, which would contain"):
        sw.load(tmp_path, {"scheduler": trained(0)[2]})


def test_accelerate_without_its_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _, scheduler = trained()
    place = tmp_path / "pytorch_model_fsdp_0"
    dcp.save({"model": model.state_dict()}, checkpoint_id=place, no_dist=True)
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.bin")
    other, its_optimizer, _ = trained(0)
    names = {"model": other, "optimizer": its_optimizer}
    assert_lacks(caplog, tmp_path, "optimizer_0/.metadata", names, "optimizer")


def test_a_directory_of_lightning_without_its_other_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, _ = trained()
    named = torch.optim.AdamW(model.named_parameters())
    named.load_state_dict(optimizer.state_dict())
    state = {"state_dict": model.state_dict(), "optimizer_0": named.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "step.ckpt", no_dist=True)
    other, its_optimizer, _ = trained(0)
    names = {"model": other, "optimizer": its_optimizer}
    assert_lacks(caplog, tmp_path / "step.ckpt", "meta.pt", names, "optimizer")


def test_what_is_missing_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    trainer_directory(tmp_path / "saved", trained())
    (tmp_path / "saved" / "optimizer.pt").unlink()
    found = sw.open(tmp_path / "saved")
    assert "optimizer: optimizer.pt is missing" in found.left_out
