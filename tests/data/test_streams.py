"""Virtual streams: mixtures, epochs of sources, errors, and misuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.data import (
    BestFitPacker,
    ConcatPacker,
    ElasticStreamDataset,
    ElasticStreamLoader,
    FileSource,
    MapSource,
)
from shardwise.data.packing import Tokens
from shardwise.data.streams import Stream, StreamState
from tests.data.labelled import label_sources, tokens_of, whole_samples


def items_of(dataset: ElasticStreamDataset, stream: int = 0) -> Iterator[Any]:
    one = Stream(dataset, stream, StreamState())
    while True:
        yield one.next_item()


def first_items(dataset: ElasticStreamDataset, count: int, stream: int = 0) -> list[Any]:
    return list(islice(items_of(dataset, stream), count))


def test_the_streams_share_each_epoch_of_a_source() -> None:
    sources = label_sources([3, 0, 2, 5, 1, 4, 2, 2, 1, 1])
    dataset = ElasticStreamDataset(sources, streams=4)
    epochs: dict[int, Counter[Any]] = {0: Counter(), 1: Counter(), 2: Counter()}
    orders = set()
    for number in range(4):
        stream = Stream(dataset, number, StreamState())
        while True:
            item = stream.next_item()
            place = stream.state().places["s0"]
            epoch = place.finished_segments // len(range(number, 10, 4))
            if epoch > 2:
                break
            epochs[epoch][item] += 1
            orders.add((number, epoch, item[1]))
    expected = Counter(sources["s0"].samples())
    assert epochs == {0: expected, 1: expected, 2: expected}
    assert len({number for number, _, segment in orders if segment == 3}) > 1


def test_the_mixture_follows_the_weights_in_every_batch() -> None:
    sources = label_sources(*[[50] * 64] * 3)
    weights = {"s0": 1, "s1": 2, "s2": 5}
    dataset = ElasticStreamDataset(sources, streams=64, weights=weights)
    for batch in islice(ElasticStreamLoader(dataset, collate_fn=list), 20):
        counts = Counter(name for name, _, _ in batch)
        assert all(abs(counts[name] - 8 * weight) <= 2 for name, weight in weights.items())
    counts = Counter(name for name, _, _ in first_items(dataset, 800))
    assert all(abs(counts[name] - 100 * weight) <= 5 for name, weight in weights.items())


def test_a_source_without_weight_is_not_read() -> None:
    sources = label_sources([5], [5], [5])
    dataset = ElasticStreamDataset(sources, streams=1, weights={"s0": 1, "s1": 1, "s2": 0})
    assert {name for name, _, _ in first_items(dataset, 100)} == {"s0", "s1"}


def test_files_are_read_from_the_middle(tmp_path: Path) -> None:
    paths = []
    for i in range(2):
        paths.append(tmp_path / f"{i}.txt")
        paths[-1].write_text("".join(f"{i}{k}\n" for k in range(4)))
    source = FileSource(paths, lambda path: path.read_text().split())
    assert list(source.read(1, 2)) == ["12", "13"]
    assert list(source.read(1, 4)) == []
    dataset = ElasticStreamDataset({"text": source}, streams=1)
    whole = first_items(dataset, 8)
    assert sorted(whole) == [f"{i}{k}" for i in range(2) for k in range(4)]
    for cut in range(8):
        first = Stream(dataset, 0, StreamState())
        for _ in range(cut):
            first.next_item()
        second = Stream(dataset, 0, first.state())
        assert [second.next_item() for _ in range(8 - cut)] == whole[cut:]


def test_a_map_dataset_is_shuffled_sample_by_sample() -> None:
    dataset = ElasticStreamDataset({"map": MapSource(list("abcdefgh"))}, streams=1)
    items = first_items(dataset, 16)
    assert sorted(items[:8]) == sorted(items[8:]) == list("abcdefgh")
    assert items[:8] not in (items[8:], list("abcdefgh"))


@pytest.mark.parametrize(
    "packer", [partial(ConcatPacker, 13), partial(BestFitPacker, 13, sequences=4)]
)
def test_packing_uses_each_document_once(packer: Any) -> None:
    sources = label_sources([7, 8, 9])
    dataset = ElasticStreamDataset(sources, streams=1, transform=tokens_of, packer=packer)
    stream = Stream(dataset, 0, StreamState())
    tokens: list[int] = []
    while (
        stream.state().places.get("s0") is None or stream.state().places["s0"].finished_segments < 6
    ):
        tokens += stream.next_item().tolist()
    found = whole_samples(tokens)
    assert set(found) == set(sources["s0"].samples())
    assert set(found.values()) <= {1, 2, 3}  # the third epoch has just begun
    assert Counter(found.values())[2] >= 16


class Torn:
    """A source whose second segment ends with an error after one sample."""

    segment_count = 3

    def read(self, segment: int, start: int) -> Iterable[str]:
        for i in range(start, 3):
            if segment == 1 and i == 1:
                raise OSError("bad block")
            yield f"{segment}{i}"


def refuse_11(sample: str) -> str:
    if sample == "10":
        raise OSError("bad block")
    return sample


@pytest.mark.parametrize(("transform", "offset"), [(None, 1), (refuse_11, 0)])
def test_an_error_says_which_sample_it_was(transform: Any, offset: int) -> None:
    dataset = ElasticStreamDataset({"torn": Torn()}, streams=1, transform=transform)
    items: list[str] = []
    with pytest.raises(OSError, match="bad block") as caught:
        items.extend(items_of(dataset))
    assert "11" not in items
    assert f"sample {offset} in segment 1 of the source 'torn'" in str(
        getattr(caught.value, "__notes__", "")
    )


def test_an_empty_source_is_refused() -> None:
    dataset = ElasticStreamDataset(label_sources([0, 0, 0, 0]), streams=2)
    with pytest.raises(sw.StateError, match="'s0' has no samples in the segments of one stream"):
        first_items(dataset, 1)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (np.zeros((2, 2), int), r"one-dimensional array of integers to pack, not int64 of shape"),
        (np.zeros(2), "not float64"),
        ([2**31], "do not fit into int32"),
        ("text", "not <U4 of shape"),
    ],
)
def test_only_tokens_can_be_packed(document: object, message: str) -> None:
    dataset = ElasticStreamDataset(
        label_sources([3]),
        streams=1,
        transform=lambda sample: document,
        packer=partial(ConcatPacker, 4),
    )
    with pytest.raises(sw.StateError, match=message):
        first_items(dataset, 1)


def test_empty_documents_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.data.streams._MOST_EMPTY_DOCUMENTS", 10)
    packer = partial(ConcatPacker, 2)
    some = ElasticStreamDataset(
        label_sources([3]), streams=1, packer=packer, transform=lambda s: [s[2]] * (s[2] % 2)
    )
    assert first_items(some, 2)[0].tolist() == [1, 1]
    none = ElasticStreamDataset(
        label_sources([3]), streams=1, packer=packer, transform=lambda s: []
    )
    with pytest.raises(sw.StateError, match="documents in a row have no tokens"):
        first_items(none, 1)


def test_a_transform_that_changes_its_result_is_noticed() -> None:
    lengths = iter([5, 1])
    dataset = ElasticStreamDataset(
        label_sources([3]),
        streams=1,
        transform=lambda sample: [1] * next(lengths),
        packer=partial(ConcatPacker, 3),
    )
    stream = Stream(dataset, 0, StreamState())
    stream.next_item()
    with pytest.raises(sw.StateError, match="has 1 tokens, but 3 of them were used"):
        Stream(dataset, 0, stream.state()).next_item()


class Stuck(ConcatPacker):
    def add(self, document: Tokens) -> int:
        return 0


def test_a_packer_that_takes_nothing_is_noticed() -> None:
    dataset = ElasticStreamDataset(
        label_sources([3]), streams=1, transform=tokens_of, packer=partial(Stuck, 3)
    )
    with pytest.raises(sw.StateError, match=r"took 0 of \d tokens, but finished no sequence"):
        first_items(dataset, 1)


class Growing(BestFitPacker):
    """A packer whose state is larger than it says."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.capacity = 9


def test_a_packer_beyond_its_capacity_is_noticed() -> None:
    dataset = ElasticStreamDataset(
        label_sources([9]), streams=1, transform=tokens_of, packer=partial(Growing, 9)
    )
    stream = Stream(dataset, 0, StreamState())
    stream.next_item()
    with pytest.raises(sw.StateError, match="more than its capacity of 9"):
        stream.state()


@pytest.mark.parametrize("name", ["", 1, None])
def test_a_source_needs_a_name(name: Any) -> None:
    with pytest.raises(TypeError, match="expected names as keys"):
        ElasticStreamDataset({name: MapSource("abc")}, streams=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": 0}, r"streams=0\): expected at least 1"),
        ({"streams": 4}, "'s0' has 3 segments, less than one for each of 4 streams"),
        ({"weights": {"s0": 1}}, "expected a weight for each"),
        ({"weights": {"s0": 1, "s1": 1, "s2": 1}}, "expected a weight for each"),
        ({"weights": {"s0": 0, "s1": 0}}, "not all 0"),
        ({"weights": {"s0": -1, "s1": 2}}, "at least 0"),
        ({"weights": {"s0": float("nan"), "s1": 2}}, "at least 0"),
        ({"weights": {"s0": 1e308, "s1": 1e308}}, "finite weights"),
        ({"sources": {}}, "at least one source"),
        ({"seed": -1}, r"seed=-1\)"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"sources": label_sources([1] * 3, [1] * 9), "streams": 3, **options}
    with pytest.raises(ValueError, match=message):
        ElasticStreamDataset(**arguments)


@pytest.mark.parametrize("weights", [[1, 2], {"s0": "x", "s1": 1}, {"s0": None, "s1": 1}])
def test_weights_must_be_numbers_by_name(weights: Any) -> None:
    with pytest.raises(TypeError, match=r"ElasticStreamDataset\(weights="):
        ElasticStreamDataset(label_sources([1] * 3, [1] * 9), streams=3, weights=weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 5}, "global_batch=5.*a multiple of the number of streams, 3"),
        ({"global_batch": 0}, r"global_batch=0\)"),
        ({"world_size": 4, "rank": 0}, "world_size=4.*only 3 streams; create it with at least one"),
        ({"num_workers": -1}, r"num_workers=-1\)"),
    ],
)
def test_wrong_arguments_of_a_loader_are_refused(options: dict[str, Any], message: str) -> None:
    dataset = ElasticStreamDataset(label_sources([1] * 3), streams=3)
    with pytest.raises(ValueError, match=message):
        ElasticStreamLoader(dataset, **options)


def test_advance_counts_only_batches_that_were_taken() -> None:
    loader = ElasticStreamLoader(
        ElasticStreamDataset(label_sources([9]), streams=1), collate_fn=list
    )
    batches = iter(loader)
    next(batches)
    loader.advance()
    with pytest.raises(sw.StateError, match="more often than batches were taken"):
        loader.advance()
    with pytest.raises(sw.StateError, match=r"4096 batches were taken, but advance\(\) was not"):
        [next(batches) for _ in range(5000)]
    loader.load_state_dict(loader.state_dict())
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(sw.StateError, match="this iteration has ended"):
        next(batches)
