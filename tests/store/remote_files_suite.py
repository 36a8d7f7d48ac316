"""Tests of every remote file system: subclass `RemoteFilesSuite`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.ports.store import Store, open_store
from shardwise.testing.store_suite import KEY, StoreSuite, content, read_file, write_file


class RemoteFilesSuite(StoreSuite):
    """The conformance suite of stores, and what all remote file systems have in common.

    The module of the subclass defines a fixture `place`: the URL of a directory that does not exist
    yet.
    """

    @pytest.fixture
    def store(self, place: str) -> Store:
        return open_store(place)

    def test_a_place_is_its_url(self, store: Store, place: str) -> None:
        assert str(store) == place
        assert str(store.at("step")) == f"{place}/step"
        assert str(pickle.loads(pickle.dumps(store))) == place

    def test_a_checkpoint_is_saved_and_loaded(self, place: str) -> None:
        state = {"weight": torch.randn(300, 500), "step": 7}
        sw.save(place, state)
        with pytest.raises(sw.CheckpointExistsError):
            sw.save(place, state)
        loaded = {"weight": torch.zeros(300, 500), "step": 0}
        sw.load(place, loaded)
        assert torch.equal(loaded["weight"], state["weight"])
        assert loaded["step"] == 7

    def test_files_that_are_not_committed_are_deleted(self, store: Store) -> None:
        file = store.create(KEY, 5000)
        file.write_at(0, content(1000))
        file.close()
        assert store.list() == []

    def test_a_forked_process_opens_a_client_of_its_own(self, store: Store, tmp_path: Path) -> None:
        write_file(store, KEY, content(5000))
        pid = os.fork()
        if pid == 0:
            try:
                (tmp_path / "read").write_bytes(read_file(store, KEY))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert (tmp_path / "read").read_bytes() == content(5000).tobytes()
