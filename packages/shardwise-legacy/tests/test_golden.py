"""What the golden files hold: state that frameworks stored. See `tests/compat/foreign/contents.py`.

`tests/formats/programs/train_megatron.py` made `megatron_legacy`. `programs/take_snapshot.py` made
`torchsnapshot`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.foreign.contents import HELD, SAVED, unstated_files

GOLDEN = Path(__file__).parent / "golden"
COMPUTED = "computed from a checkpoint; a test compares it with a tolerance"
CONTENTS = {
    "megatron_legacy": {
        "megatron-legacy/4/*/*": SAVED,
        "megatron-legacy/4/*.expected.pt": HELD,
        "megatron-legacy/4/*.logits.pt": COMPUTED,
    },
    "torchsnapshot": {
        ".snapshot_metadata": SAVED,
        "[01]/*": SAVED,
        "batched/*": SAVED,
        "expected.pt": HELD,
    },
}


@pytest.mark.parametrize("name", CONTENTS)
def test_every_file_is_stated_to_be_stored_state(name: str) -> None:
    assert unstated_files(GOLDEN / f"{name}.tar.xz", CONTENTS[name]) == set()


def test_there_are_no_other_golden_files() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.tar.xz" for name in CONTENTS}
