"""The demo of failures runs, and would tell if something were not as it should be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = ("--steps", "15", "--blocks", "1", "--failures", "2")


def demo(out: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "failures.py"), "--out", str(out), *options]
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=580,
    )


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_killed_trainer_and_a_lost_host_cost_neither_storage_nor_a_bit(on_disk: Path) -> None:
    done = demo(on_disk / "out", *SHORT)
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    killed, lost = re.findall(r"resumed as (.+) from (.+) at step (\d+)", done.stdout)
    assert killed[:2] == ("FSDP on 4", "memory")
    assert lost[:2] == ("TP on 3", "memory")
    assert int(lost[2]) >= 5
    assert (on_disk / "out" / "failures.png").read_bytes().startswith(b"\x89PNG")


def test_a_machine_without_the_tools_is_told_so(on_disk: Path) -> None:
    done = demo(on_disk, PATH=str(on_disk))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"skipped: .+\n", done.stdout)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parts of the demo, and a story in which all went well."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import failures_hosts
    import failures_report

    def launch(name: str, parallel: str, first: int, last: int) -> Any:
        journal = tmp_path / f"{name}.jsonl"
        losses = {step: 3.0 - 0.1 * step for step in range(first, last)}
        write(journal, losses)
        return failures_hosts.Launch(name, parallel, ["host-0"], [journal])

    failure = SimpleNamespace(title="something fails", source="memory", cost=1)
    recovery = SimpleNamespace(
        failure=failure, source="memory", step=4, reached=5, origin={"decoded": 7}, read=7
    )
    reference = launch("reference", "fsdp", 0, 9)
    story = SimpleNamespace(
        launches=[launch("before", "fsdp", 0, 5), launch("after", "tp", 4, 9)],
        recoveries=[recovery],
    )
    return SimpleNamespace(
        story=story,
        recovery=recovery,
        faults=lambda: failures_report.failed_checks(story, reference),
    )


def write(journal: Path, losses: dict[int, float]) -> None:
    entries = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    journal.write_text("\n".join([*entries, ""]), encoding="utf-8")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("source", "storage", "resumed from storage, not memory"),
        ("reached", 6, "at most 1 may be lost"),
        ("reached", 3, "at most 1 may be lost"),
        ("step", 5, "restored step 5, resumed at 4"),
        ("read", 8, "8 bytes of state were read, but the sources add up to 7"),
        ("origin", {"root": 1 << 22}, "but the sources add up to 4194304"),
    ],
)
def test_a_recovery_that_is_not_as_it_should_be_is_told(
    told: Any, field: str, value: object, said: str
) -> None:
    assert told.faults() == []
    setattr(told.recovery, field, value)
    assert said in "\n".join(told.faults())


@pytest.mark.parametrize(
    ("launch", "step", "off", "is_fault"),
    [(0, 3, 1e-15, True), (1, 4, 9e-6, False), (1, 4, 2e-5, True), (1, 8, 4e-5, False)],
)
def test_losses_that_are_off_are_told(
    told: Any, launch: int, step: int, off: float, is_fault: bool
) -> None:
    which = told.story.launches[launch]
    losses = which.losses
    losses[step] *= 1 + off
    write(which.journals[0], losses)
    assert bool(told.faults()) == is_fault


def test_a_run_that_ends_too_early_is_told(told: Any) -> None:
    which = told.story.launches[-1]
    losses = which.losses
    del losses[8]
    write(which.journals[0], losses)
    assert told.faults() == ["after: did not train to the end"]
