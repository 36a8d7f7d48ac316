"""PyTorch DCP: what shardwise reads in place is what torch itself loads."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from tests.formats.dcp_checkpoints import FLAT, NESTED, named, settings_of, torch_loads
from tests.formats.foreign_goldens import opened, values_of
from tests.formats.reference import read_tensors
from tests.multirank.models import WORLDS, build
from tests.tools.gang import Gang


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes, dtype and shape."""
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)


@pytest.mark.parametrize("kind", [*NESTED, *FLAT])
def test_it_reads_what_torch_loads(dcp_saved: Path, kind: str) -> None:
    foreign = opened(dcp_saved / kind)
    state = torch_loads(dcp_saved / kind)
    expected, read = named(state), read_tensors(dcp_saved / kind, foreign)
    assert sorted(read) == sorted(expected)
    assert sum(name.endswith(".exp_avg") for name in read) == 4 * 6 + 2
    assert not [name for name in expected if not same(read[name], expected[name])]
    values = values_of(dcp_saved / kind)
    groups = values.pop("optimizer.param_groups")
    by_member = {member: group["value"] for group in groups for member in group["members"]}
    assert by_member == settings_of(state)
    assert len(groups) == 2
    assert values["step"] == state["step"] == 1
    assert not foreign.left_out
    assert foreign.world_size == WORLDS[kind]


def test_hyperparameters_that_a_pipeline_lost_are_told(dcp_saved: Path) -> None:
    """Without flattening, each stage writes its groups over those of the others."""
    foreign = opened(dcp_saved / "pipeline")
    expected = named(torch_loads(dcp_saved / "pipeline"))
    read = read_tensors(dcp_saved / "pipeline", foreign)
    assert sorted(read) == sorted(expected)
    assert len(foreign.left_out) == 1
    assert "the hyperparameters of 13 parameters are missing" in foreign.left_out[0]


@pytest.mark.parametrize("kind", ["fsdp2_uneven", "fsdp_tp"])
def test_a_run_resumes_from_it(gang: Gang, dcp_saved: Path, tmp_path: Path, kind: str) -> None:
    gang.run(resume, [str(dcp_saved / kind)], str(tmp_path), world=2)
    expected = named(torch_loads(dcp_saved / kind))
    checkpoint = sw.open(tmp_path / "0")
    found = {name: checkpoint[name] for name in expected}
    assert checkpoint["scheduler"] == torch_loads(dcp_saved / kind)["scheduler"]
    assert not [name for name in expected if not same(found[name][...], expected[name])]


def resume(places: list[str], root: str) -> None:
    """Load into another parallelism, and save what there is then."""
    for i, place in enumerate(places):
        state = build("fsdp2", 2)
        sw.load(place, state)
        sw.save(f"{root}/{i}", state)


def test_what_was_compressed_is_refused(dcp_saved: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint._extension import StreamTransformExtension

    class Plain(StreamTransformExtension):
        """Changes nothing, and yet a reader must know it."""

        @staticmethod
        def registry_name() -> str:
            return "stream.plain"

        @staticmethod
        def from_descriptor(version: str) -> Plain:
            return Plain()

        def get_descriptor(self) -> str:
            return "stream.plain/1"

        def transform_to(self, output: Any) -> Any:
            return output

        def transform_from(self, input: Any) -> Any:  # noqa: A002
            return input

    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Plain()])
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with pytest.raises(sw.FormatError, match=r"w was saved with stream.plain/1.*without"):
        opened(tmp_path)


def test_lies_of_the_metadata_are_refused(tmp_path: Path) -> None:
    """An item out of its file, a file out of the place, and another shape than was stored."""
    dcp.save({"weight": torch.ones(5, 3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    ((index, place),) = metadata.storage_data.items()
    chunk = metadata.state_dict_metadata["weight"].chunks[0]
    lies = [
        (replace(place, offset=2**40), chunk, "contains a wrong length|the file was truncated"),
        (replace(place, offset=8, length=900), chunk, "are not a file of torch.save"),
        (replace(place, relative_path="../../etc/passwd"), chunk, "1 is missing"),
        (place, replace(chunk, sizes=torch.Size([3, 5])), ".metadata says float32 of shape"),
        (place, replace(chunk, offsets=torch.Size([1, 0])), "does not say where it is"),
    ]
    for where, box, complaint in lies:
        metadata.storage_data = {index: where}
        metadata.state_dict_metadata["weight"].chunks = [box]
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(sw.FormatError, match=complaint):
            opened(tmp_path)


def test_metadata_runs_nothing(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    dcp.save({"weight": torch.ones(5)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = {"weight": Attack()}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(sw.FormatError, match="contains objects of classes that shardwise does not"):
        opened(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_a_transposed_tensor_and_a_flat_module(tmp_path: Path) -> None:
    """An array keeps its order in the file; what is flat is a module's state_dict."""
    weight = torch.arange(15.0).reshape(5, 3).t()
    dcp.save({"layer.weight": weight, "b": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    foreign = opened(tmp_path)
    read = read_tensors(tmp_path, foreign)
    assert sorted(read) == ["model.b", "model.layer.weight"]
    assert same(read["model.layer.weight"], weight)
    assert foreign.pieces.stride.tolist().count([1, 3]) == 1


def test_a_conjugated_view_is_refused_by_name(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex64).conj()}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(sw.FormatError, match=r"\.distcp: model\.b: .*conjugated .*resolve_conj"):
        sw.open(tmp_path / "dcp")


def test_files_that_are_missing_are_named(dcp_saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "part"
    shutil.copytree(dcp_saved / "fsdp2", place)
    lost = sorted(path.name for path in place.glob("*.distcp"))[1:]
    for name in lost:
        (place / name).unlink()
    listed = ", ".join(lost)
    with pytest.raises(
        sw.FormatError, match=rf"that \.metadata names, .* missing: {listed}\. Copy"
    ):
        sw.open(place)
