"""Object stores: the conformance suite on servers, and what is their own."""

from __future__ import annotations

import pytest

from shardwise.store import Store, open_store
from shardwise.testing.store_suite import StoreSuite
from tests.store.servers import Server, moto, seaweedfs  # noqa: F401 - fixtures


class TestMoto(StoreSuite):
    @pytest.fixture
    def store(self, moto: Server) -> Store:  # noqa: F811
        return open_store(moto.new_url(retry="5"))


@pytest.mark.long
class TestSeaweedFs(StoreSuite):
    @pytest.fixture
    def store(self, seaweedfs: Server) -> Store:  # noqa: F811
        return open_store(seaweedfs.new_url())
