"""Adapters: `PeftModel.from_pretrained` opens what is exported; parts are not taken for models."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from tests.breadth import mostly_long
from tests.formats.comparing import assert_same


@pytest.fixture(scope="module")
def peft() -> Any:
    """The package; importing it takes seconds, which collecting the tests must not."""
    return pytest.importorskip("peft", reason="pip install '.[frameworks]'")


class Base(nn.Module):
    """An embedding, two layers with biases, a norm without statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.down(torch.relu(self.up(self.embed(tokens)))))
        out: torch.Tensor = self.head(hidden)
        return out


def randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)


def outputs(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model.eval()(torch.arange(12))
    return out.detach()


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 2}),
    "scaled": ("LoraConfig", {"r": 2, "use_rslora": True, "lora_alpha": 32}),
    "dora": ("LoraConfig", {"r": 2, "use_dora": True}),
    "lora-bias": ("LoraConfig", {"r": 2, "bias": "lora_only"}),
    "all-biases": ("LoraConfig", {"r": 2, "bias": "all"}),
    "bias-of-b": ("LoraConfig", {"r": 2, "lora_bias": True}),
    "modules": ("LoraConfig", {"r": 2, "modules_to_save": ["head", "norm"]}),
    "embedding": ("LoraConfig", {"r": 2, "target_modules": ["embed", "up"]}),
    "tokens": ("LoraConfig", {"r": 2, "trainable_token_indices": {"embed": [1, 3]}}),
    "pattern": ("LoraConfig", {"r": 2, "rank_pattern": {"down": 3}}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down"]}),
    "loha": ("LoHaConfig", {"r": 2}),
    "lokr": ("LoKrConfig", {"r": 2}),
    "oft": ("OFTConfig", {"r": 2, "oft_block_size": 0}),
    "hra": ("HRAConfig", {"r": 2}),
}


def make(peft: Any, kind: str, *adapters: str) -> Any:
    name, options = CONFIGS[kind]
    config = getattr(peft, name)(**{"target_modules": ["up", "down"], **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(Base(), config, adapter_name=adapters[0])
        for each in adapters[1:]:
            model.add_adapter(each, config)
    for each in adapters:
        model.set_adapter(each)
        randomize(model)
    return model


def saved_by_peft(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return exported(folder)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in all files of adapters, by the file and the name."""
    return {
        f"{path.relative_to(folder)} {name}": tensor
        for path in sorted(folder.rglob("adapter_model.safetensors"))
        for name, tensor in sorted(load_file(path).items())
    }


@pytest.mark.parametrize(
    ("kind", "whole"),
    mostly_long(
        [(kind, whole) for kind in CONFIGS for whole in (False, True)],
        [*((kind, False) for kind in CONFIGS), (next(iter(CONFIGS)), True)],
    ),
)
def test_peft_opens_an_exported_adapter(peft: Any, tmp_path: Path, kind: str, whole: bool) -> None:
    """The files have the same tensors as those of PEFT, under the same names."""
    model = make(peft, kind, "default")
    sw.save(tmp_path / "run", {"model": model if whole else sw.trainable(model), "step": 3})
    report = sw.export(tmp_path / "run", tmp_path / "adapter", to="peft")
    if whole and "bias" in kind:  # only a configuration says which biases are trained
        return
    assert_same(exported(tmp_path / "adapter"), saved_by_peft(model, tmp_path / "theirs"))
    assert any("adapter_config.json" in line for line in report.left_out) == whole
    if whole:
        model.peft_config["default"].save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing adapter keys
        warnings.filterwarnings("ignore", message=".*(inference|in_features|fan_in).*")
        loaded = peft.PeftModel.from_pretrained(Base(), str(tmp_path / "adapter"))
    assert torch.equal(outputs(loaded), outputs(model))


def test_each_adapter_gets_its_directory(peft: Any, tmp_path: Path) -> None:
    model = make(peft, "modules", "default", "b")
    sw.save(tmp_path / "run", {"model": sw.trainable(model)})
    sw.export(tmp_path / "run", tmp_path / "out", to="peft")
    theirs = saved_by_peft(model, tmp_path / "theirs")
    assert_same(exported(tmp_path / "out"), theirs)
    loaded = peft.PeftModel.from_pretrained(Base(), str(tmp_path / "out"))
    loaded.load_adapter(str(tmp_path / "out/b"), "b")
    for each in ("default", "b"):
        model.set_adapter(each)
        loaded.set_adapter(each)
        assert torch.equal(outputs(loaded), outputs(model))


def test_the_configuration_is_the_one_that_peft_writes(peft: Any, tmp_path: Path) -> None:
    """Apart from the class of the base, which PEFT writes for models of unknown tasks."""
    model = make(peft, "modules", "default")
    sw.save(tmp_path / "run", {"model": sw.trainable(model)})
    sw.export(tmp_path / "run", tmp_path / "out", to="peft")
    saved_by_peft(model, tmp_path / "theirs")
    found, expected = (
        json.loads((tmp_path / each / "adapter_config.json").read_text())
        for each in ("out", "theirs")
    )
    for config in (found, expected):
        del config["auto_mapping"]
        for key in ("target_modules", "modules_to_save"):
            config[key] = sorted(config[key])
    assert found == expected


def test_an_adapter_in_a_model_of_transformers(peft: Any, tmp_path: Path) -> None:
    """Also without a PeftModel around it; `from_pretrained` of transformers reads it, too."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}

    def base() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            intermediate_size=32, num_key_value_heads=2, vocab_size=50, **sizes
        )
        return transformers.LlamaForCausalLM(config)

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tokens = torch.arange(6)[None]
    for kind in ("wrapped", "injected"):
        model: Any = base()
        if kind == "wrapped":
            model = peft.get_peft_model(model, config)
        else:
            model.add_adapter(config)
        randomize(model)
        sw.save(tmp_path / kind, {"model": sw.trainable(model)})
        sw.export(tmp_path / kind, tmp_path / f"{kind}-out", to="peft")
        loaded = peft.PeftModel.from_pretrained(base(), str(tmp_path / f"{kind}-out"))
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
        merged = loaded.merge_and_unload()
        sw.save(tmp_path / f"{kind}-merged", {"model": merged})
        sw.export(tmp_path / f"{kind}-merged", tmp_path / f"{kind}-hf")
        merged.config.save_pretrained(tmp_path / f"{kind}-hf")
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"{kind}-hf")
        assert torch.equal(again(tokens).logits, merged(tokens).logits)


@pytest.mark.parametrize("to", ["hf", "deepspeed-universal"])
@pytest.mark.parametrize("key", ["model", ""])
def test_a_trained_part_is_not_exported_as_a_model(tmp_path: Path, to: str, key: str) -> None:
    model = Base().requires_grad_(False)
    model.head.requires_grad_(True)
    sw.save(tmp_path / "run", {"model": sw.trainable(model)})
    refusal = r"model: the checkpoint has only the trained part.*without 7 frozen.*to='peft'"
    for only in ((), ["model.*"], ["model.head.*"]):
        with pytest.raises(sw.StateError, match=refusal):
            sw.export(tmp_path / "run", tmp_path / "out", to=to, only=only, model_key=key)
    assert not (tmp_path / "out").exists()


def test_a_trained_part_can_be_written_knowingly(tmp_path: Path) -> None:
    model = Base().requires_grad_(False)
    model.head.requires_grad_(True)
    sw.save(tmp_path / "run", {"model": sw.trainable(model), "critic": Base()})
    sw.export(tmp_path / "run", tmp_path / "out", skip=["model._frozen.*"])
    assert {*load_file(tmp_path / "out/model.safetensors")} == {"head.weight", "head.bias"}
    sw.export(tmp_path / "run", tmp_path / "critic", model_key="critic")
    assert_same(load_file(tmp_path / "critic/model.safetensors"), dict(Base().state_dict()))
    sw.export(tmp_path / "run", tmp_path / "native", to="native")
    assert {*sw.open(tmp_path / "native").frozen} == {"model"}


def test_a_whole_model_with_adapters_is_not_exported_as_one(peft: Any, tmp_path: Path) -> None:
    model = make(peft, "lora", "default")
    sw.save(tmp_path / "wrapped", {"model": model})
    sw.save(tmp_path / "inner", {"model": model.get_base_model()})
    for each in ("wrapped", "inner"):
        with pytest.raises(sw.StateError, match=r"adapters of PEFT, which transformers does not"):
            sw.export(tmp_path / each, tmp_path / "out")


def broken(peft: Any) -> dict[str, tuple[Callable[[], nn.Module], str]]:
    def with_more() -> nn.Module:
        model: Any = make(peft, "lora", "default")
        model.base_model.model.head.requires_grad_(True)
        return model

    def other_kind() -> nn.Module:
        model: nn.Module = peft.get_peft_model(Base(), peft.VeraConfig(r=2, target_modules=["up"]))
        return model

    return {
        "more": (with_more, r"model\.base_model\.model\.head\.weight: 2 tensors .* no adapter"),
        "kind": (other_kind, r"'default' is of the kind VERA.*save_pretrained"),
        "none": (Base, r"no adapter of PEFT is below 'model'.*LORA"),
    }


@pytest.mark.parametrize("case", ["more", "kind", "none"])
def test_what_peft_would_not_read_is_refused(peft: Any, tmp_path: Path, case: str) -> None:
    make_model, refusal = broken(peft)[case]
    sw.save(tmp_path / "run", {"model": sw.trainable(make_model())})
    with pytest.raises(sw.StateError, match=refusal):
        sw.export(tmp_path / "run", tmp_path / "out", to="peft")
    assert not (tmp_path / "out").exists()
