"""Phases of a run: each is started by torchrun, on its own number of workers, and may be killed."""

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
"""Seconds for a phase. Nothing should come near it, but on a machine that does much else."""


@dataclass(frozen=True)
class Phase:
    """So many workers, and how they share a model.

    Attributes:
        title: how, in a few words.
        script: what they run, with these options.
    """

    workers: int
    title: str
    script: str
    options: str = ""

    @property
    def name(self) -> str:
        """What it is on how many."""
        return f"{self.title} on {self.workers}"

    @property
    def command(self) -> str:
        """What a user would type, but for what all phases share."""
        return f"torchrun --nproc-per-node {self.workers} {self.script} {self.options}".rstrip()

    def arguments(self) -> list[str]:
        """The same, for this Python."""
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        script = (str(EXAMPLES / self.script), *self.options.split())
        return [*torchrun, "--nproc-per-node", str(self.workers), *script]


@dataclass(frozen=True)
class Run:
    """What all phases of a run share: its directory, its model, and how long it is trained."""

    out: Path
    blocks: int
    steps: int
    every: int

    def arguments(self) -> list[str]:
        """The options for it."""
        return [
            *("--root", str(self.out / "checkpoints"), "--blocks", str(self.blocks)),
            *("--steps", str(self.steps), "--every", str(self.every)),
        ]


@dataclass(frozen=True)
class Outcome:
    """What became of a phase.

    Attributes:
        killed: after this step a worker was killed; None: trained to the end.
        losses: of each step.
        saved: the steps that were saved.
        restored: step, place, bytes and seconds of the restore it began with, if it did.
        again: where it saved at once what it had restored.
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
        """The step that it went on from, or 0."""
        return self.restored["at"] if self.restored else 0

    @property
    def newest(self) -> int:
        """The newest step that was saved when it ended."""
        return max(self.saved, default=self.begun)

    def gaps(self, reference: dict[int, float]) -> dict[int, float]:
        """How far each loss is from the reference's at that step."""
        return {step: abs(loss - reference[step]) for step, loss in self.losses.items()}


def launch(run: Run, phase: Phase, killed: int | None = None) -> Outcome:
    """Start a phase, and wait until it has trained to the end, or was killed."""
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
                process.terminate()  # torchrun ends its workers then
                process.wait()
    said = output.read_text()
    as_meant = "SIGKILL" in said if killed else status == 0
    told = journal.entries(log)
    losses = {each["step"]: each["loss"] for each in told if "loss" in each}
    if not as_meant or not losses:
        sys.exit(f"{phase.name}: exit status {status}; {output} ends with\n{said[-3000:]}")
    saved = [each["at"] for each in told if each.get("event") == "save"]
    restored = next((each for each in told if each.get("event") == "load"), None)
    return Outcome(phase, killed, losses, saved, restored, again, time.monotonic() - began)
