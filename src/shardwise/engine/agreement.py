"""The messages by which ranks agree on a save and get its plan, and rank 0's reply."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.engine.divergence import find_differing_sets
from shardwise.engine.exchange import require_equal
from shardwise.plan.save import ManifestPlan

ChoosePeers = Callable[[Sequence[bytes]], list[list[int]]]
"""Chooses each rank's peers: ranks whose pieces the rank copies from its own replicas.

The argument has the fingerprint of each rank's description. Ranks with equal fingerprints hold
equal replicas. The result has a list of peers for each rank.
"""


@prepare_decoding
class PlanMessage(msgspec.Struct, array_like=True):
    """A rank's message to rank 0.

    Attributes:
        terms: the settings that must be equal on all ranks.
        fingerprint: the fingerprint of the rank's description.
        cached_plans: the fingerprints of the plans in the rank's cache.
        values_digest: the digest of the rank's plain values.
        message: the rank's message to `admit`.
        digests: the rank's message about the replicas that it compared at the last save.
    """

    terms: str
    fingerprint: bytes
    cached_plans: list[bytes]
    values_digest: bytes
    message: bytes
    digests: bytes


@prepare_decoding
class Agreement(msgspec.Struct, array_like=True):
    """Rank 0's reply to a rank.

    Attributes:
        save_id: the id of the save; "" if the save is skipped.
        plan: the fingerprint of the plan.
        is_cached: whether all ranks have the plan in their caches.
        send_values: whether this rank sends its plain values to rank 0.
        gather_values: whether any rank sends its plain values.
        peers: on rank 0, the peers of each rank; empty on other ranks.
        differing: the sets of replicas that differed at the last save, as `find_differing_sets`
            returns them.
    """

    save_id: str
    plan: bytes
    is_cached: bool
    send_values: bool
    gather_values: bool
    peers: list[list[int]] = []
    differing: dict[int, int] = {}


@prepare_decoding
class EncodedPlan(msgspec.Struct, array_like=True):
    """The plan of one rank, as rank 0 sends it.

    Attributes:
        pieces: the encoded pieces of the rank.
        peers: the encoded pieces of each of its peers.
        replica_sets: the encoded sets of replicas of the rank.
        manifest: on rank 0, the planned part of the manifest.
    """

    pieces: bytes
    peers: dict[int, bytes]
    replica_sets: bytes
    manifest: ManifestPlan | None = None


def agree_on_plan(
    encoded: Sequence[bytes],
    admit: Callable[[list[bytes]], str],
    choose_peers: ChoosePeers | None,
) -> list[Agreement]:
    """Make rank 0's reply to each rank.

    Of several ranks with equal plain values, only the first sends them.

    Args:
        encoded: the encoded `PlanMessage` of each rank.
        admit, choose_peers: as for `planning.plan_together`.

    Raises:
        MismatchError: ranks do not save the same checkpoint.
    """
    messages = [msgspec.msgpack.decode(each, type=PlanMessage) for each in encoded]
    require_equal(
        [each.terms for each in messages],
        "ranks do not save the same checkpoint in the same way:",
    )
    save_id = admit([each.message for each in messages])
    fingerprints = [each.fingerprint for each in messages]
    peers = choose_peers(fingerprints) if choose_peers is not None else [[] for _ in messages]
    plan = fingerprint_of(msgspec.msgpack.encode((fingerprints, peers)))
    is_cached = bool(save_id) and all(plan in each.cached_plans for each in messages)
    first_rank_of = {m.values_digest: rank for rank, m in reversed(list(enumerate(messages)))}
    senders = set(first_rank_of.values())
    gather = len(senders) > 1
    differing = find_differing_sets([each.digests for each in messages])
    return [
        Agreement(
            save_id,
            plan,
            is_cached,
            rank in senders,
            gather,
            [] if rank else peers,
            differing,
        )
        for rank in range(len(messages))
    ]


def fingerprint_of(data: bytes) -> bytes:
    """Return a digest of 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()
