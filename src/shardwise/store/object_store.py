"""`ObjectStore`: the objects below a prefix of a bucket, or the files of a web server."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.errors import StoreError
from shardwise.store import leases
from shardwise.store.conditional_put import create_object, probe_conditional_put, read_if_exists
from shardwise.store.multipart_put import put_parts
from shardwise.store.names import check_name, check_name_to_write
from shardwise.store.object_clients import (
    COMMON_OPTIONS,
    OPTIONS,
    Client,
    find_settings,
    longest_request,
)
from shardwise.store.object_errors import http_status
from shardwise.store.object_reader import ObjectReader, read_object
from shardwise.store.store import (
    READING_GRACE,
    REMOTE_TRANSFER,
    FileStatus,
    StoreTraits,
    WritableFile,
)
from shardwise.store.store_url import StoreUrl, parse_url
from shardwise.store.unfinished_uploads import (
    abort_failed_upload,
    abort_idle_uploads,
    abort_uploads_of,
)
from shardwise.store.uploads import MultipartUpload, SmallUpload, UploadShare

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore import ObjectMeta

PART_MIB = 16
MOST_PARTS = 9000  # S3 allows 10,000
UPLOAD_REQUESTS = 8
NODE_UPLOAD_REQUESTS = 32
SMALLEST_WINDOW = 32 << 20  # threads that write hold fewer bytes together
HEAD_THREADS = 16
NO_LISTINGS = (400, 404, 405, 501)
"""The statuses of web servers that cannot list directories."""
IDLE_SECONDS = 3600.0
"""An unfinished upload that got no part for this time and a request with its retries is aborted."""


class ObjectStore:
    """The objects below a prefix of a bucket.

    Args:
        url: the URL; see docs/storage.md for its options.
        client: the client of the bucket, which the stores below share; None to open one.
        times: the times of locks.
        share: the upload requests of this process; None for all requests of a node.

    Raises:
        StoreError: the URL is wrong.
    """

    def __init__(
        self,
        url: str | StoreUrl,
        client: Client | None = None,
        times: leases.LeaseTimes | None = None,
        share: UploadShare | None = None,
    ) -> None:
        self.url = url if isinstance(url, StoreUrl) else parse_object_url(url)
        self._client = client or Client(self.url)
        lock_seconds = self.url.number("lock_seconds", leases.LEASE_SECONDS, smallest=2)
        self._times = times or leases.LeaseTimes(lease=lock_seconds)
        self._requests = int(self.url.number("requests", UPLOAD_REQUESTS, smallest=1))
        self._share = share or UploadShare(max(NODE_UPLOAD_REQUESTS, self._requests))
        self.traits = StoreTraits(
            alignment=1,
            lock_expiry=self._times.lease,
            reading_grace=self.url.number("grace_seconds", READING_GRACE, smallest=0),
            transfer=REMOTE_TRANSFER,
        )

    def __repr__(self) -> str:
        return f"ObjectStore({str(self)!r})"

    def __str__(self) -> str:
        return str(self.url)

    def with_settings(self) -> ObjectStore:
        """Return this store with what `find_settings` finds as options of its URL."""
        found = find_settings(self.url)
        url = replace(self.url, options={**self.url.options, **found})
        return ObjectStore(url, times=self._times) if found else self

    def at(self, name: str) -> ObjectStore:
        """Return the store one level below."""
        check_name(name, str(self))
        return self._at(self.url.below(name))

    @property
    def name(self) -> str:
        """The last component of the path; "" for a bucket."""
        return self.url.path.rpartition("/")[2]

    @property
    def parent(self) -> ObjectStore | None:
        """The store one level above; None for a bucket."""
        if not self.url.path:
            return None
        return self._at(replace(self.url, path=self.url.path.rpartition("/")[0]))

    def divide_uploads(self, processes: int) -> ObjectStore:
        """Return the same store, for one of several processes that divide a node's requests."""
        share = UploadShare(self._share.requests // processes)
        return ObjectStore(self.url, self._client, self._times, share)

    def exists(self) -> bool:
        """Return whether there is an object at this URL or below."""
        return self.is_file() or bool(self.list())

    def is_file(self) -> bool:
        """Return whether this URL is one object."""
        try:
            return bool(self.url.path) and self._head("") is not None
        except FileNotFoundError:
            return False

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the objects below, by relative path."""
        start = len(self.url.path) + 1 if self.url.path else 0
        found: dict[str, FileStatus] = {}

        def collect(store: Any) -> None:
            found.clear()
            for page in _obstore().list(store, self.url.path or None):
                for each in page:
                    name = each["path"][start:]
                    if name and not leases.is_lease(name.rpartition("/")[2]):
                        found[name] = _status_of(each)
                if len(found) > limit:
                    raise StoreError(
                        f"{self}: there are more than the supported {limit} files below; open "
                        "the prefix of one checkpoint"
                    )

        self._client.request("list", str(self), collect)
        if not found and self.is_file():
            return {self.name: _status_of(self._head(""))}
        return dict(sorted(found.items()))

    def open_below(self, path: str, size: int | None = None) -> ObjectReader:
        """Open an object at any level below."""
        key = f"{self.url.path}/{path}".strip("/")
        place = self._place(path)
        if size is None:
            size = self._head(path)["size"]
        return ObjectReader(self._client, key, place, size)

    def create(self, key: str, size: int) -> WritableFile:
        """Create an object of `size` bytes. It is visible after `commit`."""
        self._path_to_write(key)
        with suppress(FileNotFoundError):
            self._head(key)
            raise FileExistsError(errno.EEXIST, "the object exists already", self._place(key))
        return self.create_atomic(key, size)

    def create_atomic(self, key: str, size: int) -> WritableFile:
        """Create or replace an object. It is visible after `commit`."""
        path, place = self._path_to_write(key), self._place(key)
        self._refuse_read_only(key)
        part = self._part_bytes(size)
        if size <= part:
            return SmallUpload(place, size, lambda content: self._put(path, place, content))

        def put(chunks: Iterator[memoryview]) -> None:
            abort_uploads_of(self._client, path)  # those of a process that was killed
            with self._share.reserve(self._requests) as requests:
                put_parts(self._client, path, place, chunks, part=part, requests=requests)

        window = max(2 * part, SMALLEST_WINDOW)
        return MultipartUpload(
            place, size, put, lambda: abort_failed_upload(self._client, path), window=window
        )

    def open(self, key: str) -> ObjectReader:
        """Open an object."""
        check_name(key, str(self))
        return self.open_below(key)

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Put a small object; without `replace`, only if there is none.

        If it is unknown whether a put succeeded, the object is read: a put of the same bytes has
        succeeded.
        """
        path, place = self._path_to_write(key), self._place(key)
        self._refuse_read_only(key)
        if not replace and not self.url.is_set("single_writer"):
            probe_conditional_put(self._client, self.url.path, self._place())
            create_object(self._client, path, data, place)
            return
        if not replace and read_if_exists(self._client, path, place, limit=0) is not None:
            raise FileExistsError(errno.EEXIST, "the object exists already", place)
        self._put(path, place, data)

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small object."""
        return read_object(self._client, self._path_to_read(key), self._place(key), limit=limit)

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
        return sorted({*prefixes, *(name for name in objects if not leases.is_lease(name))})

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        path = self._path_to_write(key)
        self._refuse_read_only(key)
        with suppress(FileNotFoundError):
            self._client.request(
                "delete", self._place(key), lambda store: _obstore().delete(store, path)
            )

    def remove(self) -> None:
        """Delete the expired leases of this prefix. An empty prefix does not exist anyway."""
        names = self.list()
        if names:
            raise OSError(errno.ENOTEMPTY, f"not empty: it has {names[0]}", str(self))
        leases.remove_expired(_LeaseFiles(self), times=self._times)

    def stores_with(self, key: str) -> set[str]:
        """Return the names of the prefixes one level below that contain this object."""
        prefixes = sorted(self._list()[0])

        def has_key(name: str) -> bool:
            try:
                self.at(name).open(key).close()
            except FileNotFoundError:
                return False
            return True

        with ThreadPoolExecutor(HEAD_THREADS) as pool:
            found = list(pool.map(has_key, prefixes))
        return {name for name, is_there in zip(prefixes, found, strict=True) if is_there}

    def is_writable(self) -> bool:
        """Return whether this process may create objects here. Writes and deletes an empty one."""
        files = _LeaseFiles(self)
        name = leases.lease_name("writable")
        try:
            files.touch(name)
        except PermissionError:
            return False
        with suppress(OSError):
            files.delete(name)
        return True

    def sync(self) -> None:
        """Do nothing: objects are durable once they are visible."""

    def hold(self, key: str, *, shared: bool) -> AbstractContextManager[bool]:
        """Lock an object by a lease; see `store/leases.py`. A shared lock needs none."""
        if shared:
            return nullcontext(self.at(key).is_file())
        check_name_to_write(key, str(self))
        return leases.hold(_LeaseFiles(self), key, times=self._times)

    def _head(self, path: str) -> ObjectMeta:
        """Return the size and time of an object at any level below; of this URL itself for ""."""
        key = f"{self.url.path}/{path}".strip("/")
        found: ObjectMeta = self._client.request(
            "read", self._place(path), lambda store: _obstore().head(store, key)
        )
        return found

    def _list(self) -> tuple[set[str], Mapping[str, ObjectMeta]]:
        """Return the names of the prefixes one level below, and the objects by name."""
        found = self._client.request(
            "list",
            str(self),
            lambda store: _obstore().list_with_delimiter(store, self.url.path or None),
        )
        start = len(self.url.path) + 1 if self.url.path else 0
        objects: dict[str, ObjectMeta] = {each["path"][start:]: each for each in found["objects"]}
        prefixes: set[str] = {each.rstrip("/")[start:] for each in found["common_prefixes"]}
        return prefixes - {""}, {name: each for name, each in objects.items() if name}

    def _put(self, path: str, place: str, data: bytes | memoryview) -> None:
        self._client.request(
            "write", place, lambda store: _obstore().put(store, path, data, use_multipart=False)
        )

    @property
    def _is_web(self) -> bool:
        return self.url.scheme.startswith("http")

    def _refuse_read_only(self, key: str) -> None:
        if self._is_web:
            raise PermissionError(
                errno.EROFS, "files on a web server can only be read", self._place(key)
            )

    def abort_uploads(self, idle_seconds: float = IDLE_SECONDS) -> int:
        """Abort the unfinished uploads below this prefix that nobody continues.

        This needs boto3, so it works for S3 only.

        Args:
            idle_seconds: how long an upload got no part. The longest time of a request and its
                retries is added, because a live upload can be idle for this time.
        """
        prefix = f"{self.url.path}/" if self.url.path else ""
        seconds = idle_seconds + longest_request(self.url)
        return abort_idle_uploads(self._client, prefix, idle_seconds=seconds)

    def _at(self, url: StoreUrl) -> ObjectStore:
        return ObjectStore(url, self._client, self._times, self._share)

    def _part_bytes(self, size: int) -> int:
        """Return the size of the parts of an object, so that their number is allowed."""
        part = int(self.url.number("part_mib", PART_MIB, smallest=5)) << 20
        return max(part, -(-size // MOST_PARTS >> 20) << 20)

    def _path_to_read(self, key: str) -> str:
        check_name(key, str(self))
        return self.url.below(key).path

    def _path_to_write(self, key: str) -> str:
        check_name_to_write(key, str(self))
        return self.url.below(key).path

    def _place(self, key: str = "") -> str:
        """Return the URL of an object without options, for messages."""
        path = self.url.below(key).path if key else self.url.path
        return f"{self.url.scheme}://{self.url.host}/{path}"


def parse_object_url(place: str) -> StoreUrl:
    """Parse the URL of an object store.

    Raises:
        StoreError: the URL is wrong.
    """
    scheme = place.partition("://")[0].lower()
    return parse_url(place, [*COMMON_OPTIONS, *OPTIONS[scheme]])


def _status_of(found: ObjectMeta) -> FileStatus:
    return FileStatus(found["size"], found["e_tag"] or str(found["last_modified"].timestamp()))


class _LeaseFiles:
    """The leases in a prefix."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def touch(self, name: str) -> None:
        self._store.publish(name, b"", replace=True)

    def create_empty(self, name: str) -> None:
        with suppress(FileExistsError):
            self._store.publish(name, b"", replace=False)

    def modification_times(self, prefix: str) -> Mapping[str, float]:
        _, objects = self._store._list()
        return {
            name: each["last_modified"].timestamp()
            for name, each in objects.items()
            if name.startswith(prefix)
        }

    def delete(self, name: str) -> None:
        self._store.delete(name)


def _obstore() -> Any:
    """Return obstore, which is imported when an object store is first used."""
    import obstore

    return obstore
