"""Megatron-Core's torch_dist: checkpoints that it made, and what it restored of them itself.

They lie in tests/compat/foreign, beside the program that made them: on 2 and 4 ranks, and read by
Megatron on one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.formats.comparing import assert_same
from tests.formats.foreign_goldens import opened, unpacked, values_of
from tests.formats.reference import read_tensors

WORLDS = {
    "plain": 4,
    "bfloat16": 4,
    "fully_reshardable": 2,
    "fully_sharded_model_space": 4,
    "plain_0.19": 4,
    "fully_reshardable_0.19": 2,
}
# What the modules of Megatron's plain layers are called, and what in every checkpoint.
RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def restored_by_megatron(place: Path, kind: str) -> dict[str, torch.Tensor]:
    """Names as they are in the checkpoint, to tensors as Megatron has them after loading."""
    found = {}
    for name, value in torch.load(place / "expected.pt").items():
        for module, key in RENAMED.items():
            name = name.replace(module, key)
        if name.endswith(".param"):
            name = name.replace("optimizer.", "model.").removesuffix(".param")
        elif not kind.startswith("plain"):
            name = name.replace("model.", "module.")
        found[name] = value
    return found


@pytest.mark.parametrize("kind", WORLDS)
def test_it_reads_what_megatron_restores(kind: str, tmp_path: Path) -> None:
    """Tensor and pipeline parallel, optimizers plain and distributed, stacked and flattened."""
    place = unpacked(f"megatron_{kind}", tmp_path)
    foreign = opened(place)
    read, expected = read_tensors(place, foreign), restored_by_megatron(place, kind)
    for common in ("optimizer", "optimizer.optimizer"):
        read.pop(f"common.{common}.state.common_step", None)
    steps = {name: value for name, value in read.items() if name.endswith(".step")}
    assert {value.item() for value in steps.values()} == {2.0}
    assert len(steps) == 29
    assert sorted(read) == sorted({*expected, *steps})
    for name, value in expected.items():
        assert_same(read[name], value)
    assert (foreign.step, foreign.world_size) == (2, WORLDS[kind])
    assert len(foreign.left_out) == 1
    assert "_extra_state and 7 more: they are None" in foreign.left_out[0]


@pytest.mark.parametrize("kind", WORLDS)
def test_groups_have_their_members(kind: str, tmp_path: Path) -> None:
    """Biases and what has one dimension do not decay, which is Megatron's own rule."""
    values = values_of(unpacked(f"megatron_{kind}", tmp_path))
    members = {
        group["value"]["wd_mult"]: group["members"] for group in values["optimizer.param_groups"]
    }
    assert sorted(map(len, members.values())) == [11, 18]
    assert "decoder.layers.1.mlp.linear_fc1.weight" in members[1.0]
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in members[0.0]
    assert values["common.iteration"] == 2


def test_buckets_keep_their_names(tmp_path: Path) -> None:
    """Of `dp_reshardable`, no file tells which parameter lies where in a bucket."""
    foreign = opened(unpacked("megatron_dp_reshardable", tmp_path))
    buckets = [t for t in foreign.tensors if t.name.startswith("optimizer.distributed.")]
    assert sorted(t.name.rpartition(".")[2] for t in buckets) == ["exp_avg", "exp_avg_sq", "param"]
    assert sum(t.name.startswith("model.") for t in foreign.tensors) == 29


def test_a_layer_is_read_by_name(tmp_path: Path) -> None:
    place = unpacked("megatron_plain", tmp_path)
    expected = restored_by_megatron(place, "plain")
    checkpoint = sw.open(place)
    name = "model.decoder.layers.1.self_attention.linear_qkv.weight"
    assert_same(checkpoint[name][3:7], expected[name][3:7])


def test_another_backend_is_refused(tmp_path: Path) -> None:
    place = unpacked("megatron_plain", tmp_path)
    (place / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(
        sw.FormatError, match=r"sharded_backend is .zarr., but only .torch_dist. is"
    ):
        opened(place)


@pytest.mark.parametrize("name", ["common.pt", "metadata.json"])
def test_without_one_of_its_files_it_is_not_taken_for_dcp(name: str, tmp_path: Path) -> None:
    """Of which names are other, and hyperparameters lost."""
    place = unpacked("megatron_plain", tmp_path)
    (place / name).unlink()
    with pytest.raises(sw.FormatError, match=f"Megatron-Core wrote, 1 is missing: {name}. Copy"):
        opened(place)


@pytest.mark.parametrize("kind", ["plain_0.19", "fully_reshardable_0.19"])
def test_the_common_state_may_lie_among_the_items(kind: str, tmp_path: Path) -> None:
    """As Megatron-Core 0.19 has it, which writes no common.pt, and still reads one."""
    place = unpacked(f"megatron_{kind}", tmp_path)
    assert not (place / "common.pt").exists()
    assert not any(entry.name.startswith("common_state") for entry in opened(place).objects)
    torch.save({"iteration": 7}, place / "common.pt")
    assert opened(place).step == 7
    (place / "common.pt").unlink()
    (place / "metadata.json").unlink()
    with pytest.raises(sw.FormatError, match=r"wrote, 1 is missing: metadata\.json"):
        opened(place)


def test_a_flattened_shard_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    place = unpacked("megatron_fully_sharded_model_space", tmp_path)
    metadata = (place / ".metadata").read_bytes()
    whole = b"K\x02K\x18K\x08\x87"  # (2, 24, 8), of linear_qkv.weight
    assert whole in metadata
    lying = metadata.replace(whole, b"K\x02K\x17K\x08\x87")
    (place / ".metadata").write_bytes(lying)
    with pytest.raises(sw.FormatError, match=r"flattened|.metadata says"):
        opened(place)


@pytest.mark.parametrize(("factor", "is_wrong"), [(1.0005, False), (1.05, True), (0.0, True)])
def test_masters_are_compared_in_the_precision_of_the_weights(
    tmp_path: Path, factor: float, is_wrong: bool
) -> None:
    """The weights are in bfloat16. A master may differ from its weight by the rounding only.

    Two parameters of this checkpoint begin with the same values, and both are changed.
    """
    place = unpacked("megatron_bfloat16", tmp_path)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    found = sw.open(place)
    masters, weights = found[f"model.{name}"][...], found[f"module.{name}"][...]
    first = masters.reshape(-1)[:16]
    old, new = first.numpy().tobytes(), (first * factor).numpy().tobytes()
    for file in place.glob("*.distcp"):
        file.write_bytes(file.read_bytes().replace(old, new))
    found = sw.open(place)
    read = found[f"model.{name}"][...]
    lines = [line for line in found.left_out if line.startswith("optimizer.*: the master")]
    assert len(lines) == is_wrong
    assert all(name in line for line in lines)
    if is_wrong:
        assert torch.equal(read, weights)
        assert read.dtype == torch.bfloat16
    else:
        assert torch.equal(read.reshape(-1)[:16], first * factor)
