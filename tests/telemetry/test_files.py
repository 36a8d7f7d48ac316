"""Where telemetry is stored, and that it is a file of its save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.kernel.manifest.manifest import decode_manifest, telemetry_file
from shardwise.kernel.store import LocalStore, Store
from shardwise.parts.telemetry import files
from tests.memory_store import MemoryStore, Server
from tests.telemetry.tables import same, table_of


@pytest.fixture(params=["local", "object store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path) if request.param == "local" else MemoryStore(Server())


def test_the_telemetry_of_a_save_is_in_its_directory(root: Store) -> None:
    table = table_of(range(4), 4)
    checkpoint = root.at("step-00000100")
    assert files.read_file(checkpoint, telemetry_file(table.id)) is None
    files.write_of_save(checkpoint, table)
    files.write_of_save(checkpoint, table)  # again, for example by another attempt
    assert checkpoint.list() == [f"telemetry-{table.id}.json.gz"]
    found = files.read_file(checkpoint, telemetry_file(table.id))
    assert found is not None
    assert same(found, table)


def test_damage_names_the_file(root: Store) -> None:
    table = table_of(range(4), 4)
    root.publish(telemetry_file(table.id), b"damage", replace=True)
    with pytest.raises(
        sw.FormatError, match=rf"/{telemetry_file(table.id)}: the telemetry is dama"
    ):
        files.read_file(root, telemetry_file(table.id))


def test_operations_are_listed_oldest_first(root: Store) -> None:
    assert files.list_operations(root) == []
    names = [
        files.write_operation(
            root,
            table_of(range(2), 2, operation=operation, started=f"2026-11-27T04:0{minute}:00+00:00"),
        )
        for operation, minute in (("snapshot", 5), ("restore", 3), ("snapshot", 4))
    ]
    root.at(files.DIRECTORY).publish("notes.txt", b"of somebody else", replace=True)
    assert files.list_operations(root) == [names[1], names[2], names[0]]
    assert names[1] == f"restore-20261127T040300Z-{'ab' * 8}.json.gz"
    found = files.read_file(root.at(files.DIRECTORY), names[1])
    assert found is not None
    assert found.operation == "restore"


def test_old_operations_are_removed(root: Store) -> None:
    for second in range(5):
        started = f"2026-11-27T04:00:0{second}+00:00"
        files.write_operation(
            root, table_of(range(1), 1, operation="snapshot", started=started), keep=3
        )
    assert [name[22:24] for name in files.list_operations(root)] == ["02", "03", "04"]


def save_with_telemetry(place: Path, value: float = 1.0, *, overwrite: bool = False) -> str:
    """Save, store telemetry beside the checkpoint, and return the id of the save."""
    sw.save(place, {"w": torch.full((8,), value)}, group=sw.SoloGroup(), overwrite=overwrite)
    save_id = decode_manifest((place / "manifest.json").read_bytes()).save_id
    files.write_of_save(LocalStore(place), table_of(range(1), 1, id=save_id))
    return save_id


def test_a_checkpoint_is_read_with_any_telemetry(tmp_path: Path) -> None:
    place = tmp_path / "step-00000001"
    telemetry = place / telemetry_file(save_with_telemetry(place))
    for damage in (lambda: None, lambda: telemetry.write_bytes(b"?"), telemetry.unlink):
        damage()
        state = {"w": torch.zeros(8)}
        sw.load(place, state, group=sw.SoloGroup())
        assert state["w"].tolist() == [1.0] * 8
        assert sw.open(place).verify().intact
        assert [each.state for each in sw.list_checkpoints(tmp_path).checkpoints] == ["committed"]


def test_a_replaced_checkpoint_loses_its_telemetry(tmp_path: Path) -> None:
    first = save_with_telemetry(tmp_path)
    second = save_with_telemetry(tmp_path, 2.0, overwrite=True)
    assert not (tmp_path / telemetry_file(first)).exists()
    third = save_with_telemetry(tmp_path, 3.0, overwrite=True)
    assert not (tmp_path / telemetry_file(second)).exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "manifest.json",
        f"r00000-{third}.safetensors",
        telemetry_file(third),
    ]


def test_a_removed_checkpoint_loses_its_telemetry(tmp_path: Path) -> None:
    place = tmp_path / "step-00000001"
    save_with_telemetry(place)
    (place / f".{telemetry_file('ab' * 8)}.01234567").write_bytes(b"of a writer that was killed")
    sw.remove(place)
    assert not place.exists()


def test_telemetry_alone_is_a_leftover(tmp_path: Path) -> None:
    place = tmp_path / "step-00000001"
    files.write_of_save(LocalStore(place), table_of(range(1), 1))
    with sw.Checkpointer(tmp_path, memory=None):
        assert not place.exists()
