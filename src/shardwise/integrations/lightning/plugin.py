"""`ShardwiseCheckpointIO`, a plugin that writes the files of Lightning's own callbacks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins import TorchCheckpointIO

import shardwise as sw

_OPTIMIZERS, _REST = "optimizer_states", "lightning"
TENSORS = ("state_dict", _OPTIMIZERS)
"""The values of Lightning's checkpoints that have the tensors of the model and the optimizers."""


class ShardwiseCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints as checkpoints of shardwise, with checksums.

    Lightning's `ModelCheckpoint` decides what to save and to keep. It saves the whole state from
    rank 0, so this plugin is for a single device and for DDP. Paths of files that Lightning wrote
    without this plugin, and of checkpoints of `ShardwiseCheckpoint`, can be loaded too; the latter
    only for their weights, as `validate`, `test` and `predict` need.

    Example:

        trainer = Trainer(plugins=[ShardwiseCheckpointIO()], callbacks=[ModelCheckpoint(...)])
        trainer.fit(model, data, ckpt_path="last")
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint. It is durable on return.

        Args:
            checkpoint: Lightning's dict of weights, optimizers and other states.
            path: the directory to create, or its URL.
            storage_options: not supported.

        Raises:
            TypeError: `storage_options` is given.
            StateError: a value has no plain form, for example in `hparams`. The error names it.
        """
        if storage_options is not None:
            raise TypeError(
                "ShardwiseCheckpointIO takes no storage_options: write options into the path, as "
                "in s3://bucket/run?region=eu-central-1"
            )
        rest = {key: value for key, value in checkpoint.items() if key not in TENSORS}
        state = {key: checkpoint[key] for key in TENSORS if key in checkpoint}
        # In a list, a dict is stored as one value with its keys. The keys of a dict that is not in
        # a list would be joined by dots.
        try:
            sw.save(str(path), {**state, _REST: [rest]}, overwrite=True, group=sw.SoloGroup())
        except sw.StateError as error:
            value, found, _ = str(error).partition(" cannot be saved")
            if not found or "hyper_parameters" not in value:
                raise
            raise sw.StateError(
                f"{value} cannot be saved, because ShardwiseCheckpointIO writes no pickles: pass a "
                "plain value to the LightningModule, or leave this one out with "
                "save_hyperparameters(ignore=[…])"
            ) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of this plugin, of `ShardwiseCheckpoint`, or of Lightning.

        Args:
            path: its path or URL.
            map_location: as for `torch.load`; only used for files that Lightning wrote. Other
                tensors are loaded to the CPU.
            weights_only: as for `torch.load`; only used for files that Lightning wrote.

        Raises:
            CorruptionError: bytes differ from the saved bytes.
        """
        if Path(path).is_file():
            return super().load_checkpoint(path, map_location, weights_only)
        opened = sw.open(str(path))
        if _REST not in opened:
            version = {"pytorch-lightning_version": lightning.__version__}
            return {"state_dict": opened.state_dict("model"), **version}
        rest: dict[str, Any] = opened[_REST][0]
        if _OPTIMIZERS in opened:
            rest[_OPTIMIZERS] = opened[_OPTIMIZERS]
        return {**rest, "state_dict": opened.state_dict("state_dict")}

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint. Do nothing if there is none."""
        if Path(path).is_file():
            super().remove_checkpoint(path)
        else:
            with suppress(sw.StoreError):  # another process reads it
                sw.remove(path)


def has_only_weights(path: str) -> bool:
    """Return whether a path is a checkpoint of shardwise that this plugin did not save."""
    if Path(path).is_file():
        return False
    try:
        opened = sw.open(path)
    except sw.ShardwiseError:
        return False
    return opened.layout.format == "shardwise" and _REST not in opened
