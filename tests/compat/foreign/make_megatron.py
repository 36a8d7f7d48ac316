"""Make the checkpoints of Megatron-Core in this directory, and the values that it restores from
them.

    torchrun --nproc-per-node N make_megatron.py TP PP KIND save FOLDER
    torchrun --nproc-per-node 1 make_megatron.py 1 1 KIND load FOLDER

KIND is `plain`, `bfloat16`, or the sharding of the distributed optimizer: `fully_reshardable`
(0.16.1), or `fully_sharded_model_space` (0.12.1, the last version that could save it). The second
command adds `expected.pt`. Version 0.19.2 made the checkpoints whose names end in `_0.19`. The
distributed optimizer needs FusedAdam; FUSED_ADAM is the path of a directory with a stand-in.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem as dcp

sys.path.insert(0, str(Path(__file__).parent))
import cuda_on_cpu


def run(tp: int, pp: int, kind: str, action: str, folder: Path) -> None:
    cuda_on_cpu.install()
    dist.init_process_group("gloo")
    import megatron.core as core
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel as Ddp
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    if "FUSED_ADAM" in os.environ:  # imported late, so that the model does not mistake it for apex
        sys.path.insert(0, os.environ["FUSED_ADAM"])
        for name in [name for name in sys.modules if name.startswith("megatron.core.optimizer")]:
            del sys.modules[name]
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    old = core.__version__.startswith("0.12")
    if old:  # this version is older than the installed numpy and torch
        import megatron.core.optimizer.distrib_optimizer as distributed

        np.product = np.prod  # type: ignore[attr-defined]
        distributed.quantize_param_shard = lambda *_, **__: None
        form = dcp.SerializationFormat.TORCH_SAVE
        dcp._write_item = functools.partial(dcp._write_item, serialization_format=form)
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(7)
    half = kind == "bfloat16"
    dtype = torch.bfloat16 if half else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=half,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=16,
        max_sequence_length=4,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    model = model.bfloat16() if half else model
    sharded = kind not in ("plain", "bfloat16")
    ddp = Ddp(config, DistributedDataParallelConfig(use_distributed_optimizer=sharded), model)
    settings = OptimizerConfig(
        optimizer="adam", lr=0.01, use_distributed_optimizer=sharded, bf16=half, params_dtype=dtype
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    for _ in range(2 if action == "save" else 1):
        for parameter in model.parameters():
            parameter.main_grad.copy_(parameter.detach() * 0.5)
        if old:
            ddp.finish_grad_sync = lambda: None
        optimizer.step()

    def state(is_loading: bool) -> dict[str, Any]:
        of_model = model.sharded_state_dict()
        how: dict[str, Any] = {}
        if sharded:
            name = "distrib_optim_sharding_type"
            how = {"sharding_type": kind} if old else {"metadata": {name: kind}}
        of_optimizer = optimizer.sharded_state_dict(of_model, is_loading=is_loading, **how)
        return {"model": of_model, "optimizer": of_optimizer, "iteration": 2}

    if action == "save":
        folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state(False), str(folder))
    else:
        loaded = dist_checkpointing.load(state(True), str(folder))
        model.load_state_dict(loaded["model"])
        with torch.no_grad():
            optimizer.load_state_dict(loaded["optimizer"])
        torch.save(restored(model, optimizer, sharded), folder / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


def restored(model: Any, optimizer: Any, sharded: bool) -> dict[str, torch.Tensor]:
    """Return all tensors of a model and its optimizer on one rank, by the names of shardwise."""
    found = {}
    inner = optimizer.chained_optimizers[0] if sharded else optimizer
    inner = getattr(inner, "chained_optimizers", [inner])[0]
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = parameter.detach().clone()
        if sharded:
            values = dict(inner._get_main_param_and_optimizer_states(parameter))
            values.pop("step", None)
        else:
            main = getattr(parameter, "main_param", parameter)
            values = dict(inner.optimizer.state[main])
            if main is not parameter:
                values["param"] = main.detach()
        for key, value in values.items():
            same = key != "step"
            found[f"optimizer.{name}.{key}"] = value.reshape(parameter.shape) if same else value
    return found


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
