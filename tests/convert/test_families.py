"""Models of Hugging Face with Megatron-Core's names, and back: by their configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from tests.convert.tiny_models import LAYERS, MODELS, VOCAB, logits_of, save_tiny_model
from tests.formats.comparing import assert_same

TOKENS = torch.arange(2 * 12).reshape(2, 12) * 7 % VOCAB


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The package; importing it takes seconds, which collecting the tests must not."""
    package = pytest.importorskip("transformers", reason="pip install '.[frameworks]'")
    package.utils.logging.set_verbosity_error()
    return package


def assert_written(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fail if a folder has other tensors, in any order."""
    found = load_file(folder / "model.safetensors")
    assert_same(dict(sorted(found.items())), dict(sorted(tensors.items())))


class Models:
    """Models that were saved, each once."""

    def __init__(self, transformers: Any, folder: Path) -> None:
        self._transformers, self._folder = transformers, folder
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}

    def of(self, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        """The folder of a model, and its tensors."""
        place = self._folder / name
        if name not in self._tensors:
            self._tensors[name] = save_tiny_model(self._transformers, name, place)
        return place, self._tensors[name]

    def with_names_of_megatron(self, name: str) -> Path:
        """A checkpoint of a model with Megatron-Core's names."""
        place = self._folder / f"{name}-megatron"
        if not place.exists():
            source, _ = self.of(name)
            sw.export(source, place, to="native", spec=sw.spec(source, to="megatron"))
        return place


@pytest.fixture(scope="module")
def models(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(transformers, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_byte_for_byte_and_says_the_same(
    transformers: Any, models: Models, tmp_path: Path, name: str
) -> None:
    source, tensors = models.of(name)
    sw.export(models.with_names_of_megatron(name), tmp_path / "back", base=source)
    assert_written(tmp_path / "back", tensors)
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()
    expected = logits_of(transformers, source, TOKENS)
    assert torch.equal(logits_of(transformers, tmp_path / "back", TOKENS), expected)


def test_layers_that_predict_further_tokens_are_apart(models: Models) -> None:
    found = sw.open(models.with_names_of_megatron("deepseek_v3"))
    names = {name for name in found if "mtp" in name}
    copies = found["model.embedding.word_embeddings.weight"][...]
    assert "model.mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight" in names
    assert "model.mtp.layers.0.eh_proj.weight" in names
    _, tensors = models.of("deepseek_v3")
    assert torch.equal(copies, tensors[f"model.layers.{LAYERS}.embed_tokens.weight"])


def test_a_copy_that_differs_is_refused(transformers: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = save_tiny_model(transformers, "deepseek_v3", tmp_path / "hf")
    tensors[f"model.layers.{LAYERS}.embed_tokens.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    spec = sw.spec(tmp_path / "hf", to="megatron")
    with pytest.raises(sw.MismatchError, match=r"word_embeddings\.weight: two copies differ"):
        sw.export(tmp_path / "hf", tmp_path / "out", to="native", spec=spec)


def test_a_model_without_its_layers_for_further_tokens(models: Models, tmp_path: Path) -> None:
    source, tensors = models.of("deepseek_v3")
    megatron = models.with_names_of_megatron("deepseek_v3")
    sw.export(megatron, tmp_path / "short", to="native", skip=["*.mtp.*"])
    sw.export(tmp_path / "short", tmp_path / "back", base=source)
    expected = {k: v for k, v in tensors.items() if f"model.layers.{LAYERS}." not in k}
    assert_written(tmp_path / "back", expected)


def test_the_configuration_says_what_dtype_was_written(models: Models, tmp_path: Path) -> None:
    source, _ = models.of("qwen3_moe")
    megatron = models.with_names_of_megatron("qwen3_moe")
    sw.export(megatron, tmp_path / "half", base=source, dtype="bfloat16")
    config = json.loads((source / "config.json").read_text())
    found = json.loads((tmp_path / "half" / "config.json").read_text())
    assert found == {**config, "dtype": "bfloat16"} != config


def test_the_configuration_loses_a_quantization_that_is_not_written(
    models: Models, tmp_path: Path
) -> None:
    source, _ = models.of("qwen3")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "base").mkdir()
    quantized = {**config, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(quantized))
    megatron = models.with_names_of_megatron("qwen3")
    report = sw.export(megatron, tmp_path / "out", base=tmp_path / "base")
    assert report.left_out == (
        "config.json: quantization_config: the written tensors are not quantized",
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_a_base_serves_a_checkpoint_with_names_of_hugging_face_too(
    models: Models, tmp_path: Path
) -> None:
    source, tensors = models.of("llama")
    sw.save(tmp_path / "trained", {"model": dict(tensors), "step": 3})
    sw.export(tmp_path / "trained", tmp_path / "out", base=source)
    assert_written(tmp_path / "out", tensors)
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


def test_links_in_a_base_are_followed(models: Models, tmp_path: Path) -> None:
    source, _ = models.of("llama")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").symlink_to(source / "config.json")
    sw.export(models.with_names_of_megatron("llama"), tmp_path / "out", base=tmp_path / "base")
    assert not (tmp_path / "out" / "config.json").is_symlink()


ARGUMENTS: dict[str, Any] = {
    "num_layers": LAYERS,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "vocab_size": VOCAB,
    "padded_vocab_size": 64,
    "swiglu": True,
    "normalization": "RMSNorm",
}
OF_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "qk_layernorm": True},
    "deepseek_v3": {"num_experts": 4, "multi_latent_attention": True, "mtp_num_layers": 1},
    "gpt_oss": {"num_experts": 4, "softmax_type": "learnable"},
}


def model_of(megatron: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model with Megatron-Core's names."""
    found = sw.open(megatron)
    return {name.removeprefix("model."): found[name][...] for name in found}


def saved_by_megatron(megatron: Path, arguments: dict[str, Any], place: Path) -> Path:
    """A checkpoint with the arguments of a training beside its model."""
    sw.save(place, {"model": model_of(megatron), "args": arguments})
    return place


@pytest.mark.parametrize("name", OF_MODELS)
def test_arguments_of_the_training_say_what_model_it_is(
    models: Models, tmp_path: Path, name: str
) -> None:
    arguments = {**ARGUMENTS, **OF_MODELS[name]}
    megatron = models.with_names_of_megatron(name)
    place = saved_by_megatron(megatron, arguments, tmp_path / "saved")
    sw.export(place, tmp_path / "out")
    assert_written(tmp_path / "out", models.of(name)[1])
    assert not (tmp_path / "out" / "config.json").exists()


def test_arguments_without_the_size_of_the_vocabulary(models: Models, tmp_path: Path) -> None:
    arguments = {**ARGUMENTS, "vocab_size": None, "padded_vocab_size": VOCAB}
    megatron = models.with_names_of_megatron("llama")
    place = saved_by_megatron(megatron, arguments, tmp_path / "saved")
    report = sw.export(place, tmp_path / "out")
    assert any("the size of the vocabulary" in line for line in report.left_out)
    assert_written(tmp_path / "out", models.of("llama")[1])


def test_names_stay_if_nothing_says_what_model_it_is(models: Models, tmp_path: Path) -> None:
    report = sw.export(models.with_names_of_megatron("mixtral"), tmp_path / "out")
    assert any("names of Hugging Face" in line and "base=" in line for line in report.left_out)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "embedding.word_embeddings.weight" in found


def test_what_is_beside_the_model_need_not_fit(models: Models, tmp_path: Path) -> None:
    source, tensors = models.of("llama")
    model = model_of(models.with_names_of_megatron("llama"))
    state = {"model": model, "critic": {"w": torch.ones(3)}, "mean": torch.ones(2)}
    sw.save(tmp_path / "saved", state)
    sw.export(tmp_path / "saved", tmp_path / "out", base=source)
    assert_written(tmp_path / "out", tensors)


BAD_BASES: dict[str, tuple[str | None, type[Exception], str]] = {
    "missing": (None, sw.CheckpointNotFoundError, r"has no config\.json: pass the directory"),
    "no-json": ("{", sw.FormatError, "not an object of JSON"),
    "no-object": ("[1]", sw.FormatError, "not an object of JSON"),
    "unknown": ('{"model_type": "bert"}', sw.StateError, "no built-in specification.*'bert'"),
    "text": (
        '{"model_type": "llama", "num_attention_heads": "4"}',
        sw.FormatError,
        "num_attention_heads",
    ),
    "zero": (
        '{"model_type": "llama", "num_attention_heads": 4, "vocab_size": 0}',
        sw.FormatError,
        "needs vocab_size, but the file has 0",
    ),
    "lacking": (
        '{"model_type": "qwen3", "num_attention_heads": 4, "vocab_size": 9}',
        sw.FormatError,
        "needs num_key_value_heads, but the file lacks it",
    ),
    "of-another": (
        '{"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 1, '
        '"vocab_size": 61}',
        sw.MismatchError,
        "linear_qkv",
    ),
}


@pytest.mark.parametrize("kind", BAD_BASES)
def test_a_bad_base_is_refused_and_nothing_is_written(
    models: Models, tmp_path: Path, kind: str
) -> None:
    text, error, message = BAD_BASES[kind]
    (tmp_path / "base").mkdir()
    if text is not None:
        (tmp_path / "base" / "config.json").write_text(text)
    megatron = models.with_names_of_megatron("llama")
    with pytest.raises(error, match=message):
        sw.export(megatron, tmp_path / "out", base=tmp_path / "base")
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit_together(models: Models, tmp_path: Path) -> None:
    source, _ = models.of("llama")
    with pytest.raises(sw.StateError, match="it belongs to to='hf'"):
        sw.export(source, tmp_path / "out", to="dcp", base=source)
    with pytest.raises(sw.StateError, match="the directory of a Hugging Face model"):
        sw.spec("megatron_llama", to="megatron")
    with pytest.raises(sw.StateError, match="choose one of hf, megatron"):
        sw.spec(source, to="dcp")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(
        '{"model_type": "gpt2", "n_head": 4, "vocab_size": 61}'
    )
    assert "heads=4, vocab=61" in str(sw.spec(tmp_path / "gpt2"))
    with pytest.raises(sw.StateError, match="no built-in specification"):
        sw.spec(tmp_path / "gpt2", to="megatron")
