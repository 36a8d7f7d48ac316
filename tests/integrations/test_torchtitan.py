"""torchtitan's own trainer with `ShardwiseCheckpointManager`: kill, resume, another mesh, options.

torchtitan needs other versions of packages than the tests. `make torchtitan` installs it into
`.venv-torchtitan`; without it, these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import shardwise as sw

PROJECT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
INTERPRETER = os.environ.get("TORCHTITAN_PYTHON", PROJECT / ".venv-torchtitan" / "bin" / "python")
TENSOR_PARALLEL = ("--parallelism.tensor_parallel_degree", "2")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not Path(INTERPRETER).exists(), reason="`make torchtitan` installs what this test needs"
    ),
]


@dataclass(frozen=True)
class Titan:
    """Runs torchtitan's debug model in a directory that has its tokenizer and data."""

    folder: Path

    def train(
        self,
        name: str,
        *options: str,
        ranks: int = 2,
        steps: int = 6,
        kill_after: int = 0,
        fails: bool = False,
        config: str = "debug_model_with_shardwise",
    ) -> tuple[dict[int, float], str]:
        """Train, and return the loss of each step, and what the program printed.

        Args:
            name: the directory of the run.
            options: torchtitan's options.
            kill_after: kill each rank after this step; 0 for never.
            fails: whether the program must fail.
        """
        losses = self.folder / f"{name}.jsonl"
        losses.unlink(missing_ok=True)
        command = [
            *(str(INTERPRETER), "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
            *(str(PROGRAMS / "titan_train.py"), str(losses), str(kill_after)),
            *("--module", "titan_configs", "--config", config, "--debug.seed", "0"),
            *("--training.steps", str(steps), "--dump_folder", str(self.folder / name), *options),
        ]
        paths = [str(PROJECT / "src"), str(PROGRAMS)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=600,
            check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == (kill_after > 0 or fails), done.stderr[-6000:]
        lines = losses.read_text().splitlines() if losses.exists() else []
        return {
            each["step"]: float.fromhex(each["loss"]) for each in map(json.loads, lines)
        }, done.stdout + done.stderr

    def checkpoints(self, name: str) -> Path:
        return self.folder / name / "checkpoint"


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Titan:
    folder = tmp_path_factory.mktemp("titan")
    subprocess.run(
        [str(INTERPRETER), str(PROGRAMS / "titan_assets.py"), str(folder)], check=True, timeout=300
    )
    return Titan(folder)


@pytest.fixture(scope="module")
def uninterrupted(titan: Titan) -> dict[int, float]:
    """The losses of a run on two ranks."""
    losses, _ = titan.train("uninterrupted")
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    return losses


def after(losses: dict[int, float], step: int) -> dict[int, float]:
    return {each: loss for each, loss in losses.items() if each > step}


def test_a_killed_run_goes_on_from_memory(titan: Titan, uninterrupted: dict[int, float]) -> None:
    snapshots = ("--checkpoint.snapshot_every", "1")
    before, _ = titan.train("killed", *snapshots, kill_after=3)
    assert before == {step: loss for step, loss in uninterrupted.items() if step <= 3}
    resumed, printed = titan.train("killed", *snapshots)
    assert "Training starts at step 4" in printed  # step 3 was only in memory
    assert resumed == after(uninterrupted, 3)


def test_a_run_goes_on_on_another_mesh(titan: Titan, uninterrupted: dict[int, float]) -> None:
    step = ("--checkpoint.load_step", "4")
    resumed, _ = titan.train(
        "uninterrupted", *step, *TENSOR_PARALLEL, "--checkpoint.load_only", ranks=4
    )
    assert resumed == pytest.approx(after(uninterrupted, 4), rel=1e-4)


def test_a_run_of_dcp_goes_on(titan: Titan, uninterrupted: dict[int, float]) -> None:
    titan.train("dcp", config="debug_model", kill_after=4)
    assert (titan.checkpoints("dcp") / "step-4" / ".metadata").exists()
    resumed, printed = titan.train("dcp")
    assert "continuing from a checkpoint of torchtitan's DCP back end" in printed
    assert resumed == after(uninterrupted, 4)
    assert sw.open(titan.checkpoints("dcp")).step == 6


def test_another_number_of_data_ranks_needs_another_loader_state(
    titan: Titan, uninterrupted: dict[int, float]
) -> None:
    load = ("--checkpoint.load_step", "4", "--checkpoint.load_only")
    _, printed = titan.train("uninterrupted", *load, ranks=1, fails=True)
    assert "leave out its state with --checkpoint.exclude_from_loading dataloader" in printed
    resumed, _ = titan.train(
        "uninterrupted", *load, "--checkpoint.exclude_from_loading", "dataloader", ranks=1
    )
    assert sorted(resumed) == [5, 6]


def test_options_for_the_first_and_last_checkpoint(
    titan: Titan, uninterrupted: dict[int, float]
) -> None:
    start = titan.checkpoints("uninterrupted") / "step-00000006"
    shared = (
        *("--checkpoint.initial_load_path", str(start), "--checkpoint.last_save_model_only"),
        *("--checkpoint.export_dtype", "bfloat16", "--checkpoint.interval", "1"),
        *("--checkpoint.keep_latest_k", "2"),
    )
    losses, _ = titan.train("native", *shared, ranks=1, steps=4)
    assert losses[1] < uninterrupted[1]
    hf_losses, _ = titan.train("hf", *shared, "--checkpoint.last_save_in_hf", ranks=1, steps=4)
    assert hf_losses == losses
    for name in ("native", "hf"):
        found = sorted(path.name for path in titan.checkpoints(name).glob("*step-*"))
        assert found == ["model-step-4", "step-00000002", "step-00000003"]
    native = sw.open(titan.checkpoints("native") / "model-step-4")
    published = sw.open(titan.checkpoints("hf") / "model-step-4")
    assert published.layout.format.startswith("Hugging Face")
    for name, hf_name in (("tok_embeddings", "model.embed_tokens"), ("norm", "model.norm")):
        one, other = native[f"model.{name}.weight"], published[f"model.{hf_name}.weight"]
        assert one.dtype == other.dtype == torch.bfloat16  # type: ignore[union-attr]
        assert torch.equal(one[...], other[...])  # type: ignore[index]
    hub = ("--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path")
    from_hf, _ = titan.train(
        "again", *hub, str(titan.checkpoints("hf") / "model-step-4"), ranks=1, steps=1
    )
    place = str(titan.checkpoints("native") / "model-step-4")
    from_native, _ = titan.train(
        "again-native", "--checkpoint.initial_load_path", place, ranks=1, steps=1
    )
    assert from_hf == from_native
