"""Train small models with Megatron-Core. Tests run these functions on the ranks of a gang.

Only workers import this module, because it changes torch for the whole process.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "formats" / "programs"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import megatron_on_cpu
import train_megatron as training
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.pipeline_parallel import get_forward_backward_func

import shardwise as sw


def unwrapped(chunk: Any) -> Any:
    module = chunk
    while type(module).__name__ in ("DistributedDataParallel", "Float16Module"):
        module = module.module
    return module


@contextmanager
def built(case: dict[str, Any]) -> Iterator[tuple[list[Any], Any, Any]]:
    """Yield this rank's chunks, optimizer and scheduler of a case."""
    ps.initialize_model_parallel(
        case.get("tp", 1),
        case.get("pp", 1),
        case.get("vp"),
        expert_model_parallel_size=case.get("ep", 1),
    )
    try:
        megatron_on_cpu.seed_model_parallel(123)
        yield training.build(case)
    finally:
        ps.destroy_model_parallel()


def tokens_of(step: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    while True:
        yield torch.randint(0, training.VOCAB, (2, training.LENGTH), generator=generator)


def train(chunks: list[Any], optimizer: Any, scheduler: Any, steps: range) -> list[float]:
    """Train these steps; return the losses on the last stage. All ranks have the same batches."""
    losses = []
    for step in steps:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()

        def forward(tokens: Iterator[torch.Tensor], model: Any) -> Any:
            out, _ = training.step_of_stage(tokens, model)
            return out, lambda loss: (loss.float().mean(), {"loss": loss.float().mean().item()})

        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[tokens_of(step) for _ in chunks] if len(chunks) > 1 else tokens_of(step),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=2,
            seq_length=training.LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        scheduler.step(increment=1)
        if found:
            losses.append(sum(each["loss"] for each in found) / len(found))
    return losses


def state_of(chunks: list[Any], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {"model": chunks, "optimizer": optimizer, "scheduler": scheduler}


def expected_of(chunks: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the whole tensors by `parameter|key`, assembled with metadata of Megatron-Core."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, training.held(chunks, optimizer))
    return training.gathered(ranks) if dist.get_rank() == 0 else {}


def save(case: dict[str, Any], place: str) -> dict[str, Any]:
    """Train for two steps (or `case["steps"]`), save, and continue."""
    with built(case) as parts:
        found: dict[str, Any] = {"before": train(*parts, range(case.get("steps", 2)))}
        sw.save(place, state_of(*parts))
        found["expected"] = expected_of(*parts[:2])
        found["after"] = train(*parts, range(2, 4))
    return found


def go_on(case: dict[str, Any], place: str, again: str) -> dict[str, Any]:
    """Load, save again, and continue."""
    torch.manual_seed(8)
    with built(case) as parts:
        train(*parts, range(7, 7 + case.get("stepped", 0)))
        sw.load(place, state_of(*parts))
        sw.save(again, state_of(*parts))
        found: dict[str, Any] = {"expected": expected_of(*parts[:2])}
        found["after"] = train(*parts, range(2, 4))
    return found


def save_with_megatron(case: dict[str, Any], place: str, sharding: str) -> dict[str, Any]:
    """Train for two steps, save with Megatron-Core, and continue."""
    with built(case) as parts:
        chunks, optimizer, _ = parts
        train(*parts, range(2))
        of_model: dict[str, Any] = {}
        for number, chunk in enumerate(chunks):
            of_model[f"model{number}"] = unwrapped(chunk).sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": sharding} if sharding else {}
        of_optimizer = optimizer.sharded_state_dict(of_model, metadata=metadata)
        if dist.get_rank() == 0:
            Path(place).mkdir()
        dist.barrier()
        if filesystem_async._results_queue is None:
            # Megatron-Core would start a new interpreter for it on each rank, with all its imports.
            context = multiprocessing.get_context("fork")
            filesystem_async._results_queue = context.Manager().Queue()
        dist_checkpointing.save({**of_model, "optimizer": of_optimizer}, place)
        found: dict[str, Any] = {"expected": expected_of(chunks, optimizer)}
        found["after"] = train(*parts, range(2, 4))
    return found


def resume_of_megatron(case: dict[str, Any], place: str, again: str) -> dict[str, Any]:
    """Load such a checkpoint, save it as ours, and continue."""
    torch.manual_seed(8)
    with built(case) as parts:
        chunks, optimizer, scheduler = parts
        train(*parts, range(7, 7 + case.get("stepped", 0)))
        state = {"model": chunks, "optimizer": optimizer}
        sw.load(place, state)
        sw.save(again, state)
        found: dict[str, Any] = {"expected": expected_of(chunks, optimizer)}
        scheduler.num_steps = 2
        found["after"] = train(*parts, range(2, 4))
    return found


def plain(case: dict[str, Any], place: str, again: str) -> dict[str, Any]:
    """Continue with a module and torch's optimizer in one process."""
    ps.initialize_model_parallel()
    try:
        megatron_on_cpu.seed_model_parallel(123)
        (model,) = training.models_of(case, training.config_of(case))
        parameters = list(model.parameters())
        groups = [[each for each in parameters if (each.ndim > 1) == big] for big in (True, False)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1.0)
        state = {"model": model, "optimizer": optimizer}
        sw.load(place, state)
        sw.save(again, state)
        losses = []
        for step in range(2, 4):
            optimizer.zero_grad()
            tokens, found = tokens_of(step), []
            for _ in range(2):
                out, mean = training.step_of_stage(tokens, model)
                loss, _ = mean(out)
                (loss / 2).backward()
                found.append(loss.item())
            optimizer.step()
            losses.append(sum(found) / 2)
        sw.save(f"{again}-later", state)
    finally:
        ps.destroy_model_parallel()
    return {"after": losses}


def save_in_memory(case: dict[str, Any], place: str, memory: str) -> None:
    """Train, save to storage and to memory, and continue while the snapshot is copied."""
    with built(case) as parts:
        train(*parts, range(2))
        sw.save(place, state_of(*parts))
        checkpointer = sw.Checkpointer(f"{place}-run", save_every=100, memory=memory_of(memory))
        for step in (1, 2):
            handle = checkpointer.save(step, state_of(*parts))
        assert handle is not None
        train(*parts, range(2, 4))
        handle.committed(120.0)
        checkpointer.close(wait=False)


def recall(case: dict[str, Any], place: str, memory: str) -> str:
    """Restore the snapshot, save it again, and return from where it was restored."""
    with built(case) as parts:
        run = f"{place}-run"
        with sw.Checkpointer(run, save_every=100, memory=memory_of(memory)) as checkpointer:
            assert checkpointer.restore(state_of(*parts)) == 2
            assert checkpointer.last_restore is not None
            sw.save(f"{place}-recalled", state_of(*parts))
            return checkpointer.last_restore.source


def memory_of(directory: str) -> sw.Memory:
    return sw.Memory(snapshot_every=1, overlap=True, dir=directory, when_full="wait", wait=120.0)


def load(case: dict[str, Any], place: str, again: str, spec: str = "") -> dict[str, Any]:
    """Load a checkpoint of any format without its scheduler, and save it as ours."""
    with built(case) as (chunks, optimizer, _):
        state = {"model": chunks, "optimizer": optimizer}
        sw.load(place, state, spec=sw.spec(spec) if spec else None)
        sw.save(again, state)
        return {"expected": expected_of(chunks, optimizer)}
