"""Who protects whom: domains apart, groups balanced, and gaps told."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.parts.lineage import Lineage
from shardwise.parts.memory.records import AgentInfo, PendingManifest
from shardwise.parts.memory.redundancy.placement import (
    Member,
    Protection,
    ProtectionGroup,
    combine_groups,
    files_to_copy,
    form_groups,
    group_of_file,
    groups_of_node,
    make_group,
    parity_file_name,
    parity_file_size,
    plan_protection,
)
from shardwise.parts.memory.trainer.agents import Membership
from shardwise.parts.memory.trainer.rings import HeldTable, Ring, form_rings
from shardwise.parts.tiers.options import StorageTask
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.breadth import examples

SAVE = "0123456789abcdef"


def nodes(*domains: str, size: int = 10_000, first: int = 0) -> list[Member]:
    """One node for each domain named, with one file."""
    return [
        Member(f"n{i:02d}", domain, ((f"r{first + i:05d}-{SAVE}.safetensors", size),))
        for i, domain in enumerate(domains)
    ]


def holders(group: ProtectionGroup, node: str) -> list[str]:
    """The nodes that keep a copy of a node's files."""
    kept = {each.node: files_to_copy(group, at) for at, each in enumerate(group.members)}
    return [
        keeper for keeper, files in kept.items() if any(owner.node == node for owner, *_ in files)
    ]


clusters = st.lists(st.sampled_from(["", "a", "b", "c", "d", "e"]), min_size=1, max_size=40)
ways = st.one_of(st.tuples(st.integers(0, 4), st.just(0)), st.tuples(st.just(0), st.integers(0, 4)))


@given(clusters, ways, st.integers(2, 10), st.randoms())
def test_every_node_is_in_one_group_and_order_does_not_matter(
    domains: list[str], way: tuple[int, int], group_size: int, random: Random
) -> None:
    members = nodes(*domains)
    copies, parity = way
    placed = form_groups(members, SAVE, copies=copies, parity=parity, group_size=group_size)
    found = [member for group in placed.groups for member in group.members]
    assert sorted(found, key=lambda each: each.node) == members
    sizes = [len(group.members) for group in placed.groups]
    assert max(sizes) - min(sizes) <= 1
    for group in placed.groups:
        n = len(group.members)
        assert group.parity == min(parity, n - 1)
        assert group.copies == min(copies, n - 1)
    if len(members) > max(copies, parity):
        assert min(sizes) > max(copies, parity)
    random.shuffle(members)
    assert placed == form_groups(members, SAVE, copies=copies, parity=parity, group_size=group_size)
    assert msgspec.json.decode(msgspec.json.encode(placed), type=Protection) == placed


@given(clusters, st.integers(1, 3), st.integers(2, 10))
def test_nodes_of_a_domain_are_dealt_out_evenly(
    domains: list[str], parity: int, group_size: int
) -> None:
    groups = form_groups(nodes(*domains), SAVE, parity=parity, group_size=group_size).groups
    for domain in set(domains) - {""}:
        counts = [sum(each.domain == domain for each in group.members) for group in groups]
        assert max(counts) - min(counts) <= 1


@given(clusters, st.integers(1, 3), st.integers(2, 10))
def test_gaps_are_told_exactly_when_a_domain_cannot_be_lost(
    domains: list[str], parity: int, group_size: int
) -> None:
    placed = form_groups(nodes(*domains), SAVE, parity=parity, group_size=group_size)
    exposed = {
        domain
        for group in placed.groups
        for domain, count in Counter(each.domain for each in group.members).items()
        if domain and count > max(group.parity, 1)
    }
    told = {gap.split()[2] for gap in placed.gaps if gap.startswith("losing domain")}
    assert told == exposed
    # There are gaps only where no groups of more nodes than blocks of parity could avoid them.
    most = max(Counter(domain for domain in domains if domain).values(), default=0)
    if exposed:
        assert most > parity * (len(domains) // (parity + 1))


@given(clusters, st.integers(1, 3), st.integers(2, 10))
@examples(50)
def test_the_loss_of_a_domain_costs_what_was_told(
    domains: list[str], copies: int, group_size: int
) -> None:
    placed = form_groups(nodes(*domains), SAVE, copies=copies, group_size=group_size)
    told = [gap for gap in placed.gaps if gap.startswith("losing domain")]
    for group in placed.groups:
        domain_of = {each.node: each.domain or each.node for each in group.members}
        for node in domain_of:
            keepers = holders(group, node)
            assert len({node, *keepers}) == group.copies + 1
            where = {domain_of[each] for each in (node, *keepers)}
            if len(where) == 1 and group.copies:
                assert any(gap.split()[2] == domain_of[node] and node in gap for gap in told)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_copies_lie_in_other_domains_where_racks_are_alike(copies: int) -> None:
    placed = form_groups(nodes(*"aaaabbbbccccdddd"), SAVE, copies=copies)
    assert placed.gaps == ()
    for group in placed.groups:
        domain_of = {each.node: each.domain for each in group.members}
        for node, domain in domain_of.items():
            found = {domain, *(domain_of[each] for each in holders(group, node))}
            assert len(found) == copies + 1


@given(clusters, st.integers(1, 3))
def test_every_node_keeps_as_many_copies_as_others_keep_of_it(
    domains: list[str], copies: int
) -> None:
    placed = form_groups(nodes(*domains), SAVE, copies=copies)
    for group in placed.groups:
        for member in group.members:
            kept = files_to_copy(group, group.members.index(member))
            assert len(kept) == group.copies
            assert all(member.node in holders(group, owner.node) for owner, _, _ in kept)


def test_groups_are_made_smaller_for_a_domain_to_be_lost() -> None:
    placed = form_groups(nodes(*"aabbccdd"), SAVE, parity=1, group_size=8)
    assert [sorted(each.domain for each in group.members) for group in placed.groups] == [
        ["a", "b", "c", "d"],
        ["a", "b", "c", "d"],
    ]
    assert placed.gaps == ()


def test_groups_are_not_made_smaller_for_nothing() -> None:
    placed = form_groups(nodes(*"aaaab"), SAVE, parity=1)
    assert [len(group.members) for group in placed.groups] == [5]
    assert placed.gaps == (
        "losing domain a (n00, n01, n02, n03) would lose the data of 4 node(s): "
        "4 nodes of a group of 5 are in it, and only 1 may be lost",
    )


def test_a_single_node_is_told_that_nobody_else_can_keep_its_data() -> None:
    placed = form_groups(nodes("a"), SAVE, copies=1)
    assert placed.gaps == (
        "node n00 is alone: no other node can store copies or parity of its data",
    )
    assert holders(placed.groups[0], "n00") == []


def test_two_nodes_survive_the_loss_of_one() -> None:
    placed = form_groups(nodes("", ""), SAVE, parity=2)
    assert placed.groups[0].parity == 1
    assert placed.gaps == (
        "2 nodes (n00, n01) survive the loss of 1 of them, not of 2: for this, at least 3 nodes "
        "are needed",
    )


def test_nothing_asked_for_leaves_no_gaps() -> None:
    assert form_groups(nodes("a", "a", "b"), SAVE).gaps == ()
    assert form_groups([], SAVE, parity=1).groups == ()


def test_memory_that_parity_takes_is_the_same_on_all_nodes() -> None:
    placed = form_groups(nodes(*[""] * 8, size=7_000_000), SAVE, parity=1)
    (group,) = placed.groups
    assert group.chunk == 1_048_576
    assert parity_file_name(SAVE, group, 0) == f"parity-{SAVE}-0-0.bin"
    assert parity_file_size(group.chunk) == 1_048_576 + 4096


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(0, 120), st.integers(0, 120))
def test_extents_cover_a_range_up_to_the_last_file(sizes: list[int], one: int, two: int) -> None:
    member = Member("n", "", tuple((f"f{i}", size) for i, size in enumerate(sizes)))
    string = [(f"f{i}", at) for i, size in enumerate(sizes) for at in range(size)]
    low, high = sorted((one, two))
    found = [
        (each.file, each.file_offset + at)
        for each in member.extents(low, high)
        for at in range(each.data_stop - each.data_start)
    ]
    assert found == string[low:high]
    assert [(each.data_start, each.data_stop) for each in member.extents(0, 120)] == [
        (sum(sizes[:i]), sum(sizes[: i + 1])) for i, size in enumerate(sizes) if size
    ]


@pytest.mark.parametrize(
    "wrong", [{"copies": 1, "parity": 1}, {"copies": -1}, {"parity": -1}, {"group_size": 1}]
)
def test_options_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="only one of them may be positive"):
        form_groups(nodes("", ""), SAVE, **wrong)


def test_groups_are_no_larger_than_the_code_can_do() -> None:
    with pytest.raises(ValueError, match="with parity=2 or more, a group has at most 32 nodes"):
        form_groups(nodes("", ""), SAVE, parity=2, group_size=33)
    assert form_groups(nodes("", ""), SAVE, parity=1, group_size=33).gaps == ()


def pending(**changed: object) -> PendingManifest:
    """A save of two nodes, on one of which two ranks run."""
    given = {
        "save_id": SAVE,
        "step": 1,
        "manifest": "",
        "files": [(f"r{rank:05d}-{SAVE}.safetensors", f"n{rank // 2}") for rank in (2, 1, 0)],
        "nodes": [AgentInfo(node, "http://127.0.0.1:1", "t") for node in ("n0", "n1")],
        "leader": "n0",
        "storage": StorageTask(root="/r"),
        "parity": 1,
    }
    return PendingManifest(**{**given, **changed})  # type: ignore[arg-type]


FILES = [FileEntry(f"r{rank:05d}-{SAVE}.safetensors", rank, 9, 0, 0, 0, 0) for rank in range(3)]


def test_the_files_of_a_node_are_in_order() -> None:
    (group,) = plan_protection(pending(), FILES).groups
    assert [each.node for each in group.members] == ["n0", "n1"]
    assert [file for file, _ in group.members[0].files] == [FILES[0].name, FILES[1].name]


@pytest.mark.parametrize(
    "changed",
    [
        {"files": [(FILES[0].name, "n0")]},
        {"files": [(each.name, "elsewhere") for each in FILES]},
        {"rings": [[FILES[0].name, "another"]]},
    ],
)
def test_what_is_not_of_the_save_is_not_protected(changed: dict[str, object]) -> None:
    with pytest.raises(StoreError, match="are not those of its manifest"):
        plan_protection(pending(**changed), FILES)


def test_no_node_is_twice_in_a_group() -> None:
    with pytest.raises(ValueError, match="nodes repeated in one group: n00"):
        make_group(nodes("a") * 2, copies=1, parity=0)


def test_unknown_files_are_named() -> None:
    with pytest.raises(StoreError, match=f"elsewhere is not a file of save {SAVE}"):
        group_of_file(form_groups(nodes("", ""), SAVE, parity=1), "elsewhere")


def test_a_node_may_protect_files_of_its_ranks_with_different_others() -> None:
    one, other = (form_groups(nodes("", "", first=first), SAVE, parity=1) for first in (0, 2))
    both = combine_groups(SAVE, one.groups + other.groups, copies=0, parity=1)
    assert [group.name for group in both.groups] == ["0", "1"]
    assert groups_of_node(both, "n00") == [(both.groups[0], 0), (both.groups[1], 0)]
    assert group_of_file(both, both.groups[1].members[1].files[0][0]) == (both.groups[1], 1)


def test_any_two_nodes_of_a_large_cluster_may_be_lost_with_two_copies() -> None:
    members = nodes(*[f"rack{i // 4}" for i in range(12)])
    placed = form_groups(members, SAVE, copies=2)
    for lost in combinations([each.node for each in members], 2):
        for each in members:
            group, _ = groups_of_node(placed, each.node)[0]
            assert {each.node, *holders(group, each.node)} - set(lost)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), min_size=1, max_size=24),
    st.sampled_from([(1, 0), (2, 0), (0, 1), (0, 2)]),
    st.integers(2, 5),
)
def test_rings_are_of_ranks_that_hold_the_same_on_different_nodes(
    ranks: list[tuple[str, int]], way: tuple[int, int], group_size: int
) -> None:
    alike = [key.encode() for key, _ in ranks]
    node_of = [f"n{node}" for _, node in ranks]
    copies, parity = way
    rings = form_rings(
        alike,
        node_of,
        dict.fromkeys(node_of, ""),
        copies=copies,
        parity=parity,
        group_size=group_size,
    )
    listed = [rank for ring in rings for rank in ring]
    assert len(listed) == len(set(listed))
    for ring in rings:
        assert len({alike[rank] for rank in ring}) == 1
        assert len({node_of[rank] for rank in ring}) == len(ring) > 1


def test_ranks_tell_each_other_only_what_has_changed() -> None:
    """The rings are those of what ranks hold now; a rank that missed a change learns it."""
    world, options = 8, sw.Memory(copies=1)
    nodes = [AgentInfo(f"n{index}", "", "", domain=f"d{index}") for index in range(4)]
    membership = Membership(Lineage("0" * 16), nodes, [f"n{rank // 2}" for rank in range(world)])
    tables = [HeldTable() for _ in range(world)]

    def snapshot(group: ThreadGroup, held: list[bytes]) -> tuple[int, Ring | None]:
        sent = group.bytes_sent
        table, sizes = tables[group.rank], (100 + group.rank, 0, 0, 0)
        is_changed = table.update(lambda: (held[group.rank], sizes), group)
        table.form(options, membership, is_changed=is_changed)
        ring = table.ring_of(group.rank, "0" * 16, membership.node_of, options)
        return group.bytes_sent - sent, ring

    def ranks_of(held: list[bytes]) -> tuple[int, list[list[int]]]:
        results = run_ranks(world, lambda group: snapshot(group, held))
        rings = [[file.rank for file in ring.files] for _, ring in results if ring is not None]
        for rank, (_, ring) in enumerate(results):
            assert ring is None or ring.files[ring.index].rank == rank
        return results[1][0], [ring for ring in rings if ring]

    alike = [b"a" * 1000, b"b" * 1000] * 4
    first, rings = ranks_of(alike)
    expected = form_rings(
        alike,
        membership.node_of,
        {info.node: info.domain for info in nodes},
        copies=1,
        parity=0,
        group_size=options.group,
    )
    assert {tuple(ring) for ring in rings} == {tuple(ring) for ring in expected}
    again, same = ranks_of(alike)
    assert same == rings
    assert again < 200 < 1000 < first
    other = [b"c" * 1000 if rank == 5 else held for rank, held in enumerate(alike)]
    assert all(5 not in ring for ring in ranks_of(other)[1])
    tables[3] = HeldTable()  # as if its round had failed
    assert ranks_of(alike)[1] == rings
