"""The wheel, as users install it: what is in it, the start of the tutorial, and an agent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

import shardwise
from tests.docs.blocks import blocks_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwise"
NOT_SOURCES = (".*", "build", "dist", "site", "node_modules", "*.egg-info", "__pycache__")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that `make dist` makes, made of a copy of the sources."""
    pytest.importorskip("build", reason="pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    # Without isolation, because tests need no network.
    command = ["-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    subprocess.run([sys.executable, *command, str(folder / "source")], check=True, timeout=300)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel. Only its dependencies are shared."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = sysconfig.get_path("purelib", "venv", vars=paths)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    # Without the path to the sources, where pip would find shardwise installed already.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*pip, "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, env=environ, check=True)
    # The dependencies, but not the editable installation of shardwise beside them.
    shared = sysconfig.get_path("purelib")
    Path(packages, "dependencies.pth").write_text(f"{shared}\n", encoding="utf-8")
    return folder / "bin"


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert wheel.name == f"shardwise-{shardwise.__version__}-py3-none-any.whl"
    assert metadata["Version"] == shardwise.__version__
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= {
        *metadata.get_all("Classifier", [])
    }
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    payload = metadata.get_payload(decode=True)
    assert isinstance(payload, bytes)
    assert payload.decode().strip() == readme.strip()


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    """Also `py.typed` and the specifications, which are no modules."""
    needed = {
        f"shardwise/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"shardwise/py.typed", "shardwise/parts/formats/specs/megatron_llama.spec"} <= needed
    about = f"shardwise-{shardwise.__version__}.dist-info"
    more = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    with zipfile.ZipFile(wheel) as archive:
        assert {*archive.namelist()} == needed | {f"{about}/{name}" for name in more}
        license_text = archive.read(f"{about}/licenses/LICENSE")
    assert license_text == (ROOT / "LICENSE").read_bytes()


def test_the_sources_are_enough_to_build_it(dist: Path) -> None:
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/shardwise/py.typed"} <= names


def run(programs: Path, folder: Path, *command: str) -> str:
    """Run a program of the environment as a user does; return its output."""
    program, *args = command
    done = subprocess.run(
        [programs / program, *args],
        cwd=folder,
        env=environment(programs),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
    return done.stdout


def environment(programs: Path) -> dict[str, str]:
    """The variables of a user's shell: none that leads to the sources."""
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return {"PATH": path, "HOME": str(programs), "OMP_NUM_THREADS": "1"}


def test_the_tutorial_and_an_agent_run_from_the_wheel(programs: Path, tmp_path: Path) -> None:
    (script,) = (block.text for block in blocks_of("tutorial.md") if block.title == "train.py")
    plain = 'sw.Checkpointer("runs/first", '
    assert plain in script
    # With an agent of this test, not with one that other tests have started in /dev/shm.
    script = script.replace(plain, f'{plain}memory=sw.Memory(dir="memory"), ')
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    (tmp_path / "memory").mkdir()
    found = run(programs, tmp_path, "python", "-c", "import shardwise; print(shardwise.__file__)")
    assert Path(found.strip()).is_relative_to(programs.parent)
    agent = subprocess.Popen(
        [programs / "shardwise", "agent", "run", "--dir", "memory"],
        cwd=tmp_path,
        env=environment(programs),
    )
    try:
        assert "starts at step 0\n" in run(programs, tmp_path, "python", "train.py", "--steps=12")
        said = run(programs, tmp_path, "python", "train.py", "--steps=20")
        assert said == "starts at step 12\n"
        shown = run(programs, tmp_path, "shardwise", "agent", "status", "--dir=memory", "--json")
        assert json.loads(shown)["process"] == agent.pid
        run(programs, tmp_path, "shardwise", "agent", "stop", "--dir=memory")
        assert agent.wait(60) == 0
    finally:
        agent.kill()
        agent.wait()
    steps = json.loads(run(programs, tmp_path, "shardwise", "ls", "runs/first", "--json"))
    assert [each["step"] for each in steps["checkpoints"]] == [5, 10, 12, 15, 20]
    run(programs, tmp_path, "shardwise", "verify", "runs/first")
    assert "0.weight" in run(programs, tmp_path, "shardwise", "inspect", "runs/first")
    specs = "import shardwise as sw; print(sw.spec('megatron_llama', vocab=8, heads=2, groups=1))"
    assert "Megatron-Core" in run(programs, tmp_path, "python", "-c", specs)
