"""Damaged records: each is noticed, fails no more than its save, and no wait for it is endless."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shardwise as sw
from shardwise.errors import StoreError
from shardwise.manifest.manifest import FileEntry
from shardwise.manifest.names import step_directory
from shardwise.memory.files import decode_record, encode_record
from shardwise.memory.records import (
    AgentInfo,
    PendingManifest,
    PersistRequest,
    ProtectRequest,
    RemoveOldRequest,
    Retry,
    RingFile,
    StagedFile,
    StageOutcome,
)
from shardwise.memory.redundancy.placement import Member, Protection, ProtectionGroup
from tests.memory.test_snapshots import shm, signal_agents

__all__ = ["shm"]
SAVE = "0123456789abcdef"
FILE = f"r00000-{SAVE}.safetensors"
GROUP = ProtectionGroup((Member("a", "", ()),))
STAGED = StagedFile(FileEntry(FILE, 0, 8, 0, 0, 0, 0), "r00000-0.slot", 2, ("commit", "persist"))
RECORDS = [
    AgentInfo("a", "http://127.0.0.1:1", "t"),
    STAGED,
    RingFile(GROUP, FILE, "r00000-1.slot", None, {FILE: (0, 8)}),
    PendingManifest(
        save_id=SAVE, step=1, manifest="{}", files=[(FILE, "a")], nodes=[], leader="a", root="/r"
    ),
    PersistRequest(save_id=SAVE, root="/r", files=[FILE], wait=1.0),
    ProtectRequest(save_id=SAVE, protection=Protection(SAVE, (GROUP,)), nodes=[], wait=1.0),
    RemoveOldRequest(save_id=SAVE, step=1, root="/r", keep={}),
    Retry(save_id=SAVE, stage="persist", failure="no answer", since=0.0, attempts=1),
    StageOutcome(save_id=SAVE, stage="commit"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: type(each).__name__)
def test_each_flipped_bit_is_noticed(record: msgspec.Struct) -> None:
    encoded = encode_record(record)
    assert decode_record(encoded, type(record), "it") == record
    for bit in range(8 * len(encoded)):
        data = bytearray(encoded)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreError, match=r"^it: the record is damaged: "):
            decode_record(bytes(data), type(record), "it")
    for size in range(len(encoded)):
        with pytest.raises(StoreError, match=r"^it: the record is damaged: "):
            decode_record(encoded[:size], type(record), "it")


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (STAGED, {"stages": ("cOmmit",)}),
        (STAGED, {"slot": "../slot"}),
        (STAGED, {"snapshots_to_keep": -1}),
        (RECORDS[2], {"parity_index": -1}),
        (RECORDS[3], {"save_id": "another"}),
        (RECORDS[3], {"files": [("../file", "a")]}),
        (RECORDS[4], {"wait": -1.0}),
        (RECORDS[6], {"step": -1}),
        (RECORDS[7], {"stage": "cOmmit"}),
        (RECORDS[8], {"save_id": "ABCDEF"}),
        (RECORDS[8], {"bytes": -1}),
    ],
)
def test_values_that_no_trainer_and_no_agent_writes_are_damage(
    record: msgspec.Struct, wrong: dict[str, Any]
) -> None:
    encoded = encode_record(msgspec.structs.replace(record, **wrong))
    with pytest.raises(StoreError, match=r"^it: the record is damaged: "):
        decode_record(encoded, type(record), "it")


def values(step: int) -> torch.Tensor:
    return torch.full((9,), float(step))


def saved(checkpointer: sw.Checkpointer, step: int) -> sw.SaveHandle:
    """Save the values of a step."""
    handle = checkpointer.save(step, {"t": values(step)})
    assert handle is not None
    return handle


def memory(shm: Path) -> sw.Memory:
    """In a directory of the test's own. Only a failure to notice damage waits as long as this."""
    return sw.Memory(dir=str(shm), wait=300.0)


def test_a_flipped_bit_fails_its_save_and_no_other(tmp_path: Path, shm: Path) -> None:
    other = sw.Checkpointer(tmp_path / "other", save_every=1, memory=memory(shm))
    hit = sw.Checkpointer(tmp_path / "hit", save_every=1, memory=memory(shm), on_failure="warn")
    with other, hit:
        saved(hit, 1).result(60.0)
        signal_agents(shm, signal.SIGSTOP)
        damaged = saved(hit, 2)
        (staged,) = shm.glob(f"shardwise-*/runs/*/{step_directory(2)}/*.staged.json")
        data = staged.read_bytes()
        assert data.count(b'"commit"') == 1
        staged.write_bytes(data.replace(b'"commit"', b'"cOmmit"'))
        signal_agents(shm, signal.SIGCONT)
        with pytest.raises(StoreError, match=rf"{staged.name}: the record is damaged: altered"):
            damaged.result()
        for checkpointer in (other, hit):
            saved(checkpointer, 3).result(60.0)
    for root, steps in (("other", [3]), ("hit", [1, 3])):
        assert sw.Checkpointer(tmp_path / root, memory=None).steps() == steps
        for step in steps:
            found = sw.open(tmp_path / root / step_directory(step))["t"][:]
            assert torch.equal(torch.as_tensor(found), values(step))
