"""Weights of torchao: each class comes back bit for bit, or a load says what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.tensor_classes.tensors import MAKERS, TRAINING, Holder, bits, values


@pytest.mark.parametrize("kind", MAKERS)
def test_a_weight_in_a_module_comes_back(tmp_path: Path, kind: str) -> None:
    make = MAKERS[kind]
    saved, live = Holder(make(values(0))), Holder(make(values(1)))
    inner = [getattr(live.weight, key) for key in live.weight.__tensor_flatten__()[0]]
    sw.save(str(tmp_path), {"model": saved})
    assert bits(live.weight) != bits(saved.weight)
    sw.load(str(tmp_path), {"model": live})
    assert bits(live.weight) == bits(saved.weight)
    assert type(live.weight.data) is type(saved.weight.data)
    # The live inner tensors are filled: nothing else holds the weight afterwards.
    now = [getattr(live.weight, key) for key in live.weight.__tensor_flatten__()[0]]
    assert all(a is b for a, b in zip(inner, now, strict=True))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_weight_as_an_item_of_the_state_comes_back(tmp_path: Path, kind: str) -> None:
    saved, live = MAKERS[kind](values(0)), MAKERS[kind](values(1))
    sw.save(str(tmp_path), {"w": saved})
    sw.load(str(tmp_path), {"w": live})
    assert bits(live) == bits(saved)


@pytest.mark.parametrize("kind", MAKERS)
def test_names_of_inner_tensors(tmp_path: Path, kind: str) -> None:
    model = Holder(MAKERS[kind](values()))
    sw.save(str(tmp_path), {"model": model})
    names = {*sw.open(str(tmp_path)).tensors()}
    keys = model.weight.__tensor_flatten__()[0]
    expected = {"model.weight"} if kind in TRAINING else {f"model.weight.{key}" for key in keys}
    assert names == expected


@pytest.mark.parametrize("kind", TRAINING)
def test_wrappers_for_training_load_and_are_loaded_as_plain_weights(
    tmp_path: Path, kind: str
) -> None:
    plain, wrapped = Holder(values(0)), Holder(MAKERS[kind](values(1)))
    sw.save(str(tmp_path / "plain"), {"model": plain})
    sw.load(str(tmp_path / "plain"), {"model": wrapped})
    assert [*bits(wrapped.weight).values()] == [*bits(plain.weight).values()]
    other = Holder(values(2))
    sw.save(str(tmp_path / "wrapped"), {"model": wrapped})
    sw.load(str(tmp_path / "wrapped"), {"model": other})
    assert bits(other.weight) == bits(plain.weight)


def test_a_scale_that_was_computed_before_is_forgotten(tmp_path: Path) -> None:
    saved = Holder(MAKERS["float8 training"](values(0)))
    live = Holder(MAKERS["float8 training"](values(1)))
    live.weight._precomputed_scale = torch.tensor(3.0)
    sw.save(str(tmp_path), {"model": saved})
    sw.load(str(tmp_path), {"model": live})
    assert live.weight._precomputed_scale is None


@pytest.mark.parametrize("kind", ["int8", "int8, activations", "intx", "float8 experts"])
def test_a_module_on_the_meta_device_is_allocated(tmp_path: Path, kind: str) -> None:
    saved, live = Holder(MAKERS[kind](values(0))), Holder(MAKERS[kind](values(1)).to("meta"))
    other = live.weight
    sw.save(str(tmp_path), {"model": saved})
    sw.load(str(tmp_path), {"model": live})
    assert live.weight is other
    assert bits(live.weight) == bits(saved.weight)


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.Module:
        model = nn.Module()
        model.a = Holder(MAKERS["int8"](values(seed)))
        model.b = Holder(values(3))
        model.b.weight = model.a.weight
        return model

    saved, live = tied(0), tied(1)
    sw.save(str(tmp_path), {"model": saved})
    sw.load(str(tmp_path), {"model": live})
    assert bits(live.b.weight) == bits(saved.a.weight)
    size = sum(each.stat().st_size for each in tmp_path.rglob("*.safetensors"))
    assert size < 1.5 * saved.a.weight.qdata.numel()


@pytest.mark.parametrize(
    ("saved", "target", "expected"),
    [
        ("int8", "int8, activations", "model.weight.context.act_quant_kwargs: null in the"),
        ("int8", "float8", "model.weight.class:"),
        ("mxfp8", "mxfp8, swizzled", "model.weight.context.is_swizzled_scales: false in the"),
        ("mxfp8", "mxfp4", "model.weight.context.elem_dtype"),
        ("nvfp4", "nvfp4, swizzled", "model.weight.tensors: "),
    ],
)
def test_what_differs_is_named_and_nothing_is_loaded(
    tmp_path: Path, saved: str, target: str, expected: str
) -> None:
    live = Holder(MAKERS[target](values(1)))
    before = bits(live.weight)
    sw.save(str(tmp_path), {"model": Holder(MAKERS[saved](values(0)))})
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(str(tmp_path), {"model": live})
    assert expected in str(caught.value)
    assert bits(live.weight) == before


@pytest.mark.parametrize("kind", ["int8", "mxfp4"])
def test_a_plain_weight_is_no_target_of_a_quantized_one_and_the_other_way(
    tmp_path: Path, kind: str
) -> None:
    plain, quantized = Holder(values(0)), Holder(MAKERS[kind](values(1)))
    for i, (saved, live) in enumerate([(plain, quantized), (quantized, plain)]):
        before = bits(live.weight)
        sw.save(str(tmp_path / str(i)), {"model": saved})
        with pytest.raises(sw.MismatchError, match=r"model\.weight: "):
            sw.load(str(tmp_path / str(i)), {"model": live})
        assert bits(live.weight) == before


@pytest.mark.parametrize("choice", [{"only": ["*.qdata"]}, {"skip": ["*.scale"]}])
def test_a_part_of_a_weight_is_not_loaded_alone(
    tmp_path: Path, choice: dict[str, list[str]]
) -> None:
    """Codes with the scales of other values would be a wrong weight."""
    live = Holder(MAKERS["int8"](values(1)))
    before = bits(live.weight)
    sw.save(str(tmp_path), {"model": Holder(MAKERS["int8"](values(0)))})
    with pytest.raises(sw.MismatchError, match=r"model\.weight: only= or skip= select a part of"):
        sw.load(str(tmp_path), {"model": live}, **choice)
    assert bits(live.weight) == before


def test_a_weight_that_differs_can_be_left_out(tmp_path: Path) -> None:
    live = Holder(MAKERS["float8"](values(1)))
    before = bits(live.weight)
    sw.save(str(tmp_path), {"model": Holder(MAKERS["int8"](values(0))), "step": 3})
    state = {"model": live, "step": 0}
    sw.load(str(tmp_path), state, skip=["model.weight*"])
    assert state["step"] == 3
    assert bits(live.weight) == before


def test_tensors_of_the_same_names_are_not_taken_for_parts_of_a_weight(tmp_path: Path) -> None:
    live = Holder(MAKERS["int8"](values(1)))
    before = bits(live.weight)
    other = {key: getattr(live.weight, key) + 1 for key in ("qdata", "scale", "zero_point")}
    sw.save(str(tmp_path), {"model": {"weight": other}})
    with pytest.raises(sw.MismatchError, match=r"model\.weight: the checkpoint has tensors of the"):
        sw.load(str(tmp_path), {"model": live}, strict=False)
    assert bits(live.weight) == before


def test_a_choice_of_an_implementation_may_differ(tmp_path: Path) -> None:
    from torchao.quantization.quantize_.common import KernelPreference

    saved, live = MAKERS["float8"](values(0)), MAKERS["float8"](values(1))
    live.kernel_preference = KernelPreference.TORCH
    sw.save(str(tmp_path), {"w": saved})
    sw.load(str(tmp_path), {"w": live})
    assert bits(live) == bits(saved)
    assert live.kernel_preference == KernelPreference.TORCH


def test_later_saves_of_a_run_have_the_values_of_their_step(tmp_path: Path) -> None:
    model = Holder(MAKERS["int8"](values(0)))
    seen = []
    with sw.Checkpointer(str(tmp_path), save_every=1) as checkpointer:
        for step in range(3):
            model.weight.qdata.add_(1)
            checkpointer.save(step, {"model": model})
            seen.append(bits(model.weight))
    for step in range(3):
        live = Holder(MAKERS["int8"](values(1)))
        sw.load(str(tmp_path), {"model": live}, step=step)
        assert bits(live.weight) == seen[step]


@pytest.mark.parametrize("kind", ["int8", "mxfp8", "nvfp4"])
def test_values_of_the_state_may_have_them(tmp_path: Path, kind: str) -> None:
    """An average of weights, for example, whose class keeps plain values only."""
    saved = {"ema": {"step": 3, "of": [MAKERS[kind](values(0))], 1: "not text"}}
    fresh: dict[str, dict[object, object]] = {"ema": {1: "", "of": [], "step": 0}}
    sw.save(str(tmp_path), saved)
    sw.load(str(tmp_path), fresh)
    assert fresh["ema"]["step"] == 3
    [loaded] = fresh["ema"]["of"]  # type: ignore[misc]
    assert bits(loaded) == bits(saved["ema"]["of"][0])  # type: ignore[index]


def test_values_that_a_load_could_not_build_are_refused(tmp_path: Path) -> None:
    state = {"ema": {"of": [MAKERS["int8, activations"](values(0))], 1: ""}}
    with pytest.raises(sw.StateError, match="keeps objects that no plain value describes"):
        sw.save(str(tmp_path), state)
