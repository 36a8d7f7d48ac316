"""Files of lost nodes come back byte for byte, or not at all."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterable
from contextlib import closing
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.errors import CorruptionError, StoreError
from shardwise.kernel.manifest.checksums import BLOCK, crc32
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.redundancy.parity import (
    ReadRange,
    add_checksums,
    bytes_per_read,
    encode_parity,
)
from shardwise.parts.memory.redundancy.placement import (
    Member,
    Protection,
    form_groups,
    groups_of_node,
    parity_file_name,
    parity_file_size,
)
from shardwise.parts.memory.redundancy.rebuild import Rebuilder, find_unreadable_files
from tests.breadth import examples, mostly_long

SAVE = "0123456789abcdef"
MOST_LOSSES = 3 if importlib.util.find_spec("pyeclib") else 1
needs_pyeclib = pytest.mark.skipif(MOST_LOSSES == 1, reason="pyeclib is not installed")


def rebuild_file(
    protection: Protection,
    node: str,
    file: str,
    read: ReadRange,
    out: Buffer,
    *,
    offset: int = 0,
    threads: int = 1,
) -> None:
    """Decode a range of a file of a lost node."""
    with closing(Rebuilder(protection, read, lost=[node], threads=threads)) as rebuilder:
        rebuilder.read(file, offset, out)


class Cluster:
    """Nodes that hold files, of which some may be lost.

    Args:
        sizes: for each node, the bytes of its files.
        in_memory: what is read is given where it lies.
    """

    def __init__(
        self, sizes: Iterable[Iterable[int]], m: int, threads: int = 1, *, in_memory: bool = False
    ) -> None:
        self.in_memory = in_memory
        random = np.random.default_rng(7)
        self.files: dict[str, dict[str, Buffer]] = {}
        rank = 0
        for i, of_node in enumerate(sizes):
            held = self.files[f"n{i}"] = {}
            for size in of_node:
                held[f"r{rank:05d}-{SAVE}.safetensors"] = random.integers(0, 256, size, np.uint8)
                rank += 1
        self.lost: set[str] = set()
        self.asked: list[tuple[str, str, int, int]] = []
        members = [
            Member(node, "", tuple((name, len(data)) for name, data in sorted(held.items())))
            for node, held in self.files.items()
        ]
        self.protection: Protection = form_groups(members, SAVE, parity=m)
        self.data = {(node, name): data for node in self.files for name, data in self.of(node)}
        for node in self.files:
            made = {name: np.zeros(size, np.uint8) for name, size in self.parity_of(node)}
            ((group, at),) = groups_of_node(self.protection, node)
            for number, file in enumerate(made.values()):

                def write(low: int, data: Buffer, file: Buffer = file) -> None:
                    file[low : low + len(data)] = data

                encode_parity(group, at, number, self.read, write, threads=threads)
                add_checksums(file, group.chunk)
            self.files[node].update(made)

    def of(self, node: str) -> list[tuple[str, Buffer]]:
        return sorted(self.files[node].items())

    def parity_of(self, node: str) -> tuple[tuple[str, int], ...]:
        ((group, _),) = groups_of_node(self.protection, node)
        size = parity_file_size(group.chunk)
        return tuple((parity_file_name(SAVE, group, q), size) for q in range(group.parity))

    def read(self, node: str, name: str, offset: int, out: Buffer) -> Buffer:
        self.asked.append((node, name, offset, len(out)))
        if node in self.lost:
            raise ConnectionRefusedError(f"node {node} does not answer")
        held = self.files.get(node, {})
        if name not in held:
            raise FileNotFoundError(name)
        assert 0 <= offset <= offset + len(out) <= len(held[name])
        if self.in_memory:
            return held[name][offset : offset + len(out)]
        out[:] = held[name][offset : offset + len(out)]
        return out

    def rebuilt(self, node: str, name: str, threads: int = 1) -> Buffer:
        out = np.full(len(self.data[node, name]), 0xAA, np.uint8)
        rebuild_file(self.protection, node, name, self.read, out, threads=threads)
        return out

    def held(self) -> dict[str, set[str]]:
        return {node: set(files) for node, files in self.files.items() if node not in self.lost}


sizes_of_files = st.lists(
    st.lists(st.sampled_from([0, 1, 100, 4096, 65_535, 65_536, 65_537, 300_000]), max_size=3),
    min_size=2,
    max_size=6,
)


@given(sizes_of_files, st.integers(1, MOST_LOSSES))
@examples(15)
def test_every_loss_that_should_be_survived_is(sizes: list[list[int]], m: int) -> None:
    m = min(m, len(sizes) - 1)
    cluster = Cluster(sizes, m)
    for count in range(1, m + 1):
        for lost in combinations(cluster.files, count):
            cluster.lost = set(lost)
            assert find_unreadable_files(cluster.protection, cluster.held()) == set()
            for (node, name), data in cluster.data.items():
                if node in lost:
                    assert np.array_equal(cluster.rebuilt(node, name), data)


@given(sizes_of_files, st.integers(1, MOST_LOSSES), st.randoms())
@examples(30)
def test_what_is_said_to_be_lost_is_what_cannot_be_rebuilt(
    sizes: list[list[int]], m: int, random: Random
) -> None:
    cluster = Cluster(sizes, min(m, len(sizes) - 1))
    for node in cluster.files:
        for name in list(cluster.files[node]):
            if random.random() < 0.4:
                del cluster.files[node][name]
    missing = find_unreadable_files(cluster.protection, cluster.held())
    for (node, name), data in cluster.data.items():
        if name in cluster.files[node]:
            assert name not in missing
        elif name in missing:
            with pytest.raises(StoreError, match="cannot be rebuilt"):
                cluster.rebuilt(node, name)
        else:
            assert np.array_equal(cluster.rebuilt(node, name), data)


@pytest.mark.parametrize("m", [1, pytest.param(2, marks=needs_pyeclib)])
@pytest.mark.parametrize("threads", mostly_long([1, 3], [3]))
@pytest.mark.parametrize("in_memory", [False, True])
def test_files_of_many_pieces(m: int, threads: int, in_memory: bool) -> None:
    piece = bytes_per_read(4 - m, m)
    long = 3 * piece + 12_345
    sizes = [[long, 5], [2 * piece], [7, long], [long + 4096]]
    cluster = Cluster(sizes, m, threads, in_memory=in_memory)
    cluster.lost = {"n0", "n2"} if m == 2 else {"n2"}
    for (node, name), data in cluster.data.items():
        if node in cluster.lost:
            assert np.array_equal(cluster.rebuilt(node, name, threads), data)


@given(st.data())
@examples(20)
def test_any_range_of_a_file(data: st.DataObject) -> None:
    cluster = RANGES
    name, whole = "r00001-" + SAVE + ".safetensors", cluster.files["n0"]
    size = len(whole[name])
    low, high = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    out = np.full(high - low, 0xAA, np.uint8)
    rebuild_file(cluster.protection, "n0", name, cluster.read, out, offset=low)
    assert np.array_equal(out, whole[name][low:high])


RANGES = Cluster([[3000, 700_000], [600_000, 1], [650_000], [10]], 1)


def test_no_more_is_read_than_a_range_needs() -> None:
    cluster = Cluster([[1_000_000]] * 4, 1)
    cluster.asked.clear()
    out = np.empty(1000, np.uint8)
    rebuild_file(
        cluster.protection, "n0", f"r00000-{SAVE}.safetensors", cluster.read, out, offset=5000
    )
    assert len(cluster.asked) == 4
    assert sorted(count for _, _, _, count in cluster.asked) == [24, 1000, 1000, BLOCK]
    assert "n0" not in [node for node, _, _, _ in cluster.asked]


@pytest.mark.parametrize("m", [1, pytest.param(2, marks=needs_pyeclib)])
def test_one_loss_too_many_is_an_error_that_says_so(m: int) -> None:
    cluster = Cluster([[500_000]] * 5, m)
    cluster.lost = {f"n{i}" for i in range(m + 1)}
    assert find_unreadable_files(cluster.protection, cluster.held()) == {
        f"r{i:05d}-{SAVE}.safetensors" for i in range(m + 1)
    }
    with pytest.raises(StoreError) as failure:
        cluster.rebuilt("n0", f"r00000-{SAVE}.safetensors")
    text = str(failure.value)
    assert "the data of node n0 cannot be rebuilt" in text
    assert f"{4 - m} of the {5 - m} chunks needed are left" in text
    assert f"its group of 5 nodes survives the loss of {m}" in text
    assert "of node n1" in text
    assert "n1 does not answer" in text


class LostAtSome(Cluster):
    """A node that is lost after so many reads of the rebuild."""

    def begin(self, node: str, reads: int) -> None:
        self.node, self.reads, self.lock = node, reads, threading.Lock()

    def failing_read(self, node: str, name: str, offset: int, out: Buffer) -> Buffer:
        with self.lock:
            self.reads -= 1
            if self.reads < 0:
                self.lost.add(self.node)
        if node in self.lost:
            out[: len(out) // 2] = 0x55  # as when a transfer breaks off
        return self.read(node, name, offset, out)


@pytest.mark.parametrize("threads", mostly_long([1, 2], [2]))
@pytest.mark.parametrize("reads", mostly_long([0, 1, 5, 8], [0, 5]))
def test_a_second_loss_during_a_rebuild_is_an_error(reads: int, threads: int) -> None:
    size = 5 * bytes_per_read(3, 1)
    cluster = LostAtSome([[size]] * 4, 1)
    cluster.begin("n3", reads)
    name = f"r00000-{SAVE}.safetensors"
    out = np.empty(size, np.uint8)
    with pytest.raises(StoreError, match=r"also missing: .* of node n3: node n3 does not answer"):
        rebuild_file(cluster.protection, "n0", name, cluster.failing_read, out, threads=threads)


@needs_pyeclib
@pytest.mark.parametrize("threads", [1, 2])
def test_a_second_loss_is_survived_if_there_is_parity_for_it(threads: int) -> None:
    size = 5 * bytes_per_read(3, 2)
    cluster = LostAtSome([[size]] * 5, 2)
    cluster.begin("n3", 6)
    name = f"r00000-{SAVE}.safetensors"
    out = np.empty(size, np.uint8)
    rebuild_file(cluster.protection, "n0", name, cluster.failing_read, out, threads=threads)
    assert "n3" in cluster.lost
    assert np.array_equal(out, cluster.data["n0", name])
    # Each file of the lost node was asked for once at most, by each thread.
    late = [name for node, name, _, _ in cluster.asked[-20:] if node == "n3"]
    assert len(late) <= 2 * threads


def test_an_altered_byte_of_parity_is_seen() -> None:
    cluster = Cluster([[300_000]] * 3, 1)
    name = f"r00000-{SAVE}.safetensors"
    group = cluster.protection.groups[0]
    size = parity_file_size(group.chunk)
    parity = parity_file_name(SAVE, group, 0)
    for where in (0, 70_000, 103_000, size - 4096, size - 4096 + 7):
        cluster.files["n1"][parity][where] ^= 0x10
        with pytest.raises(CorruptionError, match=r"parity-.* of node n1: .*parity is damaged"):
            cluster.rebuilt("n0", name)
        cluster.files["n1"][parity][where] ^= 0x10
    assert np.array_equal(cluster.rebuilt("n0", name), cluster.data["n0", name])


@needs_pyeclib
def test_altered_parity_is_passed_over_if_there_is_more() -> None:
    cluster = Cluster([[300_000]] * 4, 2)
    for name in cluster.files["n1"]:
        if name.startswith("parity-"):
            cluster.files["n1"][name][:] = 0
    name = f"r00000-{SAVE}.safetensors"
    assert np.array_equal(cluster.rebuilt("n0", name), cluster.data["n0", name])


def test_unfinished_parity_is_no_parity() -> None:
    cluster = Cluster([[300_000]] * 3, 1)
    cluster.files["n1"][parity_file_name(SAVE, cluster.protection.groups[0], 0)][:] = 0
    with pytest.raises(CorruptionError, match="parity is damaged"):
        cluster.rebuilt("n0", f"r00000-{SAVE}.safetensors")


def test_parity_cannot_be_made_without_all_data() -> None:
    cluster = Cluster([[300_000]] * 3, 1)
    cluster.lost = {"n2"}
    with pytest.raises(StoreError, match=r"node n0 cannot compute parity: .*n2 does not answer"):
        encode_parity(
            *groups_of_node(cluster.protection, "n0")[0],
            0,
            cluster.read,
            lambda *_: None,
            threads=2,
        )


def test_parity_ends_with_its_checksums() -> None:
    cluster = Cluster([[500_000, 1], [77], [400_000]], 1)
    ((name, _),) = cluster.parity_of("n1")
    found = cluster.files["n1"][name]
    chunk = cluster.protection.groups[0].chunk
    table = found[chunk:].view("<u4")
    sums = [crc32(found[at : min(at + BLOCK, chunk)]) for at in range(0, chunk, BLOCK)]
    assert table[: len(sums)].tolist() == sums


def test_copies_are_found_wherever_they_lie() -> None:
    members = [Member(f"n{i}", "", ((f"f{i}", 10),)) for i in range(3)]
    protection = form_groups(members, SAVE, copies=1)
    assert find_unreadable_files(protection, {"n1": {"f1", "f0"}, "n2": {"f2"}}) == set()
    assert find_unreadable_files(protection, {"n1": {"f1"}, "n2": {"f2"}}) == {"f0"}
    assert find_unreadable_files(protection, {}) == {"f0", "f1", "f2"}
    with pytest.raises(StoreError, match="f0 of node n0 is not protected by parity"):
        rebuild_file(protection, "n0", "f0", RANGES.read, np.empty(10, np.uint8))


def test_a_rebuilt_file_protects_others_again() -> None:
    cluster = Cluster([[300_000]] * 4, 1)
    lost = [f"r{i:05d}-{SAVE}.safetensors" for i in range(2)]
    cluster.lost = {"n0", "n1"}
    held = cluster.held()
    assert find_unreadable_files(cluster.protection, held) == set(lost)
    held["n2"] |= {lost[0]}  # wherever it came from
    parity = parity_file_name(SAVE, cluster.protection.groups[0], 0)
    assert find_unreadable_files(cluster.protection, {**held, "n0": {parity}}) == set()


@needs_pyeclib
def test_losses_in_different_places_of_a_stripe_are_survived() -> None:
    cluster = Cluster([[65536, 32768, 32768, 32768, 32768]] * 5, 2)
    # One stripe has the first, which fills its chunk, and a half chunk of each of the others.
    lost = {"n2": f"r00010-{SAVE}.safetensors", "n3": f"r00016-{SAVE}.safetensors"}
    lost["n4"] = f"r00024-{SAVE}.safetensors"
    for node, name in lost.items():
        del cluster.files[node][name]
    assert find_unreadable_files(cluster.protection, cluster.held()) == set()
    for node, name in lost.items():
        assert np.array_equal(cluster.rebuilt(node, name), cluster.data[node, name])


def test_nodes_that_are_known_to_be_lost_are_not_asked() -> None:
    cluster = Cluster([[300_000]] * 3, 1)
    cluster.asked.clear()
    with (
        closing(Rebuilder(cluster.protection, cluster.read, lost=["n0", "n1"])) as rebuilder,
        pytest.raises(StoreError, match="of node n1: the node is lost"),
    ):
        rebuilder.read(f"r00000-{SAVE}.safetensors", 0, np.empty(9000, np.uint8))
    assert cluster.asked == []


def test_the_node_itself_is_not_asked_for_what_is_rebuilt() -> None:
    cluster = Cluster([[90_000, 20_000], [130_000], [100_000]], 1)
    name = f"r00001-{SAVE}.safetensors"
    cluster.files["n0"][name][:] = 0
    want = np.zeros(20_000, np.uint8)
    cluster.asked.clear()
    with closing(Rebuilder(cluster.protection, cluster.read)) as rebuilder:
        rebuilder.read(name, 0, want)
    assert {node for node, _, _, _ in cluster.asked} == {"n1", "n2"}
    assert want.any()


@pytest.mark.parametrize(("offset", "count"), [(0, 11), (10, 1), (-1, 2), (2**62, 1)])
def test_ranges_past_the_end_are_refused(offset: int, count: int) -> None:
    cluster = Cluster([[10]] * 2, 1)
    with (
        closing(Rebuilder(cluster.protection, cluster.read)) as rebuilder,
        pytest.raises(StoreError, match="has only 10 bytes"),
    ):
        rebuilder.read(f"r00000-{SAVE}.safetensors", offset, np.empty(count, np.uint8))


def test_unknown_files_are_named() -> None:
    cluster = Cluster([[10]] * 2, 1)
    with pytest.raises(StoreError, match="other is not a file of save"):
        rebuild_file(cluster.protection, "n0", "other", cluster.read, np.empty(1, np.uint8))
