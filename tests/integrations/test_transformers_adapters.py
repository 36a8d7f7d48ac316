"""Trainers of models with adapters of PEFT: checkpoints have the adapters, but not their base."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.breadth import mostly_long
from tests.integrations.parallelism import gang, needs_frameworks, reset_accelerate
from tests.integrations.test_transformers import (
    EVALUATED,
    Run,
    assert_same_bits,
    best_weights,
    crash,
    train,
)
from tests.tools.gang import Gang

__all__ = ["gang"]
pytestmark = [
    needs_frameworks,
    pytest.mark.skipif(not find_spec("peft"), reason="pip install '.[frameworks]'"),
]


@pytest.mark.parametrize(
    ("parallelism", "world"),
    mostly_long(
        [("plain", 1), ("plain", 2), ("fsdp2", 2), ("zero1", 2), ("zero3", 2)],
        [("plain", 1)],  # tests/multirank/test_trainable.py shards adapters
    ),
)
def test_an_adapter_resumes_bit_for_bit(
    gang: Gang, tmp_path: Path, parallelism: str, world: int
) -> None:
    run = Run(tmp_path / "run", resume=True, lora=True, parallelism=parallelism)
    whole = gang.run(train, replace(run, output=tmp_path / "whole", resume=None), world=world)
    crash(gang, replace(run, resume=None, crash="raise"), world)
    saved = names_in(run)
    assert_same_bits(whole, gang.run(train, run, world=world))
    assert all("lora_" in name or "modules_to_save" in name for name in saved["model"])
    trained = {name.rpartition(".")[0] for name in saved["optimizer"]}
    assert trained == saved["model"]


def names_in(run: Run) -> dict[str, set[str]]:
    """The names of tensors in the newest checkpoint, by their keys in the state."""
    found: dict[str, set[str]] = {}
    for name in sw.open(run.output / "shardwise").tensors():
        key, _, rest = name.partition(".")
        found.setdefault(key, set()).add(rest)
    return found


def test_adapters_that_are_not_trained_are_saved_too(gang: Gang, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", resume=True, lora=True, adapters=("first", "second"))
    whole = gang.run(train, replace(run, output=tmp_path / "whole", resume=None), world=1)
    crash(gang, replace(run, resume=None, crash="raise"), 1)
    saved = names_in(run)["model"]
    assert {name for name in saved if ".first." in name}
    assert not {name for name in saved if not re.search(r"\.(first|second)\.weight$", name)}
    assert_same_bits(whole, gang.run(train, run, world=1))


def test_an_adapter_on_another_base_is_refused(gang: Gang, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", lora=True)
    crash(gang, replace(run, crash="raise"), 1)
    (outcome,) = gang.run_outcomes(train, replace(run, resume=True, base=1), world=1)
    assert isinstance(outcome.exception, sw.MismatchError), outcome.report
    assert "transformer.wte.weight: frozen, other values than at the save" in outcome.report


@pytest.mark.parametrize("save_base", mostly_long([False, True], [True]))
def test_a_base_that_was_saved_is_restored(gang: Gang, tmp_path: Path, save_base: bool) -> None:
    """With and without the option: a load fills what the checkpoint has."""
    run = Run(tmp_path / "run", lora=True, save_base=True)
    whole = gang.run(train, replace(run, output=tmp_path / "whole"), world=1)
    crash(gang, replace(run, crash="raise"), 1)
    assert "base_model.model.transformer.wte.weight" in names_in(run)["model"]
    resumed = replace(run, resume=True, save_base=save_base, base=1)
    assert_same_bits(whole, gang.run(train, resumed, world=1))
    assert ("base_model.model.transformer.wte.weight" in names_in(run)["model"]) == save_base


def test_the_best_adapter_is_loaded_at_the_end(gang: Gang, tmp_path: Path) -> None:
    options = {**EVALUATED, "load_best_model_at_end": True, "greater_is_better": True}
    (seen,) = gang.run(best_weights, Run(tmp_path, lora=True, options=options), world=1)
    assert seen["best"][0] == seen["step"] < 12
    assert {*seen["saved"]} < {*seen["weights"]}
    for name, weight in seen["saved"].items():
        assert torch.equal(weight, seen["weights"][name]), name


def train_quantized(base: Path, output: Path, steps: int, native: bool) -> dict[str, torch.Tensor]:
    """Train an adapter on a base in 4 bits, which PEFT or transformers itself adds."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainer

    class WithoutAgent(ShardwiseTrainer):
        def open_checkpointer(self, root: str, keep: sw.Keep) -> sw.Checkpointer:
            return sw.Checkpointer(root, keep=keep, memory=None)

    reset_accelerate()
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=four_bit, device_map={"": "cpu"}
    )
    torch.manual_seed(1)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    if native:
        model.add_adapter(adapter)
    else:
        model = get_peft_model(model, adapter)
    tokens = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(3))
    options = {"save_steps": 2, "learning_rate": 0.01, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(
        output, max_steps=steps, use_cpu=True, disable_tqdm=True, report_to="none", **options
    )
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = WithoutAgent(model, arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=(output / "shardwise").exists())
    return {name: value.clone() for name, value in model.state_dict().items()}


def quantized_runs(place: Path, native: bool) -> list[dict[str, torch.Tensor]]:
    """An uninterrupted training, and one in two parts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(place / "base")
    whole = train_quantized(place / "base", place / "whole", 4, native)
    train_quantized(place / "base", place / "run", 2, native)
    return [whole, train_quantized(place / "base", place / "run", 4, native)]


@pytest.mark.skipif(not find_spec("bitsandbytes"), reason="pip install '.[frameworks]'")
@pytest.mark.parametrize("native", mostly_long([False, True], [True]))
def test_an_adapter_on_a_quantized_base(gang: Gang, tmp_path: Path, native: bool) -> None:
    ((whole, resumed),) = gang.run(quantized_runs, tmp_path, native, world=1)
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    saved = names_in(Run(tmp_path / "run"))["model"]
    assert saved
    assert all("lora_" in name for name in saved)
    checkpoint = sw.open(tmp_path / "run" / "shardwise")
    assert checkpoint["model._frozen.base"] == "base"
