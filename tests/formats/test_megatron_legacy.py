"""Legacy checkpoints of Megatron-LM, against what Megatron-Core had."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.formats.recognise import read_foreign
from shardwise.formats.tree import Tree
from shardwise.formats.validate import checked
from tests.formats.comparing import assert_same
from tests.formats.conftest import LEGACY, Checkpoints
from tests.formats.reference import read_tensors


def wanted(expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the checkpoint is to have, by our names, of what the ranks had."""
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


@pytest.mark.parametrize("case", [*LEGACY, "llama"])
def test_all_that_the_ranks_had_is_there(megatron: Checkpoints, case: str) -> None:
    tree = Tree(megatron.place(case, 4))
    foreign = checked(read_foreign(tree))
    assert (foreign.format, foreign.step) == ("legacy Megatron-LM", 2)
    read = read_tensors(tree.path, foreign)
    expected = wanted(megatron.expected(case, 4))
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
    assert found["args"]["num_layers"] == 4
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
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
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
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "spec", "sizes"),
    [
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
    # GPT-2's head is another name of its embedding, and trained by that.
    apart = {"model.lm_head.weight"} if spec == "megatron_gpt2" else set()
    names = [n for n in found.tensors() if n.startswith("model.") and n not in apart]
    for name in names:
        own = f"optimizer.{name.removeprefix('model.')}.exp_avg"
        assert found.tensors()[own].shape == found.tensors()[name].shape
    qkv = before.tensors()["model.decoder.layers.3.self_attention.linear_qkv.weight"][...]
    if spec == "megatron_gpt2":
        parts = found.tensors()["model.transformer.h.3.attn.c_attn.weight"][...]
        assert torch.equal(qkv.view(4, 3, 6, 24).permute(3, 1, 0, 2).reshape(24, -1), parts)
        return
    prefix = "model.model.layers.3.self_attn."
    q, k, v = (found.tensors()[f"{prefix}{each}_proj.weight"][...] for each in "qkv")
    groups = [q.view(2, 2, 6, 24), k.view(2, 1, 6, 24), v.view(2, 1, 6, 24)]
    assert torch.equal(torch.cat(groups, 1).reshape(-1, 24), qkv)
