"""The memory that it takes to refuse a manifest that somebody made to do harm, or to open it."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw

MOST_MIB = 400
LARGEST = (48 << 20) - 4096
"""About the size of the largest manifest that is read, in bytes."""
SCRIPT = """
import os, re, sys, shardwise as sw
from pathlib import Path
sw.save(sys.argv[1], {"w": 1})
sw.open(sys.argv[1])["w"]  # imports what is needed
def used(key):
    return int(re.search(key + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
for place in sys.argv[2:]:
    if child := os.fork():  # each begins with the memory that is used now
        assert os.waitpid(child, 0)[1] == 0
        continue
    before = used("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    try:
        sw.open(place)
        print("opened")
    except sw.FormatError as error:
        print(str(error).replace("\\n", " ")[-200:])
    print(used("VmHWM") - before, flush=True)
    os._exit(0)
"""


def document(*, world: int = 1, **fields: str) -> bytes:
    defaults = {"metrics": "{}", "per_rank": "[]", "files": "[]", "objects": "[]", "tensors": "[]"}
    lines = [
        '"format":"shardwise"',
        '"version":2',
        '"save_id":"e8c102bd5ac122c2"',
        '"step":null',
        '"created":"2026-11-28T10:03:48+00:00"',
        f'"world_size":{world}',
        *(f'"{key}":{fields.get(key, text)}' for key, text in defaults.items()),
    ]
    body = ("{" + ",\n".join(lines) + ",\n").encode()
    return body + f'"crc32":{zlib.crc32(body)}}}\n'.encode()


SIZES = '"size":4108,"data_at":4096,"objects_at":4104,"checksums_at":4104'


def many(item: str) -> str:
    """A list of equal items, as long as a manifest can be."""
    return f"[{','.join([item] * (LARGEST // (len(item) + 1)))}]"


def value(text: str) -> bytes:
    return document(objects=f'[{{"name":"a","value":{text}}}]')


def ranks(count: int) -> bytes:
    checksums = ",".join(["0"] * count)
    files = f'[{{"ranks":[[0,{count},1]],{SIZES},"checksums_crc32":[{checksums}]}}]'
    return document(world=count, files=files)


def numbered(form: str, count: int) -> str:
    return "[" + ",".join(form.replace("#", f"{i}") for i in range(count)) + "]"


CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "ranks": (lambda: ranks(2**24 - 1), "malformed"),
    "files": (
        lambda: document(
            world=2**20,
            files=numbered(f'{{"ranks":[[#,1,1]],{SIZES},"checksums_crc32":[1]}}', 400_000),
        ),
        "belong to no piece",
    ),
    "tensors": (
        lambda: document(tensors=numbered('{"name":"t#","dtype":"float32","shape":[0]}', 800_000)),
        "opened",
    ),
    "string": (lambda: value('"' + "x" * (LARGEST + 8192) + '"'), "are expected"),
    "shorter string": (lambda: value('"' + "x" * (LARGEST - 4096) + '"'), "opened"),
    "wide string": (lambda: value('"' + "x" * (LARGEST - 4096) + '\U0001f600"'), "opened"),
    "numbers": (lambda: value(many("0")), "commas and brackets"),
    "lists": (lambda: value(many("[]")), "commas and brackets"),
    "dicts": (lambda: value(many("{}")), "commas and brackets"),
    "names": (lambda: document(per_rank=numbered('"#"', 4_000_000)), "malformed"),
    "metrics": (lambda: document(metrics="{" + numbered('"#":0', 10**6)[1:-1] + "}"), "malformed"),
}
SHORT = ("ranks", "string", "shorter string", "lists")
"""Those that run in `make test`."""


@pytest.mark.parametrize(
    "cases",
    [
        SHORT,
        *(pytest.param((case,), marks=pytest.mark.long) for case in CASES if case not in SHORT),
    ],
    ids=" and ".join,
)
def test_a_hostile_manifest_takes_little_memory(tmp_path: Path, cases: tuple[str, ...]) -> None:
    for case in cases:
        (tmp_path / case).mkdir()
        (tmp_path / case / "manifest.json").write_bytes(CASES[case][0]())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "other", *(tmp_path / case for case in cases)],
        check=True,
        capture_output=True,
        text=True,
        timeout=250,
    )
    lines = done.stdout.splitlines()
    for case, outcome, memory in zip(cases, lines[::2], lines[1::2], strict=True):
        assert CASES[case][1] in outcome, case
        assert int(memory) < MOST_MIB, case


@pytest.mark.parametrize("again", [False, True])
def test_too_many_plain_values_are_refused_by_the_save(tmp_path: Path, again: bool) -> None:
    """Also if the plan is cached, so that the manifest is not opened before it is published."""
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        state = {"w": torch.ones(3), "list": [0]}
        if again:
            checkpointer.save(1, state)
        state["list"] = [0] * (2**21 + 1)
        with pytest.raises(sw.StateError, match=r"commas and brackets.*save long lists as tensors"):
            checkpointer.save(2, state)
        assert checkpointer.steps() == ([1] if again else [])
