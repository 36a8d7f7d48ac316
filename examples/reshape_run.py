"""Run the phases of a training run with torchrun, each on its own number of workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import journal

EXAMPLES = Path(__file__).parent
PATIENCE = 180.0
"""Time limit of a phase in seconds; only a heavily loaded machine should come near it."""


@dataclass(frozen=True)
class Phase:
    """A number of workers, and the parallelism under which they train.

    Attributes:
        title: short description of the parallelism.
        script: script that the workers run.
        options: options of the script.
    """

    workers: int
    title: str
    script: str
    options: str = ""

    @property
    def name(self) -> str:
        """The parallelism and the number of workers."""
        return f"{self.title} on {self.workers}"

    @property
    def command(self) -> str:
        """The command that a user would type, without the options that all phases share."""
        return f"torchrun --nproc-per-node {self.workers} {self.script} {self.options}".rstrip()

    def arguments(self) -> list[str]:
        """Return the command line for this Python interpreter."""
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        script = (str(EXAMPLES / self.script), *self.options.split())
        return [*torchrun, "--nproc-per-node", str(self.workers), *script]


@dataclass(frozen=True)
class Run:
    """The settings that all phases of a run share: directory, model and training steps."""

    out: Path
    blocks: int
    steps: int
    every: int

    def arguments(self) -> list[str]:
        """Return the options for the scripts."""
        return [
            *("--root", str(self.out / "checkpoints"), "--blocks", str(self.blocks)),
            *("--steps", str(self.steps), "--every", str(self.every)),
        ]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a phase.

    Attributes:
        killed: step after which a worker was killed, or None if the phase trained to the end.
        losses: loss of each step.
        saved: steps that were saved.
        restored: step, place, bytes and seconds of the initial restore, if there was one.
        again: directory to which the phase saved the restored state again.
        seconds: duration of the phase.
    """

    phase: Phase
    killed: int | None
    losses: dict[int, float]
    saved: list[int]
    restored: dict[str, Any] | None
    again: Path
    seconds: float

    @property
    def begun(self) -> int:
        """The step from which the phase resumed, or 0."""
        return self.restored["at"] if self.restored else 0

    @property
    def newest(self) -> int:
        """The newest step that was saved when the phase ended."""
        return max(self.saved, default=self.begun)

    def gaps(self, reference: dict[int, float]) -> dict[int, float]:
        """Return the difference of each loss from the reference, by step."""
        return {step: abs(loss - reference[step]) for step, loss in self.losses.items()}


def launch(run: Run, phase: Phase, killed: int | None = None) -> Outcome:
    """Start a phase and wait until it has trained to the end or is killed."""
    run.out.mkdir(parents=True, exist_ok=True)
    number = len(list(run.out.glob("phase-*.txt")))
    log, output, again = (run.out / f"phase-{number}{end}" for end in (".jsonl", ".txt", "-again"))
    command = [
        *(*phase.arguments(), *run.arguments(), "--journal", str(log)),
        *(("--again", str(again)) if number else ()),
        *(("--die-at", str(killed)) if killed else ()),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    began = time.monotonic()
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            status = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun then ends its workers
                process.wait()
    said = output.read_text(encoding="utf-8")
    as_planned = "SIGKILL" in said if killed else status == 0
    entries = journal.entries(log)
    losses = {each["step"]: each["loss"] for each in entries if "loss" in each}
    if not as_planned or not losses:
        sys.exit(f"{phase.name}: exit status {status}; {output} ends with\n{said[-3000:]}")
    saved = [each["at"] for each in entries if each.get("event") == "save"]
    restored = next((each for each in entries if each.get("event") == "load"), None)
    return Outcome(phase, killed, losses, saved, restored, again, time.monotonic() - began)
