"""What a notebook shows of reports, options and a `Checkpointer`: one short line."""

from __future__ import annotations

from pathlib import Path

import torch

import shardwise as sw


def test_reports_and_checkpointers_are_one_short_line(tmp_path: Path) -> None:
    root = tmp_path / "run"
    state = {"w": torch.ones(4)}
    with sw.Checkpointer(root, memory=None) as checkpointer:
        checkpointer.restore(state)
        handle = checkpointer.save(3, state)
        checkpointer.restore(state)
    assert repr(checkpointer) == f"<Checkpointer of {root}>"
    assert repr(handle) == "<SaveHandle of step 3>"
    assert repr(checkpointer.last_restore) == "<RestoreReport of step 3 from storage>"
    for report, start in (
        (sw.save(tmp_path / "a", state), "<SaveReport of step None: 16 B in "),
        (sw.load(root, state), "<LoadReport of step 3: 16 B in "),
        (sw.open(root).verify(), "<VerifyReport: "),
        (sw.export(root, tmp_path / "torch", to="torch"), "<ConversionReport: 1 file in "),
    ):
        assert repr(report).startswith(start)
        assert len(repr(report)) < 100


def test_options_show_what_was_set() -> None:
    assert repr(sw.Memory(copies=1)) == "Memory(copies=1)"
    assert repr(sw.Memory()) == "Memory()"
    assert repr(sw.Mirror("s3://b/run")) == "Mirror(place='s3://b/run')"
    keep = sw.Keep(best=sw.Best("loss"))
    assert repr(sw.Mirror("m", keep)) == f"Mirror(place='m', keep={keep!r})"
    assert repr(sw.RngState()) == "RngState()"
