"""Sparse, jagged and quantized tensors come back bit for bit, with other sizes than the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.tensor_classes.layouts import DTYPES, MAKERS, compressed, contents, coo, jagged

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
    with sw.Checkpointer(tmp_path, save_every=1) as checkpointer:
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
    import torch.ao.nn.quantized as quantized

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        made = getattr(quantized, layer)(*((4, 3) if layer == "Linear" else (4, 3, 2)))
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
