"""Legacy checkpoints of Megatron-LM, against what Megatron-Core had."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from tests.formats.comparing import assert_same
from tests.formats.conftest import GOLDEN_OR_LIVE, Checkpoints
from tests.formats.foreign_goldens import opened
from tests.formats.reference import read_tensors

CASES = (
    *("float32", "bfloat16", "distributed", "distributed-bfloat16", "interleaved", "untied"),
    *("experts", "experts-distributed", "llama"),
)
TIED = ("float32", "interleaved")
"""Cases of several stages whose output layer is the embedding."""


@pytest.mark.parametrize("case", CASES)
def test_all_that_the_ranks_had_is_there(megatron: Any, case: str) -> None:
    place = megatron.place(case, 4)
    foreign = opened(place)
    assert (foreign.format, foreign.step) == ("legacy Megatron-LM", 2)
    read = read_tensors(place, foreign)
    expected = megatron.wanted(case)
    if case in TIED:  # the last stage has a copy, under a name of its own
        for name in [name for name in expected if ".output_layer." in name]:
            copy = expected.pop(name)
            assert_same(read[name.replace("output_layer", "embedding.word_embeddings")], copy)
    for name, tensor in expected.items():
        assert_same(read[name], tensor)
    rest = [name for name in read if name not in expected]
    assert all(name.startswith("rng_state.") for name in rest), rest


def logits_of(megatron: Checkpoints, case: str = "llama") -> dict[str, torch.Tensor]:
    """Of a case, now and later; and of ranks of another kind that loaded it."""
    found: dict[str, torch.Tensor] = torch.load(megatron.place(f"{case}.logits.pt", 4))
    return found


def test_values_are_there_too(megatron: Checkpoints) -> None:
    found = sw.open(megatron.place("experts-distributed", 4))
    assert found["args"]["num_layers"] == 2
    assert found["args"]["params_dtype"] == torch.bfloat16
    assert found["opt_param_scheduler"]["num_steps"] == 2
    assert found["rng_state.mp_rank_00_001"][0]["np_rng_state"][0] == "MT19937"
    groups = found["optimizer.param_groups"]
    assert [group["value"]["wd_mult"] for group in groups] == [1.0, 0.0, 1.0]
    assert [group["value"]["is_expert_parallel"] for group in groups] == [False, False, True]
    members = [name for group in groups for name in group["members"]]
    assert sorted(members) == sorted(
        name.removeprefix("model.") for name in found.tensors() if name.startswith("model.")
    )


@pytest.mark.parametrize("megatron", [GOLDEN_OR_LIVE[1]], indirect=True)
@pytest.mark.parametrize("case", ["llama", "experts"])
def test_a_run_goes_on_with_other_parallelism(megatron: Checkpoints, case: str) -> None:
    found = logits_of(megatron, case)
    torch.testing.assert_close(found["resumed"], found["now"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["resumed, later"], found["later"], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found["later"], found["now"], atol=1e-2)


def test_hugging_face_takes_it(megatron: Checkpoints) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    spec = sw.spec("megatron_llama", vocab=60, heads=4, groups=2)
    sw.load(megatron.place("llama", 4), {"model": model}, spec=spec, only=["model.*"])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        logits = model(torch.randint(0, 60, (2, 16), generator=generator)).logits
    wanted = logits_of(megatron)["now"][..., :60]
    # Another framework on another processor sums the products in another order.
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "spec", "sizes"),
    [
        ("untied", "megatron_gpt2", {}),
        ("distributed-bfloat16", "megatron_llama", {"groups": 2}),
        ("experts", "megatron_mixtral", {"groups": 2}),
        ("interleaved", "megatron_gpt2", {}),
    ],
)
def test_specifications_of_published_models_fit(
    megatron: Checkpoints, case: str, spec: str, sizes: dict[str, int]
) -> None:
    specification = sw.spec(spec, vocab=60, heads=4, **sizes)
    place = megatron.place(case, 4)
    before, found = sw.open(place), sw.open(place, spec=specification)
    # A tied head is another name of the embedding, and trained by that.
    apart = {"model.lm_head.weight"} if case in TIED else set()
    names = [n for n in found.tensors() if n.startswith("model.") and n not in apart]
    for name in names:
        own = f"optimizer.{name.removeprefix('model.')}.exp_avg"
        assert found.tensors()[own].shape == found.tensors()[name].shape
    qkv = before.tensors()["model.decoder.layers.1.self_attention.linear_qkv.weight"][...]
    if spec == "megatron_gpt2":
        parts = found.tensors()["model.transformer.h.1.attn.c_attn.weight"][...]
        assert torch.equal(qkv.view(4, 3, 2, 8).permute(3, 1, 0, 2).reshape(8, -1), parts)
        return
    prefix = "model.model.layers.1.self_attn."
    q, k, v = (found.tensors()[f"{prefix}{each}_proj.weight"][...] for each in "qkv")
    groups = [q.view(2, 2, 2, 8), k.view(2, 1, 2, 8), v.view(2, 1, 2, 8)]
    assert torch.equal(torch.cat(groups, 1).reshape(-1, 8), qkv)


def test_a_head_of_its_own_comes_out_as_one(megatron: Checkpoints, tmp_path: Path) -> None:
    spec = sw.spec("megatron_gpt2", vocab=60, heads=4)
    place = megatron.place("untied", 4)
    expected = megatron.expected("untied", 4)
    head = expected["output_layer.weight|weight"][:60]
    embedding = expected["embedding.word_embeddings.weight|weight"][:60]
    assert not torch.equal(head, embedding)
    found = sw.open(place, spec=spec).tensors()
    assert_same(found["model.lm_head.weight"][...], head)
    assert_same(found["model.transformer.wte.weight"][...], embedding)
    assert_same(
        found["optimizer.lm_head.weight.exp_avg"][...],
        expected["output_layer.weight|exp_avg"][:60],
    )
    sw.export(place, tmp_path / "hf", spec=spec, only=["model.*"])
    assert_same(load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"], head)


@pytest.mark.parametrize("case", TIED)
def test_a_tied_head_is_the_embedding(megatron: Checkpoints, case: str) -> None:
    found = sw.open(megatron.place(case, 4), spec=sw.spec("megatron_gpt2", vocab=60, heads=4))
    entries = {entry.name: entry for entry in found.layout.tensors}
    assert entries["model.lm_head.weight"].same_as == "model.transformer.wte.weight"
    assert "optimizer.lm_head.weight.exp_avg" not in entries
    assert found.verify().bytes_compared > 0


def test_a_copy_of_the_embedding_that_differs_is_refused(
    megatron: Checkpoints, tmp_path: Path
) -> None:
    place = tmp_path / "interleaved"
    shutil.copytree(megatron.place("interleaved", 4), place)
    path = place / "iter_0000002" / "mp_rank_00_001" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model1"]["output_layer.weight"][5, 7] += 1
    torch.save(state, path)
    for spec in (None, sw.spec("megatron_gpt2", vocab=60, heads=4)):
        with pytest.raises(sw.MismatchError) as caught:
            sw.export(place, tmp_path / "out", spec=spec, only=["model.*"])
        (problem,) = caught.value.problems
        assert "two copies differ, first at [5, 7]: " in problem
        assert "mp_rank_00_000/model_optim_rng.pt at byte" in problem
        assert ", and iter_0000002/mp_rank_00_001/model_optim_rng.pt at byte" in problem


def other_iteration(state: dict[str, Any]) -> None:
    state["iteration"] = 4


def other_rate(state: dict[str, Any]) -> None:
    state["optimizer"]["param_groups"][0]["lr"] = 0.75


def other_step(state: dict[str, Any]) -> None:
    state["optimizer"]["optimizer"]["param_groups"][0]["step"] = 9


@pytest.mark.parametrize(
    ("case", "edit", "said"),
    [
        ("float32", other_iteration, "is from iteration 2, and .*mp_rank_01_001 from iteration 4"),
        ("float32", other_rate, "ranks have different hyperparameters"),
        ("distributed-bfloat16", other_step, r"2\.0 on one rank and 9 on another"),
    ],
)
def test_directories_of_several_saves_are_refused(
    megatron: Checkpoints,
    tmp_path: Path,
    case: str,
    edit: Callable[[dict[str, Any]], None],
    said: str,
) -> None:
    place = tmp_path / case
    shutil.copytree(megatron.place(case, 4), place)
    path = place / "iter_0000002" / "mp_rank_01_001" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)
    with pytest.raises(sw.FormatError, match=said):
        sw.open(place)


def test_values_of_other_ranks_are_told(megatron: Checkpoints, tmp_path: Path) -> None:
    place = tmp_path / "float32"
    shutil.copytree(megatron.place("float32", 4), place)
    assert not any("ranks have other values" in line for line in sw.open(place).left_out)
    path = place / "iter_0000002" / "mp_rank_01_001" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["num_floating_point_operations_so_far"] = 7
    torch.save(state, path)
    said = "num_floating_point_operations_so_far: 1 ranks have other values"
    assert any(line.startswith(said) for line in sw.open(place).left_out)


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    copy = one.detach().clone()
    with torch.no_grad():
        one.copy_(other)
        other.copy_(copy)


@pytest.mark.parametrize(
    ("case", "file", "starts"),
    [
        ("bfloat16", "mp_rank_01_000/model_optim_rng.pt", (2, 4)),
        # From the last parameter to the first, each aligned to 64 elements.
        ("distributed-bfloat16", "mp_rank_01_000/distrib_optim.pt", (0, 256)),
        ("distributed", "mp_rank_01/distrib_optim.pt", (192, 320)),
    ],
)
def test_swapped_masters_are_found(
    megatron: Checkpoints, tmp_path: Path, case: str, file: str, starts: tuple[int, int]
) -> None:
    """Of linear_fc2 and another matrix. The weights are read without the optimizer's state."""
    place, expected = tmp_path / case, megatron.expected(case, 4)
    shutil.copytree(megatron.place(case, 4), place)
    assert not [line for line in sw.open(place).left_out if line.startswith("optimizer")]
    path = place / "iter_0000002" / file
    state = torch.load(path, weights_only=False)
    if case == "bfloat16":
        masters = state["optimizer"]["fp32_from_fp16_params"][0]
        swap(*(masters[index] for index in starts))
    else:
        (buffer,) = state[0].values()
        swap(*(buffer["param"][start : start + 64] for start in starts))
    torch.save(state, path)
    found = sw.open(place)
    assert not [name for name in found if name.startswith(("module.", "optimizer.decoder"))]
    assert "optimizer.param_groups" not in found
    (line,) = [line for line in found.left_out if line.startswith("optimizer.*: ")]
    assert "the master weights of 2 parameters, such as decoder.layers." in line
    for full, tensor in expected.items():
        name, key = full.split("|")
        if key == "weight":
            assert_same(found[f"model.{name}"][...], tensor)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    wanted = {"optimizer": {f"{name}.exp_avg": torch.zeros(8, 16)}}
    with pytest.raises(sw.MismatchError, match="left out: the master weights of"):
        sw.load(place, wanted)
