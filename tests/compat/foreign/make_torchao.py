"""Make DCP checkpoints with quantized weights of torchao 0.18, which needs torch 2.13.

python make_torchao.py torchao.tar.xz
"""

from __future__ import annotations

import sys
import tarfile
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

CONFIGS = {"int8": Int8WeightOnlyConfig(version=2), "float8": Float8WeightOnlyConfig()}

if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        tarfile.open(sys.argv[1], "w:xz") as archive,
    ):
        for name, config in CONFIGS.items():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
            quantize_(model, config)
            state = {"model": model.state_dict(), "step": 3}
            dcp.save(state, checkpoint_id=f"{folder}/{name}", no_dist=True)
        archive.add(folder, arcname="torchao")
