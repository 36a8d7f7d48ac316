"""`ReadOnlyStore`: the verbs of a store that writes nothing."""

from __future__ import annotations

from shardwise.errors import StoreError
from shardwise.store.store import WritableFile


class ReadOnlyStore:
    """Refuses all verbs that write. Stores that compose their files from others derive from it.

    Attributes:
        why_read_only: the end of the errors: why nothing can be written, or what to do instead.
    """

    why_read_only = "save to another store"

    def create(self, key: str, size: int, *, replace: bool = False) -> WritableFile:
        """Refuse: the store is read-only."""
        raise self.refusal()

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Refuse: the store is read-only."""
        raise self.refusal()

    def delete(self, key: str) -> None:
        """Refuse: the store is read-only."""
        raise self.refusal()

    def refusal(self) -> StoreError:
        """Return the error for a verb that the store does not support."""
        return StoreError(f"{self} is read-only: {self.why_read_only}")
