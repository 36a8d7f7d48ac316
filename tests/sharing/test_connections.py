"""Connections between ranks: a stranger that connects first delays no rank for long."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from shardwise.parts.ranks.connections import TOKEN_SIZE, listen
from shardwise.parts.sharing import links
from shardwise.parts.sharing.links import connect

TOKEN = b"t" * TOKEN_SIZE


@pytest.mark.parametrize("drips", [False, True])
def test_a_stranger_that_says_too_little_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, drips: bool
) -> None:
    monkeypatch.setattr(links, "HELLO_TIMEOUT", 0.5)
    ended = threading.Event()

    def talk(stranger: socket.socket) -> None:
        with suppress(OSError):
            while not ended.wait(0.1):
                stranger.sendall(b"t" if drips else b"")

    with ExitStack() as cleanup:
        listener = listen("127.0.0.1", cleanup)
        address = listener.getsockname()
        stranger = cleanup.enter_context(socket.create_connection(address))
        thread = threading.Thread(target=talk, args=(stranger,))
        thread.start()
        start = time.monotonic()
        arguments = 0, {0: address}, [0], listener, TOKEN, 60.0, cleanup
        outgoing, incoming = connect(*arguments)
        assert time.monotonic() - start < 20.0
        outgoing[0].sendall(b"hello")
        assert incoming[0].recv(5) == b"hello"
        ended.set()
        thread.join()


def test_processes_without_the_token_are_not_accepted() -> None:
    with ExitStack() as cleanup:
        listener = listen("127.0.0.1", cleanup)
        address = listener.getsockname()[:2]
        token = b"s" * TOKEN_SIZE

        intruders = []
        for wrong, source in ((b"x" * TOKEN_SIZE, 1), (token, 2), (token, 1)):
            outgoing, _ = connect(source, {0: address}, [], listener, wrong, 5.0, cleanup)
            intruders.append(outgoing[0])
        _, incoming = connect(0, {}, [1], listener, token, 5.0, cleanup)
        assert list(incoming) == [1]
        assert incoming[1].getpeername() == intruders[-1].getsockname()
