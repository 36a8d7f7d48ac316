"""Both formats in an object store are read in place: all values, as from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.ports.store import open_store
from tests.formats.conftest import GOLDEN_OR_LIVE
from tests.formats.test_in_stores import require_same, upload
from tests.store.servers import Server, moto  # noqa: F401 - a fixture


def require_same_in_store(place: Path, moto: Server) -> None:  # noqa: F811
    url = str(open_store(moto.new_url()).at(place.name))
    upload(place, open_store(url))
    require_same(place, url)


@pytest.mark.parametrize("megatron", [GOLDEN_OR_LIVE[0]], indirect=True)
def test_a_checkpoint_of_megatron_is_the_same(moto: Server, megatron: Any) -> None:  # noqa: F811
    require_same_in_store(megatron.place("bfloat16", 4), moto)


def test_a_snapshot_is_the_same(moto: Server, snapshot: Path) -> None:  # noqa: F811
    require_same_in_store(snapshot, moto)
