"""Let Megatron-Core run without CUDA: the CPU replaces what it uses of `torch.cuda`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

FACTORIES = ["tensor", "empty", "zeros", "ones", "full", "rand", "randn", "arange", "as_tensor"]
FACTORIES += ["empty_like", "zeros_like"]


class Stream:
    """A stream that has always finished."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


def on_cpu(make: Any) -> Any:
    """Return the function `make`, with CUDA devices in its arguments replaced by the CPU."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def tensor_type(tensor: torch.Tensor, *args: Any, of: Any = torch.Tensor.type) -> Any:
    """Return the type name of a tensor, as Megatron compares it."""
    return of(tensor, *args) if args else of(tensor).replace("torch.", "torch.cuda.", 1)


class Triton(ModuleType):
    """A stand-in for Triton, which Megatron-Core imports. None of its kernels can run on a CPU."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "jit":
            return lambda function=None, **_: function or (lambda given: given)
        return lambda *_, **__: lambda function: function


def install() -> None:
    """Patch torch, for the rest of this process. Call it before Megatron is imported."""
    if importlib.util.find_spec("triton") is None:
        importlib.import_module("torch._inductor.compile_fx")  # it checks for Triton
        triton = sys.modules["triton"] = Triton("triton")
        triton.language = sys.modules["triton.language"] = Triton("triton.language")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    # A separate function for each, because torch's compiler compares them.
    cuda.synchronize = lambda *_, **__: None
    cuda.set_device = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: Stream()
    cuda.Stream = lambda *_, **__: Stream()
    cuda.stream = lambda *_, **__: nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.FloatTensor, cuda.IntTensor = torch.FloatTensor, torch.IntTensor
    cuda.HalfTensor, cuda.BFloat16Tensor = torch.HalfTensor, torch.BFloat16Tensor
    made: Any = torch.Tensor
    made.cuda = lambda self, *_, **__: self
    made.type = tensor_type
    move = torch.Tensor.to
    made.to = lambda self, *args, **kwargs: move(
        self, *("cpu" if str(arg).startswith("cuda") else arg for arg in args), **kwargs
    )
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
