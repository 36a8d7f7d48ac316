"""The time to load a state from DCP and from safetensors files.

Limit: a load of the same state from our own checkpoint; the goal is at most 1.3 times its time.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardwise as sw
from benchmarks.harness import ROWS, Bench, Size, parse_arguments

SIZE = Size(tensors=64)
MOST = 1.3


def main() -> None:
    bench = Bench("foreign_load", SIZE, parse_arguments())
    model = bench.model(ROWS)
    state: dict[str, object] = {"model": model}
    native, of_dcp, of_hf = bench.dir / "native", bench.dir / "dcp", bench.dir / "hf"
    sw.save(native, state)
    dcp.save(state, checkpoint_id=of_dcp)
    whole = {name: tensor.full_tensor() for name, tensor in model.items()}
    if bench.rank == 0:
        of_hf.mkdir()
        save_file(whole, of_hf / "model.safetensors")
    del whole
    places = {"our own": native, "DCP": of_dcp, "safetensors": of_hf}
    kept = {name: tensor.to_local().clone() for name, tensor in model.items()}
    for _ in bench.rounds:
        for name, place in places.items():
            bench.drop_page_cache()
            bench.measure(f"cold: {name}", partial(sw.load, place, state))
        bench.fill_page_cache()
        for name, place in places.items():
            for tensor in model.values():
                tensor.to_local().zero_()
            bench.measure(f"warm: {name}", partial(sw.load, place, state))
            if not all(torch.equal(kept[k], t.to_local()) for k, t in model.items()):
                raise RuntimeError(f"{place}: the loaded tensors differ from the saved ones")
    for cache in ("cold", "warm"):
        base = f"{cache}: our own"
        for name in (f"{cache}: {each}" for each in list(places)[1:]):
            bench.compare(base, name)
            bench.goal(f"{name}, of our own", bench.ratio(name, base), most=MOST)
    bench.finish()


if __name__ == "__main__":
    main()
