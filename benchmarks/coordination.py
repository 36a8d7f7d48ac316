"""What torch's `TCPStore` can carry between the leaders of many nodes, and what it cannot tell.

One server, and thousands of clients in a few processes, each with a connection of its own. A round:
each leader sets a message, aggregators read those of 32 leaders with one `multi_get` and set their
own, the root reads these and sets the reply, and each leader reads the reply.

Then, rounds of shardwise's own tree with messages of the same sizes, in as many processes as there
are ranks, up to 512.

    python -m benchmarks.coordination 256 1024 2048 4096
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

from torch.distributed import DistStoreError, FileStore, TCPStore

from shardwise.parts.ranks.tree import TreeGroup

HOST = "127.0.0.1"
MESSAGE, REPLY = "m" * 2_000, "r" * 100_000
FAN_OUT = 32
PROCESSES, THREADS = 4, 16
MOST_PROCESSES, TREE_ROUNDS = 512, 20
PATIENCE = timedelta(seconds=60)


def main(counts: Sequence[int]) -> None:
    for count in (2, 8, 64, *counts):
        if count <= MOST_PROCESSES:
            measure_tree(count)
    for count in counts:
        measure_store(count)
    notice_of_death()


def measure_store(count: int) -> None:
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    server = processes.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    pipes = []
    for part in range(PROCESSES):
        pipe, other = processes.Pipe()
        mine = range(part, count, PROCESSES)
        processes.Process(target=lead, args=(other, port, mine, count), daemon=True).start()
        pipes.append(pipe)
    began = time.perf_counter()
    for pipe in pipes:
        pipe.recv()
    print(f"{count} leaders: connected in {time.perf_counter() - began:.2f} s")
    for number in range(3):
        before, began = cpu_of(ours), time.perf_counter()
        for step in ("send", "aggregate", "conclude", "receive"):
            step_began = time.perf_counter()
            for pipe in pipes:
                pipe.send((step, number))
            for pipe in pipes:
                pipe.recv()
            print(f"    {step}: {time.perf_counter() - step_began:.3f} s")
        seconds, cpu = time.perf_counter() - began, cpu_of(ours) - before
        print(f"  round {number}: {seconds:.3f} s; CPU of the server: {cpu:.3f} s")
    for pipe in pipes:
        pipe.send(("end", 0))
    ours.send("end")
    server.join()


def measure_tree(count: int) -> None:
    """Run rounds of the tree in forked processes, and print the seconds of the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        reader, writer = os.pipe()
        for rank in range(count):
            if not os.fork():
                os.write(writer, run_in_tree(rank, count, folder))
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            rows = [tuple(map(float, line.split())) for line in pipe]
        for _ in range(count):
            os.wait()
    connecting, seconds, cpu = (max(column) for column in zip(*rows, strict=True))
    print(
        f"tree of {len(rows)} processes: connected in {connecting:.3f} s; a round: "
        f"{1000 * seconds:.2f} ms, {1000 * cpu:.2f} ms of CPU in the busiest process",
        flush=True,
    )


def run_in_tree(rank: int, count: int, folder: str) -> bytes:
    store = FileStore(f"{folder}/store", count)
    began = time.perf_counter()
    with TreeGroup(store, rank, count, timeout=PATIENCE) as group:
        group.broadcast(b"")
        connecting = time.perf_counter() - began
        began, used = time.perf_counter(), time.process_time()
        for _ in range(TREE_ROUNDS):
            group.reduce(MESSAGE.encode(), max)
            group.broadcast(REPLY.encode() if rank == 0 else b"")
        seconds, used = time.perf_counter() - began, time.process_time() - used
    return f"{connecting} {seconds / TREE_ROUNDS} {used / TREE_ROUNDS}\n".encode()


def serve(pipe: Connection) -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, use_libuv=True)
    pipe.send(store.port)
    while pipe.recv() != "end":
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)


def cpu_of(server: Connection) -> float:
    server.send("cpu")
    return server.recv()


def lead(pipe: Connection, port: int, leaders: Sequence[int], count: int) -> None:
    """Simulate some leaders, with a connection for each."""
    with ThreadPoolExecutor(THREADS) as pool:

        def on_all(function: Callable[..., object], ranks: Sequence[int], *args: object) -> None:
            list(pool.map(partial(function, *args), ranks))

        def connect(rank: int) -> None:
            clients[rank] = TCPStore(HOST, port, wait_for_workers=False, timeout=PATIENCE)

        clients: dict[int, TCPStore] = {}
        on_all(connect, leaders)
        pipe.send("connected")
        aggregators = [rank for rank in leaders if rank % FAN_OUT == 0]
        while True:
            step, number = pipe.recv()
            if step == "end":
                return
            if step == "send":
                on_all(send, leaders, clients, number)
            elif step == "aggregate":
                on_all(aggregate, aggregators, clients, number, count)
            elif step == "conclude" and 0 in clients:
                firsts = [f"{number}/up/{rank}" for rank in range(0, count, FAN_OUT)]
                clients[0].multi_get(firsts)
                clients[0].set(f"{number}/reply", REPLY)
            elif step == "receive":
                on_all(receive, leaders, clients, number)
            pipe.send("done")


def send(clients: dict[int, TCPStore], number: int, rank: int) -> None:
    clients[rank].set(f"{number}/{rank}", MESSAGE)


def receive(clients: dict[int, TCPStore], number: int, rank: int) -> None:
    clients[rank].get(f"{number}/reply")


def aggregate(clients: dict[int, TCPStore], number: int, count: int, rank: int) -> None:
    ranks = range(rank, min(rank + FAN_OUT, count))
    clients[rank].multi_get([f"{number}/{each}" for each in ranks])
    clients[rank].set(f"{number}/up/{rank}", MESSAGE)


def notice_of_death() -> None:
    """Wait for a client that was killed, and for one that is suspended."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, use_libuv=True)
    for how in (signal.SIGKILL, signal.SIGSTOP):
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=connect_and_wait, args=(theirs, store.port), daemon=True
        )
        process.start()
        ours.recv()
        os.kill(process.pid or 0, how)
        began = time.perf_counter()
        try:
            store.wait(["message"], timedelta(seconds=10))
        except DistStoreError as error:
            seconds = time.perf_counter() - began
            first = str(error).splitlines()[0]
            print(f"after {how.name}, the waiting client learns after {seconds:.1f} s: {first}")
        process.kill()


def connect_and_wait(pipe: Connection, port: int) -> None:
    store = TCPStore(HOST, port, wait_for_workers=False)
    store.set("here", "1")
    pipe.send("connected")
    time.sleep(60)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or [256, 1024, 2048])
