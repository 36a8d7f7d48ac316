"""`CheckpointDirectory`: the directory of a checkpoint, from its first save to its removal.

The manifest decides what a directory is: a save publishes it last, and a removal deletes it first.
*Leftovers* are the files of interrupted and replaced saves, and of removed checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Literal, TypeVar

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import (
    CheckpointExistsError,
    FormatError,
    StoreError,
    StoreUnavailableError,
)
from shardwise.kernel.events import format_count
from shardwise.kernel.manifest.manifest import (
    LARGEST_MANIFEST,
    MANIFEST,
    REMOVED,
    FileEntry,
    Manifest,
    decode_manifest,
    is_file_of_save,
    is_lock_file,
    lock_file,
    names_of_checkpoint,
    save_id_of_file,
    save_id_of_telemetry,
)
from shardwise.kernel.manifest.validate import layout_of_manifest
from shardwise.kernel.store import Store, lock_for_reading, publish_checked

MAX_PUBLICATION_SECONDS = 10.0
"""No store's lock expires sooner. If publishing ends later than this after the last look at the
data files, the lock may have expired meanwhile, so the files are looked for once more."""
MOST_NAMES_SHOWN = 5
MOST_PROBLEMS_SHOWN = 3
LOCK_TIMEOUT, LOCK_PAUSE = 1.0, 0.05  # seconds
REQUESTS_AT_ONCE = 16
MAX_REMOVED_BYTES = 1 << 12
MAX_FILES = 2**20
Item = TypeVar("Item")
Result = TypeVar("Result")
State = Literal["committed", "damaged", "unfinished", "removed"]
"""What a directory has: see `CheckpointDirectory.state` and `examine`."""


@prepare_decoding
class _Removed(msgspec.Struct, frozen=True):
    """When a checkpoint was removed, in seconds since 1970."""

    removed_at: float


class Directory:
    """A directory with files of shardwise. It need not exist.

    Args:
        store: the directory.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def __str__(self) -> str:
        return str(self.store)

    def names(self) -> list[str]:
        """Return the names in the directory; none if there is nothing, or a file."""
        try:
            return self.store.list()
        except NotADirectoryError:
            return []

    @contextmanager
    def lock(self, save_id: str, attempts: Iterable[object] = range(1)) -> Iterator[bool]:
        """Lock the directory for a save while the block runs, and delete the lock file at its end.

        The lock keeps other processes from removing the files of the save before it is committed.

        Args:
            save_id: the id of the save, which is part of the name of the lock file.
            attempts: the lock is tried once for each item.

        Yields:
            Whether the directory is locked. It is not if another process holds this lock.
        """
        lock = lock_file(save_id)
        with ExitStack() as held:
            if is_held := any(held.enter_context(self.store.lock(lock)) for _ in attempts):
                held.callback(self.try_to_delete, lock)
            yield is_held

    @contextmanager
    def wait_for_lock(
        self, save_id: str, failure: str, deadline: Deadline | None = None
    ) -> Iterator[None]:
        """Lock the directory as `lock` does, and wait for another process that holds the lock.

        Args:
            failure: what to say if the other process holds it for too long.
            deadline: the limit for waiting. By default, twice the expiry of locks, and one second.
                By then, the lock of a killed process has expired, although servers round times to
                whole seconds. The further second is for a new Checkpointer, which briefly holds the
                lock while it looks for leftovers.

        Raises:
            StoreUnavailableError: the other process holds the lock, or requests took so long that
                there was one attempt only.
        """
        deadline = deadline or Deadline(LOCK_TIMEOUT + 2 * self.store.traits.lock_expiry)
        attempts = deadline.attempts(pause=LOCK_PAUSE, longest_pause=LOCK_TIMEOUT)
        with self.lock(save_id, attempts) as is_held:
            if not is_held:
                raise StoreUnavailableError(f"{self}: {failure}")
            yield

    def try_to_delete(self, key: str = "") -> None:
        """Delete a file; by default, the directory itself, if it is empty. An error is ignored."""
        with suppress(OSError):
            self.store.delete(key)


class CheckpointDirectory(Directory):
    """The directory of a checkpoint."""

    def state(self, names: Collection[str] | None = None) -> State | None:
        """Return what the directory has, by its names alone; None if nothing is of shardwise.

        `"committed"`: a manifest. `"removed"`: the files of a removed checkpoint, which processes
        may still read. `"unfinished"`: files of a save that runs, or was interrupted.

        Args:
            names: an earlier list of the directory. Default: list it now.
        """
        names = self.store.list() if names is None else names
        if MANIFEST in names:
            return "committed"
        if REMOVED in names:
            return "removed"
        return "unfinished" if any(map(is_file_of_save, names)) else None

    def is_committed(self) -> bool:
        """Return whether there is a manifest. This is one request, without a list."""
        return self.store.stat(MANIFEST) is not None

    def read(self) -> bytes:
        """Return the encoded manifest. Errors are those of `Store.read`."""
        return self.store.read(MANIFEST, limit=LARGEST_MANIFEST)

    def manifest(self) -> Manifest:
        """Return the manifest.

        Raises:
            FormatError: it is damaged.
            OSError: as for `Store.read`, such as `FileNotFoundError`.
        """
        return self.decode(self.read())

    def decode(self, data: bytes) -> Manifest:
        """Return the manifest, given its bytes.

        Raises:
            FormatError: it is damaged. The message begins with the directory.
        """
        try:
            return decode_manifest(data)
        except FormatError as error:
            raise FormatError(f"{self}: {error}") from error

    def saved(self) -> Manifest | None:
        """Return the manifest; None if it is missing or damaged."""
        with suppress(FileNotFoundError, NotADirectoryError, FormatError):
            return self.manifest()
        return None

    def examine(
        self, names: Collection[str], *, compares_sizes: bool = False
    ) -> tuple[State | None, Manifest | None, str]:
        """Return what the directory has, given its names: also whether its checkpoint is damaged.

        Args:
            compares_sizes: look for files of wrong sizes, too.

        Returns:
            The state; the manifest, if it can be read; and what is damaged, or "".
        """
        state = self.state(names)
        if state != "committed":
            return state, None, ""
        try:
            manifest = self.manifest()
        except (FileNotFoundError, NotADirectoryError):  # retention has just removed it
            return "removed", None, ""
        except FormatError as error:
            return "damaged", None, str(error)
        sizes: dict[str, int | None] = dict.fromkeys(names)
        if compares_sizes:
            sizes = {path: found.size for path, found in self.store.walk(MAX_FILES).items()}
        problems = "; ".join(_find_problems(manifest.files, sizes))
        if not problems:
            return "committed", manifest, ""
        if self.is_committed():
            return "damaged", manifest, f"{self}: {problems}"
        return "removed", None, ""  # retention is removing the files

    @staticmethod
    def leftovers(names: Iterable[str], manifest: Manifest | None) -> list[str]:
        """Return which names of a directory are files of saves that its manifest does not list."""
        listed = set() if manifest is None else names_of_checkpoint(manifest)
        return [name for name in names if is_file_of_save(name) and name not in listed]

    def lock_for_reading(self) -> AbstractContextManager[bool]:
        """Keep the checkpoint from being removed while a block reads it.

        Yields:
            False if the checkpoint is being removed, or does not exist.
        """
        return lock_for_reading(self.store, MANIFEST)

    @contextmanager
    def lock_for_publishing(
        self,
        save_id: str,
        files: Collection[str],
        *,
        overwrite: bool,
        deadline: Deadline | None = None,
    ) -> Iterator[bool]:
        """Lock the directory of a save by agents while the block runs.

        The save may have begun before: an earlier agent may have ended in the middle of it.

        Args:
            save_id: the id of the save.
            files: the names of its data files.
            overwrite: whether to replace an existing checkpoint.
            deadline: as for `wait_for_lock`.

        Yields:
            Whether the save is published already.

        Raises:
            CheckpointExistsError: the directory has another checkpoint, which must not be
                overwritten.
            StoreUnavailableError: as for `wait_for_lock`.
        """
        names = self.store.list()
        saved = self.saved() if MANIFEST in names else None
        is_published = saved is not None and saved.save_id == save_id
        if MANIFEST in names and not is_published and not overwrite:
            raise self.exists_error()
        if names and not any(name in names for name in files):
            self.remove_leftovers()
        with self.wait_for_lock(
            save_id,
            f"cannot lock {lock_file(save_id)}, because another process holds it: an agent that "
            "persists this save, or a Checkpointer that looks for leftovers. The agent tries "
            "again; if this lasts, look for another agent with this root",
            deadline,
        ):
            yield is_published

    def check_readable(self, manifest: bytes) -> None:
        """Check a manifest as a load would, while nothing is committed.

        Raises:
            FormatError: the manifest is wrong.
        """
        try:
            layout_of_manifest(decode_manifest(manifest))
        except FormatError as error:
            raise FormatError(
                f"{self}: nothing was committed, because the planned manifest is wrong: {error}. "
                "This is a bug of shardwise: report it, with the shapes and placements of these "
                "tensors"
            ) from error

    def commit(
        self, save_id: str, manifest: bytes, files: Sequence[str], *, overwrite: bool
    ) -> None:
        """Publish the manifest of a save, which commits the save. The caller holds the save's lock.

        Then remove the files of a replaced checkpoint, and what killed processes left incomplete.

        Args:
            save_id: the id of the save.
            manifest: the encoded manifest.
            files: the names of the data files.
            overwrite: whether to replace an existing checkpoint.

        Raises:
            CheckpointExistsError: the directory has another checkpoint, and `overwrite` is False.
                The files of this save are removed.
            StoreError, OSError: files of the save were removed, or the manifest cannot be written.
        """
        try:
            names = self.publish(manifest, files, replace=overwrite)
        except FileExistsError as error:
            saved = self.saved()
            if saved is not None and saved.save_id == save_id:  # an agent that ended published it
                return
            if saved is not None:
                with suppress(OSError):  # the next save here removes them
                    map_in_threads(self.store.delete, files)
            raise self.exists_error() from error
        if overwrite or len(names) > len(files) + 1:  # more than the files and the lock of the save
            self.remove_leftovers(own_save=save_id)

    def publish(
        self,
        manifest: bytes,
        files: Collection[str],
        *,
        replace: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> list[str]:
        """Publish the manifest of a save, and return the names that the directory had before.

        The caller holds the lock of the save. A lock can expire if this process was stopped, or the
        storage did not answer for long. Then others may have removed the files of the save.

        Args:
            manifest: the encoded manifest.
            files: the names of the data files.
            replace: whether to replace an existing checkpoint.
            clock: a monotonic clock, in seconds.

        Raises:
            FileExistsError: there is another checkpoint, and `replace` is False.
            StoreUnavailableError: files of the save were removed. Nothing is committed. In a save
                by agents, an agent copies the files again.
        """
        lists: list[tuple[float, list[str]]] = []
        is_published = False

        def check() -> None:
            lists.append((clock(), self.store.list()))
            _, names = lists[-1]
            if len(lists) == 1 and MANIFEST in names and not replace:
                raise FileExistsError(f"{self} has a manifest")
            _refuse_missing(self.store, files, names)

        try:
            publish_checked(self.store, MANIFEST, manifest, replace=replace, check=check)
            is_published = True
            listed_at, names = lists[-1]
            if clock() - listed_at > MAX_PUBLICATION_SECONDS:
                _refuse_missing(self.store, files, self.store.list())
        except _FilesRemovedError as error:
            if is_published:
                self.try_to_delete(MANIFEST)
            raise StoreUnavailableError(str(error)) from None
        return names

    def exists_error(self, step: int | None = None) -> CheckpointExistsError:
        """Return the error for a save here; `step` is given if the run of the root saves it."""
        advice = (
            "to continue its run, call restore before the first save; otherwise save elsewhere"
            if step is None
            else f"step {step} is already saved in this run: save each step once"
        ) + ", or pass overwrite=True to replace it"
        return CheckpointExistsError(f"Checkpoint already exists: {self}: {advice}")

    def remove(self) -> bool:
        """Remove the checkpoint, manifest first, unless it is read; return whether it is gone.

        In a store without shared locks, the files stay for processes that read them, until
        `remove_leftovers` is called after `StoreTraits.reading_grace` seconds.
        """
        if not self.unpublish():
            return False
        if not self.store.traits.reading_grace:
            self.remove_leftovers()
            self.try_to_delete()  # it may contain files that shardwise did not write
        return True

    def unpublish(self) -> bool:
        """Delete the manifest, unless the checkpoint is being read; return whether it is gone."""
        with self.store.lock(MANIFEST) as locked:
            if locked:
                if self.store.traits.reading_grace:
                    self.mark_as_removed(time.time())
                self.store.delete(MANIFEST)
            return locked

    def mark_as_removed(self, removed_at: float) -> None:
        """Record that the checkpoint is removed, so that its files stay for those who read them.

        Args:
            removed_at: the present time, in seconds since 1970.
        """
        self.store.publish(REMOVED, msgspec.json.encode(_Removed(removed_at)), replace=True)

    def remove_leftovers(
        self, *, own_save: str | None = None, names: Sequence[str] | None = None
    ) -> list[str]:
        """Remove the files of uncommitted, replaced and removed checkpoints.

        Files that no save made are kept. If another save is running in the directory, or processes
        may still read a checkpoint that was removed from it, nothing is removed. If the directory
        becomes empty, it is removed too.

        Args:
            own_save: the id of the caller's save, whose lock file is kept.
            names: an earlier list of the directory. Default: list it now.

        Returns:
            The names of the removed files.
        """
        store, own_lock = self.store, own_save and lock_file(own_save)
        names = store.list() if names is None else names
        ours = [name for name in names if is_file_of_save(name) and name != own_lock]
        if not ours:
            return []
        saves = {save_id_of_file(name) or save_id_of_telemetry(name) for name in ours}
        if MANIFEST in names and len(saves) == 1 and None not in saves:
            return []  # the files of one checkpoint
        with ExitStack() as locks:
            for name in filter(is_lock_file, names):
                if name != own_lock and not locks.enter_context(store.lock(name)):
                    return []
            if REMOVED in ours and self._may_be_read():
                return []
            # All locks are held, so no running save can still commit one of the listed files.
            try:
                manifest = self.manifest()
            except FileNotFoundError:
                manifest = None
            except (FormatError, StoreError):
                return []
            removed = self.leftovers(ours, manifest)
            # The mark goes last, so that after an interruption the next removal continues.
            map_in_threads(store.delete, [name for name in removed if name != REMOVED])
            if REMOVED in removed:
                store.delete(REMOVED)
            if removed:
                self.try_to_delete()
        return removed

    def _may_be_read(self) -> bool:
        """Return whether a checkpoint was removed so recently that it may still be read."""
        try:
            data = self.store.read(REMOVED, limit=MAX_REMOVED_BYTES)
            removed_at = msgspec.json.decode(data, type=_Removed).removed_at
        except (FileNotFoundError, msgspec.DecodeError):
            return False
        return abs(time.time() - removed_at) < self.store.traits.reading_grace


class _FilesRemovedError(StoreError):
    """Files of a save were removed. Unlike after other failures of a store, another attempt is of
    no use."""


def _refuse_missing(store: Store, files: Collection[str], names: Collection[str]) -> None:
    missing = sorted(set(files) - set(names))
    if missing:
        more = len(missing) - MOST_NAMES_SHOWN
        raise _FilesRemovedError(
            f"{store}: cannot commit this save, because another process removed files of it: "
            f"{', '.join(missing[:MOST_NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''}. "
            "Other processes do this only if this process did not reach the storage for long, or "
            "was stopped; save again"
        )


def _find_problems(files: Iterable[FileEntry], sizes: Mapping[str, int | None]) -> Iterator[str]:
    """Yield which files of a manifest are missing, or have other sizes. None counts as right."""
    missing = [file.name for file in files if file.name not in sizes]
    if missing:
        more = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        yield f"{format_count(len(missing), 'file')} missing: {', '.join(missing[:3])}{more}"
    wrong_sizes = [
        f"{file.name} has {size:,} bytes, but {file.size:,} were saved"
        for file in files
        if (size := sizes.get(file.name)) is not None and size != file.size
    ]
    yield from wrong_sizes[:MOST_PROBLEMS_SHOWN]
    if len(wrong_sizes) > MOST_PROBLEMS_SHOWN:
        yield f"{len(wrong_sizes) - MOST_PROBLEMS_SHOWN:,} more files with problems"


def map_in_threads(work: Callable[[Item], Result], items: Collection[Item]) -> list[Result]:
    """Return the result of `work` for each item, in order. Many items are worked on at a time."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(REQUESTS_AT_ONCE, "shardwise-requests") as pool:
        return list(pool.map(work, items))
