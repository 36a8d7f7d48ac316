"""The callback for Lightning at the ends of batches, validations, epochs and trainings."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.integrations.lightning import ShardwiseCheckpoint, ShardwiseCheckpointIO
from tests.breadth import mostly_long
from tests.integrations.lightning_program import GLOBAL_BATCH, Net, make_dataset, steps_in
from tests.integrations.test_lightning import (
    Interrupt,
    InterruptionError,
    equal,
    train_with_callback,
)

HALVES: dict[str, Any] = {"val_check_interval": 5}
STEPS_AND_EPOCHS: dict[str, Any] = {"every_n_train_steps": 3, "every_n_epochs": 1}
OPTIONS = mostly_long([{}, STEPS_AND_EPOCHS, {"every_n_train_steps": 5}], [STEPS_AND_EPOCHS])


def metrics_of(root: Path) -> dict[int, float | None]:
    steps = steps_in(root)
    return {step: sw.open(root, step=step).metrics["val_loss"] for step in steps}


class NoteLosses(Callback):
    """Notes the loss of each validation, by step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.losses[trainer.global_step] = float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_training_ends_at_max_steps_and_can_be_extended(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """In the middle of an epoch, and after an interruption at the end of the first epoch."""
    whole, trainer = train_with_callback(
        tmp_path / "whole", None, -1, limits={"max_steps": 25}, **options
    )
    assert trainer.global_step == 25
    assert steps_in(tmp_path / "whole")[-1] == 25 or not options
    for first in (10, 13, 20):
        root = tmp_path / str(first)
        train_with_callback(root, None, -1, limits={"max_steps": first}, **options)
        parts, trainer = train_with_callback(root, None, -1, limits={"max_steps": 25}, **options)
        assert trainer.global_step == 25
        assert equal(parts.state_dict(), whole.state_dict())


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_a_training_continues_after_a_validation_within_an_epoch(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole, _ = train_with_callback(tmp_path / "whole", None, 3, limits=HALVES, **options)
    for batch in (7, 17):
        root = tmp_path / str(batch)
        with pytest.raises(InterruptionError):
            train_with_callback(root, None, 3, [Interrupt(batch)], limits=HALVES, **options)
        parts, _ = train_with_callback(root, None, 3, limits=HALVES, **options)
        assert equal(parts.state_dict(), whole.state_dict())


def test_a_checkpoint_has_the_metric_of_its_own_step(tmp_path: Path) -> None:
    """Not that of the validation before."""
    noted = NoteLosses()
    options: dict[str, Any] = {"monitor": "val_loss", "save_top_k": -1}
    train_with_callback(
        tmp_path / "halves", None, 2, [noted], limits=HALVES, every_n_train_steps=5, **options
    )
    assert metrics_of(tmp_path / "halves") == noted.losses
    assert [*noted.losses] == [5, 10, 15, 20]
    every_other = {"check_val_every_n_epoch": 2}
    train_with_callback(tmp_path / "epochs", None, 3, limits=every_other, **options)
    found = metrics_of(tmp_path / "epochs")
    assert [step for step, value in found.items() if value is not None] == [20]
    best, _ = train_with_callback(tmp_path / "epochs", None, 2, resume="best", **options)
    saved = sw.open(tmp_path / "epochs", step=20).state_dict("model")
    assert equal(best.state_dict(), saved)


class StepPlateauNet(Net):
    """A training whose scheduler reacts to a metric after each step."""

    metric = "train_loss"

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = super().training_step(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.9, factor=0.9
        )
        config = {"scheduler": scheduler, "interval": "step", "monitor": self.metric}
        return {"optimizer": optimizer, "lr_scheduler": {**config, "frequency": 5, "strict": False}}


class HalfEpochPlateauNet(StepPlateauNet):
    """A training whose scheduler reacts to each validation."""

    metric = "val_loss"


@pytest.mark.parametrize("net", [StepPlateauNet, HalfEpochPlateauNet])
def test_a_scheduler_that_reacts_within_an_epoch_misses_no_step(
    tmp_path: Path, net: type[Net]
) -> None:
    limits = HALVES if net is HalfEpochPlateauNet else {}
    options: dict[str, Any] = {"net": net, "limits": limits, "every_n_train_steps": 5}
    whole, _ = train_with_callback(tmp_path / "whole", None, 2, **options)
    with pytest.raises(InterruptionError):
        train_with_callback(tmp_path / "parts", None, 2, [Interrupt(7)], **options)
    parts, _ = train_with_callback(tmp_path / "parts", None, 2, **options)
    assert equal(parts.state_dict(), whole.state_dict())


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Restores the handler of SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


class SendSignal(Callback):
    """Sends SIGTERM to this process before a batch, counted over all epochs."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, *_: Any) -> None:
        self.batch -= 1
        if self.batch == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("sigterm")
@pytest.mark.parametrize("after_signal", ["deliver", "return"])
def test_a_signal_saves_the_step_before_lightning_ends_the_training(
    tmp_path: Path, after_signal: str
) -> None:
    """Steps that are not due. Lightning calls its own handler of SIGTERM, then ours."""
    options: dict[str, Any] = {"every_n_train_steps": 100, "every_n_epochs": 100}
    whole, _ = train_with_callback(tmp_path / "whole", None, 2, limits=HALVES, **options)
    signals = {"save_on_signals": [signal.SIGTERM], "after_signal": after_signal}
    for step in (7, 10, 15):
        root = tmp_path / str(step)
        with pytest.raises(SIGTERMException):
            train_with_callback(
                root, None, 2, [SendSignal(step)], limits=HALVES, **options, **signals
            )
        assert steps_in(root) == [step]
        parts, _ = train_with_callback(root, None, 2, limits=HALVES, **options)
        if step != 10:  # the validation at the end of the epoch is not repeated
            assert equal(parts.state_dict(), whole.state_dict())


class RequeueAsLightning(Callback):
    """Saves as Lightning does before it requeues a Slurm job."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 7:
            connector = trainer._checkpoint_connector
            trainer.save_checkpoint(connector.hpc_save_path(trainer.default_root_dir))
            raise InterruptionError


def test_a_job_that_lightning_requeued_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint lacks the position of the sampler."""
    for name in ("NTASKS", "NTASKS_PER_NODE", "JOB_ID"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for name in ("LOCALID", "PROCID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    options: dict[str, Any] = {"limits": {"default_root_dir": tmp_path / "lightning"}}
    with pytest.raises(InterruptionError):
        train_with_callback(tmp_path / "run", None, 1, [RequeueAsLightning()], **options)
    with pytest.raises(sw.StateError, match=r"hpc_ckpt_1.*requeued the Slurm job.*save_on_signals"):
        train_with_callback(tmp_path / "run", None, 1, **options)


def test_a_new_training_in_the_root_of_another_is_refused(tmp_path: Path) -> None:
    train_with_callback(tmp_path, None, 2)
    with pytest.raises(sw.StateError, match=r"up to step 20.*at step 0: choose another root"):
        train_with_callback(tmp_path, None, 2, resume=None)


def test_two_callbacks_for_one_root_are_refused(tmp_path: Path) -> None:
    second = ShardwiseCheckpoint(tmp_path, every_n_train_steps=5, memory=None)
    with pytest.raises(sw.StateError, match="two ShardwiseCheckpoint callbacks for"):
        train_with_callback(tmp_path, None, 1, [second])


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"ShardwiseCheckpoint\(save_last=\): unknown option"):
        ShardwiseCheckpoint(tmp_path, save_last=True)


def test_a_loader_without_advance_is_named(tmp_path: Path) -> None:
    loader: Any = DataLoader(make_dataset())
    with pytest.raises(TypeError, match=r"a DataLoader has no method advance\(\): pass"):
        ShardwiseCheckpoint(tmp_path, data=loader)


def test_a_hyperparameter_that_needs_a_pickle_is_named(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[ShardwiseCheckpointIO()],
        callbacks=[ModelCheckpoint(tmp_path)],
    )  # fmt: skip
    net = Net()
    net.save_hyperparameters({"folder": tmp_path})
    with pytest.raises(sw.StateError, match=r"hyper_parameters\.folder.*hyperparameters\(ignore="):
        trainer.fit(net, DataLoader(make_dataset(), batch_size=GLOBAL_BATCH))


def test_an_epoch_without_validation_warns_of_no_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"check_val_every_n_epoch": 2}
    train_with_callback(tmp_path, None, 2, limits=limits, monitor="val_loss")
    assert not [each for each in caplog.records if "val_loss" in each.message]


def test_validations_at_steps_that_are_not_saved_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_with_callback(tmp_path, None, 2, monitor="val_loss", every_n_train_steps=3)
    messages = [each.message for each in caplog.records if "val_loss" in each.message]
    assert len(messages) == 1
    assert "no step was saved right after a validation until the end of epoch 0" in messages[0]


@pytest.mark.parametrize("is_data", [True, False])
def test_only_data_that_begin_anew_are_called_not_resumable(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, is_data: bool
) -> None:
    """In the middle of an epoch. Without `data=`, the loader of a resumed run begins its epoch."""
    with pytest.raises(InterruptionError):
        train_with_callback(tmp_path, None, callbacks=[Interrupt(5)], every_n_train_steps=3)
    recwarn.clear()
    if is_data:
        train_with_callback(tmp_path, None, every_n_train_steps=3)
    else:
        checkpoint = ShardwiseCheckpoint(tmp_path, every_n_train_steps=3, memory=None)
        limits: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", callbacks=[checkpoint], **limits)
        trainer.fit(Net(), DataLoader(make_dataset(), batch_size=GLOBAL_BATCH))
    warned = [str(each.message) for each in recwarn if "not resumable" in str(each.message)]
    assert len(warned) == (0 if is_data else 1)
