"""`ObjectStore`: the objects below a prefix of a bucket, or the files of a web server."""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.kernel.store.names import (
    StoreUrl,
    check_name,
    check_name_to_write,
    check_path,
    parse_url,
)
from shardwise.kernel.store.store import (
    LOCK_EXPIRY,
    READING_GRACE,
    Buffer,
    FileStatus,
    StoreTraits,
    WritableFile,
    too_large,
    too_many_files,
)
from shardwise.parts.stores.object_clients import (
    COMMON_OPTIONS,
    OPTIONS,
    Client,
    longest_request,
)
from shardwise.parts.stores.object_errors import http_status
from shardwise.parts.stores.retry import Retry
from shardwise.parts.stores.uploads import SmallUpload, UploadStream, abort_uploads
from shardwise.ports import lease_locks
from shardwise.ports.sequential import SequentialWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore import ObjectMeta

PART_MIB = 16
MOST_PARTS = 9000  # S3 allows 10,000
UPLOAD_REQUESTS = 8
SMALLEST_WINDOW = 32 << 20  # more than the threads of a save hold together
LONGEST_REQUEST = 64 << 20
READ_ATTEMPTS = 3
NO_LISTINGS = (400, 404, 405, 501)
"""The statuses of web servers that cannot list directories."""


class ObjectStore:
    """The objects below a prefix of a bucket.

    Args:
        url: the URL; see docs/storage.md for its options.
        client: the client of the bucket, which the stores below share; None to open one.

    Raises:
        StoreError: the URL is wrong.
    """

    def __init__(self, url: str | StoreUrl, client: Client | None = None) -> None:
        self.url = url if isinstance(url, StoreUrl) else parse_object_url(url)
        self._client = client or Client(self.url)
        self._requests = int(self.url.number("requests", UPLOAD_REQUESTS, smallest=1))
        self.traits = StoreTraits(
            lock_expiry=self.url.number("lock_seconds", LOCK_EXPIRY, smallest=2),
            reading_grace=self.url.number("grace_seconds", READING_GRACE, smallest=0),
        )

    def __repr__(self) -> str:
        return f"ObjectStore({str(self)!r})"

    def __str__(self) -> str:
        return str(self.url)

    def at(self, name: str) -> ObjectStore:
        """Return the store one level below."""
        check_name(name, self)
        return ObjectStore(self.url.below(name), self._client)

    def stat(self, path: str) -> FileStatus | None:
        """Return what is known about an object; None if none has exactly this name."""
        check_path(path, self)
        if not (self.url.path or path):
            return None
        try:
            return _status_of(self._head(path))
        except FileNotFoundError:
            return None

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the objects below, by relative path."""
        start = len(self.url.path) + 1 if self.url.path else 0
        found: dict[str, FileStatus] = {}

        def collect(store: Any) -> None:
            found.clear()
            for page in store.list(self.url.path or None):
                for each in page:
                    name = each["path"][start:]
                    if name and not lease_locks.is_lease(name.rpartition("/")[2]):
                        found[name] = _status_of(each)
                if len(found) > limit:
                    raise too_many_files(self, limit)

        self._client.request("list", self.url.path, collect)
        if not found and (status := self.stat("")) is not None:
            return {self.url.name: status}
        return dict(sorted(found.items()))

    def open(self, path: str, size: int | None = None) -> ObjectReader:
        """Open an object."""
        check_path(path, self)
        if size is None:
            size = self._head(path)["size"]
        return ObjectReader(self._client, self._key(path), size)

    def create(self, key: str, size: int, *, replace: bool = False) -> WritableFile:
        """Create an object of `size` bytes. It is visible after `commit`."""
        path = self._key_to_write(key)
        if not replace and self.stat(key) is not None:
            raise self._exists_error(path)
        part, retry = self._part_bytes(size), Retry(self.url.retry_seconds)
        if size <= part:
            return SmallUpload(size, lambda data: retry.call(lambda: self._put(path, data)))
        stream = UploadStream(self._client, path, retry, part=part, requests=self._requests)
        return SequentialWriter(
            stream,
            size,
            self._client.place(path),
            finish=lambda: None,
            discard=stream.discard,
            window=max(2 * part, SMALLEST_WINDOW),
            keeps_chunks=True,
        )

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Put a small object; without `replace`, only if there is none."""
        path = self._key_to_write(key)
        if replace:
            self._put(path, data)
        elif not self.url.is_set("single_writer"):
            self._probe_conditions()
            self._put(path, data, mode="create")
        elif self.stat(key) is None:
            self._put(path, data)
        else:
            raise self._exists_error(path)

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small object."""
        check_name(key, self)
        path = self._key(key)
        place = self._client.place(path)

        def get(store: Any) -> bytes:
            result = store.get(path)
            size = result.meta["size"]
            if size > limit:
                raise too_large(place, size, limit)
            content = bytes(result.bytes())
            if len(content) != size:
                raise StoreUnavailableError(
                    f"{place}: the server sent {len(content)} of {size} bytes; try again"
                )
            return content

        return self._client.request("read", path, get)

    def list(self) -> list[str]:
        """Return the names of all objects and prefixes one level below, sorted, without leases.

        Most web servers have no listings. Then the result is empty.
        """
        try:
            prefixes, objects = self._list()
        except (StoreError, FileNotFoundError) as error:
            if not self._is_web or http_status(error.__cause__ or error) not in NO_LISTINGS:
                raise
            return []
        return sorted({*prefixes, *(name for name in objects if not lease_locks.is_lease(name))})

    def delete(self, key: str) -> None:
        """Delete an object, if it exists; with "", the expired leases of an empty prefix."""
        if not key:
            names = self.list()
            if names:
                raise OSError(errno.ENOTEMPTY, f"not empty: it has {names[0]}", str(self))
            self._leases().remove_expired()
            return
        path = self._key_to_write(key)
        with suppress(FileNotFoundError):
            self._client.request("delete", path, lambda store: store.delete(path))

    def lock(self, key: str, *, shared: bool = False) -> AbstractContextManager[bool]:
        """Lock an object by a lease; see `ports/lease_locks.py`. There are no shared locks."""
        check_name_to_write(key, self)
        return self._leases().hold(key)

    def _leases(self) -> lease_locks.LeaseDirectory:
        return lease_locks.LeaseDirectory(
            self,
            lambda: {name: o["last_modified"].timestamp() for name, o in self._list()[1].items()},
            self.traits.lock_expiry,
        )

    def _probe_conditions(self) -> None:
        """Refuse a server that ignores the condition 'only if the object does not exist'.

        The probe creates an object, and tries to create it again, once for each client.

        Raises:
            StoreError: the server created an object twice.
            PermissionError: this process may not write here.
            StoreUnavailableError: the server did not say whether a put succeeded.
        """
        if self._client.obeys_conditions:
            return
        name = lease_locks.lease_name("probe")  # listings hide it, and it is deleted if it expires
        try:
            for _ in range(2):
                self._put(self._key(name), b"", mode="create")
        except FileExistsError:  # the first put raises it, too, if the client repeated it
            self._client.obeys_conditions = True
        finally:
            with suppress(OSError):
                self.delete(name)
        if not self._client.obeys_conditions:
            raise StoreError(
                f"{self._client.place(self.url.path)}: this server ignores the condition 'only if "
                "the object does not exist', so that two jobs could overwrite each other's "
                "checkpoints without noticing. Use a server with conditional puts; or, if only one "
                "job ever writes below this URL, add single_writer=true to its options"
            )

    def _head(self, path: str) -> ObjectMeta:
        """Return the size and time of an object at any level below; of this URL itself for ""."""
        key = self._key(path)
        found: ObjectMeta = self._client.request("read", key, lambda store: store.head(key))
        return found

    def _list(self) -> tuple[set[str], Mapping[str, ObjectMeta]]:
        """Return the names of the prefixes one level below, and the objects by name."""
        found = self._client.request(
            "list",
            self.url.path,
            lambda store: store.list_with_delimiter(self.url.path or None),
        )
        start = len(self.url.path) + 1 if self.url.path else 0
        objects: dict[str, ObjectMeta] = {each["path"][start:]: each for each in found["objects"]}
        prefixes: set[str] = {each.rstrip("/")[start:] for each in found["common_prefixes"]}
        return prefixes - {""}, {name: each for name, each in objects.items() if name}

    def _put(
        self,
        key: str,
        data: bytes | memoryview,
        mode: Literal["create", "overwrite"] = "overwrite",
    ) -> None:
        self._client.request(
            "write",
            key,
            lambda store: store.put(key, data, mode=mode, use_multipart=False),
        )

    @property
    def _is_web(self) -> bool:
        return self.url.scheme.startswith("http")

    def abort_uploads(self, idle_seconds: float) -> int:
        """Abort the unfinished uploads below this prefix that nobody continues.

        This needs boto3, so it works for S3 only.

        Args:
            idle_seconds: how long an upload got no part. The longest time of a request and its
                retries is added, because a live upload can be idle for this time.
        """
        prefix = f"{self.url.path}/" if self.url.path else ""
        seconds = idle_seconds + longest_request(self.url)
        return abort_uploads(self._client, prefix, idle_seconds=seconds)

    def _part_bytes(self, size: int) -> int:
        """Return the size of the parts of an object, so that their number is allowed."""
        part = int(self.url.number("part_mib", PART_MIB, smallest=5)) << 20
        return max(part, -(-size // MOST_PARTS >> 20) << 20)

    def _key(self, path: str) -> str:
        """Return the key of an object at a relative path; of this URL itself for ""."""
        return f"{self.url.path}/{path}".strip("/")

    def _key_to_write(self, name: str) -> str:
        """Return the key of an object to write or delete, after checking its name.

        Raises:
            StoreError: the name is invalid.
            PermissionError: this is a web server, which can only be read.
        """
        check_name_to_write(name, self)
        key = self._key(name)
        if self._is_web:
            place = self._client.place(key)
            raise PermissionError(errno.EROFS, "files on a web server can only be read", place)
        return key

    def _exists_error(self, key: str) -> FileExistsError:
        return FileExistsError(
            errno.EEXIST,
            "an object of this name exists already: save again, or remove the object",
            self._client.place(key),
        )


class ObjectReader:
    """An object, which is read by requests for ranges.

    Args:
        client: the client of its bucket.
        key: its key.
        size: its size, in bytes.
    """

    def __init__(self, client: Client, key: str, size: int) -> None:
        self._client, self._key = client, key
        self.size = size

    def read_at(self, offset: int, out: Buffer) -> int:
        end = min(offset + len(out), self.size)
        for low in range(offset, end, LONGEST_REQUEST):
            high = min(low + LONGEST_REQUEST, end)
            out[low - offset : high - offset] = self._request(low, high)
        return max(0, end - offset)

    def view(self, offset: int, count: int) -> Buffer:
        end = min(offset + count, self.size)
        return self._request(offset, end) if offset < end else np.zeros(0, np.uint8)

    def _request(self, low: int, high: int) -> Buffer:
        for _ in range(READ_ATTEMPTS):
            data = self._client.request(
                f"read bytes {low}:{high}",
                self._key,
                lambda store: store.get_range(self._key, start=low, end=high),
            )
            found: Buffer = np.frombuffer(memoryview(data), np.uint8)
            if len(found) == high - low:
                return found
        raise StoreError(
            f"{self._client.place(self._key)}: cannot read bytes {low}:{high}: the server sent "
            f"{len(found)} bytes instead of {high - low}; it ignores ranges, or cuts its answers: "
            "use another server"
        )

    def close(self) -> None:
        pass


def parse_object_url(place: str) -> StoreUrl:
    """Parse the URL of an object store.

    Raises:
        StoreError: the URL is wrong.
    """
    scheme = place.partition("://")[0].lower()
    return parse_url(place, [*COMMON_OPTIONS, *OPTIONS[scheme]])


def _status_of(found: ObjectMeta) -> FileStatus:
    return FileStatus(found["size"], found["e_tag"] or str(found["last_modified"].timestamp()))
