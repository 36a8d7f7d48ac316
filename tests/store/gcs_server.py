"""A small server that speaks the XML API of Google Cloud Storage, as far as obstore uses it.

It keeps objects in memory, with generations. Emulators of others speak the JSON API, which obstore
does not use.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.etree import ElementTree
from xml.sax.saxutils import escape

TOKEN = "token-of-the-tests"
SMALLEST_PART = 5 << 20
TIMEOUT = 30.0
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Refusal(Exception):  # noqa: N818 - an answer, not an error of the server
    """An answer with an error status."""

    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


@dataclass(frozen=True)
class StoredObject:
    content: bytes
    generation: int
    updated: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.content).hexdigest()}"'


@dataclass
class Bucket:
    """The objects of one bucket, and its unfinished uploads: their parts by number."""

    page: int = 1000
    objects: dict[str, StoredObject] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, key: str, content: bytes, generation: str | None) -> StoredObject:
        with self.lock:
            existing = self.objects.get(key)
            current = existing.generation if existing is not None else 0
            if generation is not None and int(generation) != current:
                raise Refusal(412, "PreconditionFailed")
            stored = StoredObject(content, next(self.numbers), time.time())
            self.objects[key] = stored
            return stored

    def find(self, key: str) -> StoredObject:
        with self.lock:
            if key not in self.objects:
                raise Refusal(404, "NoSuchKey")
            return self.objects[key]

    def delete(self, key: str) -> None:
        with self.lock:
            if self.objects.pop(key, None) is None:
                raise Refusal(404, "NoSuchKey")

    def list(
        self, prefix: str, delimiter: str, after: str
    ) -> tuple[dict[str, StoredObject | None], str]:
        """Return one page of keys, and of prefixes with None; and the last one, if more follow."""
        found: dict[str, StoredObject | None] = {}
        with self.lock:
            for key in sorted(self.objects):
                if not key.startswith(prefix):
                    continue
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                name = key if cut < 0 else key[: cut + 1]
                if name in found or name <= after:
                    continue
                if len(found) == self.page:
                    return found, list(found)[-1]
                found[name] = self.objects[key] if cut < 0 else None
        return found, ""

    def begin_upload(self) -> str:
        with self.lock:
            upload = f"upload-{next(self.numbers)}"
            self.uploads[upload] = {}
            return upload

    def parts(self, upload: str) -> dict[int, bytes]:
        with self.lock:
            if upload not in self.uploads:
                raise Refusal(404, "NoSuchUpload")
            return self.uploads[upload]

    def complete(self, key: str, upload: str, numbers: list[int]) -> StoredObject:
        parts = self.parts(upload)
        if numbers != sorted(set(numbers)) or not set(numbers) <= set(parts):
            raise Refusal(400, "InvalidPart")
        if any(len(parts[number]) < SMALLEST_PART for number in numbers[:-1]):
            raise Refusal(400, "EntityTooSmall")
        with self.lock:
            del self.uploads[upload]
        return self.put(key, b"".join(parts[number] for number in numbers), None)


class GcsServer:
    """The server, with one bucket. Use it as a context manager.

    Args:
        bucket: name of the bucket.
        page: the most names in an answer to a listing.

    Attributes:
        url: URL of the server.
        bucket: the objects.
    """

    def __init__(self, bucket: str = "bucket", page: int = 1000) -> None:
        self.bucket = Bucket(page)
        contents = {"name": bucket, "bucket": self.bucket}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), contents))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> GcsServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT
    name: str
    bucket: Bucket

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refusal(401, "AuthenticationRequired")
            split = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(split.query, keep_blank_values=True))
            _, bucket, *rest = urllib.parse.unquote(split.path).split("/", 2)
            if bucket != self.name:
                raise Refusal(404, "NoSuchBucket")
            key = rest[0] if rest else ""
            known = {"GET": self.get, "HEAD": self.get, "PUT": self.put, "POST": self.post}
            known["DELETE"] = self.delete
            known[self.command](key, query, body)
        except Refusal as refusal:
            self.answer(refusal.status, f"<Error><Code>{refusal.code}</Code></Error>".encode())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815

    def get(self, key: str, query: dict[str, str], body: bytes) -> None:
        if not key:
            return self.answer(200, self.listing(query))
        stored = self.bucket.find(key)
        size = len(stored.content)
        low, high, status, headers = 0, size, 200, _headers_of(stored)
        if match := _RANGE.fullmatch(self.headers.get("Range", "")):
            status = 206
            if match[1]:
                low, high = int(match[1]), min(int(match[2] or size) + 1, size)
            else:
                low = max(0, size - int(match[2]))
            if low >= size:
                raise Refusal(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {low}-{high - 1}/{size}"
        return self.answer(status, stored.content[low:high], headers)

    def put(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.bucket.parts(query["uploadId"])[int(query["partNumber"])] = body
            etag = f'"{hashlib.md5(body).hexdigest()}"'
            return self.answer(200, headers={"ETag": etag})
        stored = self.bucket.put(key, body, self.headers.get("x-goog-if-generation-match"))
        return self.answer(200, headers=_headers_of(stored))

    def post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            text = f"<UploadId>{self.bucket.begin_upload()}</UploadId>"
            return self.answer(200, _document("InitiateMultipartUploadResult", text))
        numbers = [
            int(each.text or "")
            for each in ElementTree.fromstring(body).iter()
            if each.tag.endswith("PartNumber")
        ]
        stored = self.bucket.complete(key, query["uploadId"], numbers)
        text = f"<Key>{escape(key)}</Key><ETag>{escape(stored.etag)}</ETag>"
        content = _document("CompleteMultipartUploadResult", text)
        return self.answer(200, content, _headers_of(stored))

    def delete(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.bucket.parts(query["uploadId"])
            del self.bucket.uploads[query["uploadId"]]
        else:
            self.bucket.delete(key)
        self.answer(204)

    def listing(self, query: dict[str, str]) -> bytes:
        after = query.get("continuation-token") or query.get("start-after", "")
        delimiter = query.get("delimiter", "")
        found, last = self.bucket.list(query.get("prefix", ""), delimiter, after)
        text = f"<IsTruncated>{str(bool(last)).lower()}</IsTruncated>"
        if last:
            text += f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
        for name, stored in found.items():
            if stored is None:
                text += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                continue
            moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(stored.updated))
            text += (
                f"<Contents><Key>{escape(name)}</Key><Size>{len(stored.content)}</Size>"
                f"<LastModified>{moment}.{int(stored.updated % 1 * 1000):03}Z</LastModified>"
                f"<ETag>{escape(stored.etag)}</ETag></Contents>"
            )
        return _document("ListBucketResult", text)

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _document(root: str, content: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{root}>{content}</{root}>'.encode()


def _headers_of(stored: StoredObject) -> dict[str, str]:
    return {
        "ETag": stored.etag,
        "x-goog-generation": str(stored.generation),
        "Last-Modified": formatdate(stored.updated, usegmt=True),
    }
