"""A training with accelerate that is killed: it goes on with the losses of an uninterrupted one."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.data import ElasticBatchSampler
from tests.breadth import mostly_long
from tests.integrations.parallelism import (
    gang,
    needs_frameworks,
    plugins_of,
    reset_accelerate,
    select_fsdp,
)
from tests.tools.gang import Gang

__all__ = ["gang"]
pytestmark = needs_frameworks

STEPS, SAVE_EVERY, CRASH_AT = 14, 3, 11
GLOBAL_BATCH, EPOCH = 8, 6  # an epoch has 6 steps
SAMPLES = GLOBAL_BATCH * EPOCH


@dataclass(frozen=True)
class Run:
    """One start of the training script.

    Attributes:
        data: "skip" uses skip_first_batches, "stateful" torchdata's loader, "elastic" a sampler.
        crash: every rank fails after step 11: "kill" by a signal, "raise" by an exception.
        dropout: the probability of dropout, which depends on the random generator of the rank.
        every: save the steps that are a multiple of this.
        workers: the number of worker processes of the loader.
    """

    root: Path
    data: str = "skip"
    crash: str = ""
    dropout: float = 0.1
    parallelism: str = "plain"
    every: int = SAVE_EVERY
    workers: int = 0


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 6)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.dropout(self.layers[0](x).relu()))


class Seen:
    """A registered object."""

    def __init__(self) -> None:
        self.samples = torch.zeros(SAMPLES, dtype=torch.int64)
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples, self.calls = state["samples"].clone(), state["calls"]


def make_accelerator(run: Run) -> Any:
    """An accelerator of the gang's ranks, as under `accelerate launch --cpu`."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    reset_accelerate()
    plugins = plugins_of(run.parallelism, GLOBAL_BATCH // dist.get_world_size(), "Linear")
    loading = DataLoaderConfiguration(
        split_batches=True,
        use_seedable_sampler=True,
        use_stateful_dataloader=run.data == "stateful",
    )
    accelerator = Accelerator(**plugins, dataloader_config=loading)
    if run.parallelism == "fsdp2":
        select_fsdp(accelerator, plugins["fsdp_plugin"])
    return accelerator


def make_loader(run: Run) -> tuple[Any, ElasticBatchSampler | None]:
    numbers = torch.arange(SAMPLES)
    torch.manual_seed(5)
    dataset = TensorDataset(torch.randn(SAMPLES, 6), numbers)
    if run.data == "elastic":
        sampler = ElasticBatchSampler(SAMPLES, global_batch=GLOBAL_BATCH, seed=3)
        generator = torch.Generator()  # otherwise, each iteration draws from torch's
        return DataLoader(dataset, batch_sampler=sampler, generator=generator), sampler
    return DataLoader(dataset, GLOBAL_BATCH, shuffle=True, num_workers=run.workers), None


def train(run: Run) -> dict[str, Any]:
    """Train to the end, or to the crash. Return what one rank has seen after this start."""
    from shardwise.integrations.accelerate import load_state, save_state

    accelerator = make_accelerator(run)
    torch.manual_seed(1)
    model = Net(run.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader, sampler = make_loader(run)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if sampler is None:
        loader = accelerator.prepare(loader)
    seen = Seen()
    accelerator.register_for_checkpointing(seen, *([] if sampler is None else [sampler]))
    torch.manual_seed(100 + accelerator.process_index)  # dropout differs between ranks
    losses, batches = {}, {}
    with sw.Checkpointer(run.root, save_every=run.every, memory=None) as checkpointer:
        step = load_state(accelerator, checkpointer) or 0
        while step < STEPS:
            active = loader
            if run.data == "skip":
                loader.set_epoch(step // EPOCH)
                active = accelerator.skip_first_batches(loader, step % EPOCH)
            for inputs, numbers in active:
                with accelerator.accumulate(model):
                    loss = model(inputs).square().sum() / GLOBAL_BATCH
                    accelerator.backward(loss * accelerator.num_processes)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if sampler is not None:
                    sampler.advance()
                step += 1
                losses[step] = float(accelerator.reduce(loss.detach()))
                batches[step] = sorted(accelerator.gather(numbers).tolist())
                seen.samples[batches[step]] += 1
                seen.calls += 1
                save_state(accelerator, checkpointer, step)
                if step == CRASH_AT and run.crash == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == CRASH_AT and run.crash == "raise":
                    raise RuntimeError("crash")
                if step == STEPS:
                    break
    return {
        "losses": losses,
        "batches": batches,
        "seen": seen.samples.tolist(),
        "calls": seen.calls,
        "rate": optimizer.param_groups[0]["lr"],
        "weights": weights_of(model),
        "noise": torch.rand(2).tolist(),
    }


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of the weights."""
    parts = ((name, getattr(p, "_local_tensor", p)) for name, p in model.named_parameters())
    return {name: part.detach().clone() for name, part in parts}


def resume_after_crash(
    gang: Gang, first: Run, run: Run, worlds: tuple[int, int], crash: str = "raise"
) -> Any:
    """Let a training fail on some ranks, and resume it on others. Return what each has seen."""
    outcomes = gang.run_outcomes(train, replace(first, crash=crash), world=worlds[0])
    kinds = {each.kind for each in outcomes}
    assert kinds == {"died" if crash == "kill" else "error"}, outcomes[0].report
    return gang.run(train, run, world=worlds[1])


def assert_tail(
    whole: dict[str, Any],
    resumed: dict[str, Any],
    key: str,
    tolerance: float,
    every: int = SAVE_EVERY,
) -> None:
    """Steps after the newest save, against those of the uninterrupted training."""
    newest = CRASH_AT // every * every
    tail = {step: value for step, value in whole[key].items() if step > newest}
    assert [*resumed[key]] == [*tail]
    for step, value in tail.items():
        assert resumed[key][step] == pytest.approx(value, rel=tolerance, abs=0), step


@pytest.mark.parametrize(
    ("data", "world", "crash"),
    [
        pytest.param("skip", 1, "raise", marks=pytest.mark.long),
        ("skip", 2, "kill"),
        ("stateful", 2, "raise"),
        pytest.param("elastic", 2, "raise", marks=pytest.mark.long),
    ],
)
def test_a_training_resumes_bit_for_bit_on_as_many_ranks(
    gang: Gang, tmp_path: Path, data: str, world: int, crash: str
) -> None:
    whole = gang.run(train, Run(tmp_path / "whole", data=data), world=world)
    run = Run(tmp_path / "run", data=data)
    assert_same_bits(whole, resume_after_crash(gang, run, run, (world, world), crash))


def assert_same_bits(whole: list[Any], resumed: list[Any], every: int = SAVE_EVERY) -> None:
    for before, after in zip(whole, resumed, strict=True):
        for key in ("losses", "batches"):
            assert_tail(before, after, key, 0, every)
        for key in ("seen", "calls", "rate", "noise"):
            assert after[key] == before[key], key
        for name, weight in before["weights"].items():
            assert torch.equal(after["weights"][name], weight), name


@pytest.mark.parametrize(  # torch waits 5 s for the worker of each loader that is not used up
    ("world", "workers"), mostly_long([(1, 1), (2, 0)], [(2, 0)])
)
def test_a_stateful_loader_continues_after_a_complete_epoch(
    gang: Gang, tmp_path: Path, world: int, workers: int
) -> None:
    run = Run(tmp_path / "run", data="stateful", every=EPOCH, workers=workers)
    whole = gang.run(train, replace(run, root=tmp_path / "whole"), world=world)
    assert_same_bits(whole, resume_after_crash(gang, run, run, (world, world)), EPOCH)


@pytest.mark.parametrize("data", ["skip", "elastic"])
@pytest.mark.parametrize("worlds", [(2, 1), pytest.param((1, 2), marks=pytest.mark.long)])
def test_a_training_resumes_with_the_same_samples_on_other_ranks(
    gang: Gang, tmp_path: Path, data: str, worlds: tuple[int, int]
) -> None:
    whole, *_ = gang.run(train, Run(tmp_path / "whole", data=data, dropout=0), world=1)
    run = Run(tmp_path / "run", data=data, dropout=0)
    for resumed in resume_after_crash(gang, run, run, worlds):
        assert_tail(whole, resumed, "batches", 0)
        assert_tail(whole, resumed, "losses", 1e-4)
        for key in ("seen", "calls", "rate"):
            assert resumed[key] == whole[key], key


@pytest.mark.parametrize(
    "parallelism",  # the test below leaves FSDP2; test_transformers.py goes from ZeRO to it
    mostly_long(["fsdp2", "zero1", "zero3"], []),
)
def test_sharded_models_resume_bit_for_bit(gang: Gang, tmp_path: Path, parallelism: str) -> None:
    whole = gang.run(train, Run(tmp_path / "whole", parallelism=parallelism), world=2)
    run = Run(tmp_path / "run", parallelism=parallelism)
    assert_same_bits(whole, resume_after_crash(gang, run, run, (2, 2)))


@pytest.mark.parametrize(
    ("parallelisms", "worlds"),
    [
        (("fsdp2", "plain"), (2, 1)),
        pytest.param(("plain", "zero3"), (1, 2), marks=pytest.mark.long),
        pytest.param(("zero1", "fsdp2"), (2, 2), marks=pytest.mark.long),
        pytest.param(("zero3", "plain"), (2, 1), marks=pytest.mark.long),
    ],
)
def test_a_training_resumes_under_another_parallelism(
    gang: Gang, tmp_path: Path, parallelisms: tuple[str, str], worlds: tuple[int, int]
) -> None:
    whole, *_ = gang.run(train, Run(tmp_path / "whole", dropout=0), world=1)
    before, after = (Run(tmp_path / "run", dropout=0, parallelism=each) for each in parallelisms)
    for resumed in resume_after_crash(gang, before, after, worlds):
        assert_tail(whole, resumed, "batches", 0)
        assert_tail(whole, resumed, "losses", 1e-4)


def test_a_stateful_loader_refuses_other_ranks(gang: Gang, tmp_path: Path) -> None:
    gang.run_outcomes(train, Run(tmp_path, data="stateful", crash="raise"), world=2)
    (outcome,) = gang.run_outcomes(train, Run(tmp_path, data="stateful"), world=1)
    assert isinstance(outcome.exception, sw.StateError)
    assert re.search(r"2 ranks have saved, and 1 load.*ElasticBatchSampler", str(outcome.exception))


def resume_with_warnings(run: Run) -> list[str]:
    """Load on one rank, with loaders and schedulers that depend on the number of ranks."""
    from shardwise.integrations.accelerate import load_state, save_state

    accelerator = make_accelerator(run)
    accelerator.dataloader_config.use_seedable_sampler = False
    accelerator.dataloader_config.split_batches = False
    model = Net(0)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = make_loader(run)[0]
    accelerator.prepare(model, optimizer, scheduler, loader)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    with sw.Checkpointer(run.root, memory=None, save_at_end=False) as checkpointer:
        load_state(accelerator, checkpointer)
        save_state(accelerator, checkpointer, 1, overwrite=True)
    logging.getLogger("shardwise").removeHandler(handler)
    return messages


def test_what_cannot_be_exact_is_said(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(resume_with_warnings, Run(tmp_path), world=2) == [[], []]
    ((loader, scheduler),) = gang.run(resume_with_warnings, Run(tmp_path), world=1)
    assert loader.startswith("loader: a RandomSampler does not repeat its order")
    assert "from 2 to 1, so its learning rates now change 0.5 times as fast" in scheduler


def two_of_each(run: Run, seed: int) -> tuple[Any, list[Any]]:
    accelerator = make_accelerator(run)
    torch.manual_seed(seed)
    models = [Net(0), nn.Linear(2, 3)]
    optimizers = [torch.optim.AdamW(models[0].parameters()), torch.optim.SGD([models[1].weight])]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers]
    objects = [*accelerator.prepare(*models, *optimizers, *schedulers)]
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    inputs = (torch.ones(1, 6), torch.ones(1, 2))
    for model, optimizer, scheduler, x in zip(
        objects, objects[2:], objects[4:], inputs, strict=False
    ):
        for _ in range(seed):
            accelerator.backward(model(x).square().sum())
            optimizer.step()
            scheduler.step()
    return accelerator, objects


def resume_several(run: Run) -> None:
    """Two models, two optimizers and two schedulers, from ours and from what accelerate saved."""
    from shardwise.integrations.accelerate import collect_state, load_state, save_state

    accelerator, objects = two_of_each(run, seed=3)
    accelerator.step = 7
    accelerator.save_state(str(run.root / "stock"))
    with sw.Checkpointer(run.root / "ours", memory=None) as checkpointer:
        save_state(accelerator, checkpointer, 5, metrics={"loss": 1.0})
    saved = [copy.deepcopy(each.state_dict()) for each in objects]
    assert [*collect_state(accelerator)] == [
        *("model", "model_1", "optimizer", "optimizer_1", "scheduler", "scheduler_1"),
        *("scaler", "rng", "accelerator"),
    ]
    accelerator, objects = two_of_each(run, seed=1)
    with sw.Checkpointer(run.root / "ours", memory=None, save_at_end=False) as checkpointer:
        assert load_state(accelerator, checkpointer) == 5
    assert (accelerator.step, accelerator.scaler.get_scale()) == (7, 8.0)
    for value, expected in zip(objects, saved, strict=True):
        torch.testing.assert_close(value.state_dict(), expected, rtol=0, atol=0)
    accelerator, objects = two_of_each(run, seed=1)
    skip = ["model_1.*", "optimizer_1.*", "rng", "accelerator.*"]

    def start(state: MutableMapping[str, Any]) -> sw.LoadReport:
        return sw.load(run.root / "stock", state, step=5, skip=skip)

    stock = run.root / "stock"  # without the step
    with (
        sw.Checkpointer(run.root / "unknown", memory=None, start_from=stock) as checkpointer,
        pytest.raises(sw.StateError, match=r"start_from=.*step="),
    ):
        load_state(accelerator, checkpointer, skip=skip)
    with sw.Checkpointer(
        run.root / "new", memory=None, save_at_end=False, start_from=start
    ) as checkpointer:
        assert load_state(accelerator, checkpointer) == 5
    for index in (0, 2, 4, 5):
        torch.testing.assert_close(objects[index].state_dict(), saved[index], rtol=0, atol=0)


def test_several_models_come_back_also_from_a_directory_of_accelerate(
    gang: Gang, tmp_path: Path
) -> None:
    gang.run(resume_several, Run(tmp_path), world=1)


def load_too_early(run: Run) -> None:
    """Load before the objects are prepared, and save in the middle of an accumulation."""
    from shardwise.integrations.accelerate import load_state, save_state

    accelerator, _ = two_of_each(run, seed=1)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    with sw.Checkpointer(run.root, memory=None) as checkpointer:
        save_state(accelerator, checkpointer, 1)
        assert messages == []
        accelerator.gradient_state._set_sync_gradients(False)
        save_state(accelerator, checkpointer, 2)
        assert "step 2 is saved in the middle of an accumulation" in messages.pop()
        accelerator = make_accelerator(run)
        with pytest.raises(sw.StateError, match="no objects to save"):
            save_state(accelerator, checkpointer, 3)
        with pytest.raises(sw.StateError, match=r"model, model_1, optimizer.*after prepare"):
            load_state(accelerator, checkpointer)
        model = accelerator.prepare(Net(0))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(sw.StateError, match=r"the checkpoint has model_1, optimizer, optimi"):
            load_state(accelerator, checkpointer)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)  # nothing loaded
        assert load_state(accelerator, checkpointer, only=["model.*"]) == 2


def test_objects_that_are_not_prepared_and_lost_gradients_are_reported(
    gang: Gang, tmp_path: Path
) -> None:
    gang.run(load_too_early, Run(tmp_path), world=1)


def test_a_missing_accelerate_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "shardwise.integrations.accelerate", raising=False)
    with pytest.raises(ImportError, match="pip install accelerate"):
        importlib.import_module("shardwise.integrations.accelerate")
