"""Specifications as users give them: over files of ranks, and over checkpoints of any format."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks

TEXT = """
ranks tp pp
let layers
model.embed -> model.embed [(tp v) h] on pp = 0
model.layers.{i}.up -> model.layers.{pp * layers + i}.up [(tp f) h]
model.layers.{i}.norm -> model.layers.{pp * layers + i}.norm [h]
"""
TP, PP, LAYERS, F, H = 2, 3, 2, 4, 5


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"embed": torch.randn(TP * 7, H)}
    for i in range(PP * LAYERS):
        tensors[f"layers.{i}.up"] = torch.randn(TP * F, H)
        tensors[f"layers.{i}.norm"] = torch.randn(H)
    return tensors


def of_rank(tp: int, pp: int) -> dict[str, torch.Tensor]:
    tensors = whole()
    found = {"embed": tensors["embed"].chunk(TP)[tp]} if pp == 0 else {}
    for i in range(LAYERS):
        found[f"layers.{i}.up"] = tensors[f"layers.{pp * LAYERS + i}.up"].chunk(TP)[tp]
        found[f"layers.{i}.norm"] = tensors[f"layers.{pp * LAYERS + i}.norm"]
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for tp in range(TP):
        for pp in range(PP):
            folder = tmp_path / f"mp_rank_{tp:02d}_{pp:03d}"
            folder.mkdir()
            state = {"model": of_rank(tp, pp), "iteration": 7, "args": {"lr": 0.1}}
            torch.save(state, folder / "model.pt")
    return tmp_path


PATTERN = "mp_rank_{tp}_{pp}/model.pt"


def same(found: sw.Checkpoint, prefix: str = "model.") -> bool:
    expected = {prefix + name: tensor for name, tensor in whole().items()}
    read = {name: tensor[...] for name, tensor in found.tensors().items()}
    return read.keys() == expected.keys() and all(
        torch.equal(read[name], expected[name]) for name in read
    )


def test_files_of_ranks_are_one_checkpoint(files: Path) -> None:
    found = sw.open(files, spec=sw.spec(TEXT, files=PATTERN, layers=LAYERS))
    assert same(found)
    assert found["iteration"] == 7
    assert found["args.lr"] == 0.1


def test_ranks_load_their_parts(files: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine.spec"
    text.write_text(TEXT)
    spec = sw.spec(text, files=PATTERN, layers=LAYERS)

    def load(group: ThreadGroup) -> torch.Tensor:
        rows = TP * F // 4
        box = sw.Box((rows * group.rank, 0), (rows, H))
        out = torch.zeros(rows, H)
        shards = sw.Shards((TP * F, H), torch.float32, [(box, out)])
        state = {"model": {"layers": {"3": {"up": shards}}}}
        sw.load(files, state, spec=spec, only=["model.layers.3.up"], group=group)
        return out

    loaded = torch.cat(run_ranks(4, load))
    assert torch.equal(loaded, whole()["layers.3.up"])


def test_safetensors_of_ranks_are_read_too(tmp_path: Path) -> None:
    for rank in range(2):
        safetensors.torch.save_file({"w": torch.full((2, 3), rank)}, tmp_path / f"{rank}.st")
    found = sw.open(tmp_path, spec=sw.spec("ranks r\nw -> w [(r a) b]", files="{r}.st"))
    assert found.tensors()["w"][...].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2


def test_a_published_model_is_exported_under_other_names(files: Path, tmp_path: Path) -> None:
    spec = sw.spec(TEXT, files=PATTERN, layers=LAYERS)
    sw.export(files, tmp_path / "hf", spec=spec)
    back = sw.spec(
        "model.embed -> model.wte [v h]\nmodel.layers.{i}.up -> model.h.{i}.fc [h f]\n".replace(
            "[h f]", "[f h]"
        )
        + "skip model.layers.*.norm"
    )
    found = sw.open(tmp_path / "hf", spec=back)
    assert torch.equal(found.tensors()["model.wte"][...], whole()["embed"])
    assert torch.equal(found.tensors()["model.h.5.fc"][...], whole()["layers.5.up"])


def test_copies_are_compared_by_a_verification_and_an_export(
    files: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("exported")
    spec = sw.spec(TEXT, files=PATTERN, layers=LAYERS)
    stored = sum(
        entry.file_size
        for file in files.rglob("model.pt")
        for entry in zipfile.ZipFile(file).infolist()
    )
    report = sw.open(files, spec=spec).verify()
    assert (report.bytes_checked, report.bytes_compared) == (stored, PP * LAYERS * H * 4)
    assert report.bytes_unchecked == 0
    path = files / "mp_rank_01_001" / "model.pt"
    state = torch.load(path)
    state["model"]["layers.1.norm"][3] += 1
    torch.save(state, path)
    reads: list[Callable[[], object]] = [
        lambda: sw.open(files, spec=spec).verify(),
        lambda: sw.export(files, tmp_path / "out", spec=spec),
    ]
    for read in reads:
        with pytest.raises(sw.MismatchError, match="the copies differ") as caught:
            read()
        (problem,) = caught.value.problems
        assert problem.startswith("model.layers.3.norm: two copies differ, first at [3]: ")
        for name in ("mp_rank_00_001/model.pt", "mp_rank_01_001/model.pt"):
            at = int(problem.partition(f"{name} at byte ")[2].split(",")[0])
            content = (files / name).read_bytes()
            norm = torch.load(files / name)["model"]["layers.1.norm"]
            assert content[at : at + 4] == norm[3].numpy().tobytes()
    assert not list((tmp_path / "out").glob("*"))
    # A load reads the first copy.
    out = torch.zeros(H)
    state = {"model": {"layers": {"3": {"norm": out}}}}
    sw.load(files, state, spec=spec, only=["model.layers.3.norm"])
    assert torch.equal(out, whole()["layers.3.norm"])


def test_what_is_missing_is_said(files: Path) -> None:
    spec = sw.spec(TEXT, files=PATTERN, layers=LAYERS)
    (files / "mp_rank_01_002" / "model.pt").unlink()
    with pytest.raises(sw.FormatError, match=r"5 files like .*not 6 \(tp=2, pp=3\)"):
        sw.open(files, spec=spec)
    with pytest.raises(sw.CheckpointNotFoundError, match="no file matches"):
        sw.open(files, spec=sw.spec(TEXT, files="rank_{tp}.pt", layers=LAYERS))


def test_what_does_not_fit_is_listed(files: Path) -> None:
    text = TEXT.replace("model.layers.{i}.norm -> model.layers.{pp * layers + i}.norm [h]\n", "")
    with pytest.raises(sw.MismatchError) as caught:
        sw.open(files, spec=sw.spec(text, files=PATTERN, layers=LAYERS))
    assert any("norm" in problem for problem in caught.value.problems)


def test_a_wrong_text_shows_where(tmp_path: Path) -> None:
    with pytest.raises(sw.SpecError, match=r":2:6: .*\n.*w -> \[\(\n.*\^"):
        sw.spec("ranks tp\nw -> [(")
    with pytest.raises(sw.StateError, match="nor a built-in specification"):
        sw.spec("llama7")
    with pytest.raises(sw.StateError, match="has a `->` on each line"):
        sw.spec("a => b")
    with pytest.raises(sw.StateError, match="whole number"):
        sw.spec(TEXT, layers="2")  # type: ignore[arg-type]


def test_values_of_other_ranks_are_told(files: Path) -> None:
    path = files / "mp_rank_01_002" / "model.pt"
    state = torch.load(path)
    torch.save({**state, "iteration": 8, "more": True}, path)
    found = sw.open(files, spec=sw.spec(TEXT, files=PATTERN, layers=LAYERS))
    assert found["iteration"] == 7
    assert list(found.left_out) == [
        "iteration: 1 ranks have other values; the first rank's is taken",
        "more: missing in the first rank's file, whose values are taken",
    ]
