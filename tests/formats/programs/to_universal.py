"""Convert checkpoints with DeepSpeed's converter: to_universal.py DIRECTORY CASE..."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.checkpoint.ds_to_universal import main

for case in sys.argv[2:]:
    place = Path(sys.argv[1], case)
    main(
        argparse.Namespace(
            input_folder=str(place / "global_step3"),
            output_folder=str(place / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
