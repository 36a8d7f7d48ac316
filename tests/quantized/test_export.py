"""Exports of block FP8: copied byte for byte, or computed as transformers computes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import shardwise as sw
from tests.breadth import OLD_TORCH
from tests.commands import run_command
from tests.quantized.published import FP8, block_fp8, publish
from tests.tools.gang import Gang

CONFIG = {
    "model_type": "llama",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def tensors_in(place: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in place.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))
        for n in a
    )


def test_block_fp8_is_copied_with_its_configuration(tmp_path: Path) -> None:
    files = {f"a.weight{n[1:]}": t for n, t in block_fp8(300, 200).files.items()}
    files["norm.weight"] = torch.rand(8).bfloat16()
    place = publish(tmp_path / "model", files)
    text = json.dumps(CONFIG, indent=3)
    (place / "config.json").write_text(text)
    report = sw.export(place, tmp_path / "out", to="hf", max_file=50_000)
    assert same(tensors_in(tmp_path / "out"), files)
    assert (tmp_path / "out" / "config.json").read_text() == text
    assert report.left_out == ()
    sw.export(place, tmp_path / "native", to="native")
    report = sw.export(tmp_path / "native", tmp_path / "again", to="hf")
    assert same(tensors_in(tmp_path / "again"), files)
    assert '"quant_method":"fp8"' in report.left_out[-1]
    assert not (tmp_path / "again" / "config.json").exists()


def test_models_without_block_fp8_get_no_configuration(tmp_path: Path) -> None:
    place = publish(tmp_path / "model", {"a.weight": torch.rand(4, 4)})
    (place / "config.json").write_text(json.dumps(CONFIG))
    assert sw.export(place, tmp_path / "out", to="hf").left_out == ()
    assert not (tmp_path / "out" / "config.json").exists()


def llama() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return hf.LlamaForCausalLM(config).bfloat16()


@pytest.mark.skipif(OLD_TORCH, reason="transformers imports torchao, which needs torch 2.10")
def test_transformers_loads_what_was_quantized(tmp_path: Path) -> None:
    import transformers as hf
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model = llama()
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:128] = 0  # has no largest value
    sw.save(tmp_path / "trained", {"model": model})
    sw.export(tmp_path / "model", tmp_path / "out", quantize=["*_proj.weight"])
    written = tensors_in(tmp_path / "out")
    plain = load_file(tmp_path / "model" / "model.safetensors")
    how = hf.FineGrainedFP8Config()
    quantizer = Fp8Quantize(type("Quantizer", (), {"quantization_config": how})())
    expected: dict[str, Tensor] = {}
    for name, each in plain.items():
        is_quantized = name.endswith("_proj.weight")
        expected |= quantizer._quantize_one(name, each) if is_quantized else {name: each}
    assert same(written, expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == [
        "lm_head",
        "model.embed_tokens",
    ]
    theirs = hf.LlamaForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.bfloat16,
        quantization_config=hf.FineGrainedFP8Config(dequantize=True),
    )
    ours = llama()
    assert len(sw.load(tmp_path / "out", {"model": ours}, dequantize=True).dequantized) == 14
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b), name
    report = sw.export(tmp_path / "trained", tmp_path / "third", quantize=["*_proj.weight"])
    assert "weight_block_size" in report.left_out[-1]
    zeros = tensors_in(tmp_path / "third")["model.layers.0.mlp.up_proj.weight_scale_inv"]
    assert torch.equal(zeros[0], torch.ones(2))


def export_together(place: Path, target: Path) -> None:
    sw.export(place, target, quantize=["*.w"], max_file=100_000)


def test_large_experts_on_several_ranks(gang: Gang, tmp_path: Path) -> None:
    files = {"a.w": torch.randn(3, 256, 128), "b.w": torch.randn(2560, 1280), "c": torch.rand(4)}
    place = publish(tmp_path / "model", files)
    gang.run(export_together, place, tmp_path / "out", world=2)
    written = tensors_in(tmp_path / "out")
    assert written.keys() == {*files, "a.w_scale_inv", "b.w_scale_inv"}
    out = {n: torch.zeros_like(t) for n, t in files.items()}
    sw.load(tmp_path / "out", {"model": out}, dequantize=True)
    for name, each in files.items():
        assert torch.allclose(out[name], each, rtol=2**-4, atol=1e-2), name
        assert written[name].dtype == (FP8 if name != "c" else torch.float32)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no match": ({"quantize": ["x*"]}, r"quantize='x\*': no tensor"),
    "a text": ({"quantize": "x*"}, r"expected a list"),
    "another format": ({"quantize": ["*w"], "to": "native"}, r"only to='hf'"),
    "a vector": ({"quantize": ["*norm"]}, r"model\.norm has the dtype float32 and the shape \[8\]"),
    "integers": ({"quantize": ["*ids"]}, r"model\.ids has the dtype int64"),
    "partial blocks": ({"quantize": ["*part"]}, r"model\.part .*\[100, 128\].*whole blocks"),
    "already": ({"quantize": ["*fp8"]}, r"model\.fp8 has the dtype float8_e4m3fn"),
    "not finite": ({"quantize": ["*nan"]}, r"model\.nan: values in rows 0 to 128 are NaN"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_quantized_is_refused(tmp_path: Path, case: str) -> None:
    options, message = BAD[case]
    files = {
        "w": torch.rand(128, 128),
        "norm": torch.rand(8),
        "ids": torch.ones(128, 128).long(),
        "part": torch.rand(100, 128),
        "fp8": torch.rand(128, 128).to(FP8),
        "nan": torch.full((128, 128), torch.nan),
    }
    place = publish(tmp_path / "model", files)
    with pytest.raises(sw.StateError, match=message):
        sw.export(place, tmp_path / "out", **options)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_the_command_quantizes(tmp_path: Path) -> None:
    place = publish(tmp_path / "model", {"w": torch.rand(128, 128)})
    run_command("export", place, tmp_path / "out", "--quantize", "*.w")
    assert tensors_in(tmp_path / "out")["w"].dtype == FP8
