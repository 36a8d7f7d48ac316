"""Whom an owner talks to, where torch.distributed runs with one rank alone."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from shardwise.engine.group import own_group


def test_one_rank_alone_talks_to_nobody() -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert own_group(timedelta(seconds=5)) is None
    finally:
        dist.destroy_process_group()
