"""A snapshot as one other node has it: the read half of a store, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import StoreError
from shardwise.memory.client import AgentClient
from shardwise.store import ReadableFile, Store, WritableFile
from shardwise.store.store import Buffer


class RemoteStore:
    """The files that a node has of a step; they are only read.

    Args:
        client: the node's agent; the caller closes it.
        run: the id of the run.
        step: the step.
    """

    alignment = 4096

    def __init__(self, client: AgentClient, run: str, step: int) -> None:
        self._client = client
        self._run = run
        self._step = step

    def __str__(self) -> str:
        return f"memory of {self._client}, run {self._run}, step {self._step}"

    def at(self, name: str) -> Store:
        """A snapshot has nothing below it."""
        raise StoreError(f"{self} is a snapshot: it has no {name!r} below it")

    def create(self, key: str, size: int) -> WritableFile:
        """It is only read."""
        raise self._refusal(key)

    def open(self, key: str) -> ReadableFile:
        """A file; its size is asked for once, here."""
        return _RemoteFile(self._client, self._run, self._step, key)

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """It is only read."""
        raise self._refusal(key)

    def read(self, key: str, *, limit: int) -> bytes:
        """All of a small file."""
        return self._client.read(self._run, self._step, key, limit=limit)

    def list(self) -> list[str]:
        """The names of the files that the node has of this step."""
        listed = self._client.list(self._run)
        return sorted(
            file.name for each in listed if each.step == self._step for file in each.files
        )

    def delete(self, key: str) -> None:
        """It is only read."""
        raise self._refusal(key)

    def remove(self) -> None:
        """It is only read."""
        raise self._refusal("")

    def sync(self) -> None:
        """It is only read."""
        raise self._refusal("")

    @contextmanager
    def hold(self, key: str, *, shared: bool) -> Iterator[bool]:
        """The node itself keeps what is being recovered from; there is nothing to hold here."""
        yield True

    def _refusal(self, key: str) -> StoreError:
        return StoreError(f"{self} is read only: {key or 'it'} cannot be changed from here")


class _RemoteFile:
    def __init__(self, client: AgentClient, run: str, step: int, name: str) -> None:
        self._client = client
        self._place = (run, step, name)
        self.size = client.size(run, step, name)

    def read_at(self, offset: int, out: Buffer) -> int:
        count = max(0, min(len(out), self.size - offset))
        self._client.read_range_into(*self._place, offset, out[:count])
        return count

    def close(self) -> None:
        pass
