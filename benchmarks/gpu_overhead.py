"""On an accelerator: the bandwidth of copies, and the overhead of a snapshot at every step.

Limits: the bandwidth of the link, and the same training without snapshots.

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

import msgspec
import torch

import shardwise as sw
from benchmarks.harness import machine, round_digits
from benchmarks.training import Shape, Training

NEVER = 1 << 30
WARM = 5
LEAST_STEP = 0.2
LINK_BYTES = 4 << 30
GOALS = {"link": 0.9, "mean": 0.01, "p99": 0.03}


def main() -> None:
    options = parse_arguments()
    if not torch.accelerator.is_available():
        sys.exit("no accelerator found: this benchmark needs one, for example a CUDA device")
    device = torch.device(torch.accelerator.current_accelerator() or "cpu", 0)
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
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps per way and round")
    parser.add_argument("--dir", default="/dev/shm", help="directory of snapshots")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    return parser.parse_args()


def measure(
    training: Training,
    checkpointer: sw.Checkpointer,
    device: torch.device,
    options: argparse.Namespace,
) -> dict[str, object]:
    """Measure everything; training with and without snapshots takes turns."""
    start = time.perf_counter()
    allocated = checkpointer.prepare(training.state)
    prepared = time.perf_counter() - start
    handles: list[sw.SaveHandle] = []

    def save() -> None:
        handle = checkpointer.save(len(handles) + 1, training.state)
        if handle is None:
            raise RuntimeError("a save was skipped instead of waiting for a slot")
        handles.append(handle)

    training.run(WARM, save)
    training.fence_ends_here()
    link = link_bandwidth(device)
    steps: dict[bool, list[float]] = {False: [], True: []}
    waited: list[float] = []
    first = len(handles)
    for _ in range(options.rounds):
        for snapshots in (False, True):
            torch.accelerator.synchronize()
            timed = training.run(options.steps, save if snapshots else lambda: None)
            handles[-1].result()
            steps[snapshots] += timed.steps
            waited += timed.waited if snapshots else []
    nbytes = sum(each.nbytes for each in training.tensors().values())
    copied = copy_bandwidth(training, save, handles, nbytes)
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "machine": machine(),
        "state_bytes": nbytes,
        "prepared": {"bytes": allocated, "seconds": round_digits(prepared)},
        "snapshots": len(handles) - first,
        "steps_of_each": len(steps[True]),
        "seconds_of_a_step": {
            name: summary(steps[snapshots])
            for name, snapshots in (("without", False), ("with", True))
        },
        "seconds_waited": summary(waited),
        "bytes_a_second": {"link": round_digits(link), "snapshot": round_digits(copied)},
        "goals": goals(steps, copied / link),
    }


def goals(steps: dict[bool, list[float]], of_link: float) -> list[dict[str, object]]:
    """Return the goals, and whether each is reached."""
    without, with_ = summary(steps[False]), summary(steps[True])
    slower = {key: with_[key] / without[key] - 1 for key in ("mean", "p99")}
    return [
        goal("pinned copies, of the link", of_link, of_link >= GOALS["link"], "≥ 0.9"),
        goal("seconds of a step without", without["mean"], without["mean"] >= LEAST_STEP, "≥ 0.2"),
        goal("slower, mean", slower["mean"], slower["mean"] <= GOALS["mean"], "≤ 0.01"),
        goal("slower, p99", slower["p99"], slower["p99"] <= GOALS["p99"], "≤ 0.03"),
    ]


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


def copy_bandwidth(
    training: Training,
    save: Callable[[], object],
    handles: list[sw.SaveHandle],
    nbytes: int,
) -> float:
    """Return the bytes per second of our copy of the state, alone, the median of five."""

    def copy() -> None:
        save()
        handles[-1].staged()

    found = []
    for _ in range(5):
        found.append(timed(copy))
        handles[-1].result()
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
        os.kill(msgspec.json.decode(info.read_bytes())["process"], signal.SIGTERM)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
