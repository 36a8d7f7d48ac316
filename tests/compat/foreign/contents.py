"""What each archive of this directory holds. `test_contents.py` checks it.

A golden file holds state that a framework stored, never a result that a test computes again: matrix
products, sums and exponential functions round differently on other processors.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

SAVED = "a checkpoint, as the framework saved it"
HELD = "the values that the framework held at the save, or restored from it"

_MEGATRON = {"*.distcp": SAVED, ".metadata": SAVED, "metadata.json": SAVED, "expected.pt": HELD}
_MEGATRON_16 = {**_MEGATRON, "common.pt": SAVED}
CONTENTS: dict[str, dict[str, str]] = {
    "bytecheckpoint": {"global_step_3/*": SAVED, "expected.pt": HELD},
    "deepspeed": {
        "deepspeed/[24]/*/*": SAVED,
        "deepspeed/[24]/*.expected.pt": HELD,
    },
    "deepspeed_autotp": {"deepspeed-autotp*/zero*": SAVED, "deepspeed-autotp*/expected.pt": HELD},
    "deepspeed_frozen": {
        "deepspeed-frozen/2/*/*": SAVED,
        "deepspeed-frozen/2/*.expected.pt": HELD,
    },
    "deepspeed_parallel": {
        "deepspeed-parallel/*/*": SAVED,
        "deepspeed-parallel/*.expected-[0-3].pt": HELD,
    },
    "deepspeed_muon": {
        "deepspeed-muon/[24]/*/*": SAVED,
        "deepspeed-muon/[24]/*.expected.pt": HELD,
    },
    "lightning": {"epoch=0-step=10.ckpt": SAVED},
    "megatron_bfloat16": _MEGATRON_16,
    "megatron_dp_reshardable": {k: v for k, v in _MEGATRON_16.items() if v == SAVED},
    "megatron_fully_reshardable": _MEGATRON_16,
    "megatron_fully_reshardable_0.19": _MEGATRON,
    "megatron_fully_sharded_model_space": _MEGATRON_16,
    "megatron_plain": _MEGATRON_16,
    "megatron_plain_0.19": _MEGATRON,
    "torchao": {"torchao/*/*.distcp": SAVED, "torchao/*/.metadata": SAVED},
}
"""For each archive: patterns of its files, each with what these files are."""


def unstated_files(archive: Path, patterns: Mapping[str, str]) -> set[str]:
    """Return files of an archive that not exactly one kind is stated for, and useless patterns."""
    with tarfile.open(archive) as opened:
        names = [each.name.removeprefix("./") for each in opened if not each.isdir()]
    kinds = {name: {k for p, k in patterns.items() if fnmatchcase(name, p)} for name in names}
    return {name for name, kind in kinds.items() if len(kind) != 1} | {
        pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)
    }
