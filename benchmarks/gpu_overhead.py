"""On an accelerator: the bandwidth of copies, and the overhead of snapshots.

Limits: the bandwidth of the link, and the same training without snapshots. The default shape is
that of a model with 0.27 billion parameters: its state has 3.2 GB. Within the steps from one
snapshot to the next, the state is copied, and the agent computes its checksums.

OMP_NUM_THREADS=4 python benchmarks/gpu_overhead.py --out gpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shardwise as sw
from benchmarks.harness import machine, round_digits
from benchmarks.training import Shape, Training
from shardwise.parts.memory.files import read_record
from shardwise.parts.memory.records import AgentInfo

NEVER = 1 << 30
WARM = 5
LEAST_STEP = 0.2
LINK_BYTES = 4 << 30
GOALS = {"link": 0.9, "mean": 0.01, "p99": 0.03}


def main() -> None:
    options = parse_arguments()
    if not torch.accelerator.is_available():
        sys.exit("no accelerator found: this benchmark needs one, for example a CUDA device")
    device = torch.device("cpu")
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        device = torch.device(accelerator.type, 0)
    shape = Shape(
        layers=options.layers,
        width=options.width,
        heads=options.width // 128,
        batch=options.batch,
        length=options.length,
        words=32768,
    )
    training = Training(shape, device, divided=False)
    home = Path(options.dir) / "shardwise-gpu-overhead"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as root:
        memory = sw.Memory(snapshot_every=1, overlap=True, dir=str(home), when_full="wait")
        checkpointer = sw.Checkpointer(root, save_every=NEVER, memory=memory)
        try:
            result = measure(training, checkpointer, device, options)
            checkpointer.close(wait=False)
        finally:
            clean(home)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)


def parse_arguments() -> argparse.Namespace:
    """Parse the options. The default model needs an accelerator with 80 GB."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--every", type=int, default=1, help="steps from a snapshot to the next")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps per way and round")
    parser.add_argument("--dir", default="/dev/shm", help="directory of snapshots")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    return parser.parse_args()


class Saves:
    """Saves the state of a training, and keeps the handles."""

    def __init__(self, checkpointer: sw.Checkpointer, training: Training, every: int) -> None:
        self.handles: list[sw.SaveHandle] = []
        self._checkpointer, self._training = checkpointer, training
        self._every, self._steps = every, 0

    def save(self) -> None:
        """Take a snapshot."""
        handle = self._checkpointer.save(len(self.handles) + 1, self._training.state)
        if handle is None:
            raise RuntimeError("a save was skipped instead of waiting for a slot")
        self.handles.append(handle)

    def save_if_due(self) -> None:
        """Take a snapshot at every n-th call."""
        self._steps += 1
        if self._steps % self._every == 0:
            self.save()


def measure(
    training: Training,
    checkpointer: sw.Checkpointer,
    device: torch.device,
    options: argparse.Namespace,
) -> dict[str, object]:
    """Measure everything; the ways to train take turns.

    A training that runs ahead queues work for the device without waiting for it. One that waits
    reads the loss after each step, so that the device is idle while `save` runs.
    """
    start = time.perf_counter()
    allocated = checkpointer.prepare(training.state)
    prepared = time.perf_counter() - start
    saves = Saves(checkpointer, training, options.every)
    training.run(WARM, saves.save)
    training.fence_ends_here()
    link = link_bandwidth(device)
    loops = {"ahead": training.run_ahead, "waiting": training.run}
    steps: dict[tuple[str, bool], list[float]] = {(k, s): [] for k in loops for s in (False, True)}
    waited: dict[str, list[float]] = {name: [] for name in loops}
    first = len(saves.handles)
    for _ in range(options.rounds):
        for (name, snapshots), found in steps.items():
            torch.accelerator.synchronize()
            timed = loops[name](options.steps, saves.save_if_due if snapshots else lambda: None)
            saves.handles[-1].result()
            found += timed.steps
            waited[name] += timed.waited if snapshots else []
    count = len(saves.handles) - first
    nbytes = sum(each.nbytes for each in training.tensors().values())
    copied = copy_bandwidth(saves, nbytes)
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "machine": machine(),
        "state_bytes": nbytes,
        "tensors": len(training.tensors()),
        "prepared": {"bytes": allocated, "seconds": round_digits(prepared)},
        "steps_from_snapshot_to_snapshot": options.every,
        "snapshots": count,
        "steps_of_each": options.rounds * options.steps,
        "seconds_of_a_step": {
            f"{name}, {'with' if snapshots else 'without'}": summary(found)
            for (name, snapshots), found in steps.items()
        },
        "seconds_waited": {name: summary(found) for name, found in waited.items()},
        "bytes_a_second": {"link": round_digits(link), "snapshot": round_digits(copied)},
        "goals": goals(steps, copied / link),
    }


def goals(steps: dict[tuple[str, bool], list[float]], of_link: float) -> list[dict[str, object]]:
    """Return the goals, and whether each is reached."""
    found = [goal("pinned copies, of the link", of_link, of_link >= GOALS["link"], "≥ 0.9")]
    for name in ("ahead", "waiting"):
        without, with_ = summary(steps[name, False]), summary(steps[name, True])
        reached = without["mean"] >= LEAST_STEP
        found.append(goal(f"{name}: seconds of a step without", without["mean"], reached, "≥ 0.2"))
        for key in ("mean", "p99"):
            slower = with_[key] / without[key] - 1
            text = f"{name}: slower, {key}"
            found.append(goal(text, slower, slower <= GOALS[key], f"≤ {GOALS[key]}"))
    return found


def goal(text: str, measured: float, reached: bool, wanted: str) -> dict[str, object]:
    """Return a goal in the format of the other benchmarks' results."""
    return {"goal": text, "wanted": wanted, "measured": round_digits(measured), "reached": reached}


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the mean, the median and the 99th percentile."""
    return {
        "mean": round_digits(statistics.mean(seconds)),
        "median": round_digits(statistics.median(seconds)),
        "p99": round_digits(statistics.quantiles(seconds, n=100, method="inclusive")[98]),
    }


def link_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a large copy into page-locked memory, the best of five."""
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    return LINK_BYTES / min(timed(lambda: target.copy_(source, non_blocking=True)) for _ in "12345")


def copy_bandwidth(saves: Saves, nbytes: int) -> float:
    """Return the bytes per second of our copy of the state, without training, the median of five.

    The copy begins when `save` returns.
    """
    found = []
    for _ in range(5):
        torch.accelerator.synchronize()
        saves.save()
        start = time.perf_counter()
        saves.handles[-1].staged()
        found.append(time.perf_counter() - start)
        saves.handles[-1].result()
    return nbytes / statistics.median(found)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the accelerator has finished some work."""
    torch.accelerator.synchronize()
    start = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def clean(home: Path) -> None:
    """Stop the agent and delete the snapshots."""
    for info in home.glob("*/agent.json"):
        agent = read_record(info, AgentInfo)
        if agent is not None:
            os.kill(agent.process, signal.SIGTERM)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
