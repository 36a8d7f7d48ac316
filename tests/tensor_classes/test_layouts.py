"""Sparse, jagged and quantized tensors come back bit for bit, with other sizes than the target."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized
from torch import nn

import shardwise as sw
from shardwise.testing.thread_group import run_ranks
from tests.tensor_classes.layouts import (
    DTYPES,
    MAKERS,
    compressed,
    contents,
    coo,
    jagged,
    quantize,
    raw,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]
KINDS = pytest.mark.parametrize("kind", MAKERS)


def holder(tensor: torch.Tensor, *, as_parameter: bool) -> Any:
    module: Any = nn.Module()
    if as_parameter:
        module.weight = nn.Parameter(tensor, requires_grad=False)
    else:
        module.register_buffer("weight", tensor)
    module.tied = nn.Module()
    module.tied.weight = module.weight
    return module


@KINDS
def test_a_tensor_as_an_item_of_the_state_comes_back(tmp_path: Path, kind: str) -> None:
    saved, live = MAKERS[kind](0), MAKERS[kind](1)
    assert contents(live) != contents(saved) or "empty dimension" in kind
    state = {"w": live}
    sw.save(tmp_path, {"w": saved})
    sw.load(tmp_path, state)
    assert contents(state["w"]) == contents(saved)
    assert state["w"] is live


@KINDS
@pytest.mark.parametrize("as_parameter", [True, False])
def test_a_tensor_in_a_module_stays_the_same_object(
    tmp_path: Path, kind: str, as_parameter: bool
) -> None:
    saved = holder(MAKERS[kind](0), as_parameter=as_parameter)
    live = holder(MAKERS[kind](1), as_parameter=as_parameter)
    before = live.weight
    before.note = "kept"
    sw.save(tmp_path, {"model": saved})
    sw.load(tmp_path, {"model": live})
    assert live.weight is live.tied.weight is before
    assert type(before) is type(saved.weight)
    assert before.note == "kept"
    assert contents(before) == contents(saved.weight)


@KINDS
def test_a_tensor_in_a_value_comes_back(tmp_path: Path, kind: str) -> None:
    saved, live = MAKERS[kind](0), MAKERS[kind](1)
    before = contents(live)
    state: dict[str, Any] = {"v": [1, (live, 2)]}
    sw.save(tmp_path, {"v": [3, (saved, 4)]})
    sw.load(tmp_path, state)
    assert state["v"][0] == 3
    assert contents(state["v"][1][0]) == contents(saved)
    assert contents(live) == before  # whoever else has it keeps a tensor in one piece


@KINDS
def test_a_checkpoint_returns_the_tensor(tmp_path: Path, kind: str) -> None:
    saved = MAKERS[kind](0)
    sw.save(tmp_path, {"w": saved})
    assert contents(sw.open(tmp_path)["w"]) == contents(saved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [coo, compressed(torch.sparse_csr), jagged])
def test_values_of_all_dtypes(tmp_path: Path, dtype: torch.dtype, make: Any) -> None:
    saved, live = make(0, dtype), make(1, dtype)
    sw.save(tmp_path, {"w": saved})
    sw.load(tmp_path, {"w": live})
    assert contents(live) == contents(saved)


@KINDS
def test_later_saves_of_a_run_have_the_values_of_their_step(tmp_path: Path, kind: str) -> None:
    model = holder(MAKERS[kind](0), as_parameter=False)
    item, seen = MAKERS[kind](0), []
    with sw.Checkpointer(tmp_path, save_every=1, memory=None) as checkpointer:
        for step in range(4):
            if step == 2:
                model.weight = model.tied.weight = MAKERS[kind](1)
                item = MAKERS[kind](1)
            checkpointer.save(step, {"model": model, "item": item, "values": [item]})
            seen.append(contents(item))
    for step, expected in enumerate(seen):
        checkpoint = sw.open(tmp_path, step=step)
        for name in ("model.weight", "item"):
            assert contents(checkpoint[name]) == expected
        assert contents(checkpoint["values"][0]) == expected


def test_a_quantizer_that_changes_in_place_is_seen(tmp_path: Path) -> None:
    live, other = MAKERS["qint8"](0), MAKERS["qint8"](1)
    with sw.Checkpointer(tmp_path, save_every=1) as checkpointer:
        for step in range(3):
            if step == 2:
                live.copy_(other)
            checkpointer.save(step, {"w": live})
    assert contents(sw.open(tmp_path, step=2)["w"]) == contents(other)


def embedding_with_momentum(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([step, 2, 2, 7])).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("steps_of_target", [0, 1])
def test_sparse_momentum_of_an_optimizer_is_resumed(tmp_path: Path, steps_of_target: int) -> None:
    model, optimizer = embedding_with_momentum(0, 3)
    assert model.weight in optimizer.state
    assert optimizer.state[model.weight]["momentum_buffer"].is_sparse
    other, its = embedding_with_momentum(1, steps_of_target)
    sw.save(tmp_path, {"model": model, "optimizer": optimizer})
    sw.load(tmp_path, {"model": other, "optimizer": its})
    moments = [o.state[m.weight]["momentum_buffer"] for o, m in ((optimizer, model), (its, other))]
    assert contents(moments[0]) == contents(moments[1])
    for each in ((model, optimizer), (other, its)):
        train(*each, 3)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("layer", ["Linear", "Conv2d"])
def test_quantized_layers_of_torch_come_back(tmp_path: Path, layer: str) -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        made = getattr(torch.ao.nn.quantized, layer)(*((4, 3) if layer == "Linear" else (4, 3, 2)))
        weight = made.weight().dequantize()
        scales, zeros = torch.rand(3) + 0.1, torch.zeros(3, dtype=torch.int64)
        made.set_weight_bias(
            torch.quantize_per_channel(torch.randn_like(weight), scales, zeros, 0, torch.qint8),
            torch.randn(3),
        )
        made.scale = 0.5 + seed
        return made

    saved, live = make(0), make(1)
    sw.save(tmp_path, {"model": saved})
    sw.load(tmp_path, {"model": live})
    assert contents(live.weight()) == contents(saved.weight())
    assert torch.equal(live.bias(), saved.bias())
    assert float(live.scale) == float(saved.scale)


def test_momentum_of_a_jagged_parameter_is_resumed(tmp_path: Path) -> None:
    def make(seed: int, steps: int) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = nn.Module()
        model.weight = nn.Parameter(MAKERS["jagged, equal sizes"](seed))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        advance(model, optimizer, steps)
        return model, optimizer

    def advance(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (model.weight * model.weight).values().sum().backward()
            optimizer.step()

    saved, other = make(0, 2), make(1, 0)
    sw.save(tmp_path, {"model": saved[0], "optimizer": saved[1]})
    sw.load(tmp_path, {"model": other[0], "optimizer": other[1]})
    for each in (saved, other):
        advance(*each, 2)
    assert contents(saved[0].weight) == contents(other[0].weight)


def run_of_a_rank(group: Any, folder: str) -> list[dict[str, Any]]:
    state = {kind: make(1) for kind, make in MAKERS.items()}
    sw.save(folder, {kind: make(0) for kind, make in MAKERS.items()}, group=group)
    sw.load(folder, state, group=group)
    return [*map(contents, state.values())]


def test_replicated_on_several_ranks(tmp_path: Path) -> None:
    expected = [contents(make(0)) for make in MAKERS.values()]
    found = run_ranks(3, lambda group: run_of_a_rank(group, str(tmp_path)))
    assert found == [expected] * 3


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.ShardwiseError, match="w"):
        run_ranks(2, lambda g: sw.save(tmp_path, {"w": coo(g.rank)}, group=g))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nested, strided": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "w: nested"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), r"save w\.to_dense"),
    "four bits": (
        lambda: quantize(
            torch.quantize_per_channel,
            *(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint4x2),
        ),
        r"save w\.dequantize",
    ),
    "meta": (lambda: coo(0).to("meta"), "meta device"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_layouts_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    make, said = REFUSED[kind]
    with pytest.raises(sw.StateError, match=said):
        sw.save(tmp_path, {"w": make()})


@pytest.mark.parametrize(
    ("saved", "target", "expected"),
    [
        ("coo", "csr", "w.class:"),
        ("coo", "coo, transposed", "w.shape.0: 4 in the checkpoint, 6 in the target"),
        ("coo", "coo, dense dimension", "w.context.dense_dim: 0 in the checkpoint, 1"),
        ("csr", "csr, 32-bit indices", "w.context.index_dtype"),
        ("qint8", "quint8", 'w.dtype: "qint8" in the checkpoint, "quint8"'),
        ("qint8", "qint8, channels", "w.class:"),
        ("jagged", "jagged, equal sizes", "w.shape.0: 3 in the checkpoint, 2"),
        ("jagged", "jagged, transposed", "w.context.ragged_dim: 1 in the checkpoint, 2"),
    ],
)
def test_what_differs_is_named_and_nothing_is_loaded(
    tmp_path: Path, saved: str, target: str, expected: str
) -> None:
    live = MAKERS[target](1)
    before = contents(live)
    sw.save(tmp_path, {"w": MAKERS[saved](0)})
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path, {"w": live})
    assert expected in str(caught.value)
    assert contents(live) == before


@pytest.mark.parametrize("kind", ["coo", "csr", "jagged", "qint8"])
def test_a_dense_tensor_is_no_target_of_another_and_the_other_way(
    tmp_path: Path, kind: str
) -> None:
    for i, (saved, live) in enumerate(
        [(MAKERS[kind](0), torch.ones(4, 6)), (torch.ones(4, 6), MAKERS[kind](0))]
    ):
        before = contents(live) if i else raw(live)
        sw.save(tmp_path / str(i), {"w": saved})
        with pytest.raises(sw.MismatchError, match=r"- w"):
            sw.load(tmp_path / str(i), {"w": live})
        assert (contents(live) if i else raw(live)) == before


@pytest.mark.parametrize("options", [{"only": ["w.values"]}, {"skip": ["w.indices"]}])
def test_a_part_of_a_tensor_cannot_be_selected(tmp_path: Path, options: Any) -> None:
    live = coo(1)
    before = contents(live)
    sw.save(tmp_path, {"w": coo(0), "x": 1})
    with pytest.raises(sw.MismatchError, match="select all of them or none"):
        sw.load(tmp_path, {"w": live, "x": 1}, **options)
    sw.load(tmp_path, {"w": live, "x": 1}, skip=["w*"])
    assert contents(live) == before


def test_a_tensor_may_have_another_name(tmp_path: Path) -> None:
    live = coo(1)
    sw.save(tmp_path, {"old": coo(0)})
    sw.load(tmp_path, {"new": live}, rename={"new": "old"})
    assert contents(live) == contents(coo(0))


def test_tensors_that_share_offsets_can_be_added_after_a_load(tmp_path: Path) -> None:
    first = jagged(0)
    other = first * 2
    sw.save(tmp_path, {"a": first, "b": other})
    live = {"a": first * 3, "b": other * 3}
    sw.load(tmp_path, live)
    assert contents(live["a"] + live["b"]) == contents(first + other)


def test_a_parameter_that_something_refers_to_is_refused_with_what_to_do(tmp_path: Path) -> None:
    live = compressed(torch.sparse_csr)(1)
    reference = weakref.ref(live)
    sw.save(tmp_path, {"w": compressed(torch.sparse_csr)(0)})
    with pytest.raises(sw.StateError, match=r"w: .* something refers to it"):
        sw.load(tmp_path, {"w": live})
    assert reference() is live
    same = MAKERS["csr"](1)
    sw.save(tmp_path / "same", {"w": torch.sparse_csr_tensor(*parts_of(same), same.shape)})
    sw.load(tmp_path / "same", {"w": live})
    assert torch.equal(live.values(), same.values() * 2)


def parts_of(csr: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return csr.crow_indices(), csr.col_indices(), csr.values() * 2


def test_sparse_parameters_of_an_optimizer_are_resumed(tmp_path: Path) -> None:
    def make(seed: int, steps: int) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = nn.Module()
        model.weight = nn.Parameter(MAKERS["coo, coalesced"](0) * (seed + 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        advance(model, optimizer, steps)
        return model, optimizer

    def advance(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.sparse.sum(model.weight * model.weight).backward()
            optimizer.step()

    saved, other = make(0, 2), make(1, 0)
    sw.save(tmp_path, {"model": saved[0], "optimizer": saved[1]})
    sw.load(tmp_path, {"model": other[0], "optimizer": other[1]})
    for each in (saved, other):
        advance(*each, 2)
    assert contents(saved[0].weight) == contents(other[0].weight)
