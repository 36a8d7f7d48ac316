"""Trainings of Lightning that are killed and resumed equal trainings that were not interrupted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.data import ElasticBatchSampler
from shardwise.integrations.lightning import ShardwiseCheckpoint, ShardwiseCheckpointIO
from tests.integrations.lightning_program import GLOBAL_BATCH, Net, make_dataset, run, steps_in
from tests.tools.agents import signal_agents
from tests.tools.gang import Gang

TIMEOUT = 120.0


@dataclass
class Program:
    """Runs the program below a directory."""

    directory: Path
    shm: Path
    gang: Gang

    def train(self, name: str, *, log: str = "", **options: Any) -> None:
        """Train in this process. The log is `log`, by default `name`."""
        run(self._options(name, log, options))

    def train_on(self, world: int, name: str, *, log: str = "", **options: Any) -> None:
        """Train on other processes. With `kill_at`, check that they were killed."""
        options = self._options(name, log, options)
        outcomes = self.gang.run_outcomes(run, options, world=world, timeout=TIMEOUT)
        for outcome in outcomes:
            assert outcome.kind == ("died" if "kill_at" in options else "value"), outcome.report

    def _options(self, name: str, log: str, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "root": str(self.directory / name),
            "shm": str(self.shm / name),
            "log": str(self.directory / f"{log or name}.log"),
            **options,
        }

    def losses(self, log: str) -> list[tuple[int, float]]:
        """Return the step and the loss of each line of a log."""
        lines = (self.directory / f"{log}.log").read_text().splitlines()
        return [(int(line.split()[0]), float(line.split()[1])) for line in lines]

    def weights(self, log: str) -> dict[str, torch.Tensor]:
        """Return the final weights."""
        return torch.load(self.directory / f"{log}.log.weights", weights_only=True)


@pytest.fixture
def program(gang: Gang, tmp_path: Path) -> Iterator[Program]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardwise-lightning-") as shm:
        yield Program(tmp_path, Path(shm), gang)
        for home in Path(shm).iterdir():
            signal_agents(home, 9)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[sw.Memory]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardwise-lightning-") as shm:
        yield sw.Memory(dir=shm)
        signal_agents(Path(shm), 9)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_killed_training_continues_bit_for_bit(program: Program) -> None:
    """In the middle of an epoch, with dropout, a scheduler and an elastic sampler."""
    program.train("whole")
    program.train_on(1, "killed", kill_at=14)
    program.train("killed", log="resumed")
    whole = program.losses("whole")
    assert [step for step, _ in whole] == list(range(1, 31))
    assert program.losses("killed") == whole[:14]
    assert program.losses("resumed") == whole[12:]
    assert equal(program.weights("resumed"), program.weights("whole"))
    assert steps_in(program.directory / "killed") == [30]


def test_another_number_of_ranks_continues(program: Program) -> None:
    program.train("whole", dropout=0.0)
    program.train_on(2, "killed", kill_at=14, dropout=0.0)
    program.train("killed", log="resumed", dropout=0.0)
    expected, found = program.losses("whole")[12:], program.losses("resumed")
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("after", [2, 1])
def test_sharded_modules_continue(program: Program, after: int) -> None:
    """Under FSDP2, with Lightning's ModelParallelStrategy."""
    options = {"dropout": 0.0, "fsdp": True}
    program.train_on(2, "whole", **options)
    program.train_on(2, "killed", kill_at=14, **options)
    program.train_on(after, "killed", log="resumed", **options)
    expected = program.losses("whole")[24::2]  # both ranks write to the log
    found = program.losses("resumed")[::after]
    assert [step for step, _ in found] == [step for step, _ in expected]
    if after == 2:
        assert found == expected
    else:
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], 1e-4)


def test_the_plugin_serves_last_and_best(tmp_path: Path) -> None:
    def train(root: str, epochs: int, ckpt_path: str | None = None) -> tuple[Net, Trainer]:
        seed_everything(7)
        keep = ModelCheckpoint(tmp_path / root, monitor="val_loss", save_last=True, save_top_k=1)
        trainer = Trainer(
            accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False,
            enable_model_summary=False, plugins=[ShardwiseCheckpointIO()], callbacks=[keep],
        )  # fmt: skip
        net, dataset = Net(dropout=0.0), make_dataset()
        train_loader = DataLoader(dataset, batch_size=GLOBAL_BATCH)
        trainer.fit(net, train_loader, DataLoader(dataset, batch_size=20), ckpt_path=ckpt_path)
        return net, trainer

    whole, _ = train("whole", 3)
    train("parts", 2)
    resumed, trainer = train("parts", 3, "last")
    assert trainer.global_step == 30
    assert equal(resumed.state_dict(), whole.state_dict())
    last = tmp_path / "parts" / "last.ckpt"
    assert sw.open(last).verify().bytes_checked > 0
    best = trainer.validate(
        Net(dropout=0.0), DataLoader(make_dataset(), batch_size=20), ckpt_path="best"
    )
    assert best[0]["val_loss"] == pytest.approx(trainer.checkpoint_callback.best_model_score)
    assert len([each for each in (tmp_path / "parts").iterdir() if each.is_dir()]) == 2


def train_with_callback(
    root: Path,
    memory: sw.Memory | None,
    epochs: int = 2,
    callbacks: Sequence[Callback] = (),
    *,
    net: type[Net] = Net,
    limits: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Net, Trainer]:
    seed_everything(7)
    dataset = make_dataset()
    sampler = ElasticBatchSampler(len(dataset), global_batch=GLOBAL_BATCH)
    checkpoint = ShardwiseCheckpoint(root, data=sampler, memory=memory, **options)
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[*callbacks, checkpoint], plugins=[ShardwiseCheckpointIO()],
        **(limits or {}),
    )  # fmt: skip
    module = net()
    loader, validation = (
        DataLoader(dataset, batch_sampler=sampler),
        DataLoader(dataset, batch_size=20),
    )
    trainer.fit(module, loader, validation)
    return module, trainer


def test_epochs_continue_and_the_best_is_found(tmp_path: Path) -> None:
    whole, trainer = train_with_callback(tmp_path / "whole", None, 4, monitor="val_loss")
    train_with_callback(tmp_path / "parts", None, 2, monitor="val_loss")
    parts, again = train_with_callback(tmp_path / "parts", None, 4, monitor="val_loss")
    assert again.global_step == trainer.global_step == 40
    assert equal(parts.state_dict(), whole.state_dict())
    data = DataLoader(make_dataset(), batch_size=20)
    score = again.validate(Net(), data, ckpt_path="best", verbose=False)[0]["val_loss"]
    callback = again.checkpoint_callback
    assert isinstance(callback, ShardwiseCheckpoint)
    step = int(callback.best_model_path.rpartition("-")[2])
    metrics = sw.open(callback.best_model_path).metrics
    assert score == pytest.approx(metrics["val_loss"])
    assert again.global_step >= step


def test_an_exception_leaves_the_save_to_the_agent(tmp_path: Path, memory: sw.Memory) -> None:
    class FailingNet(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 7:
                raise RuntimeError("injected")

    whole, _ = train_with_callback(tmp_path / "whole", None, every_n_train_steps=5)
    seed_everything(7)
    sampler = ElasticBatchSampler(40, global_batch=GLOBAL_BATCH)
    checkpoint = ShardwiseCheckpoint(
        tmp_path / "run", every_n_train_steps=5, data=sampler, memory=memory
    )
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=[checkpoint],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="injected"):
        trainer.fit(FailingNet(), DataLoader(make_dataset(), batch_sampler=sampler))
    assert checkpoint.checkpointer is None
    resumed, trainer = train_with_callback(tmp_path / "run", memory, every_n_train_steps=5)
    assert trainer.global_step == 20
    assert equal(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_train_steps": 0}, "every_n_train_steps=0.*at least 1"),
        ({"save_top_k": 0}, "save_top_k=0"),
        ({"save_top_k": "3"}, "save_top_k='3'"),
        ({"save_top_k": 3, "keep": sw.Keep(last=1)}, "either keep= or save_top_k="),
        ({"every_n_epochs": 2.5}, "every_n_epochs=2.5.*whole number"),
        ({"resume": "best"}, "pass monitor="),
        ({"resume": "last"}, "resume='last'.*\"newest\""),
        ({"resume": True}, 'resume=True.*"newest"'),
        ({"keep": sw.Keep(best=sw.Best("a"))}, "monitor=None, keep=.*pass monitor='a'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardwiseCheckpoint(tmp_path, **options)


class InterruptionError(Exception):
    """Ends a training early."""


class Interrupt(Callback):
    """Interrupts the training before a batch, counted over all epochs."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, *_: Any) -> None:
        self.batch -= 1
        if self.batch == 0:
            raise InterruptionError


def test_no_step_is_saved_within_an_accumulation_of_gradients(tmp_path: Path) -> None:
    """Such a checkpoint would lack the gradients so far."""

    def train(root: str, *callbacks: Callback) -> Net:
        return train_with_callback(
            tmp_path / root, None, 1, callbacks, limits={"accumulate_grad_batches": 4},
            every_n_train_steps=1, save_top_k=-1,
        )[0]  # fmt: skip

    whole = train("whole")
    assert steps_in(tmp_path / "whole") == [1, 2, 3]
    with pytest.raises(InterruptionError):
        train("parts", Interrupt(3))
    assert equal(train("parts").state_dict(), whole.state_dict())


class PlateauNet(Net):
    """A training that diverges, so that its scheduler reduces the learning rate each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def test_a_scheduler_that_reacts_to_a_metric_misses_no_epoch(tmp_path: Path) -> None:
    """After a resume at the end of an epoch, and in the middle of one."""
    every = {"every_n_epochs": 1, "every_n_train_steps": 4}
    whole, _ = train_with_callback(tmp_path / "whole", None, 4, net=PlateauNet, **every)
    for batch in (22, 27):
        root = tmp_path / str(batch)
        with pytest.raises(InterruptionError):
            train_with_callback(root, None, 4, [Interrupt(batch)], net=PlateauNet, **every)
        parts, trainer = train_with_callback(root, None, 4, net=PlateauNet, **every)
        assert trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"] == 4
        assert equal(parts.state_dict(), whole.state_dict())


def test_the_path_of_a_checkpoint_of_the_callback_is_refused(tmp_path: Path) -> None:
    """Lightning would load the weights, and fail at the optimizers."""
    train_with_callback(tmp_path, None, 1, every_n_train_steps=3)
    path = str(tmp_path / "step-00000009")
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[ShardwiseCheckpointIO()], callbacks=[ShardwiseCheckpoint(tmp_path / "new")],
    )  # fmt: skip
    loader = DataLoader(make_dataset(), batch_size=GLOBAL_BATCH)
    with pytest.raises(sw.StateError, match=r"ckpt_path='.*step-00000009'.*resume=STEP"):
        trainer.fit(Net(), loader, DataLoader(make_dataset(), batch_size=20), ckpt_path=path)


def test_a_run_that_goes_back_replaces_later_checkpoints(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_train_steps": 3, "save_top_k": -1}
    whole, _ = train_with_callback(tmp_path, None, 1, **options)
    before = sw.open(tmp_path, step=9).layout.save_id
    again, _ = train_with_callback(tmp_path, None, 1, resume=3, **options)
    assert steps_in(tmp_path) == [3, 6, 9]
    assert sw.open(tmp_path, step=9).layout.save_id != before
    assert equal(again.state_dict(), whole.state_dict())


def test_a_metric_that_is_never_logged_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_with_callback(tmp_path, None, 2, monitor="vol_loss")
    messages = [each.message for each in caplog.records if "vol_loss" in each.message]
    assert len(messages) == 1
    assert "logged so far: ['val_loss']" in messages[0]


def test_the_last_step_of_an_epoch_has_the_metrics_of_its_validation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"monitor": "val_loss", "every_n_train_steps": 5, "every_n_epochs": 1}
    train_with_callback(tmp_path / "both", None, 1, **options)
    train_with_callback(tmp_path / "epochs", None, 1, monitor="val_loss")
    metrics = sw.open(tmp_path / "both", step=10).metrics
    assert metrics == sw.open(tmp_path / "epochs", step=10).metrics
    assert metrics["val_loss"] is not None


def test_a_hook_that_needs_the_weights_is_refused(tmp_path: Path) -> None:
    class Averaging(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            checkpoint["average"] = checkpoint["state_dict"]

    with pytest.raises(sw.StateError, match=r"Averaging.*'state_dict'.*ShardwiseCheckpointIO"):
        train_with_callback(tmp_path, None, 1, [Averaging()])


def test_files_of_lightning_in_the_root_are_not_passed_over(tmp_path: Path) -> None:
    data = DataLoader(make_dataset(), batch_size=20)

    def trainer(steps: int, callback: Callback) -> Trainer:
        return Trainer(
            accelerator="cpu", max_steps=steps, callbacks=[callback], logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip

    first, net = ModelCheckpoint(tmp_path / "a", every_n_train_steps=3), Net()
    trainer(6, first).fit(net, data, data)
    with pytest.raises(sw.CheckpointExistsError) as caught:
        trainer(9, ShardwiseCheckpoint(tmp_path / "a", memory=None)).fit(Net(), data, data)
    assert f"start_from={first.best_model_path!r}" in str(caught.value)
    after = trainer(9, ShardwiseCheckpoint(tmp_path / "a", every_n_train_steps=1, memory=None))
    after.fit(Net(), data, data, ckpt_path=first.best_model_path)
    assert steps_in(tmp_path / "a") == [9]


class FrozenNet(Net):
    """Its first layer is frozen, and the base of what is trained."""

    strict_loading = False
    base_seed = 11

    def __init__(self) -> None:
        super().__init__()
        first = self.layers[0]
        generator = torch.Generator().manual_seed(self.base_seed)
        first.weight.data.copy_(torch.randn(first.weight.shape, generator=generator))
        first.bias.data.zero_()
        first.requires_grad_(False)


class NetWithAnotherBase(FrozenNet):
    base_seed = 12


def test_trainable_only_saves_and_resumes_without_the_frozen_part(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "net": FrozenNet, "trainable_only": True, "monitor": "val_loss",
    }  # fmt: skip
    whole, _ = train_with_callback(tmp_path / "whole", None, 2, **options)
    train_with_callback(tmp_path / "parts", None, 1, **options)
    parts, trainer = train_with_callback(tmp_path / "parts", None, 2, **options)
    assert equal(parts.state_dict(), whole.state_dict())
    saved = set(sw.open(tmp_path / "parts"))
    weights = {name for name in saved if name.startswith("model.layers")}
    assert weights == {"model.layers.3.weight", "model.layers.3.bias"}
    data = DataLoader(make_dataset(), batch_size=20)
    best = trainer.validate(FrozenNet(), data, ckpt_path="best", verbose=False)[0]["val_loss"]
    path = trainer.checkpoint_callback.best_model_path
    assert best == pytest.approx(sw.open(path).metrics["val_loss"])
    with pytest.raises(sw.MismatchError, match=r"layers\.0\.weight"):
        train_with_callback(tmp_path / "parts", None, 3, **{**options, "net": NetWithAnotherBase})
