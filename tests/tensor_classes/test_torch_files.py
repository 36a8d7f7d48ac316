"""Tensors of torchao in files of torch.save: read as in shardwise's own, without their code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

pytest.importorskip(
    "torchao.quantization", reason="of torchao 0.18 and torch 2.10", exc_type=ImportError
)
from torchao.float8.inference import Float8MMConfig
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import Float8Tensor, PerRow
from torchao.quantization.quant_primitives import ZeroPointDomain
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

import shardwise as sw
from tests.tensor_classes.tensors import MAKERS, TRAINING, Holder, bits, values


def float8_with_activations(weight: torch.Tensor) -> torch.Tensor:
    """Return what Float8DynamicActivationFloat8WeightConfig makes, which needs a GPU."""
    plain, config = MAKERS["float8"](weight), Float8MMConfig(use_fast_accum=True)
    of_activations = QuantizeTensorToFloat8Kwargs(granularity=PerRow(), mm_config=config)
    return Float8Tensor(
        plain.qdata,
        plain.scale,
        block_size=plain.block_size,
        mm_config=config,
        act_quant_kwargs=of_activations,
        kernel_preference=KernelPreference.TORCH,
        dtype=plain.dtype,
    )


ALL = {**MAKERS, "float8, activations": float8_with_activations}


def require_equal(place: Path, other: Path) -> None:
    found = sw.open(str(place)).compare(sw.open(str(other)))
    assert found.same, found


@pytest.mark.parametrize("kind", ALL)
def test_a_model_is_the_same_as_in_a_checkpoint_of_shardwise(tmp_path: Path, kind: str) -> None:
    saved, live = Holder(ALL[kind](values(0))), Holder(ALL[kind](values(1)))
    torch.save({"model": saved.state_dict()}, tmp_path / "file.pt")
    sw.save(str(tmp_path / "own"), {"model": saved})
    require_equal(tmp_path / "file.pt", tmp_path / "own")
    sw.load(str(tmp_path / "file.pt"), {"model": live})
    assert bits(live.weight) == bits(saved.weight)
    assert type(live.weight.data) is type(saved.weight.data)


@pytest.mark.parametrize("form", ["parameters", "state alone", "before torch 1.6", "pytorch_model"])
def test_other_files_with_a_model(tmp_path: Path, form: str) -> None:
    saved, live = Holder(MAKERS["int8"](values(0))), Holder(MAKERS["int8"](values(1)))
    place = tmp_path / ("pytorch_model.bin" if form == "pytorch_model" else "file.pt")
    state: dict[str, Any] = saved.state_dict(keep_vars=form == "parameters")
    torch.save(
        {"model": state} if form in ("parameters", "before torch 1.6") else state,
        place,
        _use_new_zipfile_serialization=form != "before torch 1.6",
    )
    sw.load(str(tmp_path if form == "pytorch_model" else place), {"model": live})
    assert bits(live.weight) == bits(saved.weight)


def trained(cls: Any, seed: int, steps: int = 2) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 32))
    optimizer = cls(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.randn(4, 256)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("cls", [AdamW8bit, AdamW4bit, AdamWFp8])
def test_an_optimizer_continues_from_a_file(tmp_path: Path, cls: Any) -> None:
    model, optimizer = trained(cls, 0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "file.pt")
    sw.save(str(tmp_path / "own"), {"model": model, "optimizer": optimizer})
    own = {*sw.open(str(tmp_path / "own")).tensors()}
    assert own <= {*sw.open(str(tmp_path / "file.pt")).tensors()}
    for steps in (0, 1):  # without state, and with other state
        other_model, other = trained(cls, 1, steps)
        sw.load(str(tmp_path / "file.pt"), {"model": other_model, "optimizer": other})
        for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            for key, value in optimizer.state[mine].items():
                assert bits(other.state[theirs][key]) == bits(value), key


def test_tied_weights_and_weights_in_values(tmp_path: Path) -> None:
    weight, other = MAKERS["int8"](values(0)), MAKERS["mxfp8"](values(1))
    state = {"model": {"a.weight": weight, "b.weight": weight}, "list": [other, 3, {"w": weight}]}
    torch.save(state, tmp_path / "file.pt")
    found = sw.open(str(tmp_path / "file.pt"))
    assert not found.left_out
    one, three, inner = found["list"]
    assert (bits(one), three, bits(inner["w"])) == (bits(other), 3, bits(weight))
    live = nn.Module()
    live.a, live.b = Holder(MAKERS["int8"](values(2))), Holder(MAKERS["int8"](values(3)))
    sw.load(str(tmp_path / "file.pt"), {"model": live})
    assert bits(live.a.weight) == bits(live.b.weight) == bits(weight)


@pytest.mark.parametrize(
    ("saved", "target", "expected"),
    [
        ("int8", "int8, activations", "model.weight.context.act_quant_kwargs: null in the"),
        ("int8", "float8", "model.weight.class:"),
        ("nvfp4", "nvfp4, swizzled", "model.weight.tensors: "),
    ],
)
def test_what_differs_is_named_and_nothing_is_loaded(
    tmp_path: Path, saved: str, target: str, expected: str
) -> None:
    live = Holder(MAKERS[target](values(1)))
    before = bits(live.weight)
    torch.save({"model": Holder(MAKERS[saved](values(0))).state_dict()}, tmp_path / "file.pt")
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(str(tmp_path / "file.pt"), {"model": live})
    assert expected in str(caught.value)
    assert bits(live.weight) == before


def test_no_code_of_the_class_runs(tmp_path: Path) -> None:
    states = {kind: Holder(make(values(0))).state_dict() for kind, make in MAKERS.items()}
    torch.save(states, tmp_path / "file.pt")
    program = (
        "import sys, shardwise as sw\n"
        f"found = sw.open({str(tmp_path / 'file.pt')!r})\n"
        "print(len(found.tensors()), [each for each in sys.modules if 'torchao' in each])\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    count = sum(
        1 if kind in TRAINING else len(bits(state["weight"])) for kind, state in states.items()
    )
    assert done.stdout.split(maxsplit=1) == [
        str(count),
        "['shardwise.parts.tensor_classes.torchao', "
        "'shardwise.parts.tensor_classes.torchao_objects']\n",
    ] or "torchao'" not in done.stdout.replace("tensor_classes.torchao'", "")


def test_an_unknown_class_is_named_with_its_tensor_and_can_be_left_out(tmp_path: Path) -> None:
    plain = nn.Linear(3, 2)
    unknown = TwoTensor(torch.ones(4, 3), torch.zeros(4, 3))
    state = {**plain.state_dict(), "wrapped": unknown}
    torch.save({"model": state, "step": 3}, tmp_path / "file.pt")
    live = {"model": nn.Linear(3, 2)}
    before = bits(live["model"].weight)
    with pytest.raises(
        sw.FormatError, match=r"TwoTensor \(at model\.wrapped\);.*skip_unknown=True"
    ):
        sw.load(str(tmp_path / "file.pt"), live)
    assert bits(live["model"].weight) == before
    found = sw.open(str(tmp_path / "file.pt"), skip_unknown=True)
    assert sorted(found) == ["model.bias", "model.weight", "step"]
    assert ["model.wrapped" in line and "TwoTensor" in line for line in found.left_out] == [True]
    assert torch.equal(found.tensors()["model.weight"][...], plain.weight)


@pytest.mark.parametrize("target", ["torch", "dcp"])
def test_an_export_to_plain_tensors_is_refused(tmp_path: Path, target: str) -> None:
    sw.save(str(tmp_path / "own"), {"model": Holder(MAKERS["int8"](values(0)))})
    with pytest.raises(sw.StateError, match=r"model\.weight: a torchao.*Int8Tensor.*to='hf'"):
        sw.export(str(tmp_path / "own"), str(tmp_path / "out"), to=target)


class _Reduced:
    """What a pickle says of a tensor, with another class, shape or attributes."""

    def __init__(self, *args: object) -> None:
        self._args = args

    def __reduce__(self) -> Any:
        return torch._tensor._rebuild_from_type_v2, self._args


def _reduced(**changes: Any) -> _Reduced:
    """Return a tensor as it is pickled. None removes an attribute."""
    rebuild, cls, args, state = MAKERS["int8"](values(0)).__reduce_ex__(2)[1]
    kept = {key: each for key, each in {**state, **changes}.items() if each is not Ellipsis}
    shape = kept.pop("shape", args[2])
    return _Reduced(rebuild, cls, (cls, args[1], shape, *args[3:]), kept)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shape": (-1, 2)}, "the shape of a torchao.quantization:Int8Tensor"),
        ({"shape": (2**62, 2)}, "the shape of a torchao.quantization:Int8Tensor"),
        ({"qdata": None, "scale": None, "zero_point": None}, "has no inner tensors"),
        ({"block_size": 7}, r"model\.weight: the file is damaged, or another version"),
    ],
)
def test_malformed_tensors_are_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    torch.save({"model": {"weight": _reduced(**changes)}}, tmp_path / "file.pt")
    with pytest.raises(sw.FormatError, match=expected):
        sw.open(str(tmp_path / "file.pt"))


def test_an_unknown_object_of_a_tensor_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    weight = MAKERS["int8"](values(0))
    weight.act_quant_kwargs = ZeroPointDomain.INT  # no tensor of torchao 0.18 has it
    torch.save({"model": {"weight": weight, "bias": torch.ones(2)}}, tmp_path / "file.pt")
    expected = r"model\.weight\.context\.act_quant_kwargs: .*ZeroPointDomain.*skip_unknown=True"
    with pytest.raises(sw.FormatError, match=expected):
        sw.open(str(tmp_path / "file.pt"))
    found = sw.open(str(tmp_path / "file.pt"), skip_unknown=True)
    assert [*found] == ["model.bias"]
    assert "model.weight" in str(found.left_out)


def test_a_file_of_another_version_of_the_class_is_compared_by_attributes(tmp_path: Path) -> None:
    torch.save({"model": {"weight": _reduced(reduce_range=...)}}, tmp_path / "file.pt")
    live = Holder(MAKERS["int8"](values(1)))
    before = bits(live.weight)
    with pytest.raises(sw.MismatchError, match=r"model\.weight\.context\.reduce_range: absent in"):
        sw.load(str(tmp_path / "file.pt"), {"model": live})
    assert bits(live.weight) == before
