"""What the gang's server imports, so that no worker has to: they are started again and again.

The front of shardwise imports its parts when they are first used, and so does torch.
"""

import hypothesis
import numpy.ma
import pytest
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.optim.lr_scheduler

import shardwise as sw
import shardwise.parts.sharing.strategy
from tests import forked_agents

__all__ = ["forked_agents", "hypothesis", "numpy", "pytest", "shardwise", "torch"]
USED = (sw.Checkpointer, sw.export, sw.load, sw.open, sw.save)
