"""Writes torchao.tar.xz: DCP checkpoints with quantized weights of torchao.

Run it with torch 2.13 and torchao 0.18: python make_torchao.py
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

CONFIGS = {"int8": Int8WeightOnlyConfig(version=2), "float8": Float8WeightOnlyConfig()}

if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        tarfile.open(Path(__file__).with_name("torchao.tar.xz"), "w:xz") as archive,
    ):
        for name, config in CONFIGS.items():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
            quantize_(model, config)
            state = {"model": model.state_dict(), "step": 3}
            dcp.save(state, checkpoint_id=f"{folder}/{name}", no_dist=True)
        archive.add(folder, arcname="torchao")
