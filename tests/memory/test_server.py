"""The agent's server: what it serves byte for byte, what it takes, and what it refuses."""

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

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from shardwise.kernel.errors import StoreError
from shardwise.parts.memory.agent import server
from shardwise.parts.memory.agent.server import create_app, serve_connections
from shardwise.parts.memory.files import LARGEST_RECORD, read_record, write_record
from shardwise.parts.memory.records import PendingManifest
from shardwise.parts.memory.view import Failing
from shardwise.parts.tiers.options import StorageTask
from tests.breadth import examples
from tests.memory.certificates import Authority

RUN = "0123456789abcdef"
STEP = "step-00000010"
DATA = "r00000-0123456789abcdef.safetensors"
TOKEN = "an unguessable token".replace(" ", "-")
FILE = f"/runs/{RUN}/{STEP}/{DATA}"
NOTE = "commit-0123456789abcdef.json"


@dataclass
class Served:
    """A home that a server in this process serves."""

    home: Path
    port: int = 0
    wakes: list[float] = field(default_factory=list)

    @property
    def step(self) -> Path:
        """The directory of step 10."""
        return self.home / "runs" / RUN / STEP

    def fill(self, name: str, data: bytes) -> None:
        """Have a file in it, whole from the first moment, as all that writes notes does."""
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
) -> Iterator[Served]:
    """Serve a home on loopback, from a thread, while the block runs."""
    (home / "runs").mkdir(parents=True, exist_ok=True)
    listener = socket.create_server(("127.0.0.1", port))
    served = Served(home, listener.getsockname()[1])
    ready = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def note_wake() -> None:
        served.wakes.append(time.monotonic())
        wake()

    async def run() -> None:
        ended = asyncio.Event()
        running.append((asyncio.get_running_loop(), ended))
        app = create_app(home, TOKEN, note_wake, lambda: [*failing], metrics)
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
        ("PUT", f"/runs/{RUN}/{STEP}/new-0123456789abcdef.json"),
    ],
)
def test_nothing_is_told_without_the_token(
    shared: Served, token: str | None, method: str, path: str
) -> None:
    status, body, _ = shared.ask(method, path, b"{}" if method == "PUT" else None, token=token)
    assert (status, body) == (401, b"401: Unauthorized")
    assert not shared.wakes
    assert not (shared.step / "new-0123456789abcdef.json").exists()


def test_an_agent_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token"):
        create_app(tmp_path, "", lambda: None)


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
    f"/runs/{RUN}/step-10/note-0123456789abcdef.json",
    f"/runs/{RUN}/step-000000010/note-0123456789abcdef.json",
    f"/runs/{RUN}/free/note-0123456789abcdef.json",
    f"/runs/{RUN.upper()}/{STEP}/note-0123456789abcdef.json",
    f"/runs/{RUN}0/{STEP}/note-0123456789abcdef.json",
    f"/runs/{RUN}%0a/{STEP}/note-0123456789abcdef.json",
    f"/runs/{RUN}/{STEP}/link-0123456789abcdef.json",
    f"/runs/{RUN}/{STEP}/pipe-0123456789abcdef.json",
    f"/runs/{RUN}/{STEP}/folder-0123456789abcdef.json",
    f"/runs/{RUN}/step-00000011/secret.json",
    "/runs/fedcba9876543210/step-00000010/secret.json",
]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Served]:
    """A home with all that must not be served."""
    with serve(tmp_path / "home") as one:
        one.fill("b c.json", b"secret")
        one.fill(".hidden.json", b"secret")
        for above in (one.home, one.home.parent, one.home / "runs"):
            (above / "secret.json").write_bytes(b"secret")
        (one.step / "link-0123456789abcdef.json").symlink_to(one.home / "secret.json")
        os.mkfifo(one.step / "pipe-0123456789abcdef.json")
        (one.step / "folder-0123456789abcdef.json").mkdir()
        elsewhere = one.home.parent / "elsewhere"
        (elsewhere / STEP).mkdir(parents=True)
        (elsewhere / "secret.json").write_bytes(b"secret")
        (elsewhere / STEP / "secret.json").write_bytes(b"secret")
        (one.home / "runs" / RUN / "step-00000011").symlink_to(elsewhere)
        (one.home / "runs" / "fedcba9876543210").symlink_to(elsewhere)
        yield one


@pytest.mark.parametrize("path", HOSTILE)
def test_no_name_leads_elsewhere(guarded: Served, path: str) -> None:
    for method in ("GET", "HEAD"):
        status, body, _ = guarded.ask(method, path)
        assert status in (400, 404)
        assert b"secret" not in body


@pytest.mark.parametrize("path", HOSTILE)
def test_no_note_is_written_elsewhere(guarded: Served, path: str) -> None:
    top = guarded.home.parent
    before = {each for each in top.rglob("*") if STEP not in each.parts}
    status, _, _ = guarded.ask("PUT", path, b"{}")
    within = (
        "link-0123456789abcdef.json",
        "pipe-0123456789abcdef.json",
    )  # a note takes their place
    assert status in ((204,) if path.endswith(within) else (400, 404, 405, 500))
    assert {each for each in top.rglob("*") if STEP not in each.parts} == before
    assert all(each.read_bytes() == b"secret" for each in top.rglob("secret.json"))


def test_links_and_hidden_files_are_not_listed(guarded: Served) -> None:
    status, body, _ = guarded.ask("GET", f"/runs/{RUN}")
    assert (status, [*json.loads(body)]) == (200, ["10"])
    listed = json.loads(body)["10"].keys()
    assert listed.isdisjoint(
        {".hidden.json", "b c.json", "pipe-0123456789abcdef.json", "folder-0123456789abcdef.json"}
    )


def test_a_link_that_was_there_is_replaced_and_not_followed(served: Served) -> None:
    served.fill("kept.json", b"kept")
    (served.step / "link-0123456789abcdef.json").symlink_to(served.step / "kept.json")
    assert served.ask("PUT", f"/runs/{RUN}/{STEP}/link-0123456789abcdef.json", b"new")[0] == 204
    assert not (served.step / "link-0123456789abcdef.json").is_symlink()
    assert (served.step / "kept.json").read_bytes() == b"kept"


def test_what_is_held_is_listed(served: Served) -> None:
    served.fill("persist-0123456789abcdef.json", b"12")
    served.fill(NOTE, b"123")
    (served.home / "runs" / RUN / "step-00000002").mkdir()
    (served.home / "runs" / RUN / "free").mkdir()
    listed = {"2": {}, "10": {NOTE: 3, "persist-0123456789abcdef.json": 2}}
    status, body, _ = served.ask("GET", f"/runs/{RUN}")
    assert (status, json.loads(body)) == (200, listed)
    assert served.ask("GET", "/runs/" + "0" * 16)[:2] == (200, b"{}")
    assert served.ask("GET", "/health")[:2] == (200, b"[]")


def test_a_note_is_taken_and_the_agent_woken(served: Served) -> None:
    path = f"/runs/{RUN}/{STEP}/protect-0123456789abcdef.json"
    assert served.ask("PUT", path, b'{"a":1}')[0] == 204
    assert (served.step / "protect-0123456789abcdef.json").read_bytes() == b'{"a":1}'
    assert len(served.wakes) == 1
    assert served.ask("PUT", path, b"")[0] == 204
    assert served.ask("GET", path)[:2] == (200, b"")
    assert len(served.wakes) == 2
    assert os.listdir(served.step) == ["protect-0123456789abcdef.json"]


@pytest.mark.parametrize(
    "name",
    [
        "pending-0123456789abcdef.json",
        "r00000-0123456789abcdef.staged.json",
        "r00000-0123456789abcdef.kept-0.json",
        "r00000-0123456789abcdef.safetensors.entry.json",
        "protect-done-0123456789abcdef.json",
        "protect-0123.json",
        "run.json",
        "abandoned",
    ],
)
def test_what_trainers_say_is_taken_from_nobody_else(served: Served, name: str) -> None:
    assert served.ask("PUT", f"/runs/{RUN}/{STEP}/{name}", b"{}")[0] == 400
    assert not served.step.exists()
    assert not served.wakes


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


def test_only_notes_are_taken(served: Served) -> None:
    assert served.ask("PUT", FILE, b"1")[0] == 400
    assert not served.step.exists()


@pytest.mark.parametrize(
    ("headers", "sent", "status"),
    [
        (f"Content-Length: {LARGEST_RECORD + 1}", "", 413),
        ("Transfer-Encoding: chunked", "2\r\n{}\r\n0\r\n\r\n", 411),
        ("Content-Length: -1", "", 400),
        ("Content-Length: 1e3", "", 400),
        ("Content-Length: 2\r\nContent-Length: 3", "{}", 400),
    ],
)
def test_a_body_states_its_length(served: Served, headers: str, sent: str, status: int) -> None:
    head = f"PUT /runs/{RUN}/{STEP}/{NOTE} HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n"
    with served.line(head + sent) as line:
        answer = line.recv(1000)
    assert answer.split(b" ")[1] == str(status).encode()
    assert not served.step.exists()


@pytest.mark.parametrize("sent", [0, 1, 60_000, 99_999])
def test_a_body_that_is_cut_off_leaves_nothing(served: Served, sent: int) -> None:
    head = f"PUT /runs/{RUN}/{STEP}/{NOTE} HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
    served.line(head + "x" * sent).close()
    assert served.ask("GET", "/health")[0] == 200
    time.sleep(0.05)
    assert not served.step.exists()
    assert not served.wakes


def test_no_half_written_note_is_ever_seen(served: Served) -> None:
    notes = [bytes([65 + n]) * (1 << 20) for n in range(4)]
    path = f"/runs/{RUN}/{STEP}/{NOTE}"
    served.ask("PUT", path, notes[0])
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(lambda: [served.ask("PUT", path, note)[0] for note in notes * 4])
        while not writing.done():
            status, body, _ = served.ask("GET", path)
            assert status == 200
            assert body in notes
    assert os.listdir(served.step) == [NOTE]


def test_no_room_is_told(served: Served) -> None:
    (served.step / NOTE).mkdir(parents=True)
    status, body, _ = served.ask("PUT", f"/runs/{RUN}/{STEP}/{NOTE}", b"{}")
    assert status == 500
    assert b"directory" in body
    assert os.listdir(served.step) == [NOTE]


def test_waiting_ends_when_the_note_comes(served: Served) -> None:
    path = f"/runs/{RUN}/{STEP}/{NOTE}"
    with ThreadPoolExecutor(2) as pool:
        put = pool.submit(served.ask, "GET", f"{path}?wait=20")
        own = pool.submit(
            served.ask, "GET", f"/runs/{RUN}/{STEP}/persist-0123456789abcdef.json?wait=20"
        )
        time.sleep(0.1)
        start = time.monotonic()
        served.ask("PUT", path, b"note")
        served.fill("persist-0123456789abcdef.json", b"own")
        assert put.result(40)[:2] == (200, b"note")
        assert own.result(40)[:2] == (200, b"own")
        assert time.monotonic() - start < 15  # of the 20 that they would wait


def test_waiting_ends_in_time(served: Served) -> None:
    start = time.monotonic()
    assert served.ask("GET", f"{FILE}?wait=0.2")[0] == 404
    assert 0.2 <= time.monotonic() - start < 10
    assert served.ask("GET", FILE)[0] == 404
    for wait in ("-1", "nan", "soon", "1,5"):
        assert served.ask("GET", f"{FILE}?wait={wait}")[0] == 400


def test_many_wait_without_work(served: Served) -> None:
    with ThreadPoolExecutor(32) as pool:
        waits = [pool.submit(served.ask, "GET", f"{FILE}?wait=0.5") for _ in range(32)]
        busy = time.process_time()
        assert {each.result(20)[0] for each in waits} == {404}
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
        waiting = stack.enter_context(one.line(f"GET {FILE}?wait=0.6 HTTP/1.1\r\nHost: a\r\n\r\n"))
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
    monkeypatch.setattr(server, "FIRST_REQUEST_TIMEOUT", 0.2)
    with serve(tmp_path) as one, ExitStack() as stack:
        used = stack.enter_context(one.line("GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        assert used.recv(1000).startswith(b"HTTP/1.1 200")
        half = stack.enter_context(one.line("GET /health HTTP/1.1\r\nHost: a\r\n"))
        assert is_closed(half)
        silent = socket.create_connection(("127.0.0.1", one.port), 5)
        assert is_closed(stack.enter_context(silent))
        used.settimeout(0.05)
        assert not is_closed(used)


def test_unfinished_bodies_take_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_BODY_BYTES", 3 << 20)
    head = f"PUT /runs/{RUN}/{STEP}/{NOTE} HTTP/1.1\r\nHost: a\r\nContent-Length: {2 << 20}\r\n"
    with serve(tmp_path) as one:
        with ExitStack() as stack:
            for _ in range(2):
                line = stack.enter_context(one.line(head + "\r\n"))
                line.sendall(b"x" * ((3 << 19) - 10))  # nearly three quarters
            time.sleep(0.5)  # until they are read: the server refuses whoever exceeds the limit
            deadline = time.monotonic() + 10
            while (status := put(one, 1 << 20)) == 204:
                assert time.monotonic() < deadline
            assert status in (503, 0)
            assert one.ask("GET", "/health")[0] == 200
        while put(one, 3 << 20) != 204:  # their room is free again
            assert time.monotonic() < deadline


def put(one: Served, size: int) -> int:
    """The status of a note of so many bytes; 0 if the connection is closed while it is sent."""
    with suppress(OSError):
        return one.ask("PUT", f"/runs/{RUN}/{STEP}/{NOTE}", b"x" * size)[0]
    return 0


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


def test_a_body_that_drips_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STALL_TIMEOUT", 0.5)
    head = f"PUT /runs/{RUN}/{STEP}/{NOTE} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    start = time.monotonic()
    with served.line(head) as line:
        line.settimeout(0.05)
        answer, is_reset = b"", True
        with suppress(ConnectionError):  # a byte that was sent after the answer discards it
            while not answer and time.monotonic() - start < 10:
                line.sendall(b"x")
                with suppress(TimeoutError):
                    answer = line.recv(1000)
            is_reset = False
    assert b"408" in answer or is_reset
    assert time.monotonic() - start > 0.4
    assert not served.step.exists()


def test_a_handshake_that_never_ends_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT", 0.3)
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
