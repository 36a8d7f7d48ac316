"""Damaged records: each is noticed, fails no more than its save, and no wait for it is endless."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shardwise as sw
from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import FileEntry, step_directory
from shardwise.parts.memory.agent.root_tasks import (
    mirror_tasks,
    read_root_task,
    set_root_task,
)
from shardwise.parts.memory.files import decode_record, encode_record
from shardwise.parts.memory.home import Home, SnapshotDirectory
from shardwise.parts.memory.records import (
    AgentInfo,
    Failing,
    Outcomes,
    PendingManifest,
    RankPart,
    Retry,
    RingFile,
    RunInfo,
    SaveState,
    StageOutcome,
    SubtreeReply,
)
from shardwise.parts.memory.remote import lost_agents
from shardwise.parts.memory.remote.client import AgentClient
from shardwise.parts.memory.remote.lost_agents import AgentWatch
from shardwise.parts.memory.spawn import running_agent
from shardwise.parts.memory.states import SaveStates, read_state
from shardwise.parts.tiers.options import MirrorRequest, StorageTask
from tests.memory.reconciling import free_now
from tests.memory.test_client import dripping
from tests.memory.test_server import RUN, TOKEN, serve
from tests.memory.test_snapshots import shm
from tests.tools.agents import signal_agents

__all__ = ["shm"]
SAVE = "0123456789abcdef"
FILE = f"r00000-{SAVE}.safetensors"
AGENT = AgentInfo("a", "http://127.0.0.1:1", "t")
MADE = RingFile("rank-00000.made-0.bin", FILE, {FILE: (0, 8)}, {FILE: b"sums"})
ENTRY = FileEntry(FILE, 0, 8, 0, 0, 0, 0)
PART = RankPart(
    file=ENTRY,
    snapshots_to_keep=2,
    stages=("commit", "persist"),
    epoch=0,
    made=(MADE,),
    above=[AGENT],
)
PENDING = PendingManifest(
    save_id=SAVE,
    step=1,
    manifest="{}",
    files=[(FILE, "a")],
    nodes=[],
    leader="a",
    storage=StorageTask(root="/r"),
)
REPLY = SubtreeReply(save_id=SAVE, nodes=b"abcd", nbytes=bytes(8))
TASK = StorageTask(newest=1, root="/r", keep={})
RETRY = Retry(failure="no answer", since=0.0, attempts=1)
OUTCOME = StageOutcome(seconds=1.0, bytes=8, node="a")
STATE = SaveState(
    entries={FILE: FileEntry(FILE, 0, 8, 0, 0, 0, 1)},
    parts={"commit": OUTCOME},
    outcomes={"commit": OUTCOME},
    retries={"persist": RETRY},
)
RECORDS = [
    AGENT,
    RunInfo("/r", [AGENT]),
    PART,
    PENDING,
    REPLY,
    TASK,
    STATE,
    Outcomes(1, 0.0, {SAVE: {"commit": OUTCOME}}),
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
        (PART, {"stages": ("cOmmit",)}),
        (PART, {"slots": -1}),
        (PART, {"copied": -1}),
        (PART, {"file": msgspec.structs.replace(ENTRY, name=f"../{FILE}")}),
        (PART, {"made": (msgspec.structs.replace(MADE, file="../slot"),)}),
        (PART, {"made": (msgspec.structs.replace(MADE, name="manifest.json"),)}),
        (PENDING, {"save_id": "another"}),
        (PENDING, {"files": [("../file", "a")]}),
        (PENDING, {"fan_out": 0}),
        (PENDING, {"wait": -1.0}),
        (PENDING, {"saved_at": -1.0}),
        (REPLY, {"save_id": "ABCDEF"}),
        (TASK, {"newest": -1}),
        (STATE, {"parts": {"cOmmit": OUTCOME}}),
        (STATE, {"outcomes": {"commit": msgspec.structs.replace(OUTCOME, bytes=-1)}}),
        (STATE, {"retries": {"cOmmit": RETRY}}),
        (STATE, {"retries": {"commit": msgspec.structs.replace(RETRY, attempts=-1)}}),
        (STATE, {"entries": {"../file": STATE.entries[FILE]}}),
        (RECORDS[-1], {"saves": {"ABCDEF": {}}}),
        (RECORDS[-1], {"saves": {SAVE: {"cOmmit": OUTCOME}}}),
    ],
)
def test_values_that_no_trainer_and_no_agent_writes_are_damage(
    record: msgspec.Struct, wrong: dict[str, Any]
) -> None:
    encoded = encode_record({**msgspec.to_builtins(record), **wrong})
    with pytest.raises(StoreError, match=r"^it: the record is damaged: "):
        decode_record(encoded, type(record), "it")


@pytest.mark.parametrize("keep", [{"last": -1}, {"last": [1]}, {"best": 1}, {"unknown": 1}])
def test_rules_that_no_trainer_writes_are_damage(keep: dict[str, Any]) -> None:
    for record in (StorageTask(root="/r"), MirrorRequest("/m")):
        fields = {**msgspec.structs.asdict(record), "keep": keep}
        struct = msgspec.defstruct("_AnyRules", [(name, Any) for name in fields])
        with pytest.raises(StoreError, match=r"^it: the record is damaged: "):
            decode_record(encode_record(struct(**fields)), type(record), "it")


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


@pytest.mark.parametrize(
    ("name", "field", "why"),
    [
        ("rank-00000.json", "commit", r"rank-00000\.json: the record is damaged: altered"),
        ("pending.json", "durable", r"the pending manifest of save \w+ .* is damaged"),
    ],
)
def test_a_flipped_bit_fails_its_save_and_no_other(
    tmp_path: Path, shm: Path, name: str, field: str, why: str
) -> None:
    other = sw.Checkpointer(tmp_path / "other", save_every=1, memory=memory(shm))
    hit = sw.Checkpointer(tmp_path / "hit", save_every=1, memory=memory(shm), on_failure="warn")
    with other, hit:
        saved(hit, 1).result(60.0)
        signal_agents(shm, signal.SIGSTOP)
        damaged = saved(hit, 2)
        (record,) = shm.glob(f"shardwise-*/runs/*/{step_directory(2)}-*/{name}")
        data = record.read_bytes()
        assert data.count(f'"{field}"'.encode()) == 1
        record.write_bytes(data.replace(f'"{field}"'.encode(), f'"{field.title()}"'.encode()))
        signal_agents(shm, signal.SIGCONT)
        with pytest.raises(StoreError, match=why):
            damaged.result()
        for checkpointer in (other, hit):
            saved(checkpointer, 3).result(60.0)
    for root, steps in (("other", [3]), ("hit", [1, 3])):
        assert sw.Checkpointer(tmp_path / root, memory=None).steps() == steps
        for step in steps:
            found = sw.open(tmp_path / root / step_directory(step))["t"][:]
            assert torch.equal(torch.as_tensor(found), values(step))


def test_an_agent_writes_its_own_record_again(tmp_path: Path, shm: Path) -> None:
    with sw.Checkpointer(tmp_path / "root", save_every=1, memory=memory(shm)) as checkpointer:
        saved(checkpointer, 1).result(60.0)
        home = Home(shm)
        info, intact = running_agent(home), home.info_path.read_bytes()
        home.info_path.write_bytes(intact.replace(b"http", b"hTtp"))
        assert running_agent(home) is None
        saved(checkpointer, 2).result(60.0)
        deadline = Deadline(20.0)
        assert any(home.info_path.read_bytes() == intact for _ in deadline.attempts())
        assert running_agent(home) == info


def test_an_ended_save_with_a_damaged_state_has_failed(tmp_path: Path) -> None:
    place = SnapshotDirectory(Home(tmp_path).run("0" * 16), 1, SAVE)
    place.ended_path.parent.mkdir(parents=True)
    data = encode_record(SaveState(outcomes={"commit": OUTCOME}))
    place.ended_path.write_bytes(data.replace(b"commit", b"cOmmit"))
    outcome = read_state(place).outcomes["commit"]
    assert "the record is damaged: altered" in outcome.failure


def test_a_damaged_state_fails_the_stages_and_is_written_again(tmp_path: Path) -> None:
    place = SnapshotDirectory(Home(tmp_path).run("0" * 16), 1, SAVE)
    place.path.mkdir(parents=True)
    states = SaveStates()
    states.end(place, {"commit": OUTCOME})
    path = place.state_path()
    path.write_bytes(path.read_bytes().replace(b"commit", b"cOmmit"))
    states.end_part(place, "protect", OUTCOME)
    found = read_state(place)
    assert decode_record(path.read_bytes(), SaveState, "it") == found
    assert found.parts == {"protect": OUTCOME}
    assert "the record is damaged: altered" in found.outcomes["commit"].failure


def test_what_an_agent_that_was_killed_left_does_not_hide_outcomes(tmp_path: Path) -> None:
    """It was killed while it wrote how a save that it had freed before has ended."""
    states, run = SaveStates(), Home(tmp_path).run(RUN)
    for step, save_id in enumerate((SAVE, "f" * 16)):
        place = SnapshotDirectory(run, step, save_id)
        place.path.mkdir(parents=True)
        states.end(place, {"commit": OUTCOME})
    free_now(place)
    (place.ended_path.parent / ".aaaaaaaaaaaaaaaa.json.0badf00d").touch()
    with serve(Home(tmp_path).path, states=states) as served:
        client = AgentClient(AgentInfo("a", f"http://127.0.0.1:{served.port}", TOKEN))
        with closing(client):
            found = client.read_outcomes(RUN, 0, 0.0)
    assert found.saves == {each: {"commit": OUTCOME} for each in (SAVE, place.save_id)}


def test_a_damaged_task_of_a_root_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path)
    run = home.run("0" * 16)
    set_root_task(run, StorageTask(root="/r", mirror=MirrorRequest("/m")))
    assert mirror_tasks(home).keys() == {run}
    (path,) = (home.path / "roots").iterdir()
    path.write_bytes(path.read_bytes().replace(b"/m", b"/n"))
    for _ in range(3):
        assert read_root_task(run) is None
    assert not home.runs_with_tasks()
    assert caplog.text.count("the record is damaged") == 1


@pytest.mark.parametrize(("step", "gives_up"), [(1, True), (None, True), (2, False)])
def test_a_wait_ends_if_an_agent_fails_to_work_on_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None, gives_up: bool
) -> None:
    run = Home(tmp_path / "here").run("0" * 16)
    now = [0.0]
    for seconds, is_too_long in ((59.0, False), (61.0, True)):
        failing = Failing(run.name, step, seconds, "KeyError: 'cOmmit'")
        with serve(tmp_path / "there", failing=[failing]) as served:
            info = AgentInfo("there", f"http://127.0.0.1:{served.port}", TOKEN)
            monkeypatch.setattr(lost_agents, "running_agent", lambda home, info=info: info)
            home, options = Home(tmp_path / "here"), sw.Memory(wait=60.0)
            watch = AgentWatch(home, options, 0, SnapshotDirectory(run, 1, SAVE), lambda: now[0])
            now[0] += 6.0
            if is_too_long and gives_up:
                with pytest.raises(StoreError, match=r"failed for 61 s .*KeyError: 'cOmmit'"):
                    watch.check(None)
            else:
                watch.check(None)


def test_an_agent_that_is_slow_is_not_lost_though_the_patience_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, an agent may be unable to answer for a second."""
    now = [0.0]
    with dripping(b"HTTP/1.1 2") as slow:
        monkeypatch.setattr(lost_agents, "running_agent", lambda home: slow)
        run = Home(tmp_path).run("0" * 16)
        home, options = Home(tmp_path), sw.Memory(wait=0.3)
        place = SnapshotDirectory(run, 1, SAVE)
        place.path.mkdir(parents=True)
        (place.path / "pending.json").touch()
        watch = AgentWatch(home, options, 0, place, lambda: now[0])
        now[0] = 1.0
        watch.check(0.2)
        now[0] = 6.0
        with pytest.raises(StoreError, match=r"has not answered for 6 s"):
            watch.check(0.2)
