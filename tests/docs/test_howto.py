"""The code of the tutorial, of the concepts and of the how-to pages runs as the pages say."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml

import shardwise as sw
from tests.docs.blocks import (
    DOCS,
    PRINTED,
    Block,
    blocks_of,
    changed_by,
    check_syntax,
    run_python,
    run_shardwise,
)
from tests.store.servers import Server, moto, s3_client  # noqa: F401 - a fixture
from tests.tools.agents import end_agents
from tests.tools.gang import Gang

RUN_BY_OTHER_TESTS = {
    f"howto/{name}.md"
    for name in (
        *("deepspeed", "free-memory", "gpus", "index", "kubernetes", "memory-size"),
        *("object-stores", "slurm"),
    )
}
HOWTO = sorted(page.relative_to(DOCS).as_posix() for page in (DOCS / "howto").glob("*.md"))
SECONDS_TO_SAVE = 30.0


@pytest.mark.parametrize("page", ["concepts.md", "index.md", "telemetry.md", "tutorial.md", *HOWTO])
def test_every_block_parses(page: str) -> None:
    for block in blocks_of(page):
        check_syntax(block)
        floats = [each for each in PRINTED.findall(block.text) if re.search(r"\d\.\d", each)]
        assert not floats, "another processor computes other floats"


@pytest.mark.parametrize(
    "page", ["agent.md", "concepts.md", "telemetry.md", *sorted({*HOWTO} - RUN_BY_OTHER_TESTS)]
)
def test_python_of_the_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "telemetry.md":
        for package in ("opentelemetry.sdk", "tensorboard"):
            pytest.importorskip(package, reason="pip install '.[test]'")
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("shardwise")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers])  # the page of telemetry adds one
    monkeypatch.setattr(logger, "level", logger.level)
    names: dict[str, Any] = {"sw": sw}
    for block in blocks_of(page):
        if block.language == "python":
            run_python(block, names, page)


def run_script(arguments: list[str], gang_has_group: bool) -> str:
    """Run train.py in this process; return what it prints."""
    if gang_has_group:
        dist.destroy_process_group()  # the script makes its own
    output = StringIO()
    with patch.object(sys, "argv", arguments), redirect_stdout(output):
        runpy.run_path("train.py", run_name="__main__")
    return output.getvalue()


def train_on_gang(gang: Gang, command: list[str], printed: str) -> None:
    """Run `torchrun … train.py …` or `python train.py …` on a gang, and compare what it prints."""
    program, arguments = command[0], command[command.index("train.py") :]
    world = int(command[command.index("--nproc-per-node") + 1]) if program == "torchrun" else 1
    outcomes = gang.run_outcomes(run_script, arguments, world > 1, world=world, timeout=100)
    if "--kill-at" in command:
        assert [outcome.kind for outcome in outcomes] == ["died"] * world
        return
    assert outcomes[0].value == f"{printed}\n", outcomes


def train_with_torchrun(command: list[str], printed: str) -> None:
    program = [sys.executable]
    if command[0] == "torchrun":
        program += ["-m", "torch.distributed.run"]
    done = subprocess.run(
        [*program, *command[1:]], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode != 0) == ("--kill-at" in command), done.stderr
    if printed:
        assert printed in done.stdout.splitlines(), done.stdout + done.stderr


def wait_for_saved_step(command: list[str]) -> None:
    """Wait until the agents have written the last step before a kill that is due to the root."""
    step = int(command[command.index("--kill-at") + 1]) // 5 * 5
    end = time.monotonic() + SECONDS_TO_SAVE
    while not Path(f"runs/first/step-{step:08d}/manifest.json").exists():
        assert time.monotonic() < end, f"step {step} is not saved"
        time.sleep(0.05)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("how", ["gang", pytest.param("torchrun", marks=pytest.mark.long)])
def test_the_tutorial_runs(
    how: str, gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On warm workers, or as written, with torchrun."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks_of("tutorial.md"):
        if block.title == "train.py":
            Path("train.py").write_text(block.text, encoding="utf-8")
        elif block.language == "diff":
            Path("train.py").write_text(
                changed_by(block, Path("train.py").read_text(encoding="utf-8")), encoding="utf-8"
            )
        elif block.language == "python":
            run_python(block, names, "tutorial.md")
        elif block.language == "sh":
            run_commands(block, how, gang)


def run_commands(block: Block, how: str, gang: Gang) -> None:
    for command, printed in block.commands():
        if command[0] == "shardwise":
            run_shardwise(command)
        elif how == "gang":
            train_on_gang(gang, command, printed)
        else:
            train_with_torchrun(command, printed)
        if "--kill-at" in command:
            wait_for_saved_step(command)


@pytest.mark.long
@pytest.mark.timeout(280)
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install '.[frameworks]'",
)
def test_the_page_of_deepspeed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    script, commands, export = (
        block for block in blocks_of("howto/deepspeed.md") if block.language in ("python", "sh")
    )
    Path("train.py").write_text(script.text, encoding="utf-8")
    for command, printed in commands.commands():
        assert command.pop(0) == "DS_ACCELERATOR=cpu"
        train_with_torchrun(command, printed)
    run_python(export, {"sw": sw}, "howto/deepspeed.md")
    assert sw.open("universal").step == 15


@contextmanager
def signal_before_step(step: int, number: int) -> Iterator[None]:
    """Send this process a signal before `Checkpointer.save` of a step."""
    save = sw.Checkpointer.save

    def send_then_save(self: sw.Checkpointer, at: int, *args: Any, **options: Any) -> Any:
        if at == step:
            os.kill(os.getpid(), number)
        return save(self, at, *args, **options)

    with patch.object(sw.Checkpointer, "save", send_then_save):
        yield


def script_of(page: str) -> str:
    """The training script of a page."""
    (script,) = (block.text for block in blocks_of(page) if block.title == "train.py")
    return script


def train_until_signal(script: str, step: int, number: int) -> tuple[int, int | None, str]:
    """Run a script that gets a signal before it saves a step.

    Returns its last step, its first step, and the reason of its exit, if it is not a success.
    """
    dist.destroy_process_group()  # the script makes its own
    names: dict[str, Any] = {}
    reason = ""
    try:
        with signal_before_step(step, number):
            exec(compile(script, "train.py", "exec"), names)
    except SystemExit as end:
        reason = str(end.code)
    checkpointer = names["checkpointer"]
    dist.destroy_process_group()
    report = checkpointer.last_restore
    return checkpointer.latest(), report and report.step, reason


def test_the_script_for_slurm_requeues_and_resumes(
    gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scontrol").write_text('#!/bin/sh\necho "$@" >> called\n', encoding="utf-8")
    Path("scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    script = script_of("howto/slurm.md")
    for step, first in ((3, None), (5, 3)):
        ends = gang.run(train_until_signal, script, step, signal.SIGUSR1, world=2, timeout=100)
        assert ends == [(step, first, "")] * 2
    assert Path("called").read_text(encoding="utf-8") == "requeue 4711\n" * 2


def test_the_job_for_slurm_has_its_options_before_its_commands() -> None:
    (job,) = (block.text for block in blocks_of("howto/slurm.md") if block.title == "train.sbatch")
    lines = [line for line in job.splitlines() if line]
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert lines[0] == "#!/bin/bash"
    assert options == list(range(1, len(options) + 1))
    assert "#SBATCH --signal=USR1@300" in lines


def test_the_script_for_kubernetes_saves_when_it_is_evicted(
    gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "as torchrun sets it")
    script = script_of("howto/kubernetes.md")
    for old, new in (
        ('"/snapshots"', repr(str(tmp_path))),
        ("s3://bucket/runs/a", "runs/a"),
        ("start_agent=False, ", ""),
        ('interface="eth0", ', ""),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    for step, first in ((3, None), (5, 3)):
        ends = gang.run(train_until_signal, script, step, signal.SIGTERM, world=2, timeout=100)
        assert ends == [(step, first, "evicted")] * 2


def test_the_job_for_kubernetes_fits_together() -> None:
    (manifest,) = (
        block.text for block in blocks_of("howto/kubernetes.md") if block.language == "yaml"
    )
    service, job = yaml.safe_load_all(manifest)
    spec = job["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    containers = [*spec["initContainers"], *spec["containers"]]
    for container in containers:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/snapshots"}
    assert spec["restartPolicy"] == "OnFailure"  # otherwise the snapshots end with the training
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    command = spec["containers"][0]["command"]
    assert f"--nnodes={job['spec']['completions']}" in command
    assert f"--master-addr={job['metadata']['name']}-0.{spec['subdomain']}" in command
    arguments = spec["initContainers"][0]["command"]
    assert arguments[:3] == ["shardwise", "agent", "run"]
    assert arguments[arguments.index("--dir") + 1] == "/snapshots"
    assert 'dir="/snapshots"' in script_of("howto/kubernetes.md")


def test_the_page_of_object_stores_runs(
    moto: Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    s3_client(moto.endpoint).create_bucket(Bucket="bucket")
    # In /dev/shm, another program may have started the agent, which then has other credentials.
    names: dict[str, Any] = {"own": sw.Memory(dir=str(tmp_path), snapshot_every=0, slots=1)}
    for block in [*blocks_of("howto/object-stores.md"), *blocks_of("storage.md")]:
        if block.language == "python":
            text, count = re.subn(r'(Checkpointer\("[^"]+", )', r"\1memory=own, ", block.text)
            assert count == block.text.count("Checkpointer(")
            run_python(Block("python", "", text), names, "howto/object-stores.md")
    assert sw.open("s3://bucket/runs/b").step == 1
    assert list(Path("nvme/runs/b").glob("step-*"))
    end_agents(tmp_path)


def test_the_page_of_memory_frees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another directory than /dev/shm, which other tests use."""
    monkeypatch.chdir(tmp_path)
    node = tmp_path / "node"
    node.mkdir()
    memory = sw.Memory(dir=str(node))
    checkpointer = sw.Checkpointer("runs/left", save_every=1000, memory=memory)
    checkpointer.restore({"value": 1})
    handle = checkpointer.save(1, {"value": 1})
    assert handle is not None
    handle.committed(SECONDS_TO_SAVE)
    checkpointer.close(wait=False)
    for block in blocks_of("howto/free-memory.md"):
        for command, _ in block.commands() if block.language == "sh" else ():
            run_shardwise([*command, "--dir", str(node)])
    assert not list(node.rglob("*.safetensors"))


def test_the_page_of_the_size_of_memory_follows_its_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = "howto/memory-size.md"
    rows = re.findall(
        r"^\| (.*?) \| (\S+ GiB|–) \| (\S+ GiB) \|$",
        (DOCS / page).read_text(encoding="utf-8"),
        re.M,
    )
    slots_and_protection = [(0, 0), (1, 0), (2, 0), (2, 1 / (4 - 1)), (2, 1)]
    assert len(rows) == len(slots_and_protection)
    state = 8_030_261_248 * 12 / 2**30
    for (name, *sizes), (slots, protection) in zip(rows, slots_and_protection, strict=True):
        for nodes, size in zip((1, 4), sizes, strict=True):
            node = state / nodes
            needed = (slots + 1) * node + slots * node * protection if slots else node / 8
            assert size == "–" or float(size.split()[0]) == pytest.approx(needed, rel=0.005), name
    for block in blocks_of(page):
        if block.language == "python":
            text = block.text.replace("Memory(", f"Memory(dir={str(tmp_path)!r}, ")
            run_python(Block("python", "", text), {}, page)


def test_the_script_for_gpus_resumes_on_one_process(
    gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs, with gloo."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script_of("howto/gpus.md"), encoding="utf-8")
    for world, step in ((2, 0), (1, 3)):
        arguments = ["train.py", f"--steps={step + 3}"]
        outcomes = gang.run(run_script, arguments, True, world=world, timeout=100)
        assert outcomes[0] == f"starts at step {step}\n"


@pytest.mark.long
def test_the_script_for_gpus_goes_on_bit_for_bit_after_a_kill(
    gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script_of("howto/gpus.md"), encoding="utf-8")
    options = ["train.py", "--steps=15", "--root"]
    killed = gang.run_outcomes(run_until_killed, [*options, "parts"], 13, world=2, timeout=100)
    assert [outcome.kind for outcome in killed] == ["died"] * 2
    resumed = gang.run(run_script, [*options, "parts"], True, world=2, timeout=100)
    assert resumed[0] == "starts at step 10\n"
    gang.run(run_script, [*options, "whole"], True, world=2, timeout=100)
    whole, parts = (sw.open(root, step=15).tensors() for root in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name][...], parts[name][...]) for name in whole)


def run_until_killed(arguments: list[str], step: int) -> None:
    """Run train.py, and kill this process before the save of a step."""
    with signal_before_step(step, signal.SIGKILL):
        run_script(arguments, True)
