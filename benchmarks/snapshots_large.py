"""Like `snapshots`, with 1 GB on each of two ranks; memory is large enough for two peers only."""

from benchmarks.harness import LARGE, Bench, parse_arguments
from benchmarks.snapshots import ask

BESIDE = {"dcp.async_save, thread", "dcp.async_save, thread, reused buffers"}

if __name__ == "__main__":
    ask(Bench("snapshots_large", LARGE, parse_arguments()), beside=lambda name: name in BESIDE)
