"""How the ranks of a tree find and connect to each other, through a store of `torch.distributed`.

Each rank that has ranks below it listens, and puts its address and a secret token into the store,
under its rank. The ranks below wait for the address, connect, and give the token. Other processes
are rejected. What an earlier, failed attempt left in the store does no harm: nobody answers
there, or the token is wrong, and the ranks look into the store again.

Two groups that connect through one store at the same time would mix their ranks. So a rank that
listens looks whether its address is still in the store: if it is not, another group has replaced
it, and both fail.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import LostRankError, RankError
from shardwise.kernel.version import build
from shardwise.parts.ranks.connections import (
    HELLO_TIMEOUT,
    TOKEN_SIZE,
    address_of,
    is_token,
    listen_for_ranks,
    proof_of,
    remaining,
)
from shardwise.parts.ranks.tree_links import Failure, Link

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PROTOCOL = 1
OPERATION = "connecting the ranks"
MOST_PENDING = 128
"""How many unidentified connections are kept open."""
FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 1.0
"""The seconds between two looks into the store. To wait in it would keep other threads from it."""
CONNECT_SECONDS = 3.0
STALE_SECONDS = 5.0
"""How long to wait until a rank replaces what it has left in the store in an earlier attempt."""
LOOK_AGAIN_SECONDS = 2.0
"""How long to wait for an answer before looking into the store for a newer address."""
LONGER_SECONDS = 10.0
SHARED_CHECK_SECONDS = 0.25
"""How often a rank that listens looks whether its address is still in the store."""
SHARED_PATIENCE = 1.0
"""How long a rank that has replaced an address waits until its owner objects, if that is alive."""
_NO_ENDPOINT = "none"
"""What stores return for a key that they do not have, if it is compared and set to this."""
CONNECT, ACCEPTED, REFUSED, DUPLICATE = 0, 1, 2, 3
Check = Callable[[Deadline], object]
"""Called while ranks connect. It raises to give up, or moves the deadline."""
# The same in all versions, so that ranks with different versions can tell.
_HELLO = struct.Struct(f"<{TOKEN_SIZE}sIIqq32s64sI")
"""The token, or the proof in an answer; the protocol; `CONNECT`, or the verdict in an answer; the
rank, the number of ranks, the library's build, the host, and the id of the process. In the answer
`DUPLICATE`, the host and the process are those of the process that had connected before."""


def nothing(deadline: Deadline) -> None:
    """Check nothing."""


@prepare_decoding
class _Endpoint(msgspec.Struct, array_like=True):
    """Where a rank listens, in the store; or why it no longer does."""

    host: str = ""
    port: int = 0
    token: bytes = b""
    failure: Failure | None = None


class _Peer:
    """What a rank says about itself when it connects or answers."""

    def __init__(self, fields: Sequence[int | bytes]) -> None:
        self.proof = bytes(fields[0])
        self.protocol, self.verdict, self.rank, self.size = (int(each) for each in fields[1:5])
        self.build, self.host = (
            bytes(each).rstrip(b"\0").decode("ascii", "replace") for each in fields[5:7]
        )
        self.process_id = int(fields[7])

    @property
    def process(self) -> tuple[str, int]:
        """The host and the process of this rank."""
        return self.host, self.process_id

    def problem(self, number: int, size: int) -> str:
        """Return why this rank cannot talk to the other one, or nothing.

        All ranks are told, so the text names both ranks.

        Args:
            number: the number of this rank in errors.
            size: the number of ranks, as this rank knows it.
        """
        this = f"rank {number} on host {socket.gethostname()}"
        if self.protocol != PROTOCOL or self.build != build():
            return (
                f"on host {self.host}, it has shardwise {self.build} (protocol {self.protocol}), "
                f"and {this} has {build()} (protocol {PROTOCOL}). The digits after the plus sign "
                "are a digest of the code: install the same code on all hosts"
            )
        if self.size != size:
            return (
                f"on host {self.host}, it was started as one of {self.size} ranks, and {this} as "
                f"one of {size}: use one WORLD_SIZE for all"
            )
        return ""


def _describe_self(
    proof: bytes, verdict: int, rank: int, size: int, process: tuple[str, int] | None = None
) -> bytes:
    name, process_id = process or (socket.gethostname(), os.getpid())
    host = name.encode("ascii", "replace")[:64]
    return _HELLO.pack(
        proof, PROTOCOL, verdict, rank, size, build().encode()[:32], host, process_id
    )


def _connected_twice(first: tuple[str, int], second: tuple[str, int]) -> str:
    (host, process), (other_host, other_process) = first, second
    return (
        f"it connected twice: from host {host}, process {process}, and from host {other_host}, "
        f"process {other_process}. Start one process for each rank: give each host another node "
        "rank, and end the processes of earlier jobs"
    )


class RankListener:
    """Accepts the connections of the ranks below this rank. Its address is in the store meanwhile.

    Args:
        store: the store of the ranks.
        rank, size: this rank, and the number of ranks.
        expected: the ranks below this rank.
        numbers: the number of each rank in errors; by default, the rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        expected: Sequence[int],
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._numbers = range(size) if numbers is None else numbers
        self.missing = set(expected)
        self._processes: dict[int, tuple[str, int]] = {}
        self._pending: dict[socket.socket, tuple[bytearray, Deadline]] = {}
        self._token = secrets.token_bytes(TOKEN_SIZE)
        self._cleanup = ExitStack()
        (host, port), self._socket = listen_for_ranks(self._cleanup, store)
        self._socket.setblocking(False)
        self._own = _encode(_Endpoint(host, port, self._token))
        self._next_check = Deadline(SHARED_CHECK_SECONDS)
        try:
            found = self._store.compare_set(_key(rank), "", self._own)
            if found != self._own.encode():
                self._store.set(_key(rank), self._own)
            # What was there was left by an earlier attempt, or belongs to another group.
            is_alone = found == self._own.encode() or _is_told(found)
            self._objections = Deadline(0.0 if is_alone else SHARED_PATIENCE)
        except RuntimeError as error:
            self._cleanup.close()
            raise _lost_store(store, self._numbers[rank], error) from error

    def awaited(self) -> list[tuple[int, str]]:
        """Return the ranks that are missing; this rank, while others may object to its address."""
        waits = not (self.missing or self.is_done)
        return [(self._rank, "")] if waits else [(each, "") for each in self.missing]

    @property
    def is_done(self) -> bool:
        """Whether all ranks below have connected, and no other group has used this address."""
        return not self.missing and self._objections.has_passed()

    def check_is_alone(self, *, at_once: bool = False) -> None:
        """Look, from time to time or at once, whether another group has replaced the address.

        Raises:
            RankError: it has.
            LostRankError: the store does not answer.
        """
        if not (at_once or self._next_check.has_passed()):
            return
        self._next_check = Deadline(SHARED_CHECK_SECONDS)
        try:
            # At once: nobody needs the address any more, so that a later group does not find it.
            wanted = "" if at_once else self._own
            found = self._store.compare_set(_key(self._rank), self._own, wanted).decode()
        except RuntimeError as error:
            raise _lost_store(self._store, self._numbers[self._rank], error) from error
        if found not in (wanted, self._own):
            reason = (
                f"on host {socket.gethostname()}, process {os.getpid()}, it connects through a "
                "store that another group uses at the same time as the same rank: give each "
                "TreeGroup a PrefixStore of its own, and end the processes of earlier jobs"
            )
            raise RankError(OPERATION, {self._numbers[self._rank]: reason})

    def sockets(self) -> list[socket.socket]:
        """Return the sockets on which something may arrive."""
        return [self._socket, *self._pending]

    def accept(self) -> Iterator[Link]:
        """Accept connections, and yield those of ranks that have identified themselves.

        The others stay pending. If too many are pending, the oldest ones are rejected.

        Raises:
            RankError: a rank has other code of the library, or belongs to more ranks or fewer;
                or two processes are the same rank.
        """
        with suppress(BlockingIOError, InterruptedError, ConnectionError):
            for _ in range(MOST_PENDING):
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._pending[connection] = bytearray(), Deadline(HELLO_TIMEOUT)
        for connection, (received, deadline) in list(self._pending.items()):
            try:
                received += self._receive(connection, _HELLO.size - len(received))
            except OSError:
                self._reject(connection)
                continue
            if len(received) == _HELLO.size:
                del self._pending[connection]
                yield from self._answer(connection, _Peer(_HELLO.unpack(received)))
            elif deadline.has_passed():
                self._reject(connection)
        for connection in [*self._pending][:-MOST_PENDING]:
            self._reject(connection)

    def _receive(self, connection: socket.socket, most: int) -> bytes:
        try:
            data = connection.recv(most)
        except (BlockingIOError, InterruptedError):
            return b""
        if not data:
            raise ConnectionResetError("closed")
        return data

    def _reject(self, connection: socket.socket) -> None:
        self._pending.pop(connection, None)
        connection.close()

    def _answer(self, connection: socket.socket, peer: _Peer) -> list[Link]:
        first = self._processes.get(peer.rank, peer.process)
        is_new = peer.rank in self.missing
        if not is_token(peer.proof, self._token) or (not is_new and first == peer.process):
            connection.close()  # it does not know the token, or connects again
            return []
        if is_new:
            problem = peer.problem(self._numbers[self._rank], self._size)
            verdict = REFUSED if problem else ACCEPTED
            answer = _describe_self(proof_of(self._token), verdict, self._rank, self._size)
        else:
            problem = _connected_twice(first, peer.process)
            answer = _describe_self(proof_of(self._token), DUPLICATE, self._rank, self._size, first)
        with suppress(OSError):  # noticed on the connection
            connection.sendall(answer)
        if problem:
            connection.close()
            raise RankError(OPERATION, {self._numbers[peer.rank]: problem})
        self.missing.remove(peer.rank)
        self._processes[peer.rank] = peer.process
        return [Link(peer.rank, peer.host, connection)]

    def close(self, failure: Failure | None = None) -> None:
        """Stop listening, and remove the address from the store.

        Args:
            failure: what ranks that come later are told.
        """
        with suppress(RuntimeError):  # the store may be gone
            if failure is None:
                self._store.compare_set(_key(self._rank), self._own, "")
            else:
                self._store.set(_key(self._rank), _encode(_Endpoint(failure=failure.shortened())))
        for connection in list(self._pending):
            self._reject(connection)
        self._cleanup.close()


def connect_upwards(
    store: Store,
    rank: int,
    size: int,
    above: int,
    timeout: timedelta,
    check: Check,
    numbers: Sequence[int],
) -> Link:
    """Connect to the rank above.

    Args:
        store: the store of the ranks.
        rank, size: this rank, and the number of ranks.
        above: the rank to connect to.
        timeout: the longest wait.
        check: called again and again.
        numbers: the number of each rank in errors.

    Raises:
        LostRankError: the rank cannot be reached, or did not answer in time.
        RankError: the rank has other code of the library, or another number of ranks; or it
            has failed; or another process has connected as this rank.
    """
    number = numbers[above]
    deadline, began = Deadline(timeout.total_seconds()), time.monotonic()
    reason = (
        "it has put no address into the store (look at its log; do all ranks make the same "
        f"calls?), or another process has connected as rank {numbers[rank]}"
    )
    lookup = _Lookup(store, above, check, number=numbers[rank], number_of_rank=number)
    met: tuple[_Endpoint, Deadline] | None = None
    for _ in deadline.attempts(longest_pause=1.0):
        endpoint = lookup.find(deadline)
        if endpoint is None or (met is not None and met[0] == endpoint and met[1].has_passed()):
            break  # it is late, or does not answer any more where it has answered
        try:
            with ExitStack() as cleanup:
                connection = socket.create_connection(
                    (endpoint.host, endpoint.port), min(CONNECT_SECONDS, remaining(deadline))
                )
                cleanup.callback(connection.close)
                if met is None or met[0] != endpoint:
                    met = endpoint, Deadline(STALE_SECONDS)
                connection.sendall(_describe_self(endpoint.token, CONNECT, rank, size))
                peer = _receive_answer(connection, lookup, endpoint, deadline)
                _check_verdict(peer, numbers[rank], number, size)
                cleanup.pop_all()
                return Link(above, peer.host, connection)
        except OSError as error:
            reason = (
                f"it cannot be reached at {endpoint.host}:{endpoint.port}: {error}. Check that it "
                "runs, and that no firewall blocks TCP ports between the hosts"
                if met is None or met[0] != endpoint
                else f"the connection to {endpoint.host}:{endpoint.port} failed: {error}. Check "
                "that it runs, and that no other process has its port now"
            )
    text = f"no connection within {time.monotonic() - began:.0f} s: {reason}"
    raise LostRankError(OPERATION, {number: text})


def _check_verdict(peer: _Peer, own: int, other: int, size: int) -> None:
    """Raise if the rank above does not accept this rank.

    Args:
        peer: the answer of the rank above.
        own, other: in errors, the numbers of this rank and of the rank above.
        size: the number of ranks.

    Raises:
        RankError: it does not.
    """
    if peer.verdict == DUPLICATE:
        text = _connected_twice(peer.process, (socket.gethostname(), os.getpid()))
        raise RankError(OPERATION, {own: text})
    if peer.verdict != ACCEPTED:
        problem = peer.problem(own, size) or (
            f"on host {peer.host}, it has shardwise {peer.build}, and refuses rank {own}: install "
            "the same code on all hosts"
        )
        raise RankError(OPERATION, {other: problem})


class _Lookup:
    """Looks for the address of a rank in the store.

    Args:
        store: the store.
        rank: the rank to look for.
        check: called again and again.
        number, number_of_rank: in errors, the numbers of this rank and of the one to look for.
    """

    def __init__(
        self, store: Store, rank: int, check: Check, *, number: int, number_of_rank: int
    ) -> None:
        self._store, self._rank, self._check = store, rank, check
        self._number, self._number_of_rank = number, number_of_rank
        self._first: _Endpoint | None = None
        self._patience = Deadline(0.0)

    def find(self, deadline: Deadline) -> _Endpoint | None:
        """Return the endpoint of the rank, once it is in the store; None at the deadline.

        Raises:
            RankError: the rank has failed.
            LostRankError: the store does not answer.
        """
        for _ in deadline.attempts(pause=FIRST_PAUSE, longest_pause=LONGEST_PAUSE):
            self._check(deadline)
            endpoint = self._read()
            if endpoint.port:
                return endpoint
            if endpoint.failure is not None and self._is_new(endpoint):
                raise endpoint.failure.error()
        return None

    def _read(self) -> _Endpoint:
        try:
            key = _key(self._rank)
            if not self._store.check([key]):
                return _Endpoint()
            # If the rank has removed its endpoint since, `get` would wait, for up to half an hour.
            return _decode(self._store.compare_set(key, _NO_ENDPOINT, _NO_ENDPOINT))
        except RuntimeError as error:
            raise _lost_store(self._store, self._number, error) from error
        except msgspec.DecodeError as error:
            reason = f"its address is damaged: {error}"
            raise LostRankError(OPERATION, {self._number_of_rank: reason}) from error

    def _is_new(self, endpoint: _Endpoint) -> bool:
        """Return whether a failure is of this attempt, not of an earlier one of the same ranks."""
        if self._first is None:
            self._first, self._patience = endpoint, Deadline(STALE_SECONDS)
        return endpoint != self._first or self._patience.has_passed()


def _receive_answer(
    connection: socket.socket, lookup: _Lookup, endpoint: _Endpoint, deadline: Deadline
) -> _Peer:
    """Return the answer of the rank at an endpoint.

    Raises:
        OSError: someone else answers, or the rank is at another endpoint now.
    """
    data, may_extend = b"", True
    connection.setblocking(False)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while len(data) < _HELLO.size:
        if poll.poll(1000 * min(LOOK_AGAIN_SECONDS, remaining(deadline))):
            received = connection.recv(_HELLO.size - len(data))
            if not received:
                raise ConnectionResetError("it closed the connection")
            data += received
        elif deadline.has_passed() and may_extend:
            # The rank waits for the one above it, and will say why that one did not come.
            deadline.extend(LONGER_SECONDS)
            may_extend = False
        elif deadline.has_passed() or lookup.find(deadline) != endpoint:
            raise TimeoutError("no answer")
    peer = _Peer(_HELLO.unpack(data))
    if not is_token(peer.proof, proof_of(endpoint.token)):
        raise ConnectionError("the process there does not know the token of the rank")
    return peer


def _lost_store(store: Store, number: int, error: RuntimeError) -> LostRankError:
    """Return the error of a rank that cannot reach the store."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    where = "the store of the ranks"
    if (address := address_of(store)) is not None:
        where += f" at {address[0]}:{address[1]}, which is a part of rank 0 in most jobs,"
    text = f"{where} does not answer: {reason}. Look for the first error in the log of its process"
    return LostRankError(OPERATION, {number: text})


def _key(rank: int) -> str:
    return f"{rank}"


def _encode(endpoint: _Endpoint) -> str:
    return msgspec.json.encode(endpoint).decode()


def _is_told(found: bytes) -> bool:
    """Return whether the store has no address, but why there is none."""
    with suppress(msgspec.DecodeError):
        return not _decode(found).port
    return False


def _decode(found: bytes) -> _Endpoint:
    """Return the endpoint in the store, which may have none."""
    if found in {b"", _NO_ENDPOINT.encode()}:
        return _Endpoint()
    return msgspec.json.decode(found, type=_Endpoint)
