"""Run the benchmarks, and write their tables and figures into README.md and the documentation."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import rewrite_pages

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PICTURES = [DOCS / "images" / name for name in ("results.py", "scale.py")]
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Run:
    """One benchmark with a number of processes and a dtype."""

    question: str
    processes: int = 2
    dtype: str = "float32"


RUNS = [
    *(
        Run(q, n, t)
        for q in ("durable_save", "load")
        for n in (2, 4)
        for t in ("float32", "bfloat16")
    ),
    *(Run("reshard", 4, dtype) for dtype in ("float32", "bfloat16")),
    *(
        Run(question)
        for question in (
            "many_tensors",
            "memory",
            "planning",
            "checksums",
            "snapshots",
            "snapshots_large",
        )
    ),
    *(Run("overhead", processes) for processes in (1, 2)),
    *(Run("read_once", processes) for processes in (4, 8)),
    Run("scale", 1),
    Run("data_loader", 1),
    Run("adapters", 1),
    Run("object_store"),
    Run("stall"),
    Run("steady_save", 1),
    Run("steady_ranks", 4),
    Run("rebuild", 3),
    Run("recover", 4),
    *(Run("foreign_resume", processes) for processes in (1, 4)),
    *(Run(f"foreign_{question}") for question in ("load", "dequantize", "export")),
    *(Run(f"foreign_{question}", 1) for question in ("open", "check")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    questions = list(dict.fromkeys(run.question for run in RUNS))
    groups = {question.split("_")[0] for question in questions}
    named = f"benchmarks to run: {', '.join(questions)}, or `foreign` (default: all)"
    parser.add_argument("questions", nargs="*", help=named)
    parser.add_argument("--dir", default="bench-out", help="working directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="run each benchmark once, briefly")
    parser.add_argument(
        "--page", action="store_true", help="write tables and figures from earlier results"
    )
    options = parser.parse_args()
    unknown = set(options.questions) - set(questions) - groups
    if unknown:
        parser.error(
            f"unknown benchmark: {', '.join(sorted(unknown))}; choose from: {', '.join(questions)}"
        )
    asked = options.questions or questions
    chosen = [run for run in RUNS if run.question in asked or run.question.split("_")[0] in asked]
    if options.quick:
        chosen = list({run.question: run for run in chosen}.values())
    failed = [] if options.page else [run for run in chosen if not ask(run, options)]
    if not options.quick:
        rewrite_pages([DOCS.parent / "README.md", *DOCS.rglob("*.md")], RESULTS)
        for picture in PICTURES:
            subprocess.run([sys.executable, picture], check=True)
    if failed:
        sys.exit(f"{len(failed)} benchmarks failed, see above: " + "; ".join(map(str, failed)))


def ask(run: Run, options: argparse.Namespace) -> bool:
    """Run one benchmark under torchrun; return whether it succeeded."""
    print(f"== {run.question}, {run.processes} processes, {run.dtype}", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={run.processes}", "--module", f"benchmarks.{run.question}"]
    command += [f"--dir={options.dir}", f"--rounds={options.rounds}", f"--dtype={run.dtype}"]
    command += ["--quick"] if options.quick else [f"--results={RESULTS}"]
    path = os.pathsep.join([str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = path
    return subprocess.run(command, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    main()
