"""`sw.trainable`: the trained part of a module, and what identifies the rest."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="PEFT is not installed: pip install '.[frameworks]'",
)


class Net(nn.Module):
    """A frozen base with a norm that keeps statistics, and a trained head."""

    def __init__(self, base: int = 0, head: int = 0, width: int = 8, dtype: Any = None) -> None:
        super().__init__()
        torch.manual_seed(base)
        self.base = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width)).to(dtype)
        self.base.requires_grad_(False)
        torch.manual_seed(head)
        self.head = nn.Linear(width, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.base(inputs))
        return hidden


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    before, after = a.state_dict(), b.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def tensors_of(place: Path) -> set[str]:
    checkpoint = sw.open(place)
    return {name for name in checkpoint.tensors() if name.startswith("model.")}


def test_a_run_goes_on_with_the_trained_part_alone(tmp_path: Path) -> None:
    """The statistics of a frozen norm change, too: they are saved."""
    model, resumed = Net(), Net(head=1)
    optimizer, other = adamw(model), adamw(resumed)
    train(model, optimizer, range(3))
    sw.save(tmp_path, {"model": sw.trainable(model), "optimizer": optimizer})
    train(model, optimizer, range(3, 6))
    sw.load(tmp_path, {"model": sw.trainable(resumed), "optimizer": other})
    train(resumed, other, range(3, 6))
    assert_same(model, resumed)
    statistics = {f"model.base.1.{each}" for each in ("running_mean", "running_var")}
    assert tensors_of(tmp_path) == statistics | {
        "model.base.1.num_batches_tracked",
        "model.head.weight",
        "model.head.bias",
    }
    assert not any("_frozen" in name for name in sw.open(tmp_path).state_dict("model"))


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (Net(base=1), "model.base.0.weight: frozen, other values than at the save"),
        (
            Net(width=8, dtype=torch.bfloat16),
            r"model.base.0.weight: frozen, float32 \[8, 6\] in the checkpoint, bfloat16 \[8, 6\]",
        ),
        (Net(width=4), r"model.base.0.weight: frozen, float32 \[8, 6\].*, float32 \[4, 6\] in the"),
    ],
    ids=["values", "dtype", "shape"],
)
def test_another_base_is_refused(tmp_path: Path, other: Net, problem: str) -> None:
    sw.save(tmp_path, {"model": sw.trainable(Net(), base="theirs")})
    before = deepcopy(other)
    with pytest.raises(sw.MismatchError, match=problem) as caught:
        sw.load(tmp_path, {"model": sw.trainable(other, base="ours")})
    assert "theirs at the save, ours now" in str(caught.value)
    assert_same(before, other)


def test_another_base_can_be_accepted(tmp_path: Path) -> None:
    sw.save(tmp_path, {"model": sw.trainable(Net())})
    other = Net(base=1, head=1)
    sw.load(tmp_path, {"model": sw.trainable(other)}, skip=["model._frozen.*"])
    assert torch.equal(other.head.weight, Net().head.weight)
    assert torch.equal(other.base[0].weight, Net(base=1).base[0].weight)
    head = Net(base=1, head=1)
    sw.load(tmp_path, {"model": sw.trainable(head)}, only=["model.head.*"])
    assert_same(head.head, Net().head)


def test_a_base_that_has_more_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"more": nn.Linear(2, 2).requires_grad_(False), "net": Net()})
    sw.save(tmp_path, {"model": sw.trainable(model)})
    del model["more"]
    with pytest.raises(sw.MismatchError, match=r"elements\.more\.weight\[0\]: in the checkpoint"):
        sw.load(tmp_path, {"model": sw.trainable(model)})


def test_a_checkpoint_of_everything_restores_everything(tmp_path: Path) -> None:
    sw.save(tmp_path, {"model": Net()})
    other = Net(base=1, head=1)
    sw.load(tmp_path, {"model": sw.trainable(other)})
    assert_same(other, Net())


def test_a_checkpoint_of_the_trained_part_does_not_fill_a_whole_module(tmp_path: Path) -> None:
    sw.save(tmp_path, {"model": sw.trainable(Net())})
    with pytest.raises(sw.MismatchError, match=r"pass sw\.trainable\(…\) as 'model'"):
        sw.load(tmp_path, {"model": Net(base=1)})


def test_what_is_frozen_may_change_between_saves(tmp_path: Path) -> None:
    """A base that is trained later on is saved then, and its checkpoint restores it."""
    model, trained = Net(), Net()
    trained.base.requires_grad_(True)
    nn.init.ones_(trained.base[0].weight)
    sw.save(tmp_path / "later", {"model": sw.trainable(trained)})
    sw.load(tmp_path / "later", {"model": sw.trainable(model)})
    assert_same(model, trained)
    sw.save(tmp_path / "earlier", {"model": sw.trainable(Net())})
    with pytest.raises(sw.MismatchError, match=r"model\.base\.0\.weight: not in the checkpoint"):
        sw.load(tmp_path / "earlier", {"model": sw.trainable(trained)})


def test_buffers_can_be_frozen_and_frozen_names_saved(tmp_path: Path) -> None:
    model = Net()
    spec = {"buffers": False, "also": ["base.0.*"]}
    sw.save(tmp_path, {"model": sw.trainable(model, **spec)})
    assert tensors_of(tmp_path) == {
        f"model.{layer}.{name}" for layer in ("base.0", "head") for name in ("weight", "bias")
    }
    model.base[1].running_mean += 1
    with pytest.raises(sw.MismatchError, match=r"model\.base\.1\.running_mean: frozen"):
        sw.load(tmp_path, {"model": sw.trainable(model, **spec)})


def test_a_base_without_values_is_refused(tmp_path: Path) -> None:
    sw.save(tmp_path, {"model": sw.trainable(Net())})
    model = Net()
    model.base.to("meta")
    for action in (sw.save, sw.load):
        with pytest.raises(sw.StateError, match=r"model\.base\.0\.weight.*load the base model"):
            action(
                tmp_path / "new" if action is sw.save else tmp_path, {"model": sw.trainable(model)}
            )


@pytest.mark.parametrize("value", [{"a": 1}, nn.Parameter(torch.ones(2)), []])
def test_other_values_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(sw.StateError, match=r"model: sw\.trainable got a \w+: pass a module"):
        sw.save(tmp_path, {"model": sw.trainable(value)})
    wrong: list[Any] = ["x", None]
    for also in wrong:
        with pytest.raises(sw.StateError, match=f"also={also!r}.: expected a list"):
            sw.trainable(Net(), also=also)
    with pytest.raises(sw.StateError, match=r"model: a list of sw\.trainable.*into a dict"):
        sw.save(tmp_path, {"model": [sw.trainable(Net()), sw.trainable(Net())]})


def test_dtypes_and_shapes_of_frozen_parameters(tmp_path: Path) -> None:
    """Scalars, empty tensors and dtypes that NumPy lacks."""
    dtypes = (torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.int64)

    def make(value: int) -> nn.Module:
        model = nn.Module()
        for index, dtype in enumerate(dtypes):
            for shape in ((), (0, 3), (5,), (2, 3, 4)):
                tensor = torch.full(shape, value).to(dtype)
                name = f"p{index}_{len(shape)}"
                model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        model.head = nn.Linear(2, 2)
        return model

    sw.save(tmp_path, {"model": sw.trainable(make(1))})
    sw.load(tmp_path, {"model": sw.trainable(make(1))})
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path, {"model": sw.trainable(make(0))})
    assert len([each for each in caught.value.problems if "frozen, other" in each]) == 15


def test_a_checkpointer_restores_the_trained_part(tmp_path: Path) -> None:
    model, resumed = Net(), Net(head=1)
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        assert checkpointer.restore({"model": sw.trainable(model)}) is None
        checkpointer.save(5, {"model": sw.trainable(model)})
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        assert checkpointer.restore({"model": sw.trainable(resumed)}) == 5
        with pytest.raises(sw.MismatchError, match="frozen, other values"):
            checkpointer.restore({"model": sw.trainable(Net(base=1))})
    assert_same(model, resumed)


def adapted(base: int, *adapters: str) -> Any:
    """A model of PEFT. The last adapter is trained, and a copy of the output layer with it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(base)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    config = LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"], init_lora_weights=False)
    model = get_peft_model(net, config, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, config)
    model.set_adapter(adapters[-1])
    return model


@needs_peft
def test_several_adapters_and_copies_of_layers(tmp_path: Path) -> None:
    names = ("first", "second")
    also = [f"*.{name}.*" for name in names]
    model, fresh = adapted(0, *names), adapted(0, *names)
    with torch.no_grad():
        for parameter in fresh.parameters():
            if "lora" in str(parameter.shape):
                parameter.zero_()
    for name, parameter in model.named_parameters():
        if any(f".{each}." in name for each in names):
            nn.init.normal_(parameter)
    sw.save(tmp_path, {"model": sw.trainable(model, also=also)})
    assert {name.split(".", 4)[4] for name in tensors_of(tmp_path)} == {
        *(f"lora_{side}.{name}.weight" for side in "AB" for name in names),
        *(f"modules_to_save.{name}.{kind}" for kind in ("weight", "bias") for name in names),
    }
    sw.load(tmp_path, {"model": sw.trainable(fresh, also=also)})
    assert_same(model, fresh)
    with pytest.raises(sw.MismatchError, match=r"base_layer\.weight: frozen"):
        sw.load(tmp_path, {"model": sw.trainable(adapted(1, *names), also=also)})
    with pytest.raises(sw.MismatchError, match=r"second.*in the checkpoint only"):
        sw.load(tmp_path, {"model": sw.trainable(adapted(0, "first"), also=also)})


def quantized(kind: str, base: int) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (frameworks)")
    makers: dict[str, Callable[[], nn.Module]] = {
        "nf4": lambda: bnb.nn.Linear4bit(
            128, 64, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=True
        ),
        "int8": lambda: bnb.nn.Linear8bitLt(128, 64, has_fp16_weights=False, threshold=6.0),
    }
    torch.manual_seed(base)
    model = nn.ModuleDict({"base": makers[kind](), "adapter": nn.Linear(128, 64)})
    model.to("cpu")  # quantizes
    model["base"].requires_grad_(False)
    nn.init.normal_(model["adapter"].weight)
    return model


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_base_is_not_saved(tmp_path: Path, kind: str) -> None:
    model, fresh = quantized(kind, 0), quantized(kind, 0)
    nn.init.ones_(model["adapter"].weight)
    sw.save(tmp_path, {"model": sw.trainable(model)})
    assert tensors_of(tmp_path) == {"model.adapter.weight", "model.adapter.bias"}
    sw.load(tmp_path, {"model": sw.trainable(fresh)})
    assert_same(model, fresh)
    inputs = torch.randn(3, 128)
    assert torch.equal(model["base"](inputs), fresh["base"](inputs))
    with pytest.raises(sw.MismatchError, match=r"model\.base\.weight.*: frozen, other values"):
        sw.load(tmp_path, {"model": sw.trainable(quantized(kind, 1))})


class Packed(torch.Tensor):
    """A tensor that wraps others and has no memory of its own, as quantized ones of torchao do."""

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data_: torch.Tensor, scale: torch.Tensor, dtype: Any = None) -> Packed:
        shape = (data_.shape[0], data_.shape[1] * 2) if data_.dim() == 2 else data_.shape
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or torch.float32)
        assert isinstance(made, Packed)
        return made

    def __init__(self, data_: torch.Tensor, scale: torch.Tensor, dtype: Any = None) -> None:
        self.data_, self.scale = data_, scale

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale, args[0].dtype)
        raise NotImplementedError(f"{cls.__name__}: {func}")


class Inside(Packed):
    """A wrapper in a wrapper."""


class Opaque(Packed):
    """A wrapper that does not say what it wraps."""

    __tensor_flatten__: Any = None


def packed(cls: type[Packed], data_: int = 3, scale: float = 0.5, columns: int = 8) -> Any:
    parts = torch.full((4, columns), data_, dtype=torch.uint8), torch.full((4, 1), scale)
    if cls is Inside:
        return Packed(Inside(*parts), torch.ones(4, 1))
    return cls(*parts)


def on_packed_base(weight: Any, head: float = 0.0) -> Any:
    model: Any = nn.ModuleDict({"base": nn.Linear(16, 4, bias=False), "head": nn.Linear(4, 2)})
    model["base"].weight = nn.Parameter(weight, requires_grad=False)
    for parameter in model["head"].parameters():
        nn.init.constant_(parameter, head)
    return model


@pytest.mark.parametrize("cls", [Packed, Inside, Opaque])
def test_a_base_of_tensors_that_wrap_others_is_not_saved(tmp_path: Path, cls: type[Packed]) -> None:
    sw.save(tmp_path, {"model": sw.trainable(on_packed_base(packed(cls), head=1.0))})
    assert tensors_of(tmp_path) == {"model.head.weight", "model.head.bias"}
    fresh = on_packed_base(packed(cls))
    sw.load(tmp_path, {"model": sw.trainable(fresh)})
    assert torch.equal(fresh["head"].weight, torch.ones(2, 4))
    others = [nn.Parameter(torch.ones(4, 16)), packed(cls, columns=4)]
    if cls is not Opaque:
        others += [packed(cls, data_=4), packed(cls, scale=0.25)]
    for other in others:
        with pytest.raises(sw.MismatchError, match=r"model\.base\.weight: frozen"):
            sw.load(tmp_path, {"model": sw.trainable(on_packed_base(other))})


@pytest.mark.parametrize("cls", [Packed, Inside, Opaque])
def test_what_wraps_others_is_refused_where_it_must_be_saved(
    tmp_path: Path, cls: type[Packed]
) -> None:
    model = on_packed_base(packed(cls))
    refusal = r"model\.base\.weight: a .* has no memory of its own"
    with pytest.raises(sw.StateError, match=refusal):
        sw.save(tmp_path / "also", {"model": sw.trainable(model, also=["base.*"])})
    trained = on_packed_base(packed(cls))
    trained["base"].weight.requires_grad_(True)
    with pytest.raises(sw.StateError, match=refusal):
        sw.save(tmp_path / "trained", {"model": sw.trainable(trained)})
    sw.save(tmp_path / "whole", {"model": on_packed_base(torch.ones(4, 16), head=1.0)})
    with pytest.raises(sw.StateError, match=refusal):
        sw.load(tmp_path / "whole", {"model": sw.trainable(model)})
    assert torch.equal(model["head"].weight, torch.zeros(2, 4))
    sw.load(tmp_path / "whole", {"model": sw.trainable(model)}, only=["model.head.*"])
    assert torch.equal(model["head"].weight, torch.ones(2, 4))


@pytest.mark.parametrize(
    "kind", ["sparse", "quantized", "packed-bytes", "packed-buffer", "float8", "complex-view"]
)
def test_frozen_tensors_of_any_kind_are_not_saved(tmp_path: Path, kind: str) -> None:
    def make(number: int) -> Any:
        value = float(number)
        tensors: dict[str, Callable[[], torch.Tensor]] = {
            "sparse": lambda: torch.diag(torch.full((4,), value)).to_sparse(),
            "quantized": lambda: torch.quantize_per_tensor(
                torch.full((4, 4), value), 0.1, 0, torch.qint8
            ),
            "packed-bytes": lambda: torch.full((4, 4), value).to(torch.uint8),
            "packed-buffer": lambda: torch.full((4, 4), value).to(torch.int32),
            "float8": lambda: torch.full((4, 4), value).to(torch.float8_e4m3fn),
            "complex-view": lambda: torch.full((4, 4), value, dtype=torch.complex64).conj(),
        }
        module: Any = nn.Module()
        if kind == "packed-buffer":
            module.register_buffer("packed", tensors[kind]())
        else:
            module.packed = nn.Parameter(tensors[kind](), requires_grad=False)
        module.head = nn.Linear(2, 2)
        return module

    def wrapped(value: int) -> Any:
        return sw.trainable(make(value), buffers=False)

    sw.save(tmp_path, {"model": wrapped(1)})
    assert tensors_of(tmp_path) == {"model.head.weight", "model.head.bias"}
    sw.load(tmp_path, {"model": wrapped(1)})
    if kind not in ("sparse", "quantized"):
        with pytest.raises(sw.MismatchError, match=r"model\.packed: frozen, other values"):
            sw.load(tmp_path, {"model": wrapped(2)})


def test_a_checkpoint_says_that_it_has_only_the_trained_part(tmp_path: Path) -> None:
    sw.save(tmp_path / "part", {"actor": {"model": sw.trainable(Net())}, "critic": Net()})
    sw.save(tmp_path / "whole", {"model": Net()})
    part, whole = sw.open(tmp_path / "part"), sw.open(tmp_path / "whole")
    frozen = {"base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias"}
    assert {module: {*names} for module, names in part.frozen.items()} == {"actor.model": frozen}
    assert "the trained part of actor.model" in repr(part)
    assert not whole.frozen
    assert "trained" not in repr(whole)
