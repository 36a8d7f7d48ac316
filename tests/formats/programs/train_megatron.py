"""Train a small model with Megatron-Core in several ways, and save each as Megatron-LM does.

    torchrun --nproc-per-node 4 train_megatron.py DIRECTORY [CASE...]

For each case, by default for all, `DIRECTORY/CASE` is a legacy checkpoint, and
`DIRECTORY/CASE.expected.pt` has the values of all ranks, assembled with the metadata of
Megatron-Core's parameters.

No package contains Megatron-LM's `training/checkpointing.py`. `save` has its structure, as of
core_v0.16.1 (`get_checkpoint_name`, `generate_state_dict`, `save_checkpoint`), and calls the same
functions of Megatron-Core.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "examples"))

import megatron_on_cpu
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

import shardwise as sw

LENGTH, VOCAB = 16, 60
moe_utils.te_general_gemm = None  # Megatron-Core omits it without Transformer Engine
SMALL = {"layers": 2, "hidden": 8, "ffn": 16}
LLAMA = {"llama": True, "tied": False}
CASES: dict[str, dict[str, Any]] = {
    "float32": {"tp": 2, "pp": 2},
    "llama": {"tp": 2, "pp": 2, **LLAMA},
    "bfloat16": {"tp": 2, "pp": 2, "bf16": True, **LLAMA},
    "distributed": {"tp": 2, "pp": 1, "distributed": True, "bucket": 500},
    "distributed-bfloat16": {"tp": 2, "pp": 2, "bf16": True, "distributed": True, **LLAMA},
    "untied": {"tp": 2, "pp": 2, "tied": False},
    "interleaved": {"tp": 1, "pp": 2, "vp": 2, "distributed": True, "layers": 4},
    "experts": {"tp": 1, "pp": 2, "ep": 2, "experts": 4, **LLAMA},
    "experts-distributed": {"tp": 1, "ep": 2, "experts": 4, "distributed": True, "bf16": True},
}
CASES = {name: {**SMALL, **case} for name, case in CASES.items()}

RESUMED = {
    "llama": {**SMALL, "pp": 2, "distributed": True, **LLAMA},
    "experts": {**SMALL, "experts": 4, **LLAMA},
}


def config_of(case: dict[str, Any]) -> TransformerConfig:
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    half = next((each for each in halves if case.get(each)), None)
    dtype = halves[half] if half else torch.float32
    more: dict[str, Any] = {}
    if case.get("llama"):
        more |= {"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True}
        more |= {"activation_func": torch.nn.functional.silu, "num_query_groups": 2}
        more |= {"layernorm_epsilon": 1e-6, "ffn_hidden_size": 40}
    if "ffn" in case:
        more["ffn_hidden_size"] = case["ffn"]
    if "experts" in case:
        more |= {"num_moe_experts": case["experts"], "moe_router_topk": 2}
        more |= {"expert_model_parallel_size": case.get("ep", 1), "add_bias_linear": False}
        more |= {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none"}
    return TransformerConfig(
        num_layers=case.get("layers", 4),
        hidden_size=case.get("hidden", 24),
        num_attention_heads=case.get("heads", 4),
        use_cpu_initialization=True,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        **({half: True} if half else {}),
        tensor_model_parallel_size=case.get("tp", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        virtual_pipeline_model_parallel_size=case.get("vp"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        **more,
    )


def models_of(case: dict[str, Any], config: TransformerConfig) -> Iterator[Any]:
    """Return this rank's chunks of the model."""
    torch.manual_seed(7)
    layers = get_gpt_layer_local_spec(
        num_experts=case.get("experts"), normalization=config.normalization
    )
    for chunk in range(case.get("vp") or 1):
        vp = {"vp_stage": chunk} if case.get("vp") else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=case.get("vocab", 64),
            max_sequence_length=case.get("length", LENGTH),
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, **vp),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, **vp),
            share_embeddings_and_output_weights=case.get("tied", True),
            position_embedding_type="rope" if case.get("llama") else "learned_absolute",
            **vp,
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (case.get("frozen") and "linear_fc1" in name))
        yield model.to(config.params_dtype)


def without_state(optimizer: Any, config: Any = None) -> None:
    """Make no state before the first step."""


def muon_and_adam(settings: OptimizerConfig, chunks: list[Any]) -> ChainedOptimizer:
    """Return torch's Muon for matrices and Adam for the rest, as Megatron-Core divides them.

    Megatron-Core's own Muon needs a package that PyPI lacks.
    """
    settings.bf16 = False  # a layer-wise optimizer makes the master weights
    adams = get_megatron_optimizer(settings, chunks).chained_optimizers
    groups = []
    for group in (group for each in adams for group in each.optimizer.param_groups):
        matrices = [parameter for parameter in group["params"] if parameter.dim() == 2]
        group["params"] = [each for each in group["params"] if each.dim() != 2]
        kept = {
            key: group[key]
            for key in group
            if key not in torch.optim.AdamW([torch.empty(0)]).defaults
        }
        groups.append({**kept, "params": matrices})
    muon = torch.optim.Muon([each for each in groups if each["params"]], lr=1e-2)
    return ChainedOptimizer([FP32Optimizer(muon, settings, without_state), *adams])


def build(case: dict[str, Any]) -> tuple[list[Any], Any, Any]:
    """Return this rank's chunks of the model, its optimizer and its scheduler."""
    config = config_of(case)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce="bucket" in case,
        overlap_param_gather=bool(case.get("gather")),
        use_distributed_optimizer=bool(case.get("distributed")),
        bucket_size=case.get("bucket"),
    )
    models = models_of(case, config)
    if case.get("wrapped"):
        models = (Float16Module(config, model) for model in models)
    chunks = [
        DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0)
        for chunk, model in enumerate(models)
    ]
    config.no_sync_func = None
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.01,
        bf16=config.bf16,
        fp16=config.fp16,
        initial_loss_scale=2.0**8,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=bool(case.get("distributed")),
        clip_grad=case.get("clip", 1.0),
    )
    make = muon_and_adam if case.get("muon") else get_megatron_optimizer
    optimizer = make(settings, chunks)
    if case.get("muon") == "layer-wise":
        settings.bf16 = config.bf16
        optimizer = LayerWiseDistributedOptimizer(
            optimizer.chained_optimizers,
            settings,
            ProcessGroupCollection.use_mpu_process_groups(),
            [without_state] * len(optimizer.chained_optimizers),
        )
        optimizer.allgather_params = optimizer.broadcast_params  # gloo gathers equal sizes only
    config.grad_scale_func = optimizer.scale_loss if config.fp16 else None
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 1e-2, 1e-3, 1, 10, "cosine", 0.01, 0.01, 10, "constant"
    )
    return chunks, optimizer, scheduler


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(0, VOCAB, (2, LENGTH), generator=generator)


def step_of_stage(tokens: Iterator[torch.Tensor], model: Any) -> Any:
    batch = next(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    position = torch.arange(LENGTH)[None].expand(len(batch), LENGTH)
    out = model(batch, position, mask, labels=batch)
    return out, lambda loss: (loss.float().mean(), {})


def train(chunks: list[Any], optimizer: Any, scheduler: Any, *, steps: int) -> None:
    for _ in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=step_of_stage,
            data_iterator=[batches() for _ in chunks] if len(chunks) > 1 else batches(),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        scheduler.step(increment=1)


def logits(chunks: list[Any]) -> torch.Tensor:
    """Return the model's output for a batch, on all ranks."""

    def forward(tokens: Iterator[torch.Tensor], model: Any) -> Any:
        batch, position = next(tokens), torch.arange(LENGTH)[None]
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        out = model(batch, position.expand(len(batch), LENGTH), mask)
        return out, lambda out, non_loss_data: out

    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches(),
            model=chunks[0],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=True,
            collect_non_loss_data=True,
        )
    mine = (ps.get_tensor_model_parallel_rank(), found[0].clone()) if found else None
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    shards = dict(each for each in ranks if each is not None)
    return torch.cat([shards[tp] for tp in sorted(shards)], dim=2)


def resume(place: Path, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Continue from a checkpoint of ranks with another parallelism."""
    ps.initialize_model_parallel(1, case.get("pp", 1))
    megatron_on_cpu.seed_model_parallel(123)
    chunks, optimizer, scheduler = build(case)
    state = {"model": chunks, "optimizer": optimizer, "scheduler": scheduler}
    sw.load(place, state, rename={"scheduler": "opt_param_scheduler"})
    assert scheduler.num_steps == 2
    found = {"resumed": logits(chunks)}
    train(chunks, optimizer, scheduler, steps=1)
    found["resumed, later"] = logits(chunks)
    ps.destroy_model_parallel()
    return found


def arguments(case: dict[str, Any]) -> Namespace:
    """Return some of the arguments of Megatron-LM's program."""
    return Namespace(
        rank=dist.get_rank(),
        tensor_model_parallel_size=case.get("tp", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        virtual_pipeline_model_parallel_size=case.get("vp"),
        expert_model_parallel_size=case.get("ep", 1),
        expert_tensor_parallel_size=case.get("tp", 1),
        data_parallel_size=ps.get_data_parallel_world_size(),
        num_layers=case["layers"],
        hidden_size=case["hidden"],
        num_attention_heads=4,
        num_query_groups=2 if case.get("llama") else 4,
        swiglu=bool(case.get("llama")),
        padded_vocab_size=64,
        untie_embeddings_and_output_weights=not case.get("tied", True),
        use_distributed_optimizer=bool(case.get("distributed")),
        overlap_grad_reduce="bucket" in case,
        ddp_bucket_size=case.get("bucket"),
        params_dtype=torch.bfloat16 if case.get("bf16") else torch.float32,
        optimizer="adam",
        activation_func=torch.nn.functional.silu,
    )


def name_of_rank(root: Path, case: dict[str, Any], iteration: int) -> Path:
    """`get_checkpoint_name`."""
    folder = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if case.get("pp", 1) > 1:
        folder += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if case.get("ep", 1) > 1:
        folder += f"_{ps.get_expert_model_parallel_rank():03d}"
    return root / f"iter_{iteration:07d}" / folder / "model_optim_rng.pt"


def save(root: Path, case: dict[str, Any], built: tuple[list[Any], Any, Any]) -> None:
    """`save_checkpoint`, for checkpoints of the type LEGACY."""
    chunks, optimizer, scheduler = built
    path = name_of_rank(root, case, 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    if case.get("distributed"):
        optimizer.save_parameter_state(str(path.with_name("distrib_optim.pt")))
    rng = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }
    if ps.get_expert_data_parallel_rank() == 0:
        state: dict[str, Any] = {"args": arguments(case), "checkpoint_version": 3.0}
        state["iteration"] = 2
        for number, chunk in enumerate(chunks):
            key = f"model{number}" if len(chunks) > 1 else "model"
            state[key] = chunk.module.state_dict_for_save_checkpoint()
        state["optimizer"] = optimizer.state_dict()
        state["opt_param_scheduler"] = scheduler.state_dict()
        state["rng_state"] = [rng]
        state["num_floating_point_operations_so_far"] = 123
        torch.save(state, path)
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("2")


def held(chunks: list[Any], optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the arrays and ranges of this rank by the name of the parameter in the whole model."""
    found: dict[str, dict[str, Any]] = {}
    for chunk in chunks:
        module = getattr(chunk.module, "module", chunk.module)
        for own, parameter in module.named_parameters():
            entry: dict[str, Any] = {"weight": parameter.detach().clone()}
            entry["dim"] = (
                parameter.partition_dim
                if getattr(parameter, "tensor_model_parallel", False)
                else None
            )
            entry["stride"] = getattr(parameter, "partition_stride", 1)
            entry["tp"] = ps.get_tensor_model_parallel_rank()
            entry["states"] = states_of(optimizer, parameter)
            found[global_name(module, own)] = entry
    return found


def global_name(module: Any, own: str) -> str:
    parts = own.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(module.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        count = module.config.num_moe_experts // ps.get_expert_model_parallel_world_size()
        parts[at] = str(int(parts[at]) + count * ps.get_expert_model_parallel_rank())
    return ".".join(parts)


def states_of(optimizer: Any, parameter: Any) -> list[Any]:
    """Return this rank's arrays of a parameter, and the offset at which they begin in it."""
    for part in optimizer.chained_optimizers:
        if hasattr(part, "model_param_group_index_map"):  # the distributed optimizer
            if parameter in part.model_param_group_index_map:
                arrays = part._get_main_param_and_optimizer_states(parameter)
                own = part._get_model_param_range_map(parameter)["param"]
                return [(own.start, {k: v.detach().clone() for k, v in arrays.items()})]
        else:
            main = getattr(parameter, "main_param", None)
            main = parameter if main is None else main
            if main in part.optimizer.state:
                arrays = {"param": main, **part.optimizer.state[main]}
                return [(0, {k: v.detach().clone() for k, v in arrays.items()})]
    return []


def gathered(ranks: list[dict[str, dict[str, Any]]]) -> dict[str, torch.Tensor]:
    """Return the whole tensors by the expected names."""
    found: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        shards: dict[int, dict[str, torch.Tensor]] = {}
        entries = [rank[name] for rank in ranks if name in rank]
        for entry in entries:
            shard = shards.setdefault(entry["tp"], {"weight": entry["weight"]})
            for start, arrays in entry["states"]:
                for key, array in arrays.items():
                    if array.ndim == 0:
                        shard[key] = array
                        continue
                    whole = shard.setdefault(
                        key, torch.zeros(entry["weight"].shape, dtype=array.dtype)
                    )
                    whole.view(-1)[start : start + array.numel()] = array.reshape(-1)
        first = entries[0]
        for key in shards[0]:
            parts = [shards[tp][key] for tp in sorted(shards)]
            found[f"{name}|{key}"] = joined(parts, first["dim"], first["stride"])
    return found


def joined(parts: list[torch.Tensor], dim: int | None, stride: int) -> torch.Tensor:
    if dim is None or parts[0].ndim == 0:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    pieces = [part.chunk(stride, dim) for part in parts]
    return torch.cat([piece[k] for k in range(stride) for piece in pieces], dim)


def main() -> None:
    root, cases = Path(sys.argv[1]), sys.argv[2:] or [*CASES]
    torch.set_num_threads(1)
    random.seed(5)
    np.random.seed(5)
    dist.init_process_group("gloo")
    for name in cases:
        case = CASES[name]
        ps.initialize_model_parallel(
            case.get("tp", 1),
            case.get("pp", 1),
            case.get("vp"),
            expert_model_parallel_size=case.get("ep", 1),
        )
        megatron_on_cpu.seed_model_parallel(123)
        built = build(case)
        train(*built, steps=2)
        save(root / name, case, built)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, held(*built[:2]))
        expected = gathered(ranks)
        if name in RESUMED:
            more = {"now": logits(built[0])}
            train(*built, steps=1)
            more["later"] = logits(built[0])
        ps.destroy_model_parallel()
        if name in RESUMED:
            more |= resume(root / name, RESUMED[name])
            if dist.get_rank() == 0:
                torch.save(more, root / f"{name}.logits.pt")
        if dist.get_rank() == 0:
            torch.save(expected, root / f"{name}.expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
