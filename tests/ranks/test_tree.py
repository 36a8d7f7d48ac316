"""Ranks that are connected as a tree: messages, and what goes wrong while they connect."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from shardwise import LostRankError, RankError, StateError, TreeGroup
from shardwise.kernel.engine.rounds import Round
from shardwise.parts.ranks import connections, tree, tree_links, tree_rendezvous
from shardwise.parts.ranks.tree import FAN_OUT, children_of, descendants_of, parent_of
from shardwise.parts.ranks.tree_links import MOST_BYTES, Kind, Link
from tests.breadth import mostly_long

TIMEOUT = timedelta(seconds=20)
SOON = 10.0


@pytest.fixture(params=[2, FAN_OUT])
def fan_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Few ranks below each rank, for a tree of several levels, or as many as there are."""
    monkeypatch.setattr(tree, "FAN_OUT", request.param)
    return int(request.param)


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 are below rank 0, 3 and 4 below rank 1, and so on."""
    monkeypatch.setattr(tree, "FAN_OUT", 2)


def outcomes(
    size: int,
    function: Callable[[TreeGroup], Any],
    *,
    store: Any = None,
    timeout: timedelta = TIMEOUT,
    ranks: Sequence[int] | None = None,
    size_of: Callable[[int], int] | None = None,
) -> dict[int, Any]:
    """What a function returns or raises on each rank, in threads."""
    store = dist.HashStore() if store is None else store

    def run(rank: int) -> Any:
        threading.current_thread().name = f"rank {rank}"
        try:
            own_size = size if size_of is None else size_of(rank)
            with TreeGroup(store, rank, own_size, timeout=timeout) as group:
                return function(group)
        except Exception as error:
            return error

    chosen = range(size) if ranks is None else ranks
    with ThreadPoolExecutor(size) as pool:
        return dict(zip(chosen, pool.map(run, chosen), strict=True))


def add(messages: Sequence[bytes]) -> bytes:
    return b"%d" % sum(map(int, messages))


def meet(group: TreeGroup) -> list[int]:
    with Round(group, "meeting") as all_ranks:
        return all_ranks.all_gather(group.rank, int)


def test_the_shape_of_the_tree() -> None:
    size = 131_072
    for rank in (0, 1, 31, 32, 33, 1000, 4095, 4096, 131_071):
        below = children_of(rank, size)
        assert len(below) <= FAN_OUT
        assert {parent_of(each) for each in below} <= {rank}
    depth, rank = 0, size - 1
    while rank:
        assert rank in children_of(parent_of(rank), size)
        depth, rank = depth + 1, parent_of(rank)
    assert depth == 4
    assert sum(map(len, descendants_of(0, size))) == size - 1
    assert (
        sum(sum(map(len, descendants_of(each, size))) + 1 for each in children_of(0, size))
        == size - 1
    )


@pytest.mark.parametrize("size", mostly_long([1, 2, 3, 14], [1, 3]))
def test_messages_of_all_lengths_arrive_whole(size: int, fan_out: int) -> None:
    lengths = [0, 1, 15, 16, 17, 100_000, 5_000_000]

    def talk(group: TreeGroup) -> None:
        for i in range(3):
            assert int(group.reduce(b"%d" % group.rank, add) or -1) == (
                size * (size - 1) // 2 if group.rank == 0 else -1
            )
            for length in lengths:
                message = hashlib.shake_128(b"%d" % i).digest(length)
                assert group.broadcast(message if group.rank == 0 else b"") == message
                largest = group.reduce(bytes([group.rank]) * length, max)
                assert largest == (bytes([size - 1]) * length if group.rank == 0 else b"")
        group.broadcast(b"")  # the ranks leave when all have received all

    assert set(outcomes(size, talk).values()) == {None}


def test_rounds_run_over_the_tree(fan_out: int) -> None:
    def choose_and_meet(group: TreeGroup) -> list[int]:
        with Round(group, "choosing", rank0_only=True) as all_ranks:
            assert all_ranks.broadcast(group.rank, int) == 0
        return meet(group)

    assert outcomes(9, choose_and_meet) == {rank: list(range(9)) for rank in range(9)}


def test_the_bytes_of_messages_are_counted(deep: None) -> None:
    def talk(group: TreeGroup) -> tuple[int, int]:
        group.reduce(b"7", max)
        group.broadcast(b"12345")
        return group.bytes_sent, group.bytes_received

    # Rank 1 sends a message upwards, and the answer to one rank below.
    assert outcomes(4, talk) == {0: (10, 2), 1: (6, 6), 2: (1, 5), 3: (1, 5)}


def test_two_trees_at_once(fan_out: int) -> None:
    store = dist.HashStore()

    def meet_often(group: TreeGroup) -> list[int]:
        return [meet(group) for _ in range(20)][-1]

    def run(name: str, size: int) -> dict[int, Any]:
        return outcomes(size, meet_often, store=dist.PrefixStore(name, store))

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(run, ["a", "b"], [5, 7])
    assert first == {rank: list(range(5)) for rank in range(5)}
    assert second == {rank: list(range(7)) for rank in range(7)}


def test_trees_follow_each_other_at_the_same_place(fan_out: int) -> None:
    store = dist.HashStore()

    def meet_again(rank: int) -> int:
        for i in range(20):
            with (
                TreeGroup(store, rank, 4, timeout=TIMEOUT) as group,
                Round(group, f"meeting {i}") as all_ranks,
            ):
                total = all_ranks.all_reduce(1, int, sum)
        return total

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(meet_again, range(4))) == [4] * 4


@pytest.mark.parametrize("left", ["nobody", "a silent process", "another tree"])
def test_what_an_earlier_attempt_left_in_the_store_does_no_harm(left: str) -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if left == "nobody":
            silent.close()
        old = (
            tree_rendezvous.RankListener(dist.HashStore(), 0, 2, [1])
            if left == "another tree"
            else None
        )
        if old is not None:
            port = old._socket.getsockname()[1]
        endpoint = tree_rendezvous._Endpoint("127.0.0.1", port, b"x" * 16)
        store.set("0", msgspec.json.encode(endpoint).decode())
        with ThreadPoolExecutor(2) as pool:
            late = pool.submit(
                outcomes, 2, lambda group: group.broadcast(b"x"), store=store, ranks=[1]
            )
            for _ in range(20):
                time.sleep(0.02)
                if old is not None:
                    old.accept()
            assert outcomes(2, lambda group: group.broadcast(b"x"), store=store, ranks=[0]) == {
                0: b"x"
            }
            assert late.result() == {1: b"x"}


def test_a_rank_that_never_comes_is_named(deep: None) -> None:
    began = time.monotonic()
    told = outcomes(11, meet, ranks=[0, 2, 5, 6, 7], timeout=timedelta(seconds=2))
    assert time.monotonic() - began < SOON
    for rank, error in told.items():
        assert isinstance(error, LostRankError), rank
    # Rank 2 and those below it are there, and know why rank 0 gave up.
    for rank in (0, 2, 5, 6):
        assert sorted(told[rank].failures) == [1]
        assert "did not answer within 2 s; ranks 3, 4, 7-10 send" in str(told[rank])
        assert "its stack (py-spy dump), or raise timeout=" in str(told[rank])
    assert sorted(told[7].failures) == [3]
    assert "it has put no address into the store" in str(told[7])
    assert "or another process has connected as rank 7" in str(told[7])


def test_a_rank_that_cannot_be_reached_is_named_with_its_address() -> None:
    store = dist.HashStore()
    endpoint = tree_rendezvous._Endpoint("127.0.0.1", 1, b"x" * 16)
    store.set("0", msgspec.json.encode(endpoint).decode())
    told = outcomes(2, meet, store=store, ranks=[1], timeout=timedelta(seconds=1))
    assert isinstance(told[1], LostRankError)
    assert "it cannot be reached at 127.0.0.1:1: " in told[1].failures[0]
    assert "Check that it runs, and that no firewall blocks TCP ports" in told[1].failures[0]


def test_another_process_at_the_address_of_a_rank_is_not_called_a_firewall() -> None:
    store = dist.HashStore()

    def answer(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.recv(1000)
                    connection.sendall(bytes(tree_rendezvous._HELLO.size))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        endpoint = tree_rendezvous._Endpoint("127.0.0.1", listener.getsockname()[1], b"x" * 16)
        store.set("0", msgspec.json.encode(endpoint).decode())
        told = outcomes(2, meet, store=store, ranks=[1], timeout=timedelta(seconds=1))
        listener.shutdown(socket.SHUT_RDWR)
    assert isinstance(told[1], LostRankError)
    assert "does not know the token" in told[1].failures[0]
    assert "that no other process has its port now" in told[1].failures[0]
    assert "firewall" not in told[1].failures[0]


def test_a_rank_that_answers_too_late_is_named_with_its_host(deep: None) -> None:
    ended = threading.Event()

    def run(group: TreeGroup) -> None:
        with Round(group, "first"):
            pass
        if group.rank == 4:
            ended.wait(SOON)
        try:
            with Round(group, "second"):
                pass
        finally:
            ended.set()

    told = outcomes(7, run, timeout=timedelta(seconds=3))
    for rank in (0, 1, 2, 3, 5, 6):
        assert isinstance(told[rank], LostRankError)
        assert sorted(told[rank].failures) == [4], told[rank]
        assert str(told[rank]).startswith("second: exchanging messages failed on 1 rank:")
        assert f"did not answer within 3 s, on host {socket.gethostname()}" in str(told[rank])


@pytest.mark.parametrize("lost", [0, 1, 4, 6])
def test_a_rank_that_leaves_is_known_to_all(lost: int, deep: None) -> None:
    def run(group: TreeGroup) -> None:
        with Round(group, "first"):
            pass
        if group.rank == lost:
            raise KeyError("a bug in the training")
        with Round(group, "second"):
            pass

    began = time.monotonic()
    told = outcomes(7, run)
    assert time.monotonic() - began < SOON
    check_all_know(told, lost)
    others = (str(error) for rank, error in told.items() if rank != lost)
    assert all("look for the first error in its log" in each for each in others)


def check_all_know(told: dict[int, Any], lost: int) -> None:
    """All ranks but the lost one raised an error that names it."""
    for rank, error in told.items():
        assert isinstance(error, KeyError if rank == lost else LostRankError)
        assert rank == lost or sorted(error.failures) == [lost]


def die(group: TreeGroup) -> None:
    """End the connections as the kernel does when a process is killed."""
    for link in group._links:
        link._connection.shutdown(socket.SHUT_RDWR)
    raise KeyError("killed")


@pytest.mark.parametrize("lost", [2, 3])
def test_a_rank_that_dies_before_it_joins_its_part_is_known_to_all(lost: int, deep: None) -> None:
    def run(group: TreeGroup) -> None:
        meet(group)
        if group.rank == lost:
            die(group)
        with ExitStack() as cleanup:
            part = group.part([0, 2] if group.rank % 2 == 0 else [1, 3], cleanup)
            part.broadcast(b"x")
            meet(group)

    began = time.monotonic()
    told = outcomes(4, run)
    assert time.monotonic() - began < SOON
    check_all_know(told, lost)


def test_a_rank_that_dies_outside_of_a_part_is_known_in_it(deep: None) -> None:
    ended = threading.Event()

    def run(group: TreeGroup) -> None:
        with ExitStack() as cleanup:
            part = group.part([0, 1] if group.rank < 2 else [2, 3], cleanup)
            part.broadcast(b"x")
            if group.rank == 2:
                die(group)
            if group.rank == 1:
                ended.wait(SOON)
            try:
                part.reduce(b"x", max)
                part.broadcast(b"x")
            finally:
                if group.rank == 0:
                    ended.set()

    began = time.monotonic()
    told = outcomes(4, run)
    assert time.monotonic() - began < SOON
    assert sorted(told[0].failures) == sorted(told[1].failures) == [2]


def test_ranks_may_leave_while_others_need_their_part(deep: None) -> None:
    """Ranks of another part close the whole group, which this part still watches."""

    def run(group: TreeGroup) -> bytes:
        with ExitStack() as cleanup:
            part = group.part([0, 1] if group.rank < 2 else [2, 3], cleanup)
            time.sleep(1.5 * (group.rank == 1))
            part.reduce(b"x", max)
            return part.broadcast(b"x")

    assert outcomes(4, run) == dict.fromkeys(range(4), b"x")


def test_ranks_may_leave_after_their_last_message(fan_out: int) -> None:
    """Nobody replies to the last message, so ranks close their connections early."""

    def send(group: TreeGroup) -> bytes:
        time.sleep(0.3 * (group.rank == 6))
        return group.reduce(b"%d" % group.rank, add)

    found = outcomes(7, send)
    assert found == {0: b"21"} | dict.fromkeys(range(1, 7), b"")


def test_a_closed_group_says_so() -> None:
    with TreeGroup(dist.HashStore(), 0, 1) as group:
        assert group.broadcast(b"x") == b"x"
    group.close()
    for _ in range(2):
        with pytest.raises(LostRankError, match=r"closed by close\(\): create a new Checkpointer"):
            group.broadcast(b"x")
        with pytest.raises(LostRankError, match=r"closed by close\(\): create a new Checkpointer"):
            group.reduce(b"x", max)


def fail_twice(act: Callable[[TreeGroup], Any], group: TreeGroup) -> tuple[Exception, Exception]:
    """What an action raises, and what the next exchange raises."""
    with pytest.raises(Exception) as first:  # noqa: PT011 - as telemetry, which only logs it
        act(group)
    with pytest.raises(RankError) as second:
        group.reduce(b"x", max)
    return first.value, second.value


@pytest.mark.parametrize("lost", [1, 3])
def test_the_first_lost_rank_is_named_again(lost: int, deep: None) -> None:
    connected = threading.Barrier(4)

    def run(group: TreeGroup) -> tuple[Exception, Exception]:
        meet(group)
        connected.wait(SOON)
        if group.rank == lost:
            die(group)
        return fail_twice(meet, group)

    told = outcomes(4, run)
    assert isinstance(told.pop(lost), KeyError)
    for first, second in told.values():
        assert type(first) is type(second) is LostRankError
        assert [*first.failures] == [lost]
        assert second.failures == first.failures
        assert "not possible, because exchanging messages failed earlier: create a" in str(second)


def test_the_first_failure_is_raised_again(deep: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MOST_BYTES", 10)
    connected = threading.Barrier(4)

    def run(group: TreeGroup) -> tuple[Exception, Exception]:
        connected.wait(SOON)

        def send(group: TreeGroup) -> None:
            group.reduce(b"x" * (11 if group.rank == 3 else 1), max)
            group.broadcast(b"")

        return fail_twice(send, group)

    for first, second in outcomes(4, run).values():
        assert type(first) is type(second) is RankError
        assert second.failures == first.failures
        assert [*first.failures] == [3]


def test_an_interrupted_group_says_so() -> None:
    def combine(messages: Sequence[bytes]) -> bytes:
        raise KeyError("a bug")

    def run(group: TreeGroup) -> tuple[Exception, Exception]:
        def send(group: TreeGroup) -> None:
            group.broadcast(group.reduce(b"x", combine))

        return fail_twice(send, group)

    first, second = outcomes(2, run)[0]
    assert type(first) is KeyError
    assert type(second) is LostRankError
    assert second.failures == {0: "it raised KeyError meanwhile"}


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_of_the_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(StateError, match=f"rank={rank}, size={size}"):
        TreeGroup(dist.HashStore(), rank, size)


def test_other_code_of_the_library_is_named_on_all_ranks(
    deep: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = tree_rendezvous._describe_self

    def describe_another(*args: Any) -> bytes:
        is_another = threading.current_thread().name == "rank 4"
        return describe(*args).replace(b"0.0.1", b"0.0.2" if is_another else b"0.0.1")

    monkeypatch.setattr(tree_rendezvous, "_describe_self", describe_another)
    monkeypatch.setattr(tree_rendezvous, "build", lambda: "0.0.1")
    told = outcomes(7, meet, timeout=timedelta(seconds=5))
    on_host = f"on host {socket.gethostname()}"
    for rank, error in told.items():
        assert type(error) is RankError, (rank, error)
        assert sorted(error.failures) == [1 if rank == 4 else 4]
        if rank == 4:
            assert f"{on_host}, it has shardwise 0.0.1, and refuses rank 4" in str(error)
        else:
            assert f"{on_host}, it has shardwise 0.0.2 (protocol " in str(error)
            assert f"and rank 1 {on_host} has 0.0.1 (protocol " in str(error)
        assert "install the same code" in str(error)


def test_another_number_of_ranks_is_named_on_both_sides() -> None:
    told = outcomes(
        3, lambda group: group.broadcast(b"x"), size_of=lambda rank: 4 if rank == 2 else 3
    )
    host = f"on host {socket.gethostname()}"
    for rank in (0, 1):  # rank 0 has noticed it, and rank 1 is told
        assert [*told[rank].failures.values()] == [
            f"{host}, it was started as one of 4 ranks, and rank 0 {host} as one of 3: use one "
            "WORLD_SIZE for all"
        ]
    assert f"{host}, it was started as one of 3 ranks, and rank 2 {host} as one of 4" in str(
        told[2]
    )


@pytest.mark.parametrize(("rank", "absent"), [(1, 2), (3, 4)])
def test_a_second_process_with_the_same_rank_is_named(
    rank: int, absent: int, deep: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = tree_rendezvous._describe_self

    def describe_thread(*args: Any) -> bytes:
        """Each thread says that it is another process."""
        process = threading.get_native_id()
        return describe(*args) if len(args) == 5 else describe(*args, ("host", process))

    monkeypatch.setattr(tree_rendezvous, "_describe_self", describe_thread)
    store, began = dist.HashStore(), time.monotonic()

    def run(ranks: Sequence[int]) -> dict[int, Any]:
        return outcomes(5, meet, store=store, ranks=ranks)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, [each for each in range(5) if each != absent])
        time.sleep(1)
        second = pool.submit(run, [rank])
    assert time.monotonic() - began < SOON
    for error in [*first.result().values(), *second.result().values()]:
        assert type(error) is RankError
        assert [*error.failures] == [rank]
        assert "it connected twice: from host host, process " in str(error)


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Processes that connect before the ranks do, and say what is in the list; what they hear."""
    says = [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 1000, b"x" * tree_rendezvous._HELLO.size]
    connections = []
    listen = tree_rendezvous.listen_for_ranks

    def listen_and_be_visited(*args: Any) -> Any:
        address, listener = listen(*args)
        for said in says:
            connection = socket.create_connection(address)
            connection.sendall(said)
            connections.append(connection)
        return address, listener

    monkeypatch.setattr(tree_rendezvous, "listen_for_ranks", listen_and_be_visited)
    heard: list[bytes] = []
    yield heard
    for connection in connections:
        connection.settimeout(5)
        with suppress(ConnectionError):
            heard.append(connection.recv(100))
        connection.close()
    assert set(heard) <= {b""}


def test_strangers_are_rejected(strangers: list[bytes], fan_out: int) -> None:
    began = time.monotonic()
    assert outcomes(4, lambda group: group.broadcast(b"x")) == dict.fromkeys(range(4), b"x")
    assert time.monotonic() - began < SOON


def test_many_silent_strangers_do_not_delay_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_rendezvous, "MOST_PENDING", 4)
    monkeypatch.setattr(tree_rendezvous, "HELLO_TIMEOUT", 60.0)
    open_connections = []
    accept, listen = tree_rendezvous.RankListener.accept, tree_rendezvous.listen_for_ranks

    def accept_and_count(listener: tree_rendezvous.RankListener) -> Iterator[Link]:
        yield from accept(listener)
        open_connections.append(len(listener._pending))

    with ExitStack() as cleanup:

        def listen_and_be_visited(*args: Any) -> Any:
            address, listener = listen(*args)
            for _ in range(30):
                cleanup.enter_context(socket.create_connection(address))
            return address, listener

        monkeypatch.setattr(tree_rendezvous, "listen_for_ranks", listen_and_be_visited)
        monkeypatch.setattr(tree_rendezvous.RankListener, "accept", accept_and_count)
        began = time.monotonic()
        assert outcomes(4, lambda group: group.broadcast(b"x")) == dict.fromkeys(range(4), b"x")
        assert time.monotonic() - began < SOON
    assert max(open_connections) <= 4


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        tree_links._HEAD.pack(b"swm1", Kind.REDUCE, MOST_BYTES + 1),
        tree_links._HEAD.pack(b"swm1", Kind.FAILED, 1 << 20),
        tree_links._HEAD.pack(b"swm1", 77, 1),
        tree_links._HEAD.pack(b"swm1", Kind.FAILED, 3) + b"abc",
        tree_links._HEAD.pack(b"swm1", Kind.MISSING, 1) + b"\xff",
    ],
)
def test_what_is_no_message_ends_the_connection(sent: bytes) -> None:
    def run(group: TreeGroup) -> None:
        if group.rank == 1 and (above := group._above) is not None:
            above._connection.sendall(sent)
        group.reduce(b"1", add)
        group.broadcast(b"")

    told = outcomes(2, run, timeout=timedelta(seconds=5))
    assert isinstance(told[0], LostRankError)
    assert "it sent an invalid message" in told[0].failures[1]


def test_ranks_that_do_not_exist_are_not_waited_for() -> None:
    """What another rank says of missing ranks is checked before it names them in an error."""
    news = msgspec.msgpack.encode([(-1, ""), (7, "host")])

    def run(group: TreeGroup) -> None:
        if group.rank == 1 and (above := group._above) is not None:
            above._connection.sendall(
                tree_links._HEAD.pack(b"swm1", Kind.MISSING, len(news)) + news
            )
            time.sleep(3)
            return
        group.reduce(b"1", add)

    told = outcomes(2, run, timeout=timedelta(seconds=1))
    assert isinstance(told[0], LostRankError)
    assert sorted(told[0].failures) == [1]


def test_what_a_rank_said_before_it_closed_is_read_when_sending_fails() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_links, "watch_host", lambda _: None)
        link, other = Link(1, "", ours), Link(0, "", theirs)
    for kind in (Kind.REDUCE, Kind.FAILED):
        other.put(kind, b"said")
    other.send_and_receive(can_receive=False)
    other.close()
    link.put(Kind.BROADCAST, b"x")
    link.send_and_receive(can_receive=False)
    assert "Broken pipe" in link.ended
    assert [*link.inbox] == [b"said"]
    assert [*link.news] == [(Kind.FAILED, b"said")]
    link.close()


def test_memory_grows_with_what_arrives_not_with_what_is_announced() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_links, "watch_host", lambda _: None)
        link = Link(1, "", ours)
    theirs.sendall(tree_links._HEAD.pack(b"swm1", Kind.REDUCE, MOST_BYTES) + b"x" * 1000)
    link.send_and_receive(can_receive=True)
    assert not link.ended
    assert len(link._body) == 1000
    theirs.close()
    link.send_and_receive(can_receive=True)
    assert link.ended == (
        "its connection was closed: its process ended, or its network failed; look for the first "
        "error in its log"
    )
    link.close()


@pytest.mark.parametrize(
    "sender", [0, 4, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 6))]
)
def test_all_ranks_learn_whose_message_is_too_large(
    sender: int, deep: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "MOST_BYTES", 10)

    def send(group: TreeGroup) -> None:
        group.reduce(b"x" * (11 if group.rank == sender else 1), max)
        group.broadcast(b"")

    for error in outcomes(7, send).values():
        assert type(error) is RankError
        assert [*error.failures] == [sender]
        assert "its message has 11 bytes, more than 10. Save fewer" in str(error)


def test_all_ranks_learn_which_combined_message_is_too_large(
    deep: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "MOST_BYTES", 10)

    def send(group: TreeGroup) -> None:
        group.reduce(b"x" * (8 if group.rank == 3 else 2), b"".join)
        group.broadcast(b"")

    for error in outcomes(7, send).values():
        assert type(error) is RankError
        assert [*error.failures] == [1]
        assert "combined with those of the 2 ranks below it" in str(error)
        assert "of which rank 3 sent most (8 bytes), has 12 bytes, more than 10" in str(error)


def test_all_ranks_learn_that_an_answer_is_too_large(
    deep: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "MOST_BYTES", 10)
    told = outcomes(7, lambda group: group.broadcast(b"x" * 11 if group.rank == 0 else b""))
    for error in told.values():
        assert type(error) is RankError
        assert "its message to all ranks has 11 bytes, more than 10" in error.failures[0]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_place_that_vanishes_while_it_is_read_is_not_waited_for(
    kind: str, tmp_path: Path
) -> None:
    store: Any = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }[kind]()
    store.set_timeout(timedelta(seconds=60))

    class Vanishing:
        def check(self, keys: list[str]) -> bool:
            return True  # though no store has the key any more

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    began = time.monotonic()
    told = outcomes(2, meet, store=Vanishing(), ranks=[1], timeout=timedelta(seconds=1))
    assert time.monotonic() - began < SOON
    assert "it has put no address into the store" in str(told[1])
    assert not store.check(["0"])


@pytest.mark.parametrize(
    ("of_name", "to_networks", "expected"),
    [
        ("127.0.0.2", "127.0.0.3", "127.0.0.2"),
        ("127.0.1.1", "127.0.0.3", "127.0.0.3"),  # as on Debian
        ("127.0.1.1", None, "127.0.0.1"),
        ("192.0.2.7", "127.0.0.3", "127.0.0.3"),  # a name whose address is that of another host
    ],
)
def test_a_store_without_a_host_leads_to_an_address_that_other_hosts_reach(
    of_name: str, to_networks: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the addresses of the test, which all belong to this host, two stand for other networks."""
    monkeypatch.setattr(connections, "_is_loopback", lambda address: address == "127.0.1.1")
    monkeypatch.setattr(connections, "_address_towards", lambda host, port: to_networks)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: of_name)
    with ExitStack() as cleanup:
        (host, port), listener = connections.listen_for_ranks(cleanup, dist.HashStore())
        assert (host, port) == listener.getsockname() == (expected, port)


def test_a_store_that_does_not_answer_is_named() -> None:
    class Broken:
        host, port = "node-0", 29500

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe\nexception raised from …")

        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe\nexception raised from …")

        def compare_set(self, key: str, expected: str, value: str) -> bytes:
            raise RuntimeError("Broken pipe\nexception raised from …")

    for rank, error in outcomes(2, lambda group: None, store=Broken()).items():
        assert isinstance(error, LostRankError)
        assert error.failures == {
            rank: "the store of the ranks at node-0:29500, which is a part of rank 0 in most jobs, "
            "does not answer: Broken pipe. Look for the first error in the log of its process"
        }


def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    with TreeGroup(dist.HashStore(), 0, 1) as group:
        child = os.fork()
        if not child:
            code = 1
            try:
                group.broadcast(b"")
            except LostRankError as error:
                code = 0 if "has forked this one" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert group.broadcast(b"x") == b"x"


def hang(group: TreeGroup, over: threading.Event) -> Any:
    """What combining messages does on a rank whose storage hangs."""

    def conclude(total: int) -> int:
        over.wait(60.0)
        return total

    with Round(group, "writing and publishing") as all_ranks:
        return all_ranks.all_reduce(1, int, sum, conclude, int)


def check_blamed(told: dict[int, Any], rank: int) -> None:
    """All ranks but one say that this one did not answer, and name no other."""
    for each, error in told.items():
        if each != rank:
            assert isinstance(error, LostRankError)
            assert sorted(error.failures) == [rank], (each, error)
            assert "did not answer" in error.failures[rank]


@pytest.mark.parametrize(
    ("late", "size"),
    [
        (4, 7),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 3), (2, 3), (1, 7), (6, 7))),
    ],
)
def test_a_rank_that_was_late_is_not_blamed_for_another_that_hangs_later(
    late: int, size: int, deep: None
) -> None:
    """Rank 0 has said for whom it waits; then it hangs itself, in the same round."""
    over, others = threading.Event(), {*range(1, size)}

    def run(group: TreeGroup) -> None:
        meet(group)
        if group.rank == late:
            time.sleep(2.5)
        try:
            hang(group, over)
        finally:
            others.discard(group.rank)
            if not others:
                over.set()

    check_blamed(outcomes(size, run, timeout=timedelta(seconds=5)), 0)


@pytest.mark.parametrize(
    ("late", "stopped", "size"),
    [(3, 1, 7), *(pytest.param(2, 0, size, marks=pytest.mark.long) for size in (3, 7))],
)
def test_a_rank_that_stops_while_it_waits_is_named(
    late: int, stopped: int, size: int, deep: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot say that nobody is missing any more. The others believe it for some seconds."""
    send_and_receive, began = TreeGroup._send_and_receive, dict[int, float]()
    over, others = threading.Event(), set(range(size)) - {stopped}

    def stop(group: TreeGroup, seconds: float) -> None:
        has_begun = began.get(group.rank, time.monotonic())
        if group.rank == stopped and time.monotonic() - has_begun > 2.0 and not group._is_closed:
            over.wait(60.0)
        send_and_receive(group, seconds)

    def run(group: TreeGroup) -> None:
        meet(group)
        began[group.rank] = time.monotonic()
        if group.rank == late:
            time.sleep(2.5)
        try:
            meet(group)
        finally:
            others.discard(group.rank)
            if not others:
                over.set()

    monkeypatch.setattr(TreeGroup, "_send_and_receive", stop)
    check_blamed(outcomes(size, run, timeout=timedelta(seconds=6)), stopped)


@pytest.mark.long
def test_the_rank_that_is_missing_in_the_next_round_is_named(deep: None) -> None:
    """What was said in one round does not count in the next."""

    def run(group: TreeGroup) -> None:
        if group.rank == 2:
            time.sleep(2.5)
        meet(group)
        if group.rank == 1:
            time.sleep(9.0)
        meet(group)

    check_blamed(outcomes(7, run, timeout=timedelta(seconds=4)), 1)


def flood(group: TreeGroup, frame: bytes, over: threading.Event) -> None:
    """Send the same bytes to the rank above for 8 s, as fast as it takes them."""
    assert group._above is not None
    connection = group._above._connection
    connection.setblocking(True)
    connection.settimeout(0.5)
    until = time.monotonic() + 8.0
    with suppress(OSError):
        while time.monotonic() < until and not over.is_set():
            with suppress(TimeoutError):
                connection.sendall(frame * 1000)


@pytest.mark.parametrize(
    "kind", mostly_long([Kind.REDUCE, Kind.LEAVING, Kind.MISSING], [Kind.REDUCE, Kind.MISSING])
)
def test_the_time_out_holds_against_endless_frames(kind: Kind) -> None:
    """And they do not fill the memory."""
    body = msgspec.msgpack.encode([]) if kind == Kind.MISSING else b""
    frame = tree_links._HEAD.pack(b"swm1", kind, len(body)) + body
    waiting: list[int] = []
    over = threading.Event()

    def run(group: TreeGroup) -> float:
        began = time.monotonic()
        if group.rank == 1:
            flood(group, frame, over)
        elif group.rank == 2:
            over.wait(8.0)
        with suppress(LostRankError):
            group.reduce(b"1", add)
        over.set()
        waiting.extend(len(link.inbox) for link in group._links)
        return time.monotonic() - began

    told = outcomes(3, run, timeout=timedelta(seconds=2))
    assert told[0] < 6.0, told
    assert max(waiting) <= tree_links.MOST_WAITING


def test_messages_that_wait_are_all_received(deep: None) -> None:
    """A rank may run ahead of others. What they have no room for stays in the connection."""
    count = tree_links.MOST_WAITING + 500

    def run(group: TreeGroup) -> list[bytes]:
        if group.rank:
            time.sleep(0.5)
        return [group.broadcast(b"%d" % number) for number in range(count)]

    expected = [b"%d" % number for number in range(count)]
    assert all(each == expected for each in outcomes(4, run).values())


@pytest.mark.parametrize("sender", [1, 3, 4])
@pytest.mark.parametrize("sent", [b"", b"\xc1", b"\x93\x01\x02", msgspec.msgpack.encode("x")])
def test_a_message_that_cannot_be_decoded_names_its_sender(
    sent: bytes, sender: int, deep: None
) -> None:
    def run(group: TreeGroup) -> None:
        meet(group)
        if group.rank == sender:
            group.reduce(sent, lambda messages: sent)
            group.broadcast(b"")
        else:
            meet(group)

    for error in outcomes(7, run).values():
        assert isinstance(error, RankError)
        assert not isinstance(error, LostRankError)
        assert sorted(error.failures) == [sender], error
        assert "it sent a message that cannot be decoded" in error.failures[sender]


@pytest.mark.parametrize("sent", [b"", b"\xc1", msgspec.msgpack.encode([1])])
def test_an_answer_that_cannot_be_decoded_names_its_sender(sent: bytes, deep: None) -> None:
    def run(group: TreeGroup) -> None:
        if group.rank:
            meet(group)
        else:
            group.reduce(b"", lambda messages: b"")
            group.broadcast(sent)
            meet(group)

    for error in outcomes(7, run).values():
        assert isinstance(error, RankError)
        assert sorted(error.failures) == [0], error
        assert "it sent a message that cannot be decoded" in error.failures[0]


@pytest.mark.parametrize("sender", [0, 1, 4])
@pytest.mark.parametrize("how", ["all_reduce", "all_gather"])
def test_a_value_of_another_type_names_its_sender(how: str, sender: int, deep: None) -> None:
    """The ranks stay connected: their next round works."""

    def run(group: TreeGroup) -> tuple[Any, list[int]]:
        value: Any = "text" if group.rank == sender else 1
        failure: Exception | None = None
        try:
            with Round(group, "adding") as all_ranks:
                if how == "all_gather":
                    all_ranks.all_gather(value, int)
                else:
                    all_ranks.all_reduce(value, int, sum)
        except Exception as error:
            failure = error
        return failure, meet(group)

    for error, met in outcomes(7, run).values():
        assert isinstance(error, RankError)
        assert sorted(error.failures) == [sender], error
        assert "it sent a message that cannot be decoded" in error.failures[sender]
        assert met == list(range(7))


def test_an_answer_of_another_type_names_rank_0(deep: None) -> None:
    def run(group: TreeGroup) -> list[int]:
        with (
            pytest.raises(RankError, match=r"rank 0: it sent a message that cannot be decoded"),
            Round(group, "concluding") as all_ranks,
        ):
            all_ranks.all_reduce(1, int, sum, str, int)
        with (
            pytest.raises(RankError, match=r"rank 0: it sent a message that cannot be decoded"),
            Round(group, "telling", rank0_only=True) as all_ranks,
        ):
            all_ranks.broadcast("text", int)
        return meet(group)

    assert set(map(tuple, outcomes(3, run).values())) == {(0, 1, 2)}


@pytest.mark.parametrize(
    "order", mostly_long([[0, 2, 3, 1], [0, 2, 1, 3], [2, 0, 1, 3]], [[0, 2, 3, 1]])
)
def test_two_groups_that_connect_through_one_store_at_once_are_refused(
    order: Sequence[int],
) -> None:
    """Ranks 0 and 1 of one job, and of another (2 and 3)."""
    store = dist.HashStore()

    def run(number: int) -> Any:
        time.sleep(0.2 * order.index(number))
        with TreeGroup(store, number % 2, 2, timeout=timedelta(seconds=20)) as group:
            return meet(group)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(run, number) for number in range(4)]
    for job in jobs:
        error = job.exception()
        assert isinstance(error, RankError)
        assert "give each TreeGroup a PrefixStore of its own" in str(error)


@pytest.mark.parametrize("left", [b"", b"none"])
def test_any_text_in_the_store_does_no_harm_to_a_rank_that_listens(left: bytes) -> None:
    store = dist.HashStore()
    store.set("0", left.decode())
    assert outcomes(2, meet, store=store) == {0: [0, 1], 1: [0, 1]}
