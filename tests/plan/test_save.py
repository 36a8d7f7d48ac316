"""Plan of a save: every element written once, ranks evenly, the same plan every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.boxes import Box, Sharding, ShardPlacement, shard_boxes, splits_of
from shardwise.kernel.boxes.box import padded_rows
from shardwise.kernel.errors import LayoutError, MismatchError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.manifest.pieces import Pieces, decode_tensors
from shardwise.kernel.plan.replicas import divide_replicas, water_fill
from shardwise.kernel.plan.save import SavePlan, plan_save
from shardwise.kernel.plan.structure import (
    Description,
    RanksOfStructure,
    Structure,
    find_rules,
)
from tests.tools.divisions import BoxesByRank, Tensor, boxes_of_ranks, tensors

MIB = 1 << 20
Held = list[tuple[Tensor, list[Box]]]


def described(held: Held, ties: tuple[tuple[str, str], ...] = ()) -> Description:
    """What a rank that holds these boxes says of itself: boxes that follow no rule."""
    dims = max((len(tensor.shape) for tensor, _ in held), default=0)
    rows = [(i, box) for i, (_, boxes) in enumerate(held) for box in boxes]
    structure = Structure(
        tuple(tensor.name for tensor, _ in held),
        tuple(tensor.dtype for tensor, _ in held),
        tuple(tensor.shape for tensor, _ in held),
        (),
        (-1,) * len(held),
        pack(rows, dims),
        ties,
    )
    return describe(structure, (), rows, dims)


def pack(rows: list[tuple[int, Box]], dims: int) -> bytes:
    """Boxes as a structure lists them."""
    offset = padded_rows([box.offset for _, box in rows], dims, 0)
    shape = padded_rows([box.shape for _, box in rows], dims, 1)
    return Structure.pack_boxes(np.array([i for i, _ in rows], np.int64), offset, shape)


def describe(
    structure: Structure, coordinates: tuple[int, ...], rows: list[tuple[int, Box]], dims: int
) -> Description:
    return Description(
        structure,
        coordinates,
        np.array([i for i, _ in rows], np.int64),
        padded_rows([box.offset for _, box in rows], dims, 0),
        padded_rows([box.shape for _, box in rows], dims, 1),
    )


def plans_of(descriptions: Sequence[Description]) -> list[SavePlan]:
    """The plan as each rank computes it."""
    encoded = [msgspec.msgpack.encode(each.structure) for each in descriptions]
    structures = []
    for distinct in dict.fromkeys(encoded):
        ranks = np.flatnonzero([each == distinct for each in encoded])
        coordinates = np.array([descriptions[rank].coordinates for rank in ranks], np.int64)
        structure = msgspec.msgpack.decode(distinct, type=Structure)
        structures.append(RanksOfStructure(structure, ranks, coordinates.reshape(len(ranks), -1)))
    return [
        plan_save(structures, len(descriptions), rank, each)
        for rank, each in enumerate(descriptions)
    ]


def plan_of(descriptions: Sequence[Description]) -> SavePlan:
    """The plan as rank 0 computes it."""
    return plans_of(descriptions)[0]


def entries_of(plan: SavePlan) -> tuple[TensorEntry, ...]:
    return decode_tensors(plan.encoded_tensors)[0]


def pieces_of(plan: SavePlan) -> Pieces:
    return decode_tensors(plan.encoded_tensors)[1].expand()


def written_bytes(plan: SavePlan, itemsize: int) -> list[int]:
    """Tensor bytes that each rank writes, all of one item size."""
    pieces = pieces_of(plan)
    sizes = pieces.shape.prod(axis=1) * itemsize
    ranks = plan.writers[pieces.file]
    return np.bincount(ranks, sizes, plan.writers.max() + 1).astype(int).tolist()


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Tensor], list[BoxesByRank], int]:
    world = draw(st.integers(1, 6))
    listed = draw(tensors(max_count=5))
    return listed, [draw(boxes_of_ranks(tensor.shape, world)) for tensor in listed], world


def assert_plans_are_right(plans: list[SavePlan], descriptions: Sequence[Description]) -> None:
    """Each element is written once, by a rank that holds it, and the manifest says where."""
    sizes = {each.name: each.shape for each in plans[0].tensors if each.same_as is None}
    times = {name: np.zeros(shape, int) for name, shape in sizes.items()}
    plan = plans[0]
    listed = pieces_of(plan)
    tensors = entries_of(plan)
    dims = listed.offset.shape[1]
    expected = set()
    for rank, description in enumerate(descriptions):
        pieces = plans[rank].pieces
        described_pieces = pieces.describe_pieces(description)
        rows = zip(pieces.start.tolist(), pieces.fragment, described_pieces, strict=False)
        end = 0
        for start, fragment, (name, dtype, shape, box) in rows:
            n = len(shape)
            own = Box(
                tuple(description.offset[fragment, :n].tolist()),
                tuple(description.shape[fragment, :n].tolist()),
            )
            assert own.contains(box)
            times[name][box.slices()] += 1
            assert start == end
            assert start % DTYPES[dtype].itemsize == 0
            end = start + box.size * DTYPES[dtype].itemsize
            padding = dims - n
            offset, extent = box.offset + (0,) * padding, box.shape + (1,) * padding
            expected.add((rank, start, name, offset, extent))
        assert (rank in plan.writers) == bool(pieces.fragment)
    assert all((each == 1).all() for each in times.values())
    found = {
        (
            plan.writers[int(listed.file[i])],
            int(listed.start[i]),
            tensors[int(listed.tensor[i])].name,
            tuple(listed.offset[i].tolist()),
            tuple(listed.shape[i].tolist()),
        )
        for i in range(len(listed))
    }
    assert found == expected
    assert len(found) == len(listed)
    nbytes = {
        each.name: math.prod(each.shape) * DTYPES[each.dtype].itemsize
        for each in plan.tensors
        if each.same_as is None
    }
    assert plan.bytes_stored == sum(nbytes.values())


@given(worlds())
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    case: tuple[list[Tensor], list[BoxesByRank], int],
) -> None:
    listed, held, world = case
    descriptions = [
        described([(t, list(boxes[rank])) for t, boxes in zip(listed, held, strict=True)])
        for rank in range(world)
    ]
    assert_plans_are_right(plans_of(descriptions), descriptions)


@st.composite
def meshed_ranks(draw: st.DrawFn) -> list[Description]:
    """Ranks of pipeline stages, each with a mesh, whose tensors are split by rules or by lists.

    A tensor can be in several stages, and the ranks can be in any order.
    """
    stages = draw(st.integers(1, 3))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    mesh_ranks = math.prod(sizes)
    dims = range(len(sizes))
    kinds = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple),
                st.sampled_from(["float32", "int64", "bfloat16", "int8"]),
                st.dictionaries(st.sampled_from(dims), st.integers(0, 1), max_size=len(sizes)),
                st.sets(st.integers(0, stages - 1), min_size=1),
                st.sampled_from(["rule", "rule", "rule", "list"]),
                st.integers(1, 3),
            ),
            min_size=1,
            max_size=5,
        )
    )
    order = draw(st.permutations(range(stages * mesh_ranks)))
    found = [None] * (stages * mesh_ranks)
    for number in range(stages * mesh_ranks):
        stage, within = divmod(number, mesh_ranks)
        coordinate = tuple(int(i) for i in np.unravel_index(within, sizes))
        tensors, rows, names = [], [], []
        for i, (shape, dtype, splits, in_stages, how, count) in enumerate(kinds):
            if stage not in in_stages:
                continue
            shards = [
                ShardPlacement(mesh_dim, min(dim, len(shape) - 1))
                for mesh_dim, dim in sorted(splits.items())
            ]
            sharding = Sharding("mesh", splits_of(sizes, coordinate, shards))
            boxes = [box for box, _ in shard_boxes(shape, sharding.splits)]
            for copy in range(count):
                rows += [(len(names), box) for box in boxes]
                names.append((f"t{i}.{copy}", dtype, shape))
                tensors.append((shape, sharding if how == "rule" else None, boxes))
        rules, rule_of, coordinates = find_rules(tensors)
        most_dims = max((len(shape) for _, _, shape in names), default=0)
        listed = pack([(i, box) for i, box in rows if rule_of[i] < 0], most_dims)
        columns = zip(*names, strict=True) if names else ((), (), ())
        structure = Structure(*map(tuple, columns), rules, rule_of, listed)
        found[order[number]] = describe(structure, coordinates, rows, most_dims)
    return found


@given(meshed_ranks())
def test_tensors_that_are_split_alike_are_planned_together(
    descriptions: list[Description],
) -> None:
    plans = plans_of(descriptions)
    assert_plans_are_right(plans, descriptions)
    held = [
        sum(
            math.prod(shape) * DTYPES[each.structure.dtypes[i]].itemsize
            for i, shape in zip(each.tensor.tolist(), each.shape.tolist(), strict=True)
        )
        for each in descriptions
    ]
    assert plans[0].bytes_held == sum(held)
    assert_replicas_are_right(plans, descriptions)


def assert_replicas_are_right(plans: list[SavePlan], descriptions: Sequence[Description]) -> None:
    """The owners of a set list the same boxes under the same id, and no box is left out."""
    boxes_of_set: dict[int, list[list[tuple[object, ...]]]] = {}
    owners_of_box: dict[tuple[object, ...], int] = {}
    for plan, each in zip(plans, descriptions, strict=True):
        boxes: list[tuple[object, ...]] = []
        columns = each.tensor.tolist(), each.offset.tolist(), each.shape.tolist()
        for i, offset, shape in zip(*columns, strict=True):
            n = len(each.structure.shapes[i])
            boxes.append((each.structure.names[i], *offset[:n], *shape[:n]))
        for box in boxes:
            owners_of_box[box] = owners_of_box.get(box, 0) + 1
        for replicas in plan.replicas:
            own = [boxes[i] for i in replicas.fragment.tolist()]
            boxes_of_set.setdefault(replicas.set_id, []).append(own)
    for held in boxes_of_set.values():
        assert all(each == held[0] for each in held)
        assert all(owners_of_box[box] == len(held) for box in held[0])
    in_sets = sum(len(held[0]) for held in boxes_of_set.values())
    assert in_sets == sum(count > 1 for count in owners_of_box.values())


def replicated(rank: int) -> Held:
    """DDP of 8 ranks: layers of several sizes, all of them on all ranks."""
    shapes = [(4096, 4096), (4096,), (11008, 4096), (4096, 11008), (4096,)] * 4
    return [(Tensor(f"w{i}", "float32", s), [Box.whole(s)]) for i, s in enumerate(shapes)]


def one_giant(rank: int) -> Held:
    """An embedding that is most of the model, and small layers."""
    shapes = [(256_000, 4096), (1024, 1024), (1024,)]
    return [(Tensor(f"w{i}", "float32", s), [Box.whole(s)]) for i, s in enumerate(shapes)]


def one_flat(rank: int) -> Held:
    """One tensor of one dimension."""
    shape = (1_000_000_007,)
    return [(Tensor("flat", "float32", shape), [Box.whole(shape)])]


def few_long_rows(rank: int) -> Held:
    """A tensor whose rows are fewer than the ranks, and far larger than a grain."""
    shape = (3, 1 << 28)
    return [(Tensor("rows", "float32", shape), [Box.whole(shape)])]


def hybrid(rank: int) -> Held:
    """HSDP: sharded over 4, replicated over 2; norms on all."""
    part = rank % 4
    shapes = [(8192, 2048), (2048, 8192), (2048, 2048)] * 4
    held: Held = [
        (Tensor(f"w{i}", "float32", (n, m)), [Box((part * n // 4, 0), (n // 4, m))])
        for i, (n, m) in enumerate(shapes)
    ]
    return [*held, (Tensor("norm", "float32", (2048,)), [Box.whole((2048,))])]


def mixture(rank: int) -> Held:
    """Experts over 4 ranks, each on 2; a dense part on all, that evens out what experts cannot."""
    experts = [(f"expert{i}", (1024, 4096 if i % 3 else 2048)) for i in range(16)]
    mine = {name for i, (name, _) in enumerate(experts) if i % 4 == rank % 4}
    dense = [(f"attention{i}", (4096, 4096)) for i in range(6)]
    held: Held = [
        (Tensor(name, "float32", shape), [Box.whole(shape)] if name in mine else [])
        for name, shape in experts
    ]
    return held + [(Tensor(name, "float32", s), [Box.whole(s)]) for name, s in dense]


def many_small(rank: int) -> Held:
    """Two thousand tensors that are none of them worth cutting."""
    shapes = [(64 + i % 7, 256) for i in range(2000)]
    return [(Tensor(f"w{i}", "float32", s), [Box.whole(s)]) for i, s in enumerate(shapes)]


@pytest.mark.parametrize(
    "hold", [replicated, one_giant, one_flat, few_long_rows, hybrid, mixture, many_small]
)
def test_no_rank_writes_more_than_its_part(hold: Callable[[int], Held]) -> None:
    plan = plan_of([described(hold(rank)) for rank in range(8)])
    loads = written_bytes(plan, itemsize=4)
    assert sum(loads) == plan.bytes_stored
    assert max(loads) <= 1.1 * sum(loads) / len(loads)
    assert min(loads) > 0


def test_of_overlapping_replica_sets_no_rank_writes_two() -> None:
    def pairs(rank: int) -> Held:
        """Tensor i is on ranks i and i + 1, so that no two replica sets are alike."""
        shape = (1024, 4096)
        return [
            (Tensor(f"w{i}", "float32", shape), [Box.whole(shape)] if rank in (i, i + 1) else [])
            for i in range(7)
        ]

    loads = written_bytes(plan_of([described(pairs(rank)) for rank in range(8)]), itemsize=4)
    assert max(loads) <= 16 * MIB


@pytest.mark.parametrize("hold", [replicated, hybrid, mixture])
def test_the_plan_is_the_same_every_time(hold: Callable[[int], Held]) -> None:
    first, second = (plan_of([described(hold(rank)) for rank in range(8)]) for _ in range(2))
    assert first.encoded_tensors == second.encoded_tensors
    assert (first.writers == second.writers).all()


def regular(rank: int, *, by_rule: bool) -> Description:
    """Tensors over a mesh of 2 by 3: sharded by rows, columns, both, strided, or not at all."""
    sizes, coordinate = (2, 3), (rank // 3, rank % 3)
    layouts: list[tuple[tuple[int, ...], list[ShardPlacement]]] = [
        ((7, 5), [ShardPlacement(0, 0)]),
        ((7, 5), [ShardPlacement(1, 1)]),
        ((8, 6), [ShardPlacement(0, 0), ShardPlacement(1, 1)]),
        ((12, 2), [ShardPlacement(0, 0, 3), ShardPlacement(1, 0)]),
        ((2,), [ShardPlacement(1, 0)]),  # the last rank has nothing
        ((4, 4), []),
        ((), []),
    ]
    tensors = [
        (shape, Sharding("mesh", splits_of(sizes, coordinate, shards))) for shape, shards in layouts
    ]
    boxes = [[box for box, _ in shard_boxes(n, each.splits)] for n, each in tensors]
    rows = [(i, box) for i, own in enumerate(boxes) for box in own]
    names = tuple(f"w{i}" for i in range(len(tensors)))
    rules, rule_of, coordinates = find_rules(
        [
            (n, each if by_rule or not each.splits else None, own)
            for (n, each), own in zip(tensors, boxes, strict=True)
        ]
    )
    listed = pack([(i, box) for i, box in rows if rule_of[i] < 0], 2)
    shapes = tuple(n for n, _ in tensors)
    dtypes = ("float32",) * len(names)
    structure = Structure(names, dtypes, shapes, rules, rule_of, listed)
    return describe(structure, coordinates, rows, 2)


def test_rules_and_lists_of_boxes_have_the_same_plan() -> None:
    ruled = [regular(rank, by_rule=True) for rank in range(6)]
    listed = [regular(rank, by_rule=False) for rank in range(6)]
    assert len({msgspec.msgpack.encode(each.structure) for each in ruled}) == 1
    for rank, (one, other) in enumerate(zip(plans_of(ruled), plans_of(listed), strict=True)):
        assert one.encoded_tensors == other.encoded_tensors
        pieces, others = one.pieces, other.pieces
        assert list(pieces.describe_pieces(ruled[rank])) == list(
            others.describe_pieces(listed[rank])
        )
        assert pieces.fragment == others.fragment
        for a, b in zip(one.replicas, other.replicas, strict=True):
            assert (a.set_id, a.owner_count) == (b.set_id, b.owner_count)
            assert (a.fragment == b.fragment).all()


def test_ranks_of_a_rule_need_not_be_neighbours() -> None:
    """The same shards on ranks in another order: coordinates decide, not ranks."""
    order = [4, 2, 0, 5, 1, 3]
    described_ranks = [regular(rank, by_rule=True) for rank in order]
    for plan in plans_of(described_ranks):
        assert all(fragment >= 0 for fragment in plan.pieces.fragment)


def test_regular_shardings_are_folded_into_rules() -> None:
    shape = (256, 1024)
    plan = plan_of(
        [
            described(
                [(Tensor(f"w{i}", "float32", shape), [Box((rank, 0), (1, 1024))]) for i in (0, 1)]
            )
            for rank in range(256)
        ]
    )
    assert decode_tensors(plan.encoded_tensors)[1].tensor.tolist() == [0, 1]
    assert len(pieces_of(plan)) == 512


def refused(*ranks: Held) -> Callable[[], SavePlan]:
    return lambda: plan_of([described(held) for held in ranks])


def test_pieces_of_ranks_with_equal_files_leave_no_gaps() -> None:
    """One rank's file stands for those of others."""
    world = 9
    held = [
        [
            (Tensor("rows", "float32", (2 * world, 4)), [Box((2 * rank, 0), (2, 4))]),
            (Tensor("some", "int16", (6, 2)), [Box((rank - 3, 0), (1, 2))] if rank > 2 else []),
            (Tensor("two", "float32", (world, 2)), [Box((rank, i), (1, 1)) for i in (0, 1)]),
            (Tensor("replica", "float64", (5,)), [Box((0,), (5,))]),
        ]
        for rank in range(world)
    ]
    plan = plan_of([described(each) for each in held])
    pieces = pieces_of(plan)
    itemsizes = np.array([DTYPES[entry.dtype].itemsize for entry in entries_of(plan)])
    nbytes = pieces.shape.prod(axis=1) * itemsizes[pieces.tensor]
    for file in range(world):
        rows = np.flatnonzero(pieces.file == file)
        rows = rows[np.argsort(pieces.start[rows])]
        ends = np.cumsum(nbytes[rows])
        assert pieces.start[rows].tolist() == [0, *ends[:-1].tolist()]


def test_holes_and_uneven_overlaps_are_refused() -> None:
    tensor = Tensor("w", "float32", (4, 4))
    with pytest.raises(LayoutError, match="w \\[4, 4\\]"):
        refused([(tensor, [Box((0, 0), (2, 4))])], [(tensor, [Box((3, 0), (1, 4))])])()
    with pytest.raises(LayoutError, match="rank 1 has \\[1:4,0:4\\]"):
        refused([(tensor, [Box((0, 0), (2, 4))])], [(tensor, [Box((1, 0), (3, 4))])])()


def test_every_disagreement_is_listed() -> None:
    whole = [Box.whole((2,))]
    with pytest.raises(MismatchError) as caught:
        refused(
            [(Tensor("a", "float32", (2,)), whole), (Tensor("b", "int8", (2,)), whole)],
            [(Tensor("a", "float16", (2,)), whole), (Tensor("b", "int8", (3,)), [])],
        )()
    assert [line.split(":")[0] for line in caught.value.problems] == ["a", "b"]


def test_structures_without_coordinates_have_ranks_of_their_own() -> None:
    """Two pipeline stages of one and of two ranks, each with a tensor that is not split."""
    whole = Sharding("mesh", ())

    def stage(name: str) -> Description:
        rules, rule_of, coordinates = find_rules([((4,), whole, [Box.whole((4,))])])
        structure = Structure((name,), ("float32",), ((4,),), rules, rule_of)
        return describe(structure, coordinates, [(0, Box.whole((4,)))], 1)

    descriptions = [stage("first"), stage("second"), stage("second")]
    plans = plans_of(descriptions)
    assert_plans_are_right(plans, descriptions)
    assert [len(each.replicas) for each in plans] == [0, 1, 1]


def test_a_rank_may_list_a_box_that_others_hold_by_rule() -> None:
    """The owners of a part stay in the order of their ranks, whatever says that they hold it."""
    by_rule = [regular(rank, by_rule=True) for rank in range(6)]
    mixed = [regular(rank, by_rule=rank % 2 == 1) for rank in range(6)]
    plans, others = plans_of(mixed), plans_of(by_rule)
    assert_plans_are_right(plans, mixed)
    assert_replicas_are_right(plans, mixed)
    assert plans[0].encoded_tensors == others[0].encoded_tensors


def test_a_tie_on_one_rank_only_is_refused() -> None:
    tensor, other = Tensor("a", "float32", (2,)), Tensor("b", "float32", (2,))
    whole = [Box.whole((2,))]
    tied = described([(tensor, whole)], ties=(("b", "a"),))
    assert entries_of(plan_of([tied, tied]))[1] == TensorEntry("b", "float32", (2,), "a")
    with pytest.raises(LayoutError, match="tie it on all ranks"):
        plan_of([tied, described([(tensor, whole), (other, whole)])])


WORLD = 6
Replica = tuple[tuple[int, ...], int]

replicas = st.lists(
    st.tuples(st.lists(st.integers(1, 40), max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8])),
    min_size=1,
    max_size=8,
)
owner_sets = st.sets(st.integers(0, WORLD - 1), min_size=1).map(sorted)
starting_loads = st.lists(st.integers(0, 20_000), min_size=WORLD, max_size=WORLD)


@given(replicas, owner_sets, starting_loads, st.sampled_from([8, 64, 1024]))
def test_every_element_goes_to_one_owner(
    described: list[Replica], owners: list[int], start: list[int], grain: int
) -> None:
    loads = np.array(start, np.float64)
    times = [np.zeros(shape, int) for shape, _ in described]
    given_bytes = np.zeros(WORLD)
    for index, rank, box in divide_replicas(described, owners, loads, grain=grain):
        assert rank in owners
        times[index][box.slices()] += 1
        given_bytes[rank] += box.size * described[index][1]
    assert all((each == 1).all() for each in times)
    assert (loads == np.array(start) + given_bytes).all()


@given(replicas, owner_sets, starting_loads, st.sampled_from([8, 64, 1024]))
def test_loads_are_level_but_for_a_grain(
    described: list[Replica], owners: list[int], start: list[int], grain: int
) -> None:
    loads = np.array(start, np.float64)
    total = sum(math.prod(shape) * itemsize for shape, itemsize in described)
    before = loads[owners].copy()
    ideal = before + water_fill(before, float(total))
    divide_replicas(described, owners, loads, grain=grain)
    assert (loads[owners] <= ideal + 2 * grain).all()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 5000))
def test_water_finds_its_level(start: list[int], amount: int) -> None:
    loads = np.array(start, np.float64)
    poured = water_fill(loads, float(amount))
    assert (poured >= 0).all()
    assert math.isclose(poured.sum(), amount, abs_tol=1e-6)
    wet = poured > 1e-9
    after = loads + poured
    if wet.any():
        assert np.allclose(after[wet], after[wet][0])
        assert (after[~wet] >= after[wet][0] - 1e-6).all()
