"""One file of torch.save, of a nested state."""

from __future__ import annotations

from typing import Any

from shardwise.convert.archive import Archive, Growing
from shardwise.convert.chosen import Chosen
from shardwise.convert.nested import nested
from shardwise.convert.output import Part, Target
from shardwise.convert.pickling import pickled
from shardwise.errors import StateError

FILE = "checkpoint.pt"
_FOLDER = "archive"
_VERSION = b"3\n"


def torch_target(chosen: Chosen) -> Target:
    """Lay out what `torch.load(weights_only=True)` reads: modules and optimizers as state_dicts.

    All is in one file, however large. What torch does not load without trust is left out.
    """
    state = nested(chosen)
    left_out = list(state.left_out)
    whole: dict[str, Any] = {}
    for path, value in state.parts.items():
        why = refusal(value, ".".join(path))
        if why:
            left_out.append(why)
            continue
        *above, key = path
        here = whole.setdefault(above[0], {}) if above else whole
        here[key] = value
    for name, optimizer in state.optimizers.items():
        whole[name] = optimizer.numbered()
        left_out += [f"{name}.{lost}: it is in no group" for lost in optimizer.ungrouped()]
    file = Growing(FILE)
    add_torch_file(file, whole, FILE)
    return Target((file.output(),), lambda sums: {}, tuple(left_out))


def refusal(value: Any, name: str) -> str:
    """Why torch would not load a value; nothing if it would."""
    if isinstance(value, Part):
        return ""
    try:
        pickled(value, name)
    except StateError as error:
        return str(error)
    return ""


def add_torch_file(file: Growing, value: Any, name: str) -> None:
    """Lay out, at the end of a file, what torch.save would write; where it begins is aligned.

    Args:
        name: of the value, for messages.

    Raises:
        StateError: the value holds what torch does not load.
    """
    pickle = pickled(value, name)
    file.align()
    archive = Archive(file)
    archive.add(f"{_FOLDER}/data.pkl", pickle.data)
    archive.add(f"{_FOLDER}/byteorder", b"little")
    for number, storage in enumerate(pickle.storages):
        archive.add(f"{_FOLDER}/data/{number}", storage)
    archive.add(f"{_FOLDER}/version", _VERSION)
    archive.close()
