"""`restore` never returns None after it has loaded an optimizer: it knows the step, or refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardwise as sw
from tests.formats.foreign_goldens import unpacked
from tests.tools.gang import Gang

State = dict[str, Any]


def trained(steps: int = 2) -> State:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def bytes_of(state: State) -> list[bytes]:
    tensors = [*state["model"].parameters()]
    tensors += [v for each in state["optimizer"].state.values() for v in each.values()]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def save_with_torch(place: Path, state: State) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save({key: value.state_dict() for key, value in state.items()}, place)


def save_with_dcp(place: Path, state: State) -> None:
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=place, no_dist=True)


def save_without_step(place: Path, state: State) -> None:
    sw.save(place, state)


SAVES = save_with_torch, save_with_dcp, save_without_step


@pytest.mark.parametrize("save", SAVES)
def test_the_step_comes_from_the_path(tmp_path: Path, save: Callable[[Path, State], None]) -> None:
    state, fresh = trained(), trained(0)
    place = tmp_path / "global_step_200" / "actor" / "dist_ckpt"
    save(place, state)
    assert sw.open(place).step == 200
    with sw.Checkpointer(tmp_path / "run", memory=None, start_from=place) as checkpointer:
        assert checkpointer.restore(fresh) == 200
    assert bytes_of(fresh) == bytes_of(state)


@pytest.mark.parametrize("save", SAVES)
def test_an_unknown_step_is_refused_before_anything_is_written(
    tmp_path: Path, save: Callable[[Path, State], None]
) -> None:
    state, fresh, place = trained(), trained(0), tmp_path / "checkpoint_3"
    save(place, state)
    assert sw.open(place).step is None
    before = bytes_of(fresh)
    with (
        sw.Checkpointer(tmp_path / "run", memory=None, start_from=place) as checkpointer,
        pytest.raises(sw.StateError, match=r"state of optimizer, .*start_from=.*step="),
    ):
        checkpointer.restore(fresh)
    assert bytes_of(fresh) == before

    def start(target: MutableMapping[str, Any]) -> sw.LoadReport:
        return sw.load(place, target, step=7)

    with sw.Checkpointer(tmp_path / "run", memory=None, start_from=start) as checkpointer:
        assert checkpointer.restore(fresh) == 7
    assert bytes_of(fresh) == bytes_of(state)
    with (
        sw.Checkpointer(
            tmp_path / "run", memory=None, start_from=lambda target: sw.load(place, target)
        ) as checkpointer,
        pytest.raises(sw.StateError, match=r"start_from=.*step="),
    ):
        checkpointer.restore(fresh)


def test_plain_tensors_of_an_optimizer_count(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"w.momentum": torch.ones(2)}}
    torch.save(state, tmp_path / "last.pt")
    fresh = {"model": {"w": torch.zeros(2)}, "optimizer": {"w.momentum": torch.zeros(2)}}
    with (
        sw.Checkpointer(tmp_path / "a", memory=None, start_from=tmp_path / "last.pt") as run,
        pytest.raises(sw.StateError, match="state of optimizer"),
    ):
        run.restore(fresh)
    assert fresh["optimizer"]["w.momentum"].tolist() == [0.0, 0.0]


def test_published_weights_start_a_training(tmp_path: Path) -> None:
    state = trained()
    save_file(state["model"].state_dict(), tmp_path / "model.safetensors")
    for fresh in ({"model": trained(0)["model"]}, trained(0)):
        only = ["model.*"] if len(fresh) > 1 else []
        with sw.Checkpointer(tmp_path / "run", memory=None, start_from=tmp_path) as checkpointer:
            assert checkpointer.restore(fresh, only=only) is None


def restore_unknown(place: Path, root: Path) -> int | None:
    """Only one rank has the optimizer, as on a pipeline stage that trains alone."""
    state = trained(0)
    if torch.distributed.get_rank():
        del state["optimizer"]
    with sw.Checkpointer(root, memory=None, start_from=place) as checkpointer:
        return checkpointer.restore(state, strict=False)


def test_all_ranks_refuse_and_all_ranks_know(gang: Gang, tmp_path: Path) -> None:
    save_with_torch(tmp_path / "last.pt", trained())
    shutil.copy(tmp_path / "last.pt", tmp_path / "step_12.pt")
    outcomes = gang.run_outcomes(restore_unknown, tmp_path / "last.pt", tmp_path / "a", world=2)
    assert all("start_from=" in str(each.exception) for each in outcomes)
    assert gang.run(restore_unknown, tmp_path / "step_12.pt", tmp_path / "b", world=2) == [12, 12]


def test_a_recorded_step_is_not_overridden(tmp_path: Path) -> None:
    place = tmp_path / "step-500"
    sw.save(place, trained(), step=3)
    assert sw.open(place).step == 3
    with pytest.raises(sw.StateError, match="records its step, 3: leave out step="):
        sw.open(place, step=500)
    with pytest.raises(sw.StateError, match="leave out step="):
        sw.open(place, step=sw.Best("loss"))


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("step-500/a/weights.pt", None),  # any directory may lie in that of a step
        ("step-500/weights.pt", 500),
        ("step_500/lit_model.pth", 500),
        ("step_500.pt", 500),
        ("step500.pt", 500),
        ("iter_0000100/mp_rank_00/model.pt", 100),
        ("iter_500.pth", 500),
        ("checkpoint-500/optimizer.pt", 500),
        ("checkpoint-3.pth", None),  # an epoch, of many training scripts
        ("checkpoint_3/model.pt", None),  # the fourth save of accelerate
        ("epoch=1-step=500.ckpt", 500),
        ("epoch=1-step=500-v1.ckpt", 500),
        ("m-epoch=02-val_loss=0.32-step=500.ckpt", 500),
        ("epoch=3.ckpt", None),
        ("epoch_3_step_500.pt", 500),
        ("gpt--val_loss=2.1-step=10-consumed_samples=80.0-last/weights/model.pt", 10),
        ("global_step100/model.pt", 100),
        ("step1_supervised_finetuning/model.pt", None),
        ("step-3-sft/model.pt", None),
        ("step1/model.pt", None),
        ("step_3_sft.pt", None),
        ("max_steps-1000.pt", None),
        ("warmup_step_100.pt", None),
        ("max-step=5.ckpt", None),
        ("step_1_000.pt", None),
        ("step_500k.pt", None),
        ("step-1e5.pt", None),
        ("step-1.5.pt", None),
        ("run-2026/model.pt", None),
        ("7.pt", None),
    ],
)
def test_only_what_a_framework_writes_is_a_step(tmp_path: Path, path: str, step: int) -> None:
    place = tmp_path / path
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.ones(1)}, place)
    assert sw.open(place).step == step


def test_links_lead_to_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_dcp(tmp_path / "step-500", trained())
    (tmp_path / "newest").symlink_to("step-500")
    assert sw.open(tmp_path / "newest").step == 500
    (tmp_path / "step-400").symlink_to("step-500")
    assert sw.open(tmp_path / "step-400").step is None  # the two names contradict each other
    monkeypatch.chdir(tmp_path / "step-500")
    assert sw.open(".").step == 500


def test_an_export_into_a_root_has_the_step_of_its_directory(tmp_path: Path) -> None:
    state, fresh = trained(), trained(0)
    save_with_torch(tmp_path / "last.pt", state)
    place = tmp_path / "new" / "step-00000100"
    sw.export(tmp_path / "last.pt", place, to="native")
    assert sw.open(place).step == sw.open(tmp_path / "new").step == 100
    assert sw.load(tmp_path / "new", trained(0)).step == 100
    with sw.Checkpointer(tmp_path / "new", memory=None) as checkpointer:
        assert checkpointer.restore(fresh) == 100
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.load.step == 100
    assert bytes_of(fresh) == bytes_of(state)


@pytest.fixture
def root_of_megatron(tmp_path: Path) -> Path:
    root = tmp_path / "megatron"
    place = unpacked("megatron_plain", tmp_path / "golden")
    common = torch.load(place / "common.pt", weights_only=False)
    del common["iteration"]
    torch.save(common, place / "common.pt")
    for name in ("iter_0000050", "iter_0000100", "release"):
        shutil.copytree(place, root / name)
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return root


def test_the_root_of_megatron_opens(root_of_megatron: Path) -> None:
    root = root_of_megatron
    assert (sw.open(root).path, sw.open(root).step) == (str(root / "iter_0000100"), 100)
    assert sw.open(root, step=50).path == str(root / "iter_0000050")
    with pytest.raises(sw.FormatError, match=r"step=70: iter_0000070 is missing.*iter_0000100"):
        sw.open(root, step=70)
    with pytest.raises(sw.CheckpointExistsError, match="Megatron-Core"):
        sw.save(root, trained())
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text("release\n")
    assert (sw.open(root).path, sw.open(root).step) == (str(root / "release"), None)
    tracker.write_text("300")
    with pytest.raises(sw.FormatError, match=r"says '300', and iter_0000300 is missing.*iter_0"):
        sw.open(root)
    tracker.write_text("x" * 200)
    with pytest.raises(sw.ShardwiseError):
        sw.open(root)


def test_the_roots_of_verl_and_nemo_open(tmp_path: Path, root_of_megatron: Path) -> None:
    step = tmp_path / "nemo" / "gpt--val_loss=0.00-step=30-consumed_samples=60.0-last"
    shutil.copytree(root_of_megatron / "release", step / "weights")
    (step / "context").mkdir()
    (step / "context" / "model.yaml").write_text("a: 1")
    assert sw.open(step).step == 30
    save_with_dcp(tmp_path / "verl" / "global_step_8", trained())
    (tmp_path / "verl" / "latest_checkpointed_iteration.txt").write_text("8")
    assert sw.open(tmp_path / "verl").step == 8
