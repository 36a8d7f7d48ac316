"""`sw.load(..., dequantize=True)`: block-scaled tensors are loaded into plain ones, exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import shardwise as sw
from tests.breadth import OLD_TORCH, examples
from tests.quantized.published import (
    FLOATS,
    FP8,
    Stored,
    block_fp8,
    compressed,
    exponents,
    mxfp4,
    publish,
)

SCHEMES: dict[str, Callable[[], Stored]] = {
    "block": lambda: block_fp8(256, 384),
    "block-edges": lambda: block_fp8(300, 200),
    "block-small": lambda: block_fp8(3, 5),
    "block-bf16": lambda: block_fp8(130, 257, dtype=torch.bfloat16),
    "block-e8m0": lambda: exponents(300, 260, dtype=torch.float8_e8m0fnu),
    "block-exponents": lambda: exponents(128, 256, dtype=torch.uint8),
    "block-experts": lambda: block_fp8(3, 130, 140),
    "block-whole": lambda: block_fp8(2, 128, 256),
    "one-scale": lambda: Stored(
        {"w": torch.ones(4, 4).to(FP8), "w_scale_inv": torch.tensor(0.3)}, torch.full((4, 4), 0.3)
    ),
    "tensor": lambda: compressed(70, 50, scales=torch.tensor([0.37])),
    "tensor-vector": lambda: compressed(70, scales=torch.tensor(0.37)),
    "rows": lambda: compressed(70, 50, scales=torch.rand(70, 1) + 0.1),
    "rows-bf16": lambda: compressed(70, 50, scales=(torch.rand(70, 1) + 0.1).bfloat16()),
    "rows-experts": lambda: compressed(2, 7, 5, scales=torch.rand(2, 7, 1) + 0.1),
    "blocks": lambda: compressed(300, 200, scales=torch.rand(3, 2) + 0.1),
    "mxfp4": lambda: mxfp4(3, 70, 4),
    "mxfp4-one": lambda: mxfp4(1, 1, 1),
}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits. The NaNs of torch's conversions vary in theirs."""
    if a.dtype != b.dtype:
        return False
    if a.dtype in FLOATS:
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = (each.masked_fill(each.isnan(), 0) for each in (a, b))
    a, b = a.contiguous(), b.contiguous()
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_those_of_numbers_times_scales(tmp_path: Path, scheme: str) -> None:
    stored = SCHEMES[scheme]()
    place = publish(tmp_path / "model", {**stored.files, "norm": torch.rand(8)})
    for dtype in FLOATS:
        out = torch.zeros_like(stored.values, dtype=dtype)
        norm = torch.zeros(8)
        report = sw.load(place, {"model": {"w": out, "norm": norm}}, dequantize=True)
        assert same_bits(out, stored.values.to(dtype)), dtype
        assert report.dequantized == ("model.w",)
        assert "1 tensor dequantized" in str(report)
        assert report.bytes_needed == next(iter(stored.files.values())).nbytes + 32
        assert report.bytes_read > report.bytes_needed
        assert norm.all()


@pytest.mark.skipif(OLD_TORCH, reason="transformers imports torchao, which needs torch 2.10")
@pytest.mark.parametrize("scheme", ["block", "block-whole", "block-exponents", "block-small"])
def test_block_fp8_is_what_transformers_computes(scheme: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored = SCHEMES[scheme]()
    for dtype in FLOATS:  # transformers divides tensors into equal blocks, and DeepSeek does not
        theirs = Fp8Dequantize(None)._dequantize_one(*stored.files.values(), output_dtype=dtype)
        assert same_bits(theirs, stored.values.to(dtype))


@pytest.mark.skipif(OLD_TORCH, reason="ldexp() of torch 2.9 overflows in half precision")
@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp4-one"])
def test_mxfp4_is_what_transformers_computes(scheme: str) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = SCHEMES[scheme]()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        theirs = convert_moe_packed_tensors(*stored.files.values(), dtype=dtype)
        assert same_bits(theirs, stored.values.to(dtype))


def test_experts_of_compressed_tensors_are_multiplied_in_float32(tmp_path: Path) -> None:
    name = "mlp.experts.0.up_proj.weight"
    stored = compressed(7, 5, scales=(torch.rand(7, 1) + 0.1).bfloat16(), name=name)
    place = publish(tmp_path / "model", stored.files)
    out = torch.zeros(7, 5)
    sw.load(place, {"model": {name: out}}, dequantize=True)
    assert same_bits(out, stored.values)


@pytest.mark.parametrize("pair", [("a.weight", "a.scale"), ("a.weight", "a.qscale_weight")])
def test_other_names_of_scales(tmp_path: Path, pair: tuple[str, str]) -> None:
    stored = block_fp8(130, 140)
    files = dict(zip(pair, stored.files.values(), strict=True))
    place = publish(tmp_path / "model", files)
    out = torch.zeros(130, 140)
    sw.load(place, {"model": {"a.weight": out}}, dequantize=True)
    assert same_bits(out, stored.values)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[sw.Box]:
    """Boxes that cover a tensor, cut at any place."""
    waiting, boxes = [sw.Box.whole(shape)], []
    while waiting:
        box = waiting.pop()
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if len(boxes) + len(waiting) >= 6 or not dims or draw(st.booleans()):
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.shape[dim] - 1))
        for low, n in ((0, at), (at, box.shape[dim] - at)):
            offset = [*box.offset]
            offset[dim] += low
            waiting.append(sw.Box(tuple(offset), (*box.shape[:dim], n, *box.shape[dim + 1 :])))
    return boxes


@pytest.mark.parametrize("scheme", ["block-edges", "block-experts", "rows", "mxfp4"])
@examples(8)
@given(data=st.data())
def test_boxes_that_cut_through_blocks(
    tmp_path_factory: pytest.TempPathFactory, scheme: str, data: st.DataObject
) -> None:
    stored = SCHEMES[scheme]()
    place = publish(tmp_path_factory.mktemp("boxes") / "model", stored.files, in_files=2)
    boxes = data.draw(partitions(tuple(stored.values.shape)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    is_transposed = data.draw(st.booleans())
    for box in boxes:
        out = torch.full(box.shape, 7, dtype=dtype)
        if is_transposed:
            out = out.mT.contiguous().mT
        shards = sw.Shards(tuple(stored.values.shape), dtype, [(box, out)])
        sw.load(place, {"model": {"w": shards}}, dequantize=True, staging_bytes=1 << 20)
        assert same_bits(out, stored.values[box.slices()].to(dtype)), box


def test_large_tensors_are_read_in_several_spans(tmp_path: Path) -> None:
    fp8, packed = block_fp8(1500, 1100), mxfp4(2, 600, 90)
    files = {f"a.{name}": each for name, each in fp8.files.items()}
    files |= {f"b.{name}": each for name, each in packed.files.items()}
    place = publish(tmp_path / "model", files)
    a, b = (torch.zeros_like(each.values, dtype=torch.bfloat16) for each in (fp8, packed))
    state = {"model": {"a.w": a, "b.w": b}}
    sw.load(place, state, dequantize=True, staging_bytes=1 << 20)
    assert same_bits(a, fp8.values.bfloat16())
    assert same_bits(b, packed.values.bfloat16())


def test_scales_that_are_not_kept_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = [block_fp8(1300, 1100, seed=seed) for seed in range(4)]
    files = {f"{i}.{name}": t for i, each in enumerate(stored) for name, t in each.files.items()}
    place = publish(tmp_path / "model", files)

    def load() -> sw.LoadReport:
        outs = {f"{i}.w": torch.zeros_like(each.values) for i, each in enumerate(stored)}
        report = sw.load(place, {"model": outs}, dequantize=True, staging_bytes=1 << 20)
        for out, each in zip(outs.values(), stored, strict=True):
            assert same_bits(out, each.values)
        return report

    once = load()
    monkeypatch.setattr("shardwise.parts.quantized.dequantized.KEPT_BYTES", 0)
    monkeypatch.setattr("shardwise.parts.quantized.dequantized._READ_BYTES", 1000)
    again = load()
    assert again.bytes_read > once.bytes_read


def test_checkpoints_of_shardwise_and_renamed_names(tmp_path: Path) -> None:
    fp8, packed = block_fp8(200, 140), mxfp4(2, 40, 3)
    files = {f"a.{name}": each for name, each in fp8.files.items()}
    files |= {f"b.{name}": each for name, each in packed.files.items()}
    sw.save(tmp_path / "saved", {"net": dict(files)})
    a, b = torch.zeros(200, 140), torch.zeros(2, 96, 40)
    sw.load(
        tmp_path / "saved",
        {"model": {"x": a, "b": {"w": b}}},
        rename={"model": "net", "model.x": "net.a.w"},
        dequantize=True,
    )
    assert same_bits(a, fp8.values)
    assert same_bits(b, packed.values.float())


def test_modules_and_overlapping_memory(tmp_path: Path) -> None:
    stored = block_fp8(140, 130)
    files = {name.replace("w", "weight", 1): t for name, t in stored.files.items()}
    place = publish(tmp_path / "model", {f"a.{name}": t for name, t in files.items()})
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(130, 140, bias=False)}).bfloat16()
    sw.load(place, {"model": module}, dequantize=True)
    assert same_bits(module["a"].weight.data, stored.values.bfloat16())
    memory = torch.zeros(140 * 130)
    state = {"model": {"a.weight": memory.view(140, 130)}, "flat": memory}
    with pytest.raises(sw.MismatchError, match="flat"):
        sw.load(place, state, dequantize=True)
    sw.load(place, state, dequantize=True, strict=False)
    assert same_bits(memory.view(140, 130), stored.values)


def test_names_that_share_memory(tmp_path: Path) -> None:
    one, other = block_fp8(140, 130), block_fp8(140, 130, seed=1)
    tied = torch.nn.Linear(130, 140, bias=False)
    model = torch.nn.ModuleDict({"a": tied, "b": tied})
    files = {f"a.weight{n[1:]}": t for n, t in one.files.items()}
    sw.load(publish(tmp_path / "one", files), {"model": model}, dequantize=True)
    assert same_bits(tied.weight.data, one.values)
    files |= {f"b.weight{n[1:]}": t for n, t in other.files.items()}
    place = publish(tmp_path / "two", files)
    with pytest.raises(sw.MismatchError, match=r"model.a.weight and model.b.weight"):
        sw.load(place, {"model": model}, dequantize=True)
    sw.load(place, {"model": model}, dequantize=True, skip=["model.a.*"])
    assert same_bits(tied.weight.data, other.values)


def test_scales_of_inputs_are_left_out(tmp_path: Path) -> None:
    stored = compressed(8, 6, scales=torch.rand(8, 1) + 0.1, name="a.weight")
    place = publish(tmp_path / "model", {**stored.files, "a.input_scale": torch.ones(1)})
    out = torch.zeros(8, 6)
    sw.load(place, {"model": {"a.weight": out}}, dequantize=True)
    assert same_bits(out, stored.values)


def test_without_the_option_tensors_are_loaded_as_stored(tmp_path: Path) -> None:
    stored = block_fp8(140, 130)
    place = publish(tmp_path / "model", stored.files)
    same = {name: torch.zeros_like(each) for name, each in stored.files.items()}
    assert sw.load(place, {"model": same}).dequantized == ()
    for name, each in stored.files.items():
        assert same_bits(same[name], each)
        assert same_bits(sw.open(place)[f"model.{name}"].tensor(), each)
    with pytest.raises(sw.MismatchError, match=r"float8_e4m3fn in the target; dequantize=True"):
        sw.load(place, {"model": same}, dequantize=True)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [lambda: block_fp8(140, 130), lambda: mxfp4(2, 40, 3)])
def test_without_the_option_other_targets_are_refused(
    tmp_path: Path, make: Callable[[], Stored], strict: bool, cast: bool
) -> None:
    stored = make()
    place = publish(tmp_path / "model", {**stored.files, "norm": torch.rand(8)})
    out, norm = torch.zeros_like(stored.values), torch.zeros(8)
    state = {"model": {"w": out, "norm": norm}}
    with pytest.raises(sw.MismatchError, match=r"model\.w: .*w_scale.*dequantize=True"):
        sw.load(place, state, strict=strict, cast=cast)
    assert not out.any()
    assert not norm.any()


def test_numbers_without_their_scales_are_refused_even_if_not_strict(tmp_path: Path) -> None:
    stored = block_fp8(140, 130)
    place = publish(tmp_path / "model", stored.files)
    out = torch.zeros(140, 130).to(FP8)
    with pytest.raises(sw.MismatchError, match=r"w_scale_inv: left over, but model.w has no"):
        sw.load(place, {"model": {"w": out}}, strict=False)
    assert not out.float().any()
    sw.load(place, {"model": {"w": out}}, skip=["*_scale_inv"])
    assert same_bits(out, stored.files["w"])


FP8_FILES = block_fp8(300, 200).files
MXFP4_FILES = mxfp4(2, 40, 3).files
NAN, INF = float("nan"), float("inf")


def with_scale(value: float, at: tuple[int, int] = (2, 1)) -> dict[str, Tensor]:
    scales = FP8_FILES["w_scale_inv"].clone()
    scales[at] = value
    return {**FP8_FILES, "w_scale_inv": scales}


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "missing": ({"w": FP8_FILES["w"]}, r"model\.w: .*lacks its scales, model\.w_scale_inv or"),
    "shape": (
        {**FP8_FILES, "w_scale_inv": torch.rand(2, 3)},
        r"model\.w: .*model\.w_scale_inv have the shape \[2, 3\].*need \[3, 2\] for blocks of 128",
    ),
    "shape-of-one": ({**FP8_FILES, "w_scale_inv": torch.ones(1, 1)}, r"shape \[1, 1\].*\[3, 2\]"),
    "rank": ({**FP8_FILES, "w_scale_inv": torch.rand(1, 3, 2)}, r"shape \[1, 3, 2\]"),
    "rows": (
        {"w": FP8_FILES["w"], "w_scale": torch.rand(200, 1)},
        r"w_scale have the shape \[200, 1\].*\[300, 1\] for rows",
    ),
    "vector": (
        {"w": FP8_FILES["w"], "w_scale": torch.rand(300)},
        r"w_scale have the shape \[300\]",
    ),
    "dtype": ({**FP8_FILES, "w_scale_inv": torch.ones(3, 2).int()}, r"w_scale_inv .*dtype int32"),
    "float64": ({**FP8_FILES, "w_scale_inv": torch.ones(3, 2).double()}, r"dtype float64"),
    "zero-points": (
        {**FP8_FILES, "w_zero_point": torch.zeros(3, 2, dtype=torch.int8)},
        r"model\.w: .*zero points",
    ),
    "nan": (with_scale(NAN), r"model\.w_scale_inv: 1 of 6 scales are NaN, infinite, zero"),
    "inf": (with_scale(INF), r"model\.w_scale_inv: 1 of 6"),
    "zero": (with_scale(0.0), r"model\.w_scale_inv: 1 of 6"),
    "negative": (with_scale(-1.0, (0, 0)), r"model\.w_scale_inv: 1 of 6"),
    "e8m0-nan": (
        {
            **FP8_FILES,
            "w_scale_inv": torch.full((3, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        },
        r"model\.w_scale_inv: 6 of 6",
    ),
    "mxfp4-missing": (
        {"w_blocks": MXFP4_FILES["w_blocks"]},
        r"model\.w: stored as model\.w_blocks, but its scales model\.w_scales are missing",
    ),
    "mxfp4-shape": (
        {**MXFP4_FILES, "w_scales": MXFP4_FILES["w_scales"][:, :, :2].contiguous()},
        r"model\.w_scales have the shape \[2, 40, 2\].*need \[2, 40, 3\]",
    ),
    "mxfp4-dtype": ({**MXFP4_FILES, "w_scales": torch.ones(2, 40, 3)}, r"w_scales .*dtype float32"),
    "mxfp4-blocks": (
        {"w_blocks": MXFP4_FILES["w_blocks"][0], "w_scales": MXFP4_FILES["w_scales"][0]},
        r"model\.w_blocks has the shape \[40, 3, 16\]",
    ),
    "mxfp4-nan": (
        {**MXFP4_FILES, "w_scales": torch.full((2, 40, 3), 255, dtype=torch.uint8)},
        r"model\.w_scales: 240 of 240",
    ),
    "int8": (
        {"w": torch.ones(300, 200, dtype=torch.int8), "w_scale_inv": FP8_FILES["w_scale_inv"]},
        r"model\.w: int8 .*quantized together with model\.w_scale_inv: dequantize the model with",
    ),
    "nvfp4": (
        {
            "w_packed": torch.ones(300, 100, dtype=torch.uint8),
            "w_scale": torch.ones(300, 12).to(FP8),
            "w_global_scale": torch.ones(1),
        },
        r"model\.w: stored as model\.w_packed and .*dequantize the model with",
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", BAD)
def test_bad_scales_are_refused_before_anything_is_loaded(
    tmp_path: Path, case: str, strict: bool
) -> None:
    files, message = BAD[case]
    norm = torch.rand(8)
    place = publish(tmp_path / "model", {"a": norm, **files})
    out = torch.zeros((2, 96, 40) if "mxfp4" in case else (300, 200))
    state: dict[str, Any] = {"model": {"a": torch.zeros(8), "w": out}}
    with pytest.raises((sw.MismatchError, sw.FormatError), match=message):
        sw.load(place, state, dequantize=True, strict=strict, cast=True)
    assert not out.any()
    assert not state["model"]["a"].any()
    sw.load(place, state, dequantize=True, strict=False, skip=["model.w*"])
    assert torch.equal(state["model"]["a"], norm)


def test_fp8_without_scales_is_not_cast_where_others_have_scales(tmp_path: Path) -> None:
    files = {**FP8_FILES, "v": FP8_FILES["w"].clone()}
    place = publish(tmp_path / "model", files)
    out = torch.zeros(300, 200)
    with pytest.raises(sw.MismatchError, match=r"lacks the scales of model\.v, but has model\.w_s"):
        sw.load(place, {"model": {"v": out}}, cast=True, strict=False)
    assert not out.any()


def test_models_without_quantized_tensors_are_loaded_as_before(tmp_path: Path) -> None:
    place = publish(tmp_path / "model", {"w": torch.ones(4)})
    out = torch.zeros(4)
    assert sw.load(place, {"model": {"w": out}}, dequantize=True).dequantized == ()
    assert out.all()


def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a model block FP8, or its experts MXFP4."""
    found: dict[str, Tensor] = {}
    for name, each in tensors.items():
        generator = torch.Generator().manual_seed(len(found))
        if name.endswith("proj.weight") and each.shape[0] % 128 == 0:
            weight = torch.randn(each.shape, generator=generator).to(FP8)
            rows, columns = each.shape
            scales = torch.rand(rows // 128, columns // 128, generator=generator) + 0.01
            found |= {name: weight, f"{name}_scale_inv": scales}
        elif name.endswith("_proj"):
            experts, columns, rows = each.shape
            shape = (experts, rows, columns // 32, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            scales = torch.randint(110, 130, shape[:-1], dtype=torch.uint8, generator=generator)
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            found[name] = each
    return found


def families() -> dict[str, Any]:
    """Tiny models of transformers, and their quantization configs."""
    import transformers as hf

    small: dict[str, Any] = {
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "num_hidden_layers": 2,
    }
    llama = hf.LlamaConfig(hidden_size=256, intermediate_size=384, **small)
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    gpt_oss = hf.GptOssConfig(hidden_size=64, intermediate_size=96, **moe, **small)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    mxfp4_config = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return {
        "llama": SimpleNamespace(
            make=hf.LlamaForCausalLM,
            config=llama,
            quantized=fp8,
            how=hf.FineGrainedFP8Config(dequantize=True),
        ),
        "gpt-oss": SimpleNamespace(
            make=hf.GptOssForCausalLM,
            config=gpt_oss,
            quantized=mxfp4_config,
            how=hf.Mxfp4Config(dequantize=True),
        ),
    }


@pytest.mark.skipif(OLD_TORCH, reason="transformers imports torchao, which needs torch 2.10")
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_models_of_transformers(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    family = families()[name]
    family.make(family.config).bfloat16().save_pretrained(tmp_path / "plain")
    files = quantize(load_file(tmp_path / "plain" / "model.safetensors"))
    place = publish(tmp_path / "model", files, in_files=3)
    family.config.quantization_config = family.quantized
    family.config.save_pretrained(place)
    theirs = family.make.from_pretrained(place, dtype=dtype, quantization_config=family.how)
    del family.config.quantization_config
    ours = family.make(family.config).to(dtype)
    report = sw.load(place, {"model": ours}, dequantize=True, cast=True)
    assert len(report.dequantized) == {"llama": 14, "gpt-oss": 4}[name]
    expected = dict(theirs.named_parameters())
    for key, each in ours.named_parameters():
        assert torch.equal(each, expected[key].to(dtype)), key
