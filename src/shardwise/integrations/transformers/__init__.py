"""A transformers `Trainer` that saves and resumes with shardwise.

    from shardwise.integrations.transformers import ShardwiseTrainer

    trainer = ShardwiseTrainer(model, arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=True)

Works with a single process, DDP, FSDP2 and DeepSpeed, and resumes on any number of ranks.
docs/howto/trainer.md describes each option of the Trainer, and lists the overridden methods.
"""

from __future__ import annotations

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"shardwise.integrations.transformers needs transformers and accelerate ({error}): "
        "pip install transformers accelerate"
    ) from error

from shardwise.integrations.transformers.trainer import ShardwiseTrainer

__all__ = ["ShardwiseTrainer"]
