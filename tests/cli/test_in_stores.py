"""Every command accepts URLs of object stores, as it accepts directories."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from tests.breadth import mostly_long
from tests.cli.conftest import Run
from tests.cli.states import Model, state
from tests.formats.test_in_stores import require_same
from tests.store.servers import Server, moto  # noqa: F401 - a fixture
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.telemetry_runs import save_of, write_telemetry


@pytest.fixture
def root(moto: Server) -> str:  # noqa: F811
    """The URL of a run with two steps."""
    url = moto.new_url()
    for step in (100, 200):
        sw.save(below(url, f"step-{step:08}"), state(step), step=step)
    return url


def trained_state() -> dict[str, object]:
    """A model and its optimizer after a step."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def below(url: str, name: str) -> str:
    """The URL of a name below a URL, with the same options."""
    path, _, options = url.partition("?")
    return f"{path}/{name}?{options}"


def test_a_root_is_listed_inspected_verified_and_compared(run: Run, root: str) -> None:
    listed = run("ls", root, "--json").document["checkpoints"]
    assert [(each["step"], each["state"]) for each in listed] == [
        (100, "committed"),
        (200, "committed"),
    ]
    shown = run("inspect", root)
    assert (shown.status, "model." in shown.out) == (0, True), shown.err
    assert max(map(len, run("ls", root).out.splitlines())) <= 80
    assert run("inspect", root, "step", "--json").document["value"] == 200
    verified = run("verify", root, "--json").document
    assert verified["intact"] is True
    compared = run("diff", below(root, "step-00000100"), below(root, "step-00000200"))
    assert compared.status == 1
    assert "step" in compared.out


def test_what_is_open_can_be_read_on_after_rm(
    run: Run,
    root: str,
    moto: Server,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = sw.open(root, step=100)
    name, shape = next((name, each.shape) for name, each in opened.tensors().items() if each.shape)
    ran = run("rm", root, "--step", "100", "--yes")
    assert (ran.status, "its files stay for an hour" in ran.out) == (0, True), ran.err
    assert opened[name].tensor().shape == shape
    listed = run("ls", root, "--json").document["checkpoints"]
    assert [each["state"] for each in listed] == ["removed", "committed"]
    verified = run("verify", root, "--json").document
    assert (verified["unfinished"], verified["removed"]) == ([], ["step-00000100"])
    with pytest.raises(sw.CheckpointNotFoundError, match="was removed by retention"):
        sw.open(below(root, "step-00000100"))
    later = time.time() + 3601
    monkeypatch.setattr("shardwise.kernel.engine.checkpoint_directory.time.time", lambda: later)
    assert run("rm", root, "--step", "100", "--yes").status == 0
    assert {key.partition("/")[0] for key in moto.keys(root)} == {"step-00000200"}
    with pytest.raises(sw.CheckpointNotFoundError, match="was removed by retention"):
        opened[name].tensor()


def test_a_prefix_with_files_of_torch_is_explained(run: Run, moto: Server, tmp_path: Path) -> None:  # noqa: F811
    url = moto.new_url()
    torch.save({"w": torch.ones(3)}, tmp_path / "last.pt")
    moto.put(url, "last.pt", (tmp_path / "last.pt").read_bytes())
    moto.put(url, "notes.txt", b"nothing")
    for place in (url, str(tmp_path)):
        ran = run("ls", place)
        assert ran.status != 0
        text = ran.err.replace("\n", "")
        assert "Open a checkpoint below: last.pt" in text
    shown = run("inspect", below(url, "last.pt"))
    assert (shown.status, "w" in shown.out) == (0, True), shown.err


def test_damage_is_found(run: Run, root: str, moto: Server) -> None:  # noqa: F811
    step = below(root, "step-00000100")
    (name,) = [name for name in moto.keys(step) if name.endswith(".safetensors")]
    data = bytearray(moto.read(step, name))
    data[len(data) // 2] ^= 1
    moto.put(step, name, bytes(data))
    assert run("verify", root).status == 1
    moto.put(step, name, bytes(data[:-1]))
    states = [each["state"] for each in run("ls", root, "--json").document["checkpoints"]]
    assert states == ["damaged", "committed"]


def test_a_wrong_name_gets_a_suggestion(run: Run, root: str) -> None:
    ran = run("inspect", below(root, "step-00000010"))
    assert ran.status != 0
    assert "step-00000100" in ran.err.replace("\n", "")
    ran = run("ls", below(root, "step-00000100"))
    assert (ran.status != 0, "is a checkpoint" in ran.err.replace("\n", " ")) == (True, True)


@pytest.mark.parametrize(
    "to", mostly_long(["native", "hf", "dcp", "torch", "deepspeed-universal"], ["native", "dcp"])
)
def test_exports_to_a_store_are_those_to_a_directory(
    run: Run,
    root: str,
    moto: Server,  # noqa: F811
    tmp_path: Path,
    to: str,
) -> None:
    source = below(root, "step-00000200")
    only = [] if to == "torch" else ["--only", "model.*"]
    if to == "deepspeed-universal":  # holds a model and its optimizer
        source, only = below(root, "step-00000300"), ["--model-key", "model"]
        sw.save(source, trained_state(), step=300)
    target = below(root, "exported")
    for place in (tmp_path / "here", target):
        ran = run("export", source, place, "--to", to, *only)
        assert ran.status == 0, ran.err
    files = moto.keys(target)
    names = {path.relative_to(tmp_path / "here").as_posix() for path in _files(tmp_path / "here")}
    if to == "native":  # names of data files are random
        assert len(files) == len(names)
        names = set(files)
    assert set(files) == names
    for name in names:
        downloaded = moto.read(target, name)
        copy = tmp_path / "copy" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(downloaded)
        if to != "native":
            assert downloaded == (tmp_path / "here" / name).read_bytes(), name
    weight = sw.open(source).tensors()["model.embed.weight"][...]
    if to == "hf":
        found = safetensors.torch.load_file(tmp_path / "copy" / "model.safetensors")
        assert torch.equal(found["embed.weight"], weight)
    elif to == "dcp":
        held = {"model": {"embed.weight": torch.zeros_like(weight)}}
        dcp.load(held, checkpoint_id=tmp_path / "copy", no_dist=True)
        assert torch.equal(held["model"]["embed.weight"], weight)
    elif to == "deepspeed-universal":
        assert "global_step300_universal/zero/embed.weight/exp_avg.pt" in names
        assert torch.equal(sw.open(target).tensors()["model.embed.weight"][...], weight)
        require_same(tmp_path / "here", target)
    elif to == "native":
        assert sw.open(target).verify().bytes_checked > 0
        assert torch.equal(sw.open(target).tensors()["model.embed.weight"][...], weight)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def gone(operation: str) -> None:
    raise OSError("the network is gone")


def test_an_interrupted_export_is_refused(root: str, moto: Server) -> None:  # noqa: F811
    source, target = below(root, "step-00000200"), below(root, "exported")
    target_store = FaultyStore(target, Fault(2, gone, verbs=("commit",)))
    with pytest.raises(OSError, match="the network is gone"):
        sw.export(source, target_store, max_file=600, only=["model.*"])
    with pytest.raises(sw.CheckpointExistsError, match="was interrupted: remove it"):
        sw.export(source, target, max_file=600, only=["model.*"])
    target = below(root, "again")
    sw.export(source, target, max_file=600, only=["model.*"])
    assert not [key for key in moto.keys(target) if key.startswith(".")]
    wanted, found = sw.open(source).tensors(), sw.open(target).tensors()
    assert all(torch.equal(found[name][...], wanted[name][...]) for name in found)
    with pytest.raises(sw.CheckpointExistsError, match="not empty"):
        sw.export(source, target, only=["model.*"])


def test_a_run_and_a_checkpoint_are_reported(run: Run, root: str, tmp_path: Path) -> None:
    for step, factor in ((100, 1.0), (200, 3.0)):
        place = below(root, f"step-{step:08}")
        table = save_of(8, step=step, noise=0, slow={"write": {3: factor}}, started=str(step))
        write_telemetry(place, table)
    page = tmp_path / "report.html"
    for place in (root, below(root, "step-00000200")):
        found = run("report", place, "-o", page, "--json").document
        assert found["operation"]["step"] == 200
        assert [each["group"]["ranks"] for each in found["stragglers"]] == [[3]]
        assert found["slowdown"]["other_step"] == 100
        assert found["problems"] == []
    assert "rank 3 on node-0000" in page.read_text(encoding="utf-8")
