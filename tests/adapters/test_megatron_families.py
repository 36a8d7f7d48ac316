"""Published models of each family, in Megatron-Core under any parallelism, and back."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.breadth import mostly_long
from tests.convert.tiny_models import MODELS, VOCAB, logits_of, save_tiny_model
from tests.formats.comparing import assert_same
from tests.tools.hosted_gang import HostedGang, hosted_gang

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="Megatron-Core is not installed: pip install '.[frameworks]'",
    ),
]

EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss")
WORKERS = "tests.adapters.megatron_families"
SEED, LENGTH, LARGEST_TOKEN = 5, 16, 60  # the tokens of `train_megatron.batches`


def pass_through(*args: Any) -> torch.Tensor:
    """Call a function of what is imported by workers only, because it changes torch."""
    warnings.simplefilter("ignore")  # there are dozens, on every rank
    found: torch.Tensor = importlib.import_module(WORKERS).pass_through(*args)
    return found


@pytest.fixture(scope="module")
def workers() -> Iterator[HostedGang]:
    """A gang whose server imports Megatron-Core, which changes torch."""
    with hosted_gang(4, ["tests.preloaded", WORKERS]) as gang:
        yield gang


@pytest.mark.parametrize("name", mostly_long(MODELS, ("deepseek_v3",)))
def test_megatron_computes_what_hugging_face_does(
    workers: HostedGang, tmp_path: Path, name: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install '.[frameworks]'")
    transformers.utils.logging.set_verbosity_error()
    published, back = tmp_path / "published", tmp_path / "back"
    tensors = save_tiny_model(transformers, name, published)
    division = {"tp": 2, "pp": 2, **({"ep": 2} if name in EXPERTS else {})}
    paths = str(published), str(tmp_path / "saved"), str(back)
    found = workers.run(
        pass_through, *paths, division, world=4, timeout=240.0, group_timeout=120.0
    )[0]
    written = load_file(back / "model.safetensors")
    expected = {key: each for key, each in tensors.items() if key in written}
    assert_same(dict(sorted(written.items())), dict(sorted(expected.items())))
    left = tensors.keys() - written.keys()
    assert left <= ({"lm_head.weight"} if name == "llama-tied" else set())
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, LARGEST_TOKEN, (2, LENGTH), generator=generator)
    logits = logits_of(transformers, published, tokens)
    assert logits.abs().max() > 1
    torch.testing.assert_close(found[..., :VOCAB], logits, rtol=1e-4, atol=1e-5)
