"""The size of a checkpoint of a model with LoRA adapters, and the time to save it durably.

The model is a GPT-2 of 29.5 million float32 parameters; the adapters have rank 2. Peer: the
`Trainer` of transformers, which saves the adapters only; the goals are 1.25 times its bytes and its
time.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import shardwise as sw
from benchmarks.harness import NO_TENSORS, Bench, parse_arguments
from shardwise.integrations.transformers import ShardwiseTrainer

STEPS = 6
PEER, OURS, WITH_BASE = "Trainer", "ShardwiseTrainer", "ShardwiseTrainer, with the base"


def main() -> None:
    bench = Bench("adapters", NO_TENSORS, parse_arguments())
    sizes: dict[str, int] = {}
    for _ in bench.rounds:
        bench.clear()
        for name in (PEER, OURS, WITH_BASE):
            sizes[name] = train(bench, name)
    bench.compare(PEER, OURS, WITH_BASE)
    rows: list[dict[str, object]] = [
        {"who saves": name, "bytes": size, "times the Trainer's": round(size / sizes[PEER], 2)}
        for name, size in sizes.items()
    ]
    bench.table("One checkpoint on disk", rows)
    bench.goal("size of a checkpoint, of the Trainer's", sizes[OURS] / sizes[PEER], most=1.25)
    bench.goal("time of a save, of the Trainer's", bench.ratio(OURS, PEER), most=1.25)
    bench.finish()


def train(bench: Bench, name: str) -> int:
    """Train a few steps and save each, the time of which is measured; return the bytes of one."""
    seconds: list[float] = []

    class Measured(Trainer if name == PEER else ShardwiseTrainer):  # type: ignore[misc]
        def open_checkpointer(self, root: str, keep: sw.Keep) -> sw.Checkpointer:
            return sw.Checkpointer(root, keep=keep, memory=None)

        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            bench.measure(
                name, lambda: super(Measured, self)._maybe_log_save_evaluate(*args, **kwargs)
            )
            seconds.append(bench.seconds[name].pop())

    output = bench.dir / name.replace(", ", "-").replace(" ", "-")
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=STEPS, save_steps=1, save_total_limit=2, report_to=[],
        per_device_train_batch_size=1, use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    options = {"save_base_model": True} if name == WITH_BASE else {}
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * STEPS
    Measured(model=make_model(), args=arguments, train_dataset=data, **options).train()
    bench.seconds.setdefault(name, []).append(statistics.median(seconds[2:]))
    newest = [each for each in output.rglob("*") if each.is_file() and _is_of_newest(each.parts)]
    return sum(file.stat().st_size for file in newest)


def _is_of_newest(parts: tuple[str, ...]) -> bool:
    return f"checkpoint-{STEPS}" in parts or f"step-{STEPS:08d}" in parts


def make_model() -> Any:
    """Return a GPT-2 with adapters."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=6, n_embd=512, n_head=8, n_positions=512, vocab_size=20_000)
    return get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=2, task_type="CAUSAL_LM"))


if __name__ == "__main__":
    main()
