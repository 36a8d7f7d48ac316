"""Checkpoints of DeepSpeed's engine, against what the engine had when it wrote them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.formats.conftest import ON_FOUR, ON_TWO, Checkpoints
from tests.formats.programs.small_model import Model, optimizer_of
from tests.formats.reference import read_tensors

CASES = [*((case, 2) for case in ON_TWO), *((case, 4) for case in ON_FOUR)]
LOWER = ("bfloat16", "float16", "aligned", "offload", "sub-groups")
pytestmark = pytest.mark.timeout(400)  # the first test waits for all checkpoints to be made


def values_of(place: Path) -> dict[str, Any]:
    found = sw.open(place, format="deepspeed")
    return {name: found[name] for name in found if name not in found.tensors()}


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the byte."""
    return (
        tensor.dtype == other.dtype and tensor.shape == other.shape and torch.equal(tensor, other)
    )


def read(place: Path) -> Any:
    return sw.open(place, format="deepspeed").layout


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_all_is_as_the_engine_had_it(checkpoints: Checkpoints, case: str, ranks: int) -> None:
    place, expected = checkpoints.place(case, ranks), checkpoints.expected(case, ranks)
    foreign = read(place)
    tensors = read_tensors(place, foreign)
    wanted = {f"model.{name}": tensor for name, tensor in expected["parameters"].items()}
    wanted |= {f"optimizer.{name}": tensor for name, tensor in expected["moments"].items()}
    for kind in ("frozen", "buffers"):
        wanted |= {f"model.{name}": tensor for name, tensor in expected[kind].items()}
    assert [name for name, tensor in wanted.items() if not same(tensors[name], tensor)] == []
    beside = {name for name in tensors if not name.startswith("module.")} - set(wanted)
    steps = {f"optimizer.{name}.step" for name in expected["parameters"]}
    assert beside == {"model.head.weight"} | (set() if case == "zero1-sgd" else steps)
    assert foreign.step == 3


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_steps_are_tensors_as_torch_has_them(
    checkpoints: Checkpoints, case: str, ranks: int
) -> None:
    place = checkpoints.place(case, ranks)
    tensors = read_tensors(place, read(place))
    steps = [tensor for name, tensor in tensors.items() if name.endswith(".step")]
    # DeepSpeed steps once to make the state, where it keeps masters without ZeRO.
    count = 4.0 if case == "zero0-bfloat16" else 3.0
    assert all(same(step, torch.tensor(count)) for step in steps)
    assert bool(steps) == (case != "zero1-sgd")


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_each_group_keeps_its_hyperparameters(
    checkpoints: Checkpoints, case: str, ranks: int
) -> None:
    foreign = read(checkpoints.place(case, ranks))
    values = values_of(checkpoints.place(case, ranks))
    if case == "zero2-elastic":
        assert "optimizer.param_groups" not in values
        assert any("optimizer.param_groups" in line for line in foreign.left_out)
        return
    groups = values["optimizer.param_groups"]
    assert [group["value"] for group in groups] == checkpoints.expected(case, ranks)["groups"]
    assert {len(group["members"]) for group in groups} == {3}
    assert set(groups[0]["members"]) == {"embedding.weight", "first.weight", "second.weight"}


@pytest.mark.parametrize("case", ON_TWO)
def test_plain_values_are_there(checkpoints: Checkpoints, case: str) -> None:
    values = values_of(checkpoints.place(case))
    assert (values["client_state.epoch"], values["client_state.note"]) == (7, "hello")
    assert values["scheduler"]["last_epoch"] == 3
    assert (values["deepspeed.global_steps"], values["deepspeed.skipped_steps"]) == (3, 0)
    assert values["deepspeed.ds_config"]["zero_optimization"]["stage"] == int(case[4])
    if case == "zero2-float16":
        assert values["deepspeed.loss_scaler"]["cur_scale"] == 16


@pytest.mark.parametrize("case", ON_TWO)
def test_weights_of_lower_precision_are_the_module(checkpoints: Checkpoints, case: str) -> None:
    place, expected = checkpoints.place(case), checkpoints.expected(case)
    tensors = read_tensors(place, read(place))
    module = {name.removeprefix("module."): t for name, t in tensors.items() if "module." in name}
    if (not case.endswith(LOWER) and "bfloat16" not in case) or case.startswith("zero3"):
        assert module == {}
        return
    low = torch.float16 if case == "zero2-float16" else torch.bfloat16
    for name, tensor in expected["parameters"].items():
        assert same(module[name], tensor.to(low))
    rest = expected["frozen"] | expected["buffers"]
    assert all(same(module[name], tensor) for name, tensor in rest.items())
    assert set(module) == {*expected["parameters"], *rest, "head.weight"}


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_replicas_hold_the_same_bytes(checkpoints: Checkpoints, case: str, ranks: int) -> None:
    place = checkpoints.place(case, ranks)
    foreign = read(place)
    tensors = read_tensors(place, foreign)
    again = foreign.replicas
    for row in range(len(again)):
        entry = foreign.tensors[again.tensor[row]]
        ndim = len(entry.shape)
        data = (place / foreign.files[again.file[row]].name).read_bytes()
        size = tensors[entry.name].element_size()
        strides = [int(n) for n in foreign.replicas.stride[row][:ndim]]
        flat = torch.frombuffer(bytearray(data[int(again.start[row]) :]), dtype=torch.uint8)
        whole = flat[: len(flat) // size * size].view(tensors[entry.name].dtype)
        shape = [int(n) for n in again.shape[row][:ndim]]
        part = torch.as_strided(whole, shape, strides)
        box = tuple(
            slice(int(o), int(o) + n) for o, n in zip(again.offset[row], shape, strict=False)
        )
        assert same(part, tensors[entry.name][box])
    if case in ("zero1-float32", "zero2-round-robin"):
        assert len(again) >= 6  # the module has the very weights that are divided


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        *(("zero0-float32", 2), ("zero1-float32", 2), ("zero2-round-robin", 2)),
        *(("zero3-bfloat16", 2), ("zero2-bfloat16", 4), ("zero3-sub-groups", 4)),
    ],
)
def test_a_plain_model_goes_on_from_it(checkpoints: Checkpoints, case: str, ranks: int) -> None:
    expected = checkpoints.expected(case, ranks)
    model = Model()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    client = {"epoch": 0, "note": ""}
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "client_state": client,
    }
    # What is frozen is in bf16 there.
    sw.load(checkpoints.place(case, ranks), state, cast="bfloat16" in case or "sub" in case)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert same(parameter.detach(), expected["parameters"][name])
            for key in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[parameter][key]
                assert same(moment, expected["moments"][f"{name}.{key}"])
            assert float(optimizer.state[parameter]["step"]) == 3
        else:
            assert same(parameter.detach(), expected["frozen"][name].float())
    assert torch.equal(model.norm.running_mean, expected["buffers"]["norm.running_mean"].float())
    assert model.head.weight is model.embedding.weight
    kept = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    assert kept == expected["groups"]
    assert (client, scheduler.last_epoch) == ({"epoch": 7, "note": "hello"}, 3)


@pytest.mark.parametrize(
    "case", ["zero0-float32", "zero0-bfloat16", "zero1-float32", "zero2-float16", "zero3-float32"]
)
def test_an_optimizer_over_frozen_parameters_goes_on(checkpoints: Checkpoints, case: str) -> None:
    """DeepSpeed leaves frozen parameters out of the groups. The other members tell the group."""
    expected = checkpoints.expected(case)
    model = Model()
    parameters = [*model.parameters()]
    groups = [
        {"params": [p for p in reversed(parameters) if p.dim() > 1], "lr": 7.0},
        {"params": [p for p in reversed(parameters) if p.dim() <= 1], "lr": 7.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    sw.load(checkpoints.place(case), {"model": model, "optimizer": optimizer}, cast=True)
    kept = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert kept == [{**group} for group in expected["groups"]]
    for name, parameter in model.named_parameters():
        assert bool(optimizer.state.get(parameter)) == parameter.requires_grad
        if parameter.requires_grad:
            moment = optimizer.state[parameter]["exp_avg"]
            assert same(moment, expected["moments"][f"{name}.exp_avg"])


def test_a_group_of_frozen_parameters_only_is_refused(checkpoints: Checkpoints) -> None:
    model = Model()
    groups = [{"params": [*part.parameters()]} for part in (model.frozen, model.first)]
    state = {"model": model, "optimizer": torch.optim.AdamW(groups)}
    with pytest.raises(sw.MismatchError, match=r"no hyperparameters for frozen\.bias, frozen"):
        sw.load(checkpoints.place("zero1-float32"), state, strict=False)


def test_a_module_of_lower_precision_has_its_own_weights(checkpoints: Checkpoints) -> None:
    model = Model().bfloat16()
    sw.load(checkpoints.place("zero1-bfloat16"), {"module": model}, cast=True)
    expected = checkpoints.expected("zero1-bfloat16")["parameters"]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == expected.keys()
    assert all(same(p.detach(), expected[name].bfloat16()) for name, p in trained.items())


def test_a_tied_weight_is_told_to_be_tied(checkpoints: Checkpoints) -> None:
    for case in ("zero0-float32", "zero1-bfloat16", "zero3-bfloat16"):
        entries = {entry.name: entry for entry in read(checkpoints.place(case)).tensors}
        assert entries["model.head.weight"].same_as == "model.embedding.weight"
        assert "optimizer.head.weight.exp_avg" not in entries


def test_the_place_may_be_the_tag_itself(checkpoints: Checkpoints) -> None:
    place = checkpoints.place("zero1-float32")
    inside = place / "global_step3"
    assert read_tensors(inside, read(inside)).keys() == read_tensors(place, read(place)).keys()


def test_other_places_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(sw.CheckpointNotFoundError):
        read(tmp_path)
    (tmp_path / "latest").write_text("nowhere")
    with pytest.raises(sw.CheckpointNotFoundError):
        read(tmp_path)


def test_files_of_another_run_are_told(checkpoints: Checkpoints, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    shutil.copytree(checkpoints.place("zero1-float32"), place)
    other = checkpoints.place("zero1-bfloat16-optimizer", 4) / "global_step3"
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / f"bf16_{name}", place / "global_step3" / name)
    with pytest.raises(sw.FormatError, match="divided among 2 ranks"):
        read(place)


def test_files_that_changed_names_are_told(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Of ZeRO 1 and 2: those of ZeRO 3 say nowhere which rank's they are."""
    place = tmp_path / "copy"
    shutil.copytree(checkpoints.place("zero1-float32"), place)
    one, other = sorted(place.glob("global_step3/zero_pp_rank_*_optim_states.pt"))
    one.rename(tmp_path / "one")
    other.rename(one)
    (tmp_path / "one").rename(other)
    with pytest.raises(sw.FormatError, match="files of ranks were renamed"):
        read(place)


def test_what_is_beside_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    shutil.copytree(checkpoints.place("zero1-float32"), place)
    (place / "global_step3" / "notes.txt").write_text("mine")
    assert any("notes.txt" in line for line in read(place).left_out)
