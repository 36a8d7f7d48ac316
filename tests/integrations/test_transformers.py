"""Trainers that are killed: they go on with the losses of an uninterrupted training."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.breadth import mostly_long
from tests.integrations.parallelism import (
    deepspeed_config,
    gang,
    needs_frameworks,
    plugins_of,
    prepare_deepspeed,
    reset_accelerate,
    select_fsdp,
)
from tests.memory.test_snapshots import shm
from tests.tools.gang import Gang

__all__ = ["gang", "shm"]
pytestmark = needs_frameworks
GLOBAL_BATCH, EPOCH, STEPS, SAVE_EVERY, CRASH_AT = 8, 6, 14, 3, 11
NEWEST = CRASH_AT // SAVE_EVERY * SAVE_EVERY


@dataclass(frozen=True)
class Run:
    """One start of a script with a Trainer.

    Attributes:
        output: the output_dir.
        resume: the argument of `train`.
        stock: use the Trainer of transformers itself.
        crash: how every rank fails after step 11: "kill" or "raise".
        dropout: the probability of dropout, which depends on the random generator of the rank.
        hub: push to the Hub.
        lora: train an adapter of PEFT, and the whole output layer.
        adapters: the names of the adapters; the last one is trained.
        base: the seed of the weights. The samples do not depend on it.
        save_base: save the frozen weights, too.
        nodes: each rank has a separate output_dir, and only the root of shardwise is shared.
        shm: where agents keep what they save in the background; None saves without agents.
        options: further arguments of TrainingArguments.
    """

    output: Path
    resume: Any = None
    stock: bool = False
    crash: str = ""
    dropout: float = 0.1
    shm: Path | None = None
    parallelism: str = "plain"
    hub: bool = False
    lora: bool = False
    adapters: tuple[str, ...] = ("default",)
    base: int = 0
    save_base: bool = False
    nodes: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def make_trainer(run: Run) -> Any:
    """A trainer of a tiny GPT-2. The first token of a sample is its index."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainer

    class Recording(Trainer if run.stock else ShardwiseTrainer):  # type: ignore[misc]
        """Notes the loss and the samples of each step on all ranks, and fails."""

        def open_checkpointer(self, root: str, keep: sw.Keep) -> sw.Checkpointer:
            memory = run.shm and sw.Memory(snapshot_every=0, slots=1, dir=run.shm)
            root = str(run.output / "shardwise") if run.nodes else root
            return sw.Checkpointer(root, keep=keep, memory=memory)

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if run.parallelism == "fsdp2":
                plugin = plugins_of("fsdp2", 0, "GPT2Block")["fsdp_plugin"]
                select_fsdp(self.accelerator, plugin)
                self.is_fsdp_enabled = True

        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> torch.Tensor:
            step = self.state.global_step + 1
            if step == CRASH_AT + 1 and run.crash == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if step == CRASH_AT + 1 and run.crash == "raise":
                raise RuntimeError("crash")
            rows = self.accelerator.gather(inputs["input_ids"][:, 0])
            loss = super().training_step(model, inputs, *args)
            samples.setdefault(step, []).extend(rows.tolist())
            losses[step] = losses.get(step, 0) + float(self.accelerator.gather(loss).mean())
            return loss

    samples: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    reset_accelerate()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), run.dropout)
    sizes["tie_word_embeddings"] = not run.lora  # FSDP2 refuses weights that two layers share
    tokens = torch.randint(64, (GLOBAL_BATCH * EPOCH, 8))
    tokens[:, 0] = torch.arange(GLOBAL_BATCH * EPOCH)
    if run.base:
        torch.manual_seed(run.base)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
    if run.lora:
        from peft import LoraConfig, get_peft_model

        options = {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]}
        adapter = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=run.dropout, **options)
        model = get_peft_model(model, adapter, adapter_name=run.adapters[0])
        for name in run.adapters[1:]:
            model.add_adapter(name, adapter)
        model.set_adapter(run.adapters[-1])
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    world = int(os.environ["WORLD_SIZE"])
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": GLOBAL_BATCH // world,
        "save_steps": SAVE_EVERY,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **run.options,
    }
    if run.parallelism.startswith("zero"):
        prepare_deepspeed()
        config = deepspeed_config(run.parallelism, arguments["per_device_train_batch_size"])
        configured = {"use_configured_state": True}
        arguments |= {"use_cpu": False, "deepspeed": config, "accelerator_config": configured}
    output = run.output / os.environ["RANK"] if run.nodes else run.output
    further: dict[str, Any] = {}
    if run.lora and not run.stock:
        further = {"save_base_model": run.save_base}
    trainer = Recording(
        model,
        TrainingArguments(output_dir=str(output), **arguments),
        train_dataset=dataset,
        eval_dataset=dataset[:8],
        **further,
    )
    trainer.samples, trainer.losses = samples, losses
    return trainer


def train(run: Run) -> dict[str, Any]:
    """Train to the end, or to the crash. Return what one rank has seen after this start."""
    trainer = make_trainer(run)
    trainer.args.push_to_hub = run.hub  # the constructor of Trainer would connect to the Hub
    trainer.train(resume_from_checkpoint=run.resume)
    logged = [each for each in trainer.state.log_history if "loss" in each]
    return {
        "losses": trainer.losses,
        "samples": {step: sorted(rows) for step, rows in trainer.samples.items()},
        "logged": {each["step"]: (each["loss"], each["learning_rate"]) for each in logged},
        "weights": weights_of(trainer.model),
        "noise": torch.rand(2).tolist(),
        "best": (trainer.state.best_global_step, trainer.state.best_metric),
    }


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of the weights."""
    parts = ((name, getattr(p, "_local_tensor", p)) for name, p in model.named_parameters())
    return {name: part.detach().clone() for name, part in parts}


def crash(gang: Gang, run: Run, world: int) -> None:
    outcomes = gang.run_outcomes(train, run, world=world)
    kinds = {each.kind for each in outcomes}
    assert kinds == {"died" if run.crash == "kill" else "error"}, outcomes[0].report


def assert_tail(
    whole: dict[str, Any], resumed: dict[str, Any], key: str, tolerance: float, newest: int = NEWEST
) -> None:
    """Steps after the newest save, against those of the uninterrupted training."""
    tail = {step: value for step, value in whole[key].items() if step > newest}
    assert [*resumed[key]] == [*tail]
    for step, value in tail.items():
        assert resumed[key][step] == pytest.approx(value, rel=tolerance, abs=0), (key, step)


def assert_same_bits(whole: list[Any], resumed: list[Any], newest: int = NEWEST) -> None:
    for before, after in zip(whole, resumed, strict=True):
        assert_tail(before, after, "losses", 0, newest)
        assert_tail(before, after, "samples", 0, newest)
        assert after["noise"] == before["noise"]
        assert after["logged"] == before["logged"]
        for name, weight in before["weights"].items():
            assert torch.equal(after["weights"][name], weight), name


@pytest.mark.parametrize(
    ("world", "how", "accumulation"),
    [
        (1, "kill", 1),
        pytest.param(1, "raise", 1, marks=pytest.mark.long),
        pytest.param(2, "raise", 2, marks=pytest.mark.long),
        pytest.param(2, "kill", 1, marks=pytest.mark.long),  # as in test_accelerate.py
    ],
)
def test_a_trainer_resumes_bit_for_bit_on_as_many_ranks(
    gang: Gang, tmp_path: Path, shm: Path, world: int, how: str, accumulation: int
) -> None:
    options = {
        "per_device_train_batch_size": GLOBAL_BATCH // world // accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    home = shm if how == "kill" else None
    run = Run(tmp_path / "run", resume=True, options=options, shm=home)
    whole = gang.run(train, replace(run, output=tmp_path / "whole", resume=None), world=world)
    crash(gang, replace(run, resume=None, crash=how), world)
    assert_same_bits(whole, gang.run(train, run, world=world))
    written = {path.name for path in (run.output / "checkpoint-9").iterdir()}
    assert written == {"trainer_state.json"}
    assert sw.open(run.output / "shardwise", step=9)["trainer_state"]["global_step"] == 9


@pytest.mark.parametrize("worlds", [(2, 1), pytest.param((1, 2), marks=pytest.mark.long)])
def test_a_trainer_resumes_with_the_same_samples_on_other_ranks(
    gang: Gang, tmp_path: Path, worlds: tuple[int, int]
) -> None:
    run = Run(tmp_path / "run", dropout=0, resume=True)
    whole, *_ = gang.run(train, Run(tmp_path / "whole", dropout=0), world=1)
    crash(gang, replace(run, resume=None, crash="raise"), worlds[0])
    for resumed in gang.run(train, run, world=worlds[1]):
        assert_tail(whole, resumed, "samples", 0)
        assert_tail(whole, resumed, "losses", 1e-4)


# A test below goes from ZeRO to FSDP2, and tests/adapters/test_deepspeed.py loads ZeRO 3.
@pytest.mark.parametrize("parallelism", mostly_long(["fsdp2", "zero1", "zero3"], []))
def test_sharded_models_resume_bit_for_bit(gang: Gang, tmp_path: Path, parallelism: str) -> None:
    run = Run(tmp_path / "run", resume=True, parallelism=parallelism)
    whole = gang.run(train, replace(run, output=tmp_path / "whole", resume=None), world=2)
    crash(gang, replace(run, resume=None, crash="raise"), 2)
    assert_same_bits(whole, gang.run(train, run, world=2))


@pytest.mark.parametrize(
    ("parallelisms", "worlds"),
    [
        pytest.param(("fsdp2", "plain"), (2, 1), marks=pytest.mark.long),
        pytest.param(("plain", "zero3"), (1, 2), marks=pytest.mark.long),
        (("zero1", "fsdp2"), (2, 2)),
        pytest.param(("zero3", "plain"), (2, 1), marks=pytest.mark.long),
    ],
)
def test_a_trainer_resumes_under_another_parallelism(
    gang: Gang, tmp_path: Path, parallelisms: tuple[str, str], worlds: tuple[int, int]
) -> None:
    whole, *_ = gang.run(train, Run(tmp_path / "whole", dropout=0), world=1)
    before, after = (Run(tmp_path / "run", dropout=0, parallelism=each) for each in parallelisms)
    crash(gang, replace(before, crash="raise"), worlds[0])
    for resumed in gang.run(train, replace(after, resume=True), world=worlds[1]):
        assert_tail(whole, resumed, "samples", 0)
        assert_tail(whole, resumed, "losses", 1e-4)


EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": SAVE_EVERY,
    "metric_for_best_model": "loss",
    "learning_rate": 0.5,  # the loss is not best at the end
}


def saved_steps(run: Run) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run.output / "shardwise").glob("step-*"))


def best_weights(run: Run) -> dict[str, Any]:
    """Train, and return the weights at the end beside those of the best checkpoint."""
    seen = train(run)
    best = sw.Best("best_model_step", mode="max")
    checkpoint = sw.open(run.output / "shardwise", step=best)
    return {**seen, "step": checkpoint.step, "saved": checkpoint.state_dict("model")}


@pytest.mark.parametrize(
    ("limit", "kept"), mostly_long([(None, 5), (1, 2), (2, 2), (3, 3)], [(None, 5), (1, 2)])
)
def test_the_limit_and_the_best_model_at_the_end(
    gang: Gang, tmp_path: Path, limit: int | None, kept: int
) -> None:
    options = {**EVALUATED, "save_total_limit": limit, "load_best_model_at_end": True}
    run = Run(tmp_path, options=options)
    (seen,) = gang.run(best_weights, run, world=1)
    step, _ = seen["best"]
    assert (step, seen["step"]) == (step, step)
    assert step < 12
    for name, weight in seen["weights"].items():
        assert torch.equal(weight, seen["saved"][name]), name
    assert len(saved_steps(run)) == kept, saved_steps(run)
    assert {step, 14} <= {*saved_steps(run)}


def test_of_equal_checkpoints_the_first_is_the_best(gang: Gang, tmp_path: Path) -> None:
    """So the Trainer says. Another run that resumes from a later step loads it, too."""
    options = {**EVALUATED, "learning_rate": 0.0, "load_best_model_at_end": True}
    run = Run(tmp_path / "run", options={**options, "save_total_limit": 2})
    (seen,) = gang.run(best_weights, run, world=1)
    assert (seen["best"][0], seen["step"], saved_steps(run)) == (3, 3, [3, 14])
    source = str(run.output / "checkpoint-14")
    other = Run(tmp_path / "other", resume=source, options={**options, "max_steps": 16})
    (resumed,) = gang.run(train, other, world=1)
    assert resumed["best"][0] == 3
    assert 3 not in saved_steps(other)
    for name, weight in resumed["weights"].items():
        assert torch.equal(weight, seen["saved"][name]), name


def test_a_limit_without_a_metric(gang: Gang, tmp_path: Path) -> None:
    run = Run(tmp_path, options={"save_total_limit": 2})
    gang.run(train, run, world=1)
    assert saved_steps(run) == [12, 14]


@pytest.mark.parametrize(
    ("strategy", "steps"), [("epoch", [6, 12, 14]), ("no", []), ("best", None)]
)
def test_strategies(gang: Gang, tmp_path: Path, strategy: str, steps: list[int] | None) -> None:
    run = Run(tmp_path, options={**EVALUATED, "save_strategy": strategy})
    (seen,) = gang.run(train, run, world=1)
    if steps is None:
        assert saved_steps(run)[-1] == seen["best"][0]
    else:
        assert saved_steps(run) == steps


@pytest.mark.long
def test_resume_from_the_best_from_paths_and_from_the_stock_trainer(
    gang: Gang, tmp_path: Path
) -> None:
    first = Run(tmp_path / "first", options=EVALUATED)
    whole = gang.run(train, first, world=1)
    best = whole[0]["best"][0]
    crash(gang, replace(first, output=tmp_path / "crashed", crash="raise"), 1)
    for name, start, newest in (
        ("first", "best", best),
        ("first", tmp_path / "first" / "checkpoint-9", 9),
        ("other", str(tmp_path / "first" / "checkpoint-6/"), 6),
        ("third", str(tmp_path / "first" / "shardwise" / "step-00000012"), 12),
        ("fourth", str(tmp_path / "crashed" / "shardwise"), NEWEST),
    ):
        run = replace(first, output=tmp_path / name, resume=start)
        resumed = gang.run(train, run, world=1)
        assert_same_bits(whole, resumed, newest)
    mistyped = replace(first, resume=str(tmp_path / "first" / "checkpoint-90"))
    (outcome,) = gang.run_outcomes(train, mistyped, world=1)
    assert isinstance(outcome.exception, sw.CheckpointNotFoundError), outcome.report
    stock = Run(tmp_path / "stock", stock=True, options=EVALUATED)
    gang.run_outcomes(train, replace(stock, crash="raise"), world=1)
    for start in (True, str(tmp_path / "stock" / "checkpoint-9")):
        assert_same_bits(whole, gang.run(train, replace(stock, stock=False, resume=start), world=1))


@pytest.mark.long  # the test below damages the newest save, and passes it over alike
def test_an_incomplete_newest_save_is_passed_over(gang: Gang, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-9"))
    whole = gang.run(train, Run(tmp_path / "whole"), world=1)
    crash(gang, replace(run, resume=None, crash="raise"), 1)
    (run.output / "shardwise" / "step-00000009" / "manifest.json").unlink()
    assert_same_bits(whole, gang.run(train, run, world=1), 6)


@pytest.mark.parametrize("parallelism", mostly_long(["plain", "fsdp2"], ["plain"]))
def test_a_damaged_newest_save_is_passed_over(gang: Gang, tmp_path: Path, parallelism: str) -> None:
    """The counters of the Trainer are intact, so the damage shows when the weights are loaded.

    Of the checkpoint before, the manifest is damaged.
    """
    world = 2 if parallelism == "fsdp2" else 1
    whole = gang.run(train, Run(tmp_path / "whole", parallelism=parallelism), world=world)
    run = Run(tmp_path / "run", parallelism=parallelism)
    crash(gang, replace(run, crash="raise"), world)
    for file in (run.output / "shardwise" / "step-00000009").glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    (run.output / "shardwise" / "step-00000006" / "manifest.json").write_text("{")
    outcomes = gang.run_outcomes(
        train, replace(run, resume=str(run.output / "checkpoint-9")), world=world
    )
    assert "CorruptionError" in outcomes[0].report
    assert_same_bits(whole, gang.run(train, replace(run, resume=True), world=world), 3)


def test_only_the_model(gang: Gang, tmp_path: Path) -> None:
    run = Run(tmp_path, resume=True, options={"save_only_model": True})
    crash(gang, replace(run, resume=None, crash="raise"), 1)
    names = [*sw.open(tmp_path / "shardwise", step=9)]
    assert {name.partition(".")[0] for name in names} == {
        *("model", "trainer_state", "samples_per_step"),
    }
    (resumed,) = gang.run(train, run, world=1)
    assert [*resumed["losses"]] == [*range(10, 15)]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"resume": True}, "run/shardwise> has no checkpoint to resume from"),
        ({"resume": "best"}, "needs TrainingArguments\\(metric_for_best_model"),
        ({"resume": "checkpoint-4"}, "no checkpoint"),
        ({"hub": True}, 'pass hub_strategy="end"'),
        ({"options": {"enable_jit_checkpoint": True}}, "leave it out"),
    ],
)
def test_what_cannot_be_done_is_refused(
    gang: Gang, tmp_path: Path, run: dict[str, Any], message: str
) -> None:
    (outcome,) = gang.run_outcomes(train, Run(tmp_path / "run", **run), world=1)
    assert isinstance(outcome.exception, sw.ShardwiseError), outcome.report
    assert re.search(message, str(outcome.exception))


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "shardwise.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match="pip install transformers accelerate"):
        importlib.import_module("shardwise.integrations.transformers")


@pytest.mark.parametrize("place", ["", "step-00000001", "link"])
def test_another_run_that_goes_on_is_resumed_from_one_step(tmp_path: Path, place: str) -> None:
    """Each resume loads twice: the counters, and then the rest."""
    from shardwise.integrations.transformers.resuming import LoadPath

    root = tmp_path / "run"
    root.mkdir()
    (root / "link").symlink_to("step-00000001")
    load, found = LoadPath(str(root / place)), []
    for step in (1, 2):
        sw.save(root / f"step-{step:08}", {"a": step}, step=step)
        state = {"a": 0}
        load(state)
        found.append(state["a"])
    assert found == [1, 1]
