"""The client of an agent: bytes from another node, failures in bounded time."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.parts.memory.files import decode_record
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.records import PENDING, AgentInfo, StageOutcome, SubtreeReply
from shardwise.parts.memory.remote.client import AgentClient, Discarded
from shardwise.parts.memory.states import read_state
from shardwise.testing.store_suite import UNSAFE
from tests.breadth import examples
from tests.memory.certificates import Authority
from tests.memory.test_server import (
    DATA,
    REPLY,
    RUN,
    SAVE,
    STEP,
    TOKEN,
    Served,
    noise,
    serve,
)

SIZE = 300_007
OTHER = f"step-00000012-{SAVE}"
CHILD = """
import asyncio, socket, sys
from pathlib import Path
from typing import Any
from shardwise.parts.memory.agent.server import Served, create_app, serve_connections

async def main():
    app = create_app(Served(home=Path(sys.argv[1]), token=sys.argv[2], wake=lambda: None))
    listener = socket.create_server(("127.0.0.1", 0))
    async with serve_connections(app, listener):
        print(listener.getsockname()[1], flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def running_agent(port: int, *, token: str = TOKEN, scheme: str = "http") -> AgentInfo:
    """How to talk to a server on this port."""
    return AgentInfo(node="node-b", url=f"{scheme}://127.0.0.1:{port}", token=token)


@contextmanager
def calling(info: AgentInfo, **options: Any) -> Iterator[AgentClient]:
    """A client that is closed afterwards."""
    client = AgentClient(info, **options)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that has one data file."""
    with serve(tmp_path_factory.mktemp("shared")) as one:
        one.fill(DATA, noise(SIZE))
        yield one


@pytest.fixture(scope="module")
def client(shared: Served) -> Iterator[AgentClient]:
    """A client of it."""
    with calling(running_agent(shared.port), read_timeout=5.0) as one:
        yield one


@examples(60)
@given(low=st.integers(0, SIZE), count=st.integers(0, SIZE))
def test_ranges_land_in_memory(client: AgentClient, low: int, count: int) -> None:
    expected = np.frombuffer(noise(SIZE), np.uint8)[low : low + count]
    out = np.zeros(count + 2, np.uint8)
    client.read_range_into(RUN, STEP, DATA, low, out[1 : 1 + len(expected)])
    assert (out[1 : 1 + len(expected)] == expected).all()
    assert out[0] == 0
    assert not out[1 + len(expected) :].any()


def test_a_range_past_the_end_is_an_error(client: AgentClient) -> None:
    for low, count in [(SIZE, 1), (SIZE - 5, 6), (0, SIZE + 1)]:
        with pytest.raises(StoreError, match="node-b"):
            client.read_range_into(RUN, STEP, DATA, low, np.zeros(count, np.uint8))


def test_small_verbs(shared: Served, client: AgentClient) -> None:
    assert client.list_failing() == []
    assert client.read(RUN, STEP, DATA, limit=SIZE) == noise(SIZE)
    assert client.list_files(RUN) == {STEP: {DATA: SIZE}}
    assert client.list_files("f" * 16) == {}


def test_a_call_brings_the_reply_once_there_is_one(shared: Served, client: AgentClient) -> None:
    before = len(shared.wakes)

    def call(wait: float) -> bytes | None:
        return client.call(RUN, STEP, "protect", "näme & co", patience=7.5, wait=wait)

    start = time.monotonic()
    assert call(0.2) is None
    assert time.monotonic() - start >= 0.2
    assert len(shared.wakes) > before
    received = shared.calls.call_of(shared.place, "protect")
    assert received == ("näme & co", 7.5)
    shared.calls.reply(shared.place, "protect", received, REPLY)
    found = call(20.0)
    assert found is not None
    assert decode_record(found, SubtreeReply, "reply") == REPLY


def test_an_agent_may_reply_after_longer_than_the_limit(shared: Served) -> None:
    """By as much as it was asked to wait."""
    with calling(running_agent(shared.port), read_timeout=0.5) as one:
        assert one.call(RUN, STEP, "persist", "a", patience=1.0, wait=1.5) is None


def test_outcomes_and_rescues(tmp_path: Path) -> None:
    with serve(tmp_path) as one, calling(running_agent(one.port)) as client:
        with pytest.raises(FileNotFoundError):
            client.call(RUN, STEP, "rescue", "näme & co", patience=0.0, wait=0.0)
        one.fill(PENDING, b"{}")
        client.call(RUN, STEP, "rescue", "näme & co", patience=0.0, wait=0.0)
        assert read_state(one.place).rescue == "näme & co"
        found = client.read_outcomes(RUN, 0, 20.0)
        assert found.saves == {SAVE: {}}
        start = time.monotonic()
        assert client.read_outcomes(RUN, found.version, 0.2) == found
        assert 0.2 <= time.monotonic() - start < 10
        done = StageOutcome(bytes=5, node="a")
        one.states.end(one.place, {"commit": done})
        assert client.read_outcomes(RUN, found.version, 20.0).saves == {SAVE: {"commit": done}}


def test_a_node_that_has_discarded_the_snapshot_is_told_from_one_without_it(
    tmp_path: Path,
) -> None:
    with serve(tmp_path) as one, calling(running_agent(one.port)) as client:
        with pytest.raises(FileNotFoundError):
            client.call(RUN, STEP, "commit", "a", patience=1.0, wait=0.1)
        one.fill("abandoned", b"")
        with pytest.raises(Discarded, match="node-b"):
            client.call(RUN, STEP, "commit", "a", patience=1.0, wait=0.1)


def test_what_is_not_there_is_not_found(client: AgentClient) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        client.read(RUN, STEP, "absent.json", limit=1)
    with pytest.raises(FileNotFoundError):
        client.call(RUN, OTHER, "commit", "a", patience=1.0, wait=0.0)
    with pytest.raises(FileNotFoundError):
        client.read_range_into(RUN, OTHER, DATA, 0, np.zeros(1, np.uint8))


def test_limits_hold_before_anything_is_read(client: AgentClient) -> None:
    with pytest.raises(StoreError, match=f"{SIZE} bytes; at most {SIZE - 1}"):
        client.read(RUN, STEP, DATA, limit=SIZE - 1)
    assert client.list_failing() == []


@pytest.mark.parametrize("name", [*UNSAFE, "..", ".a", "%2e%2e", "a?b", "a\r\nb"])
def test_no_unsafe_name_is_sent(client: AgentClient, name: str) -> None:
    with pytest.raises(StoreError, match="not a file of a snapshot"):
        client.read(RUN, STEP, name, limit=1)
    with pytest.raises(StoreError, match="not a file of a snapshot"):
        client.call(RUN, STEP, name, "a", patience=1.0, wait=0.0)
    for snapshot in (name, f"{STEP}/{name}", f"{STEP}\n", "step-00000010"):
        with pytest.raises(StoreError, match="not a file of a snapshot"):
            client.read(RUN, snapshot or "free", DATA, limit=1)
    with pytest.raises(StoreError, match="not a run id"):
        client.list_files(name)


def test_a_wrong_token_is_refused_and_never_told(shared: Served) -> None:
    with calling(running_agent(shared.port, token="gu3ssed")) as one:
        with pytest.raises(StoreError, match=r"node-b.*token") as caught:
            one.read(RUN, STEP, DATA, limit=SIZE)
        assert "gu3ssed" not in str(caught.value)
    with pytest.raises(StoreError, match="node-b") as caught:
        AgentClient(running_agent(shared.port, token="gu3ssed\r\nX: y"))
    assert "gu3ssed" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "http://", "ftp://a:1", "http://a", "http://a:x", "/runs"])
def test_a_card_needs_an_address(url: str) -> None:
    with pytest.raises(StoreError, match="not an http"):
        AgentClient(AgentInfo(node="node-b", url=url, token="t"))


def test_a_line_is_kept_and_made_anew_once_it_is_dead(tmp_path: Path) -> None:
    with serve(tmp_path) as one:
        client = AgentClient(running_agent(one.port))
        for _ in range(5):
            client.list_failing()
        assert len(client._idle) == 1
        first = client._idle[0].sock.getsockname()
        with pytest.raises(FileNotFoundError):
            client.read(RUN, OTHER, "a.json", limit=1)
        assert client._idle[0].sock.getsockname() == first
    with serve(tmp_path, port=one.port):
        assert client.list_failing() == []
        client.close()
        assert client._idle == []
        client.list_failing()
        assert client._idle == []
    with pytest.raises(StoreError, match="node-b"):
        client.list_failing()


def test_many_threads_share_a_client(client: AgentClient) -> None:
    expected = np.frombuffer(noise(SIZE), np.uint8)

    def read(low: int) -> bool:
        out = np.empty(7001, np.uint8)
        client.read_range_into(RUN, STEP, DATA, low, out)
        return bool((out == expected[low : low + 7001]).all())

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(read, range(0, SIZE - 7001, 1499)))
    assert len(client._idle) <= 16


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], AgentInfo]]:
    """A server in a process of its own, which has a large file that begins with ones."""
    step = tmp_path / "runs" / RUN / STEP
    step.mkdir(parents=True)
    with open(step / DATA, "wb") as file:
        file.write(b"\1" * 4096)
        file.truncate(256 << 20)
    command = [sys.executable, "-c", CHILD, str(tmp_path), TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, running_agent(int(process.stdout.readline()))
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_is_lost_in_mid_read_is_an_error_in_time(
    child: tuple[subprocess.Popen[str], AgentInfo], number: signal.Signals
) -> None:
    process, info = child
    out = np.zeros(256 << 20, np.uint8)

    def strike() -> None:
        while not out[0]:
            time.sleep(0.0005)
        process.send_signal(number)

    with calling(info, read_timeout=1.0) as one:
        one.list_failing()
        striker = threading.Thread(target=strike)
        striker.start()
        start = time.monotonic()
        with pytest.raises(StoreError, match="node-b"):
            one.read_range_into(RUN, STEP, DATA, 0, out)
        assert time.monotonic() - start < 10
        striker.join()
        start = time.monotonic()
        with pytest.raises(StoreError, match="node-b"):
            one.list_failing()
        assert time.monotonic() - start < 10


def test_no_torch_and_no_aiohttp_to_talk_to_an_agent() -> None:
    script = (
        "import sys; import shardwise.parts.memory.remote.client; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'aiohttp')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def answering(answer: bytes) -> tuple[AgentInfo, threading.Thread]:
    """A peer that is no agent, and answers one request with these bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def live() -> None:
        with listener, listener.accept()[0] as line:
            line.recv(1 << 16)
            line.sendall(answer)

    thread = threading.Thread(target=live)
    thread.start()
    return running_agent(listener.getsockname()[1]), thread


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"pid":1',
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 5\r\n\r\n\x1b[31m",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    ],
)
def test_a_peer_that_is_no_agent(answer: bytes) -> None:
    info, thread = answering(answer)
    with (
        calling(info, read_timeout=2.0) as one,
        pytest.raises(StoreError, match="node-b") as caught,
    ):
        one.list_failing()
    assert "\x1b" not in str(caught.value)
    thread.join(5)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 1-4/9\r\nContent-Length: 4\r\n\r\nabcd",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-3/9\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-3/9\r\nContent-Length: 4\r\n\r\nabc",
    ],
)
def test_a_peer_that_sends_another_range(answer: bytes) -> None:
    info, thread = answering(answer)
    with calling(info, read_timeout=2.0) as one, pytest.raises(StoreError, match="node-b"):
        one.read_range_into(RUN, STEP, DATA, 0, np.zeros(4, np.uint8))
    thread.join(5)


@pytest.mark.parametrize("name", ["../a", "/a", ".a", "a\n", ""])
def test_no_unsafe_name_is_received(name: str) -> None:
    escaped = name.replace("\n", "\\n")
    body = f'{{"{STEP}":{{"{escaped}":1}}}}'
    info, thread = answering(
        f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    with calling(info) as one, pytest.raises(StoreError, match="node-b"):
        one.list_files(RUN)
    thread.join(5)


def test_over_tls(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    node, trainer = ours.issue("node"), ours.issue("trainer").for_client()
    with serve(tmp_path / "home", tls=node.for_server()) as one:
        one.fill(DATA, noise(SIZE))
        info = running_agent(one.port, scheme="https")
        client = AgentClient(info, tls=trainer)
        out = np.zeros(200_000, np.uint8)
        client.read_range_into(RUN, STEP, DATA, 1001, out)
        client._idle[0].sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        assert client.list_files(RUN)[STEP][DATA] == SIZE
        client.close()
        assert out.tobytes() == noise(SIZE)[1001:201_001]
        stranger = Tls(
            certificate=theirs.issue("x").certificate, key=theirs.folder / "x.key", ca=node.ca
        )
        for tls in (theirs.issue("y"), stranger):
            with calling(info, tls=tls.for_client()) as other, pytest.raises(StoreError):
                other.list_failing()
        assert not one.wakes


def test_the_wrong_certificate_is_named(tmp_path: Path) -> None:
    """That of the agent, or that of this process: of another authority, or none at all."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    node, stranger = ours.issue("node"), theirs.issue("stranger")
    with serve(tmp_path / "home", tls=node.for_server()) as one:
        info = running_agent(one.port, scheme="https")
        with (
            calling(info, tls=stranger.for_client()) as other,
            pytest.raises(StoreError, match="The certificate of that agent is not accepted"),
        ):
            other.list_failing()
        foreign = Tls(certificate=stranger.certificate, key=stranger.key, ca=node.ca)
        without = ssl.create_default_context(cafile=str(node.ca))
        without.check_hostname = False
        for context in (foreign.for_client(), without):
            with (
                calling(info, tls=context) as other,
                pytest.raises(StoreError, match=r"That agent .*refused? .*certificate of this"),
            ):
                other.list_failing()


def test_what_scrapes_metrics_over_tls_needs_a_certificate(tmp_path: Path) -> None:
    """As docs/telemetry.md says: curl with `--cert`, `--key` and `--cacert`, and the token."""
    node = Authority(tmp_path / "ours").issue("node")
    with serve(tmp_path / "home", tls=node.for_server()) as one:
        info = running_agent(one.port, scheme="https")
        url = urlsplit(info.url)
        context = ssl.create_default_context(cafile=str(node.ca))
        context.check_hostname = False
        for has_certificate in (False, True):
            if has_certificate:
                context.load_cert_chain(node.certificate, node.key)
            request = HTTPSConnection(url.hostname or "", url.port, context=context, timeout=20)
            headers = {"Authorization": f"Bearer {info.token}"}
            try:
                request.request("GET", "/metrics", headers=headers)
                status = request.getresponse().status
            except OSError:
                status = 0
            finally:
                request.close()
            assert status == (200 if has_certificate else 0)


def test_nothing_is_sent_in_clear_where_tls_is_asked_for(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("node")
    with serve(tmp_path / "clear") as clear, serve(tmp_path / "tls", tls=tls.for_server()) as one:
        plain = running_agent(clear.port)
        with (
            calling(plain, tls=tls.for_client()) as client,
            pytest.raises(
                StoreError,
                match="nothing was sent to it, because the agent does not use TLS: start it",
            ),
        ):
            client.call(RUN, STEP, "protect", "a", patience=1.0, wait=0.0)
        with (
            calling(running_agent(one.port, scheme="https")) as client,
            pytest.raises(StoreError, match="the agent requires TLS: pass certificates"),
        ):
            client.list_failing()
        with (
            calling(running_agent(one.port), read_timeout=2.0) as client,
            pytest.raises(StoreError),
        ):
            client.list_failing()


def test_files_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    one, other = Authority(tmp_path / "a").issue("one"), Authority(tmp_path / "b").issue("other")
    secret = tmp_path / "locked.key"
    command = f"openssl pkey -in {one.key} -aes256 -passout pass:word -out {secret}"
    subprocess.run(command.split(), check=True, capture_output=True)
    for key in (other.key, secret, tmp_path / "absent.key"):
        tls = Tls(certificate=one.certificate, key=key, ca=one.ca)
        with pytest.raises(StoreError, match=r"Tls\(certificate=.*one\.pem"):
            tls.for_server()


@contextmanager
def dripping(beginning: bytes, *, period: float = 0.02) -> Iterator[AgentInfo]:
    """A node that begins its answers, and then sends a byte in each period, without end."""
    listener, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def drip(line: socket.socket) -> None:
        with line, suppress(OSError):
            line.recv(1 << 16)
            line.sendall(beginning)
            while not ended.wait(period):
                line.sendall(b" ")

    def live() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=live, daemon=True).start()
    try:
        yield running_agent(listener.getsockname()[1])
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize(
    ("beginning", "said"),
    [
        (b"HTTP/1.1 2", "no answer in 0.5 s"),
        (b"HTTP/1.1 200 OK\r\nA: ", "no answer in 0.5 s"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n", "no complete answer in 0.5 s"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 60000000\r\n\r\n", "no complete answer in 0.5 s"),
    ],
)
def test_a_node_that_sends_one_byte_at_a_time_has_one_limit(beginning: bytes, said: str) -> None:
    """Each byte comes long before the timeout of a read."""
    with dripping(beginning) as info, calling(info, read_timeout=0.5) as one:
        start = time.monotonic()
        with pytest.raises(StoreError, match=f"node-b.*{said}"):
            one.list_files(RUN)
        assert 0.4 < time.monotonic() - start < 10


def test_a_range_that_comes_one_byte_at_a_time_has_one_limit() -> None:
    answer = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9999/9\r\nContent-Length: 10000\r\n\r\n"
    out = np.zeros(10_000, np.uint8)
    with (
        dripping(answer) as info,
        calling(info, read_timeout=0.5) as one,
        pytest.raises(StoreError, match=r"node-b.*no complete answer in 0\.5 s"),
    ):
        one.read_range_into(RUN, STEP, DATA, 0, out)
    assert 0 < np.count_nonzero(out) < 1000


def test_what_comes_fast_enough_takes_longer_than_the_limit() -> None:
    """Each MiB adds a second."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 3000020\r\n\r\n" + bytes(3_000_000)
    with dripping(head, period=0.05) as info, calling(info, read_timeout=0.3) as one:
        assert one.read(RUN, STEP, DATA, limit=4_000_000) == bytes(3_000_000) + b" " * 20


def test_a_node_that_takes_one_byte_at_a_time_has_one_limit(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("node")
    for server in (None, tls.for_server()):
        ended = threading.Event()

        def take(listener: socket.socket, context: Any, ended: threading.Event) -> None:
            line: socket.socket = listener.accept()[0]
            with suppress(OSError):
                line = line if context is None else context.wrap_socket(line, server_side=True)
                while not ended.wait(0.02):
                    line.recv(1)
            line.close()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            taker = threading.Thread(target=take, args=(listener, server, ended))
            taker.start()
            scheme = "http" if server is None else "https"
            info = running_agent(listener.getsockname()[1], scheme=scheme)
            client_tls = None if server is None else tls.for_client()
            with calling(info, read_timeout=0.5, tls=client_tls) as one:
                start = time.monotonic()
                with pytest.raises(StoreError, match=r"node-b.*no answer in 0\.5 s"):
                    one.call(RUN, STEP, "commit", "a" * 10_000, patience=1.0, wait=0.0)
                assert time.monotonic() - start < 20
            ended.set()
            taker.join()


def test_all_requests_of_a_client_can_have_one_limit(shared: Served) -> None:
    now = [0.0]
    deadline = Deadline(1.0, clock=lambda: now[0])
    with calling(running_agent(shared.port), deadline=deadline) as one:
        assert one.list_failing() == []
        now[0] = 2.0
        with pytest.raises(StoreError, match=r"node-b.*no answer in 0 s"):
            one.list_failing()
