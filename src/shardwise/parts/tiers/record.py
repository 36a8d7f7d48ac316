"""`mirror.json` in a root: where its mirror is, which checkpoints the mirror has, and failures.

The process that copies to the mirror writes this file. Trainers, handles of saves, loads and tools
read it.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import MIRROR_FILE, step_of_directory
from shardwise.kernel.store import (
    LocalStore,
    Store,
    open_store,
    publish_private,
    read_private,
)
from shardwise.parts.tiers.store import TieredStore

LARGEST_RECORD = 1 << 26
log = logging.getLogger("shardwise")


class MirroredStep(msgspec.Struct, frozen=True):
    """A checkpoint that the mirror has.

    Attributes:
        save_id: the id of its save.
        bytes: the bytes that were copied; 0 if the mirror had them before.
        seconds: the duration of the copy.
    """

    save_id: str
    bytes: int = 0
    seconds: float = 0.0


@prepare_decoding
class MirrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a mirror.

    Attributes:
        place: the path or URL of the mirror.
        steps: the checkpoints that the mirror has, by step.
        waiting: the steps to copy, in this order.
        pinned: steps that the rules of the root would remove, but that stay until they are copied.
        failures: why a step could not be copied, by step.
        failure: why the mirror could not be used at all; "" if it could.
        failing_since: the time of the first failure since the last success, in seconds since 1970;
            None if the last attempt succeeded.
    """

    place: str
    steps: dict[int, MirroredStep] = {}
    waiting: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    failures: dict[int, str] = {}
    failure: str = ""
    failing_since: float | None = None

    @classmethod
    def read(cls, root: Store) -> MirrorRecord | None:
        """Return the record of the root's mirror; None if the root has none.

        Raises:
            StoreError: the record is damaged.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            data = root.read(MIRROR_FILE, limit=LARGEST_RECORD)
            try:
                return msgspec.json.decode(data, type=cls)
            except (ValueError, RecursionError) as error:
                raise StoreError(
                    f"{root}: {MIRROR_FILE} is damaged ({error}); remove it: the next training "
                    "with mirror= writes it again"
                ) from error
        return None

    def write(self, root: Store) -> None:
        """Write the record to the root.

        Raises:
            OSError: the root is full, or not writable.
        """
        data = msgspec.json.encode(self)
        publish_private(root, MIRROR_FILE, data, data)

    def has(self, step: int, save_id: str) -> bool:
        """Return whether the mirror has this save of a step."""
        return step in self.steps and self.steps[step].save_id == save_id

    def why_failing(self) -> str:
        """Return a text that says what fails; "" if nothing does."""
        reasons = [f"step {step}: {why}" for step, why in sorted(self.failures.items())]
        reasons = [self.failure, *reasons] if self.failure else reasons
        more = [f"and {len(reasons) - 3} more"] if len(reasons) > 3 else []
        return "; ".join([*reasons[:3], *more])


def open_with_mirror(store: Store) -> Store:
    """Return a root, or the directory of a step, together with the same place in its mirror.

    If no mirror is recorded in the root, the store is returned unchanged.

    Somebody else could write a record whose URL leads to their server, which would then receive the
    user's credentials. So a record counts only if nobody else can have written it. A mirror that
    cannot be opened is left out with a warning.
    """
    if not isinstance(store, LocalStore):  # in other stores, anybody may have written a file
        return store
    name = store.path.name
    is_root = step_of_directory(name) is None
    root = store if is_root else store.at_path(store.path.parent)
    try:
        data = read_private(root, MIRROR_FILE, limit=LARGEST_RECORD)
        place = msgspec.json.decode(data, type=MirrorRecord).place
        tiers = TieredStore(root, open_store(place))
        return tiers if is_root else tiers.at(name)
    except (FileNotFoundError, NotADirectoryError):
        return store
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is read without its mirror: %s", store, error)
        return store
