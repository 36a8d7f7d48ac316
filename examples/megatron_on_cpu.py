"""Make the CPU pass for a CUDA device, as far as Megatron-Core needs it.

Megatron-Core requires a GPU. Import this module before it, and only in scripts that need it: it
changes torch for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "rand", "randn", "arange", "as_tensor")
FACTORIES += ("empty_like", "zeros_like", "ones_like")


class Stream:
    """A stream, or an event, of a device that runs everything synchronously."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: Stream() if name == "record_event" else None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the tensor's type as on a GPU: Megatron-Core compares it to torch.cuda.FloatTensor."""
    found = plain_type(tensor, *args, **kwargs)
    if args or kwargs or not isinstance(found, str):
        return found
    return found.replace("torch.", "torch.cuda.", 1)


plain_type = torch.Tensor.type
cuda: Any = torch.cuda
tensors: Any = torch.Tensor
cuda.current_device = lambda: "cpu"
cuda.synchronize = lambda *args: None
cuda.set_device = lambda *args: None
cuda.current_stream = lambda *args: Stream()
cuda.Stream = lambda *args, **kwargs: Stream()
cuda.stream = lambda *args: Stream()
cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
cuda.manual_seed = lambda seed: torch.manual_seed(seed)
for kind in ("Float", "Int", "Half", "BFloat16"):
    setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
tensors.cuda = lambda self, *args, **kwargs: self
tensors.type = type_of
for name in FACTORIES:
    setattr(torch, name, on_cpu(getattr(torch, name)))


def seed_model_parallel(seed: int) -> None:
    """Seed Megatron-Core's random generators, all of which run on the CPU."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    module: Any = random
    module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
