"""The tests' store in memory passes the conformance suite."""

from __future__ import annotations

import pytest

from shardwise.store import Store
from shardwise.testing.store_suite import StoreSuite
from tests.store.memory_store import Bucket, MemoryStore


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(Bucket(), ("run",))
