"""The command line as a whole: help, errors, how it starts."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise
import shardwise as sw
from tests.cli.conftest import Run
from tests.cli.states import save_steps

COMMANDS = ("ls", "inspect", "verify", "diff", "export", "rm")
PROBE = """
import runpy, sys
try:
    runpy.run_module("shardwise", run_name="__main__")
finally:
    sys.stderr.write(f"torch: {'torch' in sys.modules}")
"""


def shell(*args: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, which is no terminal."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(shardwise.__file__).parents[1]), **environ},
    )


def test_help_names_the_commands_and_the_keys(run: Run) -> None:
    shown = run("--help")
    assert shown.status == 0
    assert all(name in shown.out for name in COMMANDS)
    for name in COMMANDS:
        shown = run(name, "-h")
        assert shown.status == 0
        assert "--json" in shown.out
        assert max(map(len, shown.out.splitlines())) <= 80


def test_the_version_is_told(run: Run) -> None:
    assert run("--version").out == f"shardwise {shardwise.__version__}\n"


@pytest.mark.parametrize("args", [("frobnicate",), ("ls",), ("diff", "one"), ("ls", "--what")])
def test_wrong_use_exits_with_two(run: Run, args: tuple[str, ...]) -> None:
    ran = run(*args)
    assert (ran.out, ran.status) == ("", 2)
    assert "Error" in ran.err


def test_of_a_root_the_newest_is_read_or_a_step(run: Run, root: Path) -> None:
    (root / "step-00000400").mkdir()  # a save that was cut off
    assert run("inspect", root, "--json").document["step"] == 300
    assert run("inspect", root, "--step", "100", "--json").document["step"] == 100
    assert run("diff", root, root / "step-00000300").status == 0
    ran = run("inspect", root, "--step", "7")
    assert (ran.out, ran.status) == ("", 2)
    assert ran.err == (
        f"shardwise: {root} has no checkpoint of step 7 (newest steps: 100, 200, 300): "
        "choose one of these, or no step for the newest\n"
    )
    ran = run("inspect", root / "step-00000100", "--step", "100")
    assert (ran.status, "leave out --step" in ran.err) == (2, True)


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_checkpoints_below_other_names_are_named(
    run: Run, root: Path, tmp_path: Path, command: str
) -> None:
    (root / "step-00000300").rename(tmp_path / "final")
    ran = run(command, tmp_path, *([root] if command == "diff" else []))
    assert "Open a checkpoint below: final" in ran.err
    assert (ran.out, ran.status) == ("", 2)


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_wrong_paths_have_hints(run: Run, root: Path, command: str) -> None:
    (root / "step-00000500").mkdir()
    (root / "step-00000500" / "r00000-0123456789abcdef.safetensors").touch()
    (root.parent / "train.py").write_text("import torch\n")
    checkpoint = root / "step-00000300"
    for path, hint in [
        (f"{root.parent}/rum", f"there is no checkpoint; did you mean {root}?"),
        (f"{root.parent}/no/where", f"{root.parent}/no does not exist either"),
        (root.parent, f"Open a checkpoint below: {root.name}"),
        (f"{root.parent}/nowhere", "is empty: there is no checkpoint; check the path"),
        (f"{root}/step-00000500", "its save has not finished; load another checkpoint, or wait"),
        (f"{checkpoint}/manifest.json", f"pass its directory, {checkpoint}"),
        (f"{root.parent}/train.py", "train.py is not a checkpoint of a known format"),
        ("nonsense://bucket", "unknown scheme nonsense://"),
    ]:
        ran = run(command, path)
        assert hint in ran.err
        assert (ran.out, ran.status, ran.err.count("\n")) == ("", 2, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("export", "--to", "xx"), "--to xx: unknown format; choose one of "),
        (("export", "--dtype", "float33"), "--dtype float33: choose one of "),
        (
            ("export", "--dtype", "float16", "--model-key", "m"),
            "--dtype float16: --model-key m: the",
        ),
        (
            ("export", "--only", "a b", "--only", "c"),
            "write: --only 'a b' --only c and no --skip select none",
        ),
        (("export", "--format", "pth"), "--format pth selects another format: leave out --format"),
        (("inspect", "--format", "pth"), "--format pth selects another format: leave out --format"),
        (("inspect", "--step", "-1"), "--step -1: expected an integer of at least 0"),
        (("verify", "--format", "dcp"), "--format dcp selects another format: leave out --format"),
        (("diff", "--format-a", "hf"), "leave out --format-a or --format-b"),
    ],
)
def test_errors_name_the_options(
    run: Run, root: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    command, *options = args
    others = {"export": [tmp_path / "new"], "diff": [root]}.get(command, [])
    checkpoint = root if "--step" in args else root / "step-00000300"
    ran = run(command, checkpoint, *others, *options)
    assert message in ran.err
    assert (ran.out, ran.status) == ("", 2)


def test_errors_quote_paths_as_they_are(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "step=3" / "lr-format=hf"
    place.mkdir(parents=True)
    (place / "notes").touch()
    assert f"{place} is not a checkpoint" in run("inspect", place).err


def test_what_is_damaged_is_listed_with_success(run: Run, root: Path) -> None:
    (root / "step-00000200" / "manifest.json").write_text("{")
    ran = run("ls", root)
    assert (ran.status, "damaged" in ran.out) == (0, True)


def test_what_the_system_refuses_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").symlink_to(tmp_path / "elsewhere")
    ran = run("inspect", tmp_path)
    assert "symbolic link" in ran.err
    assert (ran.status, ran.err.count("\n")) == (1, 1)
    (tmp_path / "loop").symlink_to("loop")
    ran = run("ls", tmp_path / "loop")
    assert ran.err.startswith(f"shardwise: {tmp_path / 'loop'}")
    assert ran.status == 2


def test_the_module_runs(root: Path) -> None:
    done = shell("-m", "shardwise", "ls", root, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert '"step-00000300"' in done.stdout


@pytest.mark.parametrize("args", ["--help", "ls", "rm"])
def test_it_starts_without_torch(root: Path, args: str) -> None:
    place = {"ls": [root], "rm": [root, "--step=100", "--dry-run"]}.get(args, [])
    done = shell("-c", PROBE, args, *place)
    assert done.stderr == "torch: False"
    assert done.returncode == 0


def test_errors_leave_no_traceback(tmp_path: Path) -> None:
    done = shell("-m", "shardwise", "verify", tmp_path / "nothing")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("shardwise: ")
    assert "Traceback" not in done.stderr


def test_in_a_locale_without_utf8(tmp_path: Path) -> None:
    """Tables replace the characters that it lacks, and JSON escapes them."""
    name = "model.größe ✓"
    sw.save(tmp_path / "one", {"model": {"größe ✓": torch.ones(2)}})
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for args in (["inspect"], ["inspect", "--json"]):
        command = [sys.executable, "-m", "shardwise", *args, str(tmp_path / "one")]
        done = subprocess.run(command, env=environ, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), done.stderr
        assert done.stdout.isascii()
    assert [each["name"] for each in json.loads(done.stdout)["tensors"]] == [name]


def terminal(*args: str | Path, columns: int) -> list[str]:
    """What a terminal of so many columns is sent, by lines and rewritten lines."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "PYTHONUTF8": "1"}
    environ.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "shardwise", *map(str, args)]
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert child.wait() == 0
    return re.split(r"[\r\n]+|\x1b\[2K", shown.decode())


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)


@pytest.mark.long
def test_colour_is_for_terminals(root: Path) -> None:
    checkpoint = root / "step-00000100"
    assert "\x1b" not in shell("-m", "shardwise", "inspect", checkpoint).stdout
    assert any("\x1b[" in line for line in terminal("inspect", checkpoint, columns=100))


def test_all_fits_80_columns(tmp_path: Path) -> None:
    long = tmp_path / "run"
    save_steps(long, 100_000, 200_000)
    metrics = {"loss": 0.123456, "validation_accuracy": 0.5}
    sw.save(long / "step-00300000", {"x": torch.ones(5000)}, step=300_000, metrics=metrics)
    lines = [plain(line) for line in terminal("ls", long, columns=80)]
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert lines[0].split()[-2:] == ["ranks", "metrics"]
    (tmp_path / "run" / "step-00100000").rename(tmp_path / "one")
    bars = [plain(line) for line in terminal("verify", tmp_path / "one", columns=80)]
    bars = [line for line in bars if "━" in line]
    assert bars
    assert max(map(len, bars)) <= 80


@pytest.mark.parametrize(
    "command",
    [
        *("ls {root}", "rm {root} --step 100 --yes"),
        *(
            pytest.param(command, marks=pytest.mark.long)
            for command in (
                *("--help", "inspect {root} --all", "ls {root} --json", "inspect --help"),
                "verify {root}",
                *("verify {root}/step-00000100 --json", "diff {root} {root}/step-00000100"),
                *("export {root} {root}-hf --to hf", "agent status --dir {root}-home"),
            )
        ),
    ],
)
def test_a_closed_pipe_is_no_finding(root: Path, command: str) -> None:
    damaged = next((root / "step-00000200").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    reading, writing = os.pipe()
    os.close(reading)
    environ = {**os.environ, "PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    words = [sys.executable, "-m", "shardwise", *command.format(root=root).split()]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, env=environ, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
