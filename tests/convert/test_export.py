"""Checkpoints written anew: every element, in bounded memory, and nothing after a kill."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.breadth import mostly_long
from tests.tools.faulty_store import FULL_DISK, Fault, FaultyStore
from tests.tools.gang import Gang

RECORDS = ".shardwise-convert"
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.bool)


def state(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of many types and sizes: none, one element, and more than a buffer holds."""
    torch.manual_seed(seed)
    shapes = [(), (0, 3), (7,), (3, 5), (2, 3, 4), (1001, 33), (65, 1, 129)]
    tensors = {
        f"layer.{i}.{str(dtype)[6:]}": (torch.rand(shape) * 100).to(dtype)
        for i, shape in enumerate(shapes)
        for dtype in DTYPES
    }
    tensors["big"] = torch.randn(3000, 3000)
    tensors["tied"] = tensors["big"]
    return {"model": tensors, "optimizer": {"moment": torch.randn(10)}}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(path)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that the tests only read."""
    place = tmp_path_factory.mktemp("export") / "source"
    sw.save(place, {**state(), "epoch": 3}, step=5, metrics={"loss": 2.5})
    return place


def test_a_model_becomes_what_safetensors_reads(source: Path, tmp_path: Path) -> None:
    report = sw.export(source, tmp_path / "hf")
    expected = state()["model"]
    found = stored(tmp_path / "hf")
    assert found.keys() == expected.keys() - {"tied"}
    assert all(same(found[name], expected[name]) for name in found)
    assert sorted(os.listdir(tmp_path / "hf")) == ["model.safetensors"]
    assert report.left_out == (
        "tied: tied to model.big, which is stored",
        "tensors below optimizer (1): this format holds only the model, which is below 'model'",
        "plain values of epoch (1): this format holds only tensors",
    )
    assert report.bytes_written == (tmp_path / "hf" / "model.safetensors").stat().st_size


def test_large_models_are_split_and_have_an_index(source: Path, tmp_path: Path) -> None:
    sw.export(source, tmp_path / "hf", max_file=100_000, dtype="float16")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = stored(tmp_path / "hf")
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    for name, file in index["weight_map"].items():
        assert name in safetensors.torch.load_file(tmp_path / "hf" / file)
    for name, saved in state()["model"].items():
        if name != "tied":
            wanted = saved.to(torch.float16) if saved.is_floating_point() else saved
            assert same(found[name], wanted)


def test_what_is_native_stays_so_in_other_files(source: Path, tmp_path: Path) -> None:
    report = sw.export(source, tmp_path / "new", to="native", max_file=1_000_000)
    assert report.files > 5
    before, after = sw.open(source), sw.open(tmp_path / "new")
    assert set(after) == set(before)
    assert after.verify().bytes_checked > 0
    assert (after.step, after.layout.metrics) == (5, {"loss": 2.5})
    for name, tensor in before.tensors().items():
        assert same(after.tensors()[name][...], tensor[...])
    target = {**state(1), "epoch": 0}
    sw.load(tmp_path / "new", target)
    assert target["epoch"] == 3
    assert same(target["model"]["big"], state()["model"]["big"])


def test_what_is_tied_to_what_is_not_converted_is_stored(tmp_path: Path) -> None:
    weight = torch.randn(10)
    sw.save(tmp_path / "source", {"model": {"w": weight}, "ema": {"w": weight}})
    sw.export(tmp_path / "source", tmp_path / "new", to="native", dtype="float16")
    after = sw.open(tmp_path / "new").tensors()
    assert same(after["model.w"][...], weight.half())
    assert same(after["ema.w"][...], weight)


def test_ranks_share_the_files(source: Path, tmp_path: Path) -> None:
    def job(group: ThreadGroup) -> sw.ConversionReport:
        return sw.export(source, tmp_path / "hf", max_file=100_000, group=group)

    reports = run_ranks(3, job)
    written = [report.bytes_written for report in reports]
    assert min(written) > 0
    sizes = [path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors")]
    assert sum(written) == sum(sizes)
    assert reports[0].files == len(sizes)
    assert stored(tmp_path / "hf").keys() == state()["model"].keys() - {"tied"}


def test_what_was_broken_off_is_no_checkpoint_and_refused(source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"

    def gone(operation: str) -> None:
        raise OSError("the disk is gone")

    def export(fault: Fault | None = None) -> sw.ConversionReport:
        target = new if fault is None else FaultyStore(new, fault)
        return sw.export(source, target, to="native", max_file=100_000)

    with pytest.raises(OSError, match="gone"):
        export(Fault(2, gone, verbs=("write_at",)))
    with pytest.raises(sw.CheckpointNotFoundError):
        sw.open(new)
    with pytest.raises(sw.CheckpointExistsError, match=r"new is not empty|was interrupted"):
        export()
    assert not list(new.glob("*.part"))
    shutil.rmtree(new)
    export()
    assert sw.open(new).verify().bytes_checked > 0
    assert RECORDS not in os.listdir(new)


def test_a_full_disk_is_told(source: Path, tmp_path: Path) -> None:
    full = FaultyStore(tmp_path / "new", Fault(0, FULL_DISK, verbs=("write_at",), sticky=True))
    with pytest.raises(OSError, match=r"No space left.*: free some space.*new/r00000") as caught:
        sw.export(source, full, to="native")
    assert caught.value.errno == errno.ENOSPC
    shutil.rmtree(tmp_path / "new")
    sw.export(source, tmp_path / "new", to="native")
    assert sw.open(tmp_path / "new").verify().bytes_checked > 0


def test_what_is_damaged_on_the_way_is_noticed(source: Path, tmp_path: Path) -> None:
    def damage(operation: str) -> None:
        (path,) = (tmp_path / "hf").glob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    target = FaultyStore(tmp_path / "hf", Fault(0, damage, verbs=("open",)))
    with pytest.raises(sw.CorruptionError, match="does not read back as written"):
        sw.export(source, target)


def export_and_die(source: Path, target: Path, at: int | None) -> None:
    """Export a checkpoint; kill this process at a chunk, counted from 0."""
    fault = Fault(at, verbs=("write_at",))
    sw.export(source, FaultyStore(target, fault), to="native", max_file=2_000_000)


@pytest.mark.parametrize("at", mostly_long([0, 3], [3]))
def test_a_kill_leaves_nothing_that_looks_whole(
    gang: Gang, source: Path, tmp_path: Path, at: int
) -> None:
    new = tmp_path / "new"
    (outcome,) = gang.run_outcomes(export_and_die, source, new, at, world=1)
    assert outcome.kind == "died", outcome.report
    with pytest.raises(sw.CheckpointNotFoundError):
        sw.open(new)
    shutil.rmtree(new)
    gang.run(export_and_die, source, new, None, world=1)
    assert sw.open(new).verify().bytes_checked > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "gguf"}, "native, hf"),
        ({"dtype": "float31"}, "bfloat16"),
        ({"only": ["nothing"]}, "select none of"),
        ({"model_key": "net"}, "of model, optimizer"),
        ({"max_file": 0}, "at least 1"),
        ({"max_file": "1G"}, "a number of bytes"),
        (
            {"to": "native", "dtype": "float16", "model_key": "net"},
            "model_key='net': the checkpoint has no tensor",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(
    source: Path, tmp_path: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        sw.export(source, tmp_path / "hf", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "hf").exists()


def test_a_place_that_holds_something_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    with pytest.raises(sw.CheckpointExistsError, match=r"notes\.txt"):
        sw.export(source, tmp_path / "hf")
    assert os.listdir(tmp_path / "hf") == ["notes.txt"]


@pytest.mark.parametrize(
    ("target", "says"),
    [("", "expected a path"), ("~/new", "expanduser"), ("s3:///new", "s3://")],
)
def test_a_target_that_is_no_directory_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, says: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(sw.StoreError, match=says):
        sw.export(source, target)
    assert not os.listdir()


def test_a_target_may_be_a_url(source: Path, tmp_path: Path) -> None:
    sw.export(source, f"file://{tmp_path}/new", to="native")
    assert sw.open(tmp_path / "new").verify().bytes_checked > 0


def test_of_two_at_once_one_is_refused(source: Path, tmp_path: Path) -> None:
    refused = []

    def export_another(operation: str) -> None:
        with pytest.raises(sw.CheckpointExistsError, match="another process is writing"):
            sw.export(source, tmp_path / "new", to="native")
        refused.append(operation)

    target = FaultyStore(tmp_path / "new", Fault(0, export_another, verbs=("create",)))
    sw.export(source, target, to="native")
    assert len(refused) == 1
    assert sw.open(tmp_path / "new").verify().bytes_checked > 0
    assert RECORDS not in os.listdir(tmp_path / "new")


def test_one_that_was_killed_before_it_said_what_it_is_goes_on(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "new" / RECORDS).mkdir(parents=True)
    sw.export(source, tmp_path / "new", to="native")
    assert sw.open(tmp_path / "new").verify().bytes_checked > 0


def test_what_safetensors_cannot_hold_is_told(tmp_path: Path) -> None:
    whole = {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}
    sw.save(tmp_path / "source", {"model": whole})
    with pytest.raises(
        sw.StateError, match=r"c: safetensors does not support complex128: leave it out with skip="
    ):
        sw.export(tmp_path / "source", tmp_path / "hf", dtype="float32")
    sw.export(tmp_path / "source", tmp_path / "hf", skip=["*.c"])
    assert list(stored(tmp_path / "hf")) == ["w"]
