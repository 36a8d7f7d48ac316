"""The integrations work without the packages that the frameworks themselves only use if present."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

HIDE = """
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = {"bitsandbytes", "deepspeed", "megatron", "peft", "torchao"}
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path = [Installed if each is PathFinder else each for each in sys.meta_path]
"""


@pytest.mark.parametrize(
    ("framework", "module"),
    [
        ("torch", "dcp"),
        pytest.param("accelerate", "accelerate", marks=pytest.mark.long),
        pytest.param("transformers", "transformers", marks=pytest.mark.long),
        pytest.param("lightning", "lightning", marks=pytest.mark.long),
    ],
)
def test_an_integration_needs_only_its_framework(framework: str, module: str) -> None:
    if find_spec(framework) is None:
        pytest.skip("pip install '.[frameworks]'")
    program = f"{HIDE}\nimport shardwise.integrations.{module}\n"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stderr
