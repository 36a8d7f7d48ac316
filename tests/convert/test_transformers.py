"""Models of transformers: from_pretrained loads what is exported from checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.formats.comparing import assert_same

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "tie_word_embeddings": True,
}


@pytest.fixture
def transformers() -> Any:
    """The package; importing it takes seconds, which collecting the tests must not."""
    return pytest.importorskip("transformers", reason="pip install '.[frameworks]'")


def llama(transformers: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(intermediate_size=32, num_key_value_heads=2, **SIZES)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("max_file", [1 << 30, 5_000])
def test_from_pretrained_loads_what_was_exported(
    transformers: Any, tmp_path: Path, max_file: int
) -> None:
    model = llama(transformers)
    sw.save(tmp_path / "source", {"model": model, "step": 3})
    sw.export(tmp_path / "source", tmp_path / "hf", max_file=max_file)
    model.config.save_pretrained(tmp_path / "hf")
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(info.values())
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
