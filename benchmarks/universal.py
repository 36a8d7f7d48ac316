"""Run DeepSpeed's ds_to_universal; at the end, print its seconds and the bytes that it read."""

from __future__ import annotations

import os
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.checkpoint import ds_to_universal

from benchmarks.limits import bytes_read

if __name__ == "__main__":
    options = ds_to_universal.parse_arguments()
    read, start = bytes_read(), time.perf_counter()
    ds_to_universal.main(options)
    print(f"\n{time.perf_counter() - start} {bytes_read() - read}")
