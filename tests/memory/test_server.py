"""The agent's server: what it serves byte for byte, whom it lets wait, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from shardwise.kernel.errors import StoreError
from shardwise.parts.memory.agent import server
from shardwise.parts.memory.agent.server import create_app, serve_connections
from shardwise.parts.memory.files import decode_record, encode_record, read_record, write_record
from shardwise.parts.memory.home import Run, SnapshotDirectory
from shardwise.parts.memory.identity import make_run_token
from shardwise.parts.memory.records import (
    PENDING,
    STAGES,
    AgentInfo,
    Failing,
    Outcomes,
    PendingManifest,
    SaveState,
    StageOutcome,
    SubtreeReply,
)
from shardwise.parts.memory.remote.calls import ReceivedCalls
from shardwise.parts.memory.states import SaveStates, read_state
from shardwise.parts.tiers.options import StorageTask
from tests.breadth import examples
from tests.memory.certificates import Authority
from tests.memory.reconciling import free_now
from tests.tools.agents import until

RUN = "0123456789abcdef"
SAVE = "0123456789abcdef"
STEP = f"step-00000010-{SAVE}"
DATA = "r00000-0123456789abcdef.safetensors"
TOKEN = "an unguessable token".replace(" ", "-")
REPLY = SubtreeReply(save_id=SAVE, lost={"b": "gone"})
FILE = f"/runs/{RUN}/{STEP}/{DATA}"
CALL = f"/runs/{RUN}/{STEP}/commit"
OUTCOMES = f"/runs/{RUN}/outcomes"


@dataclass
class Served:
    """A home that a server in this process serves."""

    home: Path
    port: int = 0
    wakes: list[float] = field(default_factory=list)
    calls: ReceivedCalls = field(default_factory=ReceivedCalls)
    states: SaveStates = field(default_factory=SaveStates)

    @property
    def place(self) -> SnapshotDirectory:
        """The snapshot of step 10."""
        return SnapshotDirectory(Run(self.home / "runs" / RUN), 10, SAVE)

    @property
    def step(self) -> Path:
        """The directory of step 10."""
        return self.place.path

    def fill(self, name: str, data: bytes) -> None:
        """Have a file in it, whole from the first moment, as all that writes records does."""
        self.step.mkdir(parents=True, exist_ok=True)
        half = self.step / f".{name}"
        half.write_bytes(data)
        half.replace(self.step / name)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        token: str | None = TOKEN,
        **headers: str,
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of an answer."""
        line = HTTPConnection("127.0.0.1", self.port, timeout=10)
        known = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            line.request(method, path, body, {**known, **headers})
            answer: HTTPResponse = line.getresponse()
            return answer.status, answer.read(), dict(answer.headers)
        finally:
            line.close()

    def line(self, text: str) -> socket.socket:
        """A connection over which this was sent, with the token, as it is."""
        opened = socket.create_connection(("127.0.0.1", self.port), 10)
        opened.sendall(text.replace("\r\n", f"\r\nAuthorization: Bearer {TOKEN}\r\n", 1).encode())
        return opened


@contextmanager
def serve(
    home: Path,
    *,
    tls: ssl.SSLContext | None = None,
    port: int = 0,
    idle_timeout: float = 90.0,
    most: int = 100,
    failing: Sequence[Failing] = (),
    wake: Callable[[], None] = lambda: None,
    metrics: Callable[[], str] = str,
    calls: ReceivedCalls | None = None,
    states: SaveStates | None = None,
) -> Iterator[Served]:
    """Serve a home on loopback, from a thread, while the block runs."""
    (home / "runs").mkdir(parents=True, exist_ok=True)
    listener = socket.create_server(("127.0.0.1", port))
    served = Served(
        home,
        listener.getsockname()[1],
        calls=calls or ReceivedCalls(),
        states=states or SaveStates(),
    )
    ready = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def note_wake() -> None:
        served.wakes.append(time.monotonic())
        wake()

    async def run() -> None:
        ended = asyncio.Event()
        running.append((asyncio.get_running_loop(), ended))
        app = create_app(
            server.Served(
                home=home,
                token=TOKEN,
                wake=note_wake,
                calls=served.calls,
                states=served.states,
                list_failing=lambda: [*failing],
                list_metrics=metrics,
            )
        )
        async with serve_connections(app, listener, tls=tls, idle_timeout=idle_timeout, most=most):
            ready.set()
            await ended.wait()

    def live() -> None:
        try:
            asyncio.run(run())
        finally:
            ready.set()

    thread = threading.Thread(target=live)
    thread.start()
    if not ready.wait(10) or not running:
        raise RuntimeError("the server did not start")
    loop, ended = running[0]
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)


def noise(size: int) -> bytes:
    """Bytes, each run of which tells where it is from."""
    return np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for tests that only read from it what they have put there themselves."""
    with serve(tmp_path_factory.mktemp("shared")) as served:
        served.fill(DATA, noise(100_003))
        served.fill("empty.bin", b"")
        yield served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server of its own."""
    with serve(tmp_path / "home") as one:
        yield one


def test_a_file_comes_byte_for_byte(shared: Served) -> None:
    status, body, headers = shared.ask("GET", FILE)
    assert (status, body) == (200, noise(100_003))
    assert headers["Content-Length"] == "100003"
    assert headers["Server"] == "shardwise"


def test_head_tells_the_size_and_nothing_else(shared: Served) -> None:
    status, body, headers = shared.ask("HEAD", FILE)
    assert (status, body, headers["Content-Length"]) == (200, b"", "100003")
    assert shared.ask("GET", f"/runs/{RUN}/{STEP}/empty.bin")[:2] == (200, b"")


@examples(60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 100_010), st.integers(1, 100_010))
def test_ranges_come_byte_for_byte(shared: Served, low: int, count: int) -> None:
    data = noise(100_003)
    status, body, headers = shared.ask("GET", FILE, Range=f"bytes={low}-{low + count - 1}")
    if low >= len(data):
        assert (status, headers["Content-Range"]) == (416, f"bytes */{len(data)}")
    else:
        high = min(low + count, len(data))
        assert status == 206
        assert body == data[low:high]
        assert headers["Content-Range"] == f"bytes {low}-{high - 1}/{len(data)}"


@pytest.mark.parametrize(
    ("wanted", "status", "part"),
    [
        ("bytes=-10", 206, slice(-10, None)),
        ("bytes=99999-", 206, slice(99_999, None)),
        ("bytes=-1000000", 206, slice(None)),
        ("bytes=5-4", 416, None),
        ("bytes=", 416, None),
        ("bytes=-", 416, None),
        ("bytes=1-2,4-5", 416, None),
        ("lines=1-2", 416, None),
        (f"bytes={'9' * 30}-", 416, None),
        (f"bytes={'9' * 5000}-", 416, None),
    ],
)
def test_odd_ranges(shared: Served, wanted: str, status: int, part: slice | None) -> None:
    got, body, _ = shared.ask("GET", FILE, Range=wanted)
    assert got == status
    if part is not None:
        assert body == noise(100_003)[part]


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "tökèn"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", FILE),
        ("GET", f"/runs/{RUN}/{STEP}/absent.json"),
        ("GET", "/no/such/thing"),
        ("PUT", f"/runs/{RUN}/{STEP}/{DATA}"),
        ("GET", OUTCOMES),
        ("POST", CALL),
        ("POST", f"/runs/{RUN}/{STEP}/rescue"),
    ],
)
def test_nothing_is_told_without_the_token(
    shared: Served, token: str | None, method: str, path: str
) -> None:
    before = sorted(os.listdir(shared.step))
    status, body, _ = shared.ask(method, path, b"{}" if method == "PUT" else None, token=token)
    assert (status, body) == (401, b"401: Unauthorized")
    assert not shared.wakes
    assert not shared.calls.stages_of(shared.place)
    assert sorted(os.listdir(shared.step)) == before


def test_an_agent_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token"):
        server.Served(home=tmp_path, token="", wake=lambda: None)


LINKED = f"step-00000011-{SAVE}"
HOSTILE = [
    f"/runs/{RUN}/{STEP}/../../../secret.json",
    f"/runs/{RUN}/{STEP}/%2e%2e%2f%2e%2e%2f%2e%2e%2fsecret.json",
    f"/runs/{RUN}/{STEP}/..%2f..%2f..%2fsecret.json",
    f"/runs/{RUN}/{STEP}/%2e%2e",
    f"/runs/{RUN}/%2e%2e/secret.json",
    f"/runs/{RUN}/../../secret.json",
    f"/runs/{RUN}/..%2f../secret.json",
    "/runs/%2e%2e/%2e%2e/secret.json",
    "/runs/../secret.json",
    "/../secret.json",
    "/secret.json",
    "//secret.json",
    f"/runs/{RUN}/{STEP}/%2fetc%2fpasswd.json",
    f"/runs/{RUN}/{STEP}//etc/passwd.json",
    f"/runs/{RUN}/{STEP}/.hidden.json",
    f"/runs/{RUN}/{STEP}/a%00.json",
    f"/runs/{RUN}/{STEP}/a%0a.json",
    f"/runs/{RUN}/{STEP}/{'a' * 250}.json",
    f"/runs/{RUN}/{STEP}/b%20c.json",
    f"/runs/{RUN}/step-10-{SAVE}/secret.json",
    f"/runs/{RUN}/step-000000010-{SAVE}/secret.json",
    f"/runs/{RUN}/step-00000010/secret.json",
    f"/runs/{RUN}/step-00000010-{SAVE.upper()}/secret.json",
    f"/runs/{RUN}/freed-{SAVE}/secret.json",
    f"/runs/{RUN}/free/secret.json",
    f"/runs/{RUN}/ended/secret.json",
    f"/runs/{RUN.upper()}/{STEP}/secret.json",
    f"/runs/{RUN}0/{STEP}/secret.json",
    f"/runs/{RUN}%0a/{STEP}/secret.json",
    f"/runs/{RUN}/{STEP}/link-0123456789abcdef.json",
    f"/runs/{RUN}/{STEP}/pipe-0123456789abcdef.json",
    f"/runs/{RUN}/{STEP}/folder-0123456789abcdef.json",
    f"/runs/{RUN}/{LINKED}/secret.json",
    f"/runs/fedcba9876543210/{STEP}/secret.json",
]
HOSTILE_CALLS = [
    f"{above}/{what}"
    for above in dict.fromkeys(path.rpartition("/")[0] for path in HOSTILE)
    for what in ("commit", "rescue")
    if above != f"/runs/{RUN}/{STEP}"
]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Served]:
    """A home with all that must not be served."""
    with serve(tmp_path / "home") as one:
        one.fill("b c.json", b"secret")
        one.fill(".hidden.json", b"secret")
        run = one.home / "runs" / RUN
        for name in (f"freed-{SAVE}", "free", "ended", "step-00000010", f"step-10-{SAVE}"):
            (run / name).mkdir()
            (run / name / "secret.json").write_bytes(b"secret")
        for above in (one.home, one.home.parent, one.home / "runs"):
            (above / "secret.json").write_bytes(b"secret")
        (one.step / "link-0123456789abcdef.json").symlink_to(one.home / "secret.json")
        os.mkfifo(one.step / "pipe-0123456789abcdef.json")
        (one.step / "folder-0123456789abcdef.json").mkdir()
        elsewhere = one.home.parent / "elsewhere"
        (elsewhere / STEP).mkdir(parents=True)
        (elsewhere / "secret.json").write_bytes(b"secret")
        (elsewhere / STEP / "secret.json").write_bytes(b"secret")
        for each in (elsewhere, elsewhere / STEP):
            (each / PENDING).write_bytes(b"secret")
        (run / LINKED).symlink_to(elsewhere)
        (one.home / "runs" / "fedcba9876543210").symlink_to(elsewhere)
        yield one


@pytest.mark.parametrize("path", HOSTILE)
def test_no_name_leads_elsewhere(guarded: Served, path: str) -> None:
    for method in ("GET", "HEAD"):
        status, body, _ = guarded.ask(method, path)
        assert status in (400, 404)
        assert b"secret" not in body


@pytest.mark.parametrize("path", [*HOSTILE, *HOSTILE_CALLS])
def test_nothing_is_called_or_written_elsewhere(guarded: Served, path: str) -> None:
    top = guarded.home.parent
    before = {each for each in top.rglob("*") if guarded.step not in each.parents}
    for method in ("PUT", "POST"):
        assert guarded.ask(method, path, b"{}")[0] in (400, 404, 405)
    assert {each for each in top.rglob("*") if guarded.step not in each.parents} == before
    secret = [*top.rglob("secret.json"), *top.rglob(PENDING)]
    assert all(each.read_bytes() == b"secret" for each in secret)
    assert not guarded.wakes


def test_links_and_hidden_files_are_not_listed(guarded: Served) -> None:
    status, body, _ = guarded.ask("GET", f"/runs/{RUN}")
    assert (status, [*json.loads(body)]) == (200, [STEP])
    listed = json.loads(body)[STEP].keys()
    assert listed.isdisjoint(
        {".hidden.json", "b c.json", "pipe-0123456789abcdef.json", "folder-0123456789abcdef.json"}
    )


def test_what_is_held_is_listed(served: Served) -> None:
    served.fill("pending.json", b"12")
    served.fill(DATA, b"123")
    run = served.home / "runs" / RUN
    for each in (f"step-00000002-{SAVE}", "free", f"freed-{SAVE}", "step-00000003"):
        (run / each).mkdir()
    listed = {f"step-00000002-{SAVE}": {}, STEP: {DATA: 3, "pending.json": 2}}
    status, body, _ = served.ask("GET", f"/runs/{RUN}")
    assert (status, json.loads(body)) == (200, listed)
    assert served.ask("GET", "/runs/" + "0" * 16)[:2] == (200, b"{}")
    assert served.ask("GET", "/health")[:2] == (200, b"[]")


@pytest.mark.parametrize("name", [DATA, "pending.json", "rank-00000.json", "save.json", "commit"])
@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
def test_other_nodes_can_write_nothing(served: Served, method: str, name: str) -> None:
    assert served.ask(method, f"/runs/{RUN}/{STEP}/{name}", b"{}")[0] == 405
    assert not served.step.exists()
    assert not served.wakes


@pytest.mark.parametrize(
    "name", ["retain", "seal", "pending.json", "x", "commit.json", "rescue.json"]
)
def test_only_stages_can_be_called(served: Served, name: str) -> None:
    served.fill(DATA, b"")
    assert served.ask("POST", f"/runs/{RUN}/{STEP}/{name}?top=a")[0] == 400
    assert os.listdir(served.step) == [DATA]
    assert not served.wakes
    assert not served.calls.stages_of(served.place)


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_is_taken_and_the_agent_woken(served: Served, stage: str) -> None:
    path = f"/runs/{RUN}/{STEP}/{stage}?top=n%C3%A4me&patience=7.5"
    assert served.ask("POST", path)[0] == 404  # its ranks have not begun yet
    assert not served.calls.stages_of(served.place)
    assert not served.wakes
    served.fill(DATA, b"")
    assert served.ask("POST", path)[:2] == (202, b"")
    assert served.wakes
    assert served.calls.stages_of(served.place) == {stage}
    call = served.calls.call_of(served.place, stage)
    assert call == ("näme", 7.5)
    served.calls.reply(served.place, stage, call, REPLY)
    assert served.ask("POST", path)[:2] == (200, encode_record(REPLY))
    assert not served.calls.stages_of(served.place)
    assert os.listdir(served.step) == [DATA]


def test_a_call_of_another_leader_gets_no_reply_to_an_earlier_one(served: Served) -> None:
    served.fill(DATA, b"")
    assert served.ask("POST", f"{CALL}?top=a")[0] == 202
    first = served.calls.call_of(served.place, "commit")
    assert first is not None
    served.calls.reply(served.place, "commit", first, REPLY)
    assert served.ask("POST", f"{CALL}?top=b")[0] == 202
    served.calls.reply(served.place, "commit", first, REPLY)  # late
    assert served.ask("POST", f"{CALL}?top=b")[0] == 202
    assert served.calls.stages_of(served.place) == {"commit"}


def test_whoever_has_discarded_the_snapshot_says_so(served: Served) -> None:
    served.fill("abandoned", b"")
    assert served.ask("POST", f"{CALL}?top=a&wait=20")[0] == 410
    os.unlink(served.step / "abandoned")
    assert served.ask("POST", f"{CALL}?top=a")[0] == 202
    write_record(served.step / "save.json", SaveState())
    free_now(served.place)
    assert served.ask("POST", f"{CALL}?top=a&wait=20")[0] == 410


def test_calls_for_freed_snapshots_are_forgotten(served: Served) -> None:
    served.fill(DATA, b"")
    assert served.ask("POST", f"{CALL}?top=a")[0] == 202
    served.calls.forget_freed()
    assert served.calls.stages_of(served.place) == {"commit"}
    call = served.calls.call_of(served.place, "commit")
    assert call is not None
    served.step.rename(served.step.with_name("freed-0"))
    served.calls.forget_freed()
    assert not served.calls.stages_of(served.place)
    served.calls.reply(served.place, "commit", call, REPLY)  # the work ended too late
    assert served.calls.call_of(served.place, "commit") is None


def test_a_rescue_is_requested_of_whoever_has_the_pending_manifest(served: Served) -> None:
    path = f"/runs/{RUN}/{STEP}/rescue?top=n%C3%A4me"
    assert served.ask("POST", path)[0] == 404
    assert not served.step.exists()
    served.fill(DATA, b"")
    assert served.ask("POST", path)[0] == 404
    assert not served.wakes
    served.fill(PENDING, b"{}")
    assert served.ask("POST", path)[:2] == (202, b"")
    assert served.wakes
    assert read_state(served.place).rescue == "näme"
    assert served.ask("POST", path.partition("?")[0])[0] == 202
    assert read_state(served.place).rescue


def test_outcomes_are_told_at_once_when_they_change(served: Served) -> None:
    def ask(version: int, wait: float) -> Outcomes:
        status, body, _ = served.ask("GET", f"{OUTCOMES}?version={version}&wait={wait}")
        assert status == 200
        return msgspec.json.decode(body, type=Outcomes)

    served.fill(DATA, b"")
    first = ask(0, 20)
    assert first.saves == {SAVE: {}}
    start = time.monotonic()
    assert ask(first.version, 0.2) == first
    assert 0.2 <= time.monotonic() - start < 10
    done = StageOutcome(seconds=1.0, bytes=5, node="a", ended_at=7.0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, first.version, 20)
        time.sleep(0.1)
        start = time.monotonic()
        served.states.end(served.place, {"commit": done})
        found = asked.result(40)
        assert time.monotonic() - start < 15  # of the 20 that it would wait
    assert found.version != first.version
    assert found.saves == {SAVE: {"commit": done}}
    free_now(served.place)
    served.states.tell()
    assert ask(found.version, 0.0).saves == {SAVE: {"commit": done}}
    other = "/runs/" + "0" * 16 + "/outcomes"
    assert json.loads(served.ask("GET", other)[1])["saves"] == {}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", OUTCOMES), ("POST", CALL), ("POST", f"/runs/{RUN}/{STEP}/rescue")]
)
def test_the_token_of_a_run_only_allows_reading_it(shared: Served, method: str, path: str) -> None:
    token = make_run_token(TOKEN, RUN)
    assert shared.ask("GET", FILE, token=token)[0] == 200
    assert shared.ask(method, path, token=token)[0] in (401, 403)
    assert not shared.wakes


@pytest.mark.parametrize("name", ["save.json", "rank-00000.json", "abandoned"])
def test_records_with_secrets_are_for_agents(served: Served, name: str) -> None:
    served.fill(name, b"{}")
    path, token = f"/runs/{RUN}/{STEP}/{name}", make_run_token(TOKEN, RUN)
    assert served.ask("GET", path)[:2] == (200, b"{}")
    assert served.ask("GET", path, token=token)[0] == 403


def test_a_pending_manifest_is_sent_without_the_text_that_only_its_leader_needs(
    served: Served,
) -> None:
    pending = PendingManifest(
        save_id=SAVE,
        step=1,
        manifest="a long text",
        files=[(DATA, "a")],
        nodes=[AgentInfo("a", "http://127.0.0.1:1", "secret")],
        leader="a",
        storage=StorageTask(root="/"),
    )
    path, token = served.step / "pending.json", make_run_token(TOKEN, RUN)
    served.fill("pending.json", b"")

    def ask(token: str = TOKEN) -> PendingManifest:
        body = served.ask("GET", f"/runs/{RUN}/{STEP}/pending.json", token=token)[1]
        return decode_record(body, PendingManifest, "body")

    for durable in (False, True, False):
        sent = msgspec.structs.replace(pending, durable=durable)
        write_record(path, sent)
        assert ask() == ask() == msgspec.structs.replace(sent, manifest="")
        (node,) = ask(token).nodes
        assert node.token == make_run_token("secret", RUN)
        assert not ask(token).manifest
    path.write_bytes(path.read_bytes()[:-9])
    assert served.ask("GET", f"/runs/{RUN}/{STEP}/pending.json")[0] == 500


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", ".x", "a/b", "a\n", ""])
def test_only_files_of_the_snapshot_can_be_asked_for(tmp_path: Path, name: str) -> None:
    pending = PendingManifest(
        save_id=RUN,
        step=1,
        manifest="",
        files=[(name, "a")],
        nodes=[],
        leader="a",
        storage=StorageTask(root="/"),
    )
    write_record(tmp_path / "note", pending)
    with pytest.raises(StoreError, match="regex"):
        read_record(tmp_path / "note", PendingManifest)


@pytest.mark.parametrize(
    "headers",
    ["Content-Length: -1", "Content-Length: 1e3", "Content-Length: 2\r\nContent-Length: 3"],
)
def test_a_body_states_its_length(served: Served, headers: str) -> None:
    served.fill(DATA, b"")
    with served.line(f"POST {CALL}?top=a HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n{{}}") as line:
        answer = line.recv(1000)
    assert answer.split(b" ")[1] == b"400"
    assert not served.calls.stages_of(served.place)


@pytest.mark.parametrize("sent", [0, 1, 60_000, 99_999])
def test_a_body_is_not_waited_for(served: Served, sent: int) -> None:
    served.fill(DATA, b"")
    head = f"POST {CALL}?top=a HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
    with served.line(head + "x" * sent) as line:
        start = time.monotonic()
        assert line.recv(1000).startswith(b"HTTP/1.1 202")
        assert time.monotonic() - start < 5
        assert is_closed(line)
    assert served.ask("GET", "/health")[0] == 200
    assert os.listdir(served.step) == [DATA]


def test_waiting_ends_when_the_reply_comes(served: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.ask, "POST", f"{CALL}?top=a&patience=1&wait=20")
        time.sleep(0.1)
        start = time.monotonic()
        served.fill(DATA, b"")
        until(lambda: served.calls.call_of(served.place, "commit") is not None)
        call = served.calls.call_of(served.place, "commit")
        assert call is not None
        served.calls.reply(served.place, "commit", call, REPLY)
        assert asked.result(40)[:2] == (200, encode_record(REPLY))
        assert time.monotonic() - start < 15  # of the 20 that it would wait


def test_waiting_ends_in_time(served: Served) -> None:
    start = time.monotonic()
    assert served.ask("POST", f"{CALL}?wait=0.2")[0] == 404
    assert 0.2 <= time.monotonic() - start < 10
    served.fill(DATA, b"")
    start = time.monotonic()
    assert served.ask("POST", f"{CALL}?wait=0.2")[0] == 202
    assert 0.2 <= time.monotonic() - start < 10
    for number in ("-1", "nan", "inf", "soon", "1,5"):
        assert served.ask("POST", f"{CALL}?wait={number}")[0] == 400
        assert served.ask("POST", f"{CALL}?patience={number}")[0] == 400
        assert served.ask("GET", f"{OUTCOMES}?version={number}")[0] == 400


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", CALL, 404), ("GET", OUTCOMES, 200)]
)
def test_many_wait_without_work(served: Served, method: str, path: str, status: int) -> None:
    version = served.states.version
    with ThreadPoolExecutor(32) as pool:
        path = f"{path}?version={version}&wait=0.5"
        waits = [pool.submit(served.ask, method, path) for _ in range(32)]
        busy = time.process_time()
        assert {each.result(20)[0] for each in waits} == {status}
        assert time.process_time() - busy < 0.5


def descriptors(home: Path) -> int:
    """How many files below a directory this process has open."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found += str(home) in os.readlink(each)
    return found


def test_those_who_do_not_read_keep_nobody_waiting(served: Served) -> None:
    with ExitStack() as stack:
        with open(served.home / "large", "wb") as file:
            file.truncate(64 << 20)
        served.fill(DATA, b"")
        os.replace(served.home / "large", served.step / DATA)
        for _ in range(20):
            stack.enter_context(served.line(f"GET {FILE} HTTP/1.1\r\nHost: a\r\n\r\n"))
        start = time.monotonic()
        assert served.ask("GET", "/health")[0] == 200
        assert len(served.ask("GET", FILE, Range="bytes=5-1000")[1]) == 996
        assert time.monotonic() - start < 10
    deadline = time.monotonic() + 20
    while descriptors(served.home) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert descriptors(served.home) == 0


def test_silent_connections_are_closed(tmp_path: Path) -> None:
    with serve(tmp_path, idle_timeout=0.2) as one, ExitStack() as stack:
        never = stack.enter_context(socket.create_connection(("127.0.0.1", one.port), 5))
        half = stack.enter_context(one.line("GET /health HTTP/1.1\r\nHost: a\r\n"))
        used = stack.enter_context(one.line("GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        waiting = stack.enter_context(one.line(f"POST {CALL}?wait=0.6 HTTP/1.1\r\nHost: a\r\n\r\n"))
        again = stack.enter_context(one.line("GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        assert used.recv(1000).startswith(b"HTTP/1.1 200")
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET /health HTT")
        for line in (never, half, used, again):
            assert is_closed(line)
        assert waiting.recv(1000).startswith(b"HTTP/1.1 404")


def test_whoever_guesses_has_to_call_again(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), 5) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
        answer = b""
        while part := line.recv(1000):
            answer += part
    assert answer.count(b"401 Unauthorized") == 1


def test_there_are_not_more_connections_than_there_may_be(tmp_path: Path) -> None:
    with serve(tmp_path, most=3) as one:
        with ExitStack() as stack:
            for _ in range(3):
                kept = stack.enter_context(one.line("GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
                assert kept.recv(1000).startswith(b"HTTP/1.1 200")
            assert is_closed(socket.create_connection(("127.0.0.1", one.port), 5))
            kept.sendall(HEALTH)
            assert kept.recv(1000).startswith(b"HTTP/1.1 200")
        assert_answers_again(one)


HEALTH = f"GET /health HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


def test_silent_strangers_keep_nobody_from_being_answered(tmp_path: Path) -> None:
    with serve(tmp_path, most=20) as one, ExitStack() as stack:
        used = stack.enter_context(one.line("GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        assert used.recv(1000).startswith(b"HTTP/1.1 200")
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", one.port), 5))
            assert one.ask("GET", "/health")[0] == 200
        used.sendall(HEALTH)
        assert used.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_stranger_is_closed_soon_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ANSWER_TIMEOUT", 0.2)
    with serve(tmp_path) as one, ExitStack() as stack:
        used = stack.enter_context(one.line("GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        assert used.recv(1000).startswith(b"HTTP/1.1 200")
        half = stack.enter_context(one.line("GET /health HTTP/1.1\r\nHost: a\r\n"))
        assert is_closed(half)
        silent = socket.create_connection(("127.0.0.1", one.port), 5)
        assert is_closed(stack.enter_context(silent))
        used.settimeout(0.05)
        assert not is_closed(used)


def test_unfinished_bodies_take_bounded_memory(served: Served) -> None:
    size, taken = 64 << 20, 0
    head = f"POST {CALL}?wait=5 HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n"
    with served.line(head) as line:
        line.settimeout(0.5)
        with suppress(TimeoutError):
            while taken < size:
                taken += line.send(b"x" * (1 << 20))
        assert taken < size // 2  # what the network holds; the server reads no more
        assert served.ask("GET", "/health")[0] == 200


def test_malformed_requests_do_not_fill_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        with served.line(f"GET /health HTTP/1.1\r\nHost: a\r\nBad header {number}\r\n\r\n") as line:
            assert line.recv(1000).startswith(b"HTTP/1.")
    with served.line("GET /health HTTP/1.1\r\nContent-Length: evil\r\n\r\n") as line:
        line.recv(1000)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def assert_answers_again(one: Served) -> None:
    """It answers, in a while, whoever calls."""
    for _ in range(100):
        with suppress(OSError, HTTPException):
            assert one.ask("GET", "/health")[0] == 200
            return
        time.sleep(0.02)
    pytest.fail("it does not answer any more")


def test_a_handshake_that_never_ends_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ANSWER_TIMEOUT", 0.3)
    tls = Authority(tmp_path / "authority").issue("node").for_server()
    with (
        serve(tmp_path / "home", tls=tls) as one,
        socket.create_connection(("127.0.0.1", one.port), 5) as line,
    ):
        assert is_closed(line)


def is_closed(line: socket.socket) -> bool:
    """Whether the other side closes it, within its timeout."""
    try:
        return line.recv(1000) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_headers_have_a_limit(served: Served) -> None:
    assert served.ask("GET", "/" + "a" * 10_000)[0] == 400
    assert served.ask("GET", "/health", None, token="a" * 10_000)[0] == 400


def test_a_file_that_shrinks_is_no_whole_answer(served: Served) -> None:
    served.fill(DATA, noise(32 << 20))
    with served.line(f"GET {FILE} HTTP/1.1\r\nHost: a\r\n\r\n") as line:
        assert line.recv(10) == b"HTTP/1.1 2"
        os.truncate(served.step / DATA, 1 << 20)
        total = 10
        while count := receive(line):
            total += count
    assert total < 32 << 20


def receive(line: socket.socket) -> int:
    """How much came, 0 once it is closed."""
    try:
        return len(line.recv(1 << 20))
    except ConnectionError:
        return 0
