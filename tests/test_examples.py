"""The scripts of new users: coming from DCP's tutorial, from Lightning, and with a Trainer."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import shardwise as sw
from tests.breadth import mostly_long
from tests.tools.gang import Gang

ROOT = Path(__file__).parents[1]


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
    module.main()


def assert_same(here: dict[str, Any], there: dict[str, Any], model: str, optimizer: str) -> None:
    """Tensors of one checkpoint against those of another, in which the two have other names."""
    for name, tensor in here.items():
        key, _, rest = name.partition(".")
        other = there[f"{model if key == 'model' else optimizer}.{rest}"]
        assert torch.equal(tensor[...], other[...]), name


class AppState(Stateful):
    """Word for word as in the tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def train_as_in_the_tutorial(folder: Path) -> None:
    """Ten steps, saved by DCP after five and after ten."""
    script = example("from_dcp")
    model, optimizer = script.build_model_and_optimizer()
    for step in range(10):
        script.train_step(model, optimizer, step)
        if step in (4, 9):
            dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder / str(step + 1))


def resume_from_the_tutorial(arguments: list[str]) -> None:
    """Run the example as a rank, with the variables that torchrun sets."""
    dist.destroy_process_group()  # the script makes its own
    with patch.object(sys, "argv", ["from_dcp.py", *arguments]):
        example("from_dcp").main()


def resume_under_torchrun(gang: Gang, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, str(ROOT / "examples" / "from_dcp.py"), *arguments],
        check=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def resume_in_gang(gang: Gang, arguments: list[str]) -> None:
    gang.run(resume_from_the_tutorial, arguments, world=2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "resume", mostly_long([resume_in_gang, resume_under_torchrun], [resume_in_gang])
)
def test_a_training_of_dcps_tutorial_goes_on(
    gang: Gang, tmp_path: Path, resume: Callable[[Gang, list[str]], None]
) -> None:
    gang.run(train_as_in_the_tutorial, tmp_path, world=4)
    options = ["--dcp", str(tmp_path / "5"), "--dcp-step=5", "--steps=10"]
    resume(gang, [*options, "--root", str(tmp_path / "run")])
    ours, theirs = sw.open(tmp_path / "run" / "step-00000010"), sw.open(tmp_path / "10")
    assert (ours["epoch"], len(ours.tensors())) == (0, len(theirs.tensors()))
    assert_same(ours.tensors(), theirs.tensors(), "app.model", "app.optim")


def test_a_training_of_lightning_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning", reason="the training that goes on is one of Lightning")
    from tests.compat.foreign import make_lightning

    made = tmp_path / "made"
    make_lightning.main(made)
    script, run = example("from_lightning"), tmp_path / "run"
    start = made / "epoch=0-step=10.ckpt"
    run_main(script, monkeypatch, "--start", start, "--root", run, "--steps", "15")
    start.unlink()  # from now on, the run goes on from what it saved itself
    run_main(script, monkeypatch, "--start", start, "--root", run, "--steps", "20")
    ours, theirs = sw.open(run / "step-00000020"), sw.open(made / "epoch=0-step=20.ckpt")
    assert len(ours.tensors()) == 16
    assert_same(ours.tensors(), theirs.tensors(), "model.net", "optimizer.net")


@pytest.mark.long
def test_a_trainer_of_transformers_goes_on_from_ours_and_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    from transformers import Trainer

    script = example("hf_trainer")
    script.make_trainer(script.ShardwiseTrainer, str(tmp_path / "whole"), 10).train()
    run_main(script, monkeypatch, "--output", tmp_path / "parts", "--steps", "5")
    run_main(script, monkeypatch, "--output", tmp_path / "parts", "--steps", "10")
    script.make_trainer(Trainer, str(tmp_path / "stock"), 5).train()
    run_main(script, monkeypatch, "--output", tmp_path / "stock", "--steps", "10")
    whole = sw.open(tmp_path / "whole" / "shardwise", step=10).tensors()
    assert sum(name.startswith("optimizer.") for name in whole) > 50
    for other in ("parts", "stock"):
        found = sw.open(tmp_path / other / "shardwise", step=10).tensors()
        assert found.keys() == whole.keys()
        assert_same(whole, found, "model", "optimizer")


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell; what ends a cell shows itself."""
    monkeypatch.chdir(tmp_path)
    document = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    names: dict[str, Any] = {}
    shown: list[Any] = []
    for cell in (each for each in document["cells"] if each["cell_type"] == "code"):
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "notebook", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
    _, opened, best, read, boxes, norms, groups, published = shown
    assert repr(opened).startswith("<Checkpoint notebook/a/step-00000040 step=40 ")
    assert opened.step == 40
    assert best[0] in (10, 20, 30, 40)
    assert (tuple(read[0]), tuple(read[2].shape)) == ((32, 8), (4, 2))
    assert [rank for _, rank in boxes] == [0]
    assert list(norms) == [10, 20, 30, 40]
    assert groups[0]["value"]["lr"] == 0.01
    weight = torch.as_tensor(sw.open("notebook/a")["model.0.weight"])
    assert torch.equal(published["model.0.weight"][...], weight.bfloat16())
