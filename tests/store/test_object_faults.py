"""Each request of a save, a load and a removal fails once, in each way.

The operation succeeds, because each request is repeated for the time that the URL says. Only an
answer that is short, and consistent with its length, can end it. Afterwards, committed checkpoints
load byte for byte, an operation that failed succeeds when it is repeated, and nothing stays in the
bucket but what the time of locks allows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import ShardwiseError, StoreUnavailableError
from shardwise.ports.store import Buffer, is_lease, open_store
from tests.breadth import mostly_long
from tests.store.azurite_server import AzureServer
from tests.store.servers import Server, moto  # noqa: F401 - a fixture
from tests.tools.fault_proxy import FaultKind, FaultProxy, HttpFault

KINDS = {
    "500": HttpFault(FaultKind.ANSWER, status=500),
    "503": HttpFault(FaultKind.ANSWER, status=503, retry_after=1),
    "reset": HttpFault(FaultKind.RESET),
    "lost": HttpFault(FaultKind.LOSE_ANSWER),
    "cut": HttpFault(FaultKind.CUT_BODY),
    "short": HttpFault(FaultKind.SHORTEN_BODY),
    "slow": HttpFault(FaultKind.SLOW_BODY, bytes_per_second=2000),
    "hang": HttpFault(FaultKind.HANG),
}
TIMEOUT = 1  # seconds until a request that hangs fails
LONGEST = 30.0  # seconds for one operation with one fault
REQUESTS = {"save": 30, "load": 14, "remove": 16}
"""At least as many requests as each operation makes, for the sweep."""


@dataclass(frozen=True)
class Place:
    """A run in a bucket, reached with and without faults."""

    server: Server | AzureServer
    proxy: FaultProxy
    path: str

    def direct(self, step: int) -> str:
        return self.server.url(f"{self.path}/step-{step:08d}", part_mib="5", grace_seconds="0")

    def faulty(self, step: int, timeout: int = TIMEOUT) -> str:
        path = f"{self.path}/step-{step:08d}"
        return self.server.behind(self.proxy.url).url(
            path, part_mib="5", timeout=str(timeout), retry="10", grace_seconds="0"
        )

    def leftovers(self, step: int) -> list[str]:
        return [key for key in self.server.keys(self.direct(step)) if not is_lease(key)]


def size_of(seed: int) -> int:
    """Only the step that is saved with faults has two parts, because large steps take time."""
    return 1_500_000 if seed == 2 else 20_000


def state_of(seed: int) -> dict[str, object]:
    weight = torch.randn(size_of(seed), generator=torch.Generator().manual_seed(seed))
    return {"weight": weight, "bias": torch.full((7,), float(seed)), "step": seed}


def load_and_compare(url: str, seed: int) -> None:
    state = {"weight": torch.zeros(size_of(seed)), "bias": torch.zeros(7), "step": -1}
    sw.load(url, state)
    for name, value in state_of(seed).items():
        same = torch.equal(state[name], value) if torch.is_tensor(value) else state[name] == value
        assert same, name


@pytest.fixture(scope="module")
def proxy(moto: Server) -> Iterator[FaultProxy]:  # noqa: F811
    logger = logging.getLogger("shardwise")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with FaultProxy(moto.endpoint) as proxy:
        yield proxy
    logger.setLevel(level)


@pytest.fixture
def place(moto: Server, proxy: FaultProxy) -> Place:  # noqa: F811
    proxy.clear()
    path = moto.new_url().partition("?")[0].split("/", 3)[3]
    return Place(moto, proxy, path)


def save(place: Place) -> None:
    sw.save(place.faulty(2), state_of(2))


def load(place: Place) -> None:
    load_and_compare(place.faulty(1), 1)


def remove(place: Place) -> None:
    assert sw.remove(place.faulty(1)) == []


OPERATIONS: dict[str, Callable[[Place], None]] = {"save": save, "load": load, "remove": remove}
CASES = [
    (operation, kind, index)
    for operation, count in REQUESTS.items()
    for kind in KINDS
    for index in range(count)
]
# Each request and each kind is in some of these, but not each pair.
QUICK = [case for number, case in enumerate(CASES) if number % 37 == 0]


@pytest.mark.parametrize(
    ("operation", "kind", "index"),
    [
        pytest.param(
            *case, marks=() if case in QUICK else pytest.mark.long, id="-".join(map(str, case))
        )
        for case in CASES
    ],
)
def test_one_request_fails(place: Place, operation: str, kind: str, index: int) -> None:
    check_one_fault(place, operation, kind, index)


def check_one_fault(place: Place, operation: str, kind: str, index: int) -> None:
    """Let one request of an operation fail, and check that all is well afterwards."""
    sw.save(place.direct(1), state_of(1))
    place.proxy.inject(replace(KINDS[kind], index=index))
    begin = time.monotonic()
    error: BaseException | None = None
    try:
        OPERATIONS[operation](place)
    except (ShardwiseError, OSError) as caught:
        error = caught
    assert time.monotonic() - begin < LONGEST
    if not any(request.fault for request in place.proxy.requests):
        assert error is None  # it makes fewer requests
        return
    if error is not None:
        assert kind == "short", error
        assert len(str(error)) > 20
    # If the answer with the upload's id is lost, a later save aborts the upload when it is idle.
    lost_upload = any(r.fault and r.status and "uploads" in r.path for r in place.proxy.requests)
    place.proxy.clear()

    if operation != "remove":
        load_and_compare(place.direct(1), 1)
    if operation == "save":
        is_committed = "manifest.json" in place.leftovers(2)
        assert is_committed or error is not None
        if not is_committed:
            sw.save(place.direct(2), state_of(2))
        load_and_compare(place.direct(2), 2)
    if operation == "remove":
        sw.remove(place.direct(1))
        assert place.leftovers(1) == []
    assert len(place.server.unfinished_uploads(place.direct(1))) <= lost_upload


def test_the_sweep_covers_all_requests(place: Place) -> None:
    for operation, act in OPERATIONS.items():
        sw.save(place.direct(1), state_of(1))
        place.proxy.clear()
        act(place)
        assert 3 < len(place.proxy.requests) <= REQUESTS[operation], [
            (request.method, request.path) for request in place.proxy.requests
        ]
        if operation != "remove":
            sw.remove(place.direct(1))


def test_of_eight_writers_one_wins_although_answers_are_lost(place: Place) -> None:
    lost = HttpFault(FaultKind.LOSE_ANSWER, count=6, methods=("PUT",), path="/manifest")
    place.proxy.inject(lost)

    def publish(number: int) -> bool:
        store = open_store(place.faulty(1, timeout=30))
        try:
            store.publish("manifest.json", b"manifest of %d" % number, replace=False)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        published = list(pool.map(publish, range(8)))
    assert sum(published) == 1
    winner = b"manifest of %d" % published.index(True)
    assert open_store(place.direct(1)).read("manifest.json", limit=100) == winner


BEGIN, COMPLETE = "uploads=", "uploadId="
"""What the requests that begin and that complete an upload have in their paths; both are POSTs."""


@pytest.mark.parametrize(
    ("request_of", "kind"),
    mostly_long(
        [(each, kind) for each in (BEGIN, COMPLETE) for kind in ("lost", "cut", "short", "500")],
        [(BEGIN, "lost"), (COMPLETE, "lost"), (COMPLETE, "short")],
    ),
)
def test_an_upload_whose_answer_is_lost_succeeds(place: Place, kind: str, request_of: str) -> None:
    """The server then no longer knows the upload; the object itself says from which it comes."""
    place.proxy.inject(replace(KINDS[kind], methods=("POST",), path=request_of))
    save(place)
    assert [request.method for request in place.proxy.requests if request.fault] == ["POST"]
    load_and_compare(place.direct(2), 2)


def test_an_upload_that_the_server_has_ended_is_an_error_although_there_is_an_older_object(
    place: Place,
) -> None:
    store, size = open_store(place.faulty(1, timeout=30)), 6 << 20
    old, new = (torch.full((size,), value, dtype=torch.uint8).numpy() for value in (1, 2))

    def write(content: Buffer) -> None:
        with closing(store.create("weights", size, replace=True)) as file:
            file.write_at(0, content)
            file.commit()

    write(old)
    ended = HttpFault(FaultKind.ANSWER, status=404, methods=("POST",), path=COMPLETE)
    place.proxy.inject(replace(ended, text="<Error><Code>NoSuchUpload</Code></Error>"))
    with pytest.raises(StoreUnavailableError, match="the upload ended on the server") as raised:
        write(new)
    assert "another process" not in str(raised.value)
    assert open_store(place.direct(1)).read("weights", limit=size) == old.tobytes()
    write(new)
    assert open_store(place.direct(1)).read("weights", limit=size) == new.tobytes()


def test_a_listing_that_breaks_off_again_and_again_is_repeated_as_long_as_the_url_says(
    place: Place,
) -> None:
    sw.save(place.direct(1), state_of(1))
    place.proxy.inject(HttpFault(FaultKind.CUT_BODY, count=4, path="list-type"))
    assert "manifest.json" in open_store(place.faulty(1)).list()
    place.proxy.inject(HttpFault(FaultKind.CUT_BODY, count=None, path="list-type"))
    begin = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="cannot list"):
        open_store(place.faulty(1).replace("retry=10", "retry=1")).list()
    assert time.monotonic() - begin > 1


def test_a_bulk_delete_that_the_server_denies_is_not_repeated(place: Place) -> None:
    """The answer to a bulk delete is a success, with an error for each key."""
    sw.save(place.direct(1), state_of(1))
    store = open_store(place.faulty(1))

    def answer(code: str) -> HttpFault:
        key = f"{str(store).partition('?')[0].split('/', 3)[3]}/manifest.json"
        error = f"<Key>{key}</Key><Code>{code}</Code><Message>no</Message>"
        text = f"<DeleteResult><Error>{error}</Error></DeleteResult>"
        return HttpFault(FaultKind.ANSWER, status=200, text=text, methods=("POST",), path="delete")

    place.proxy.inject(answer("AccessDenied"))
    with pytest.raises(PermissionError, match="AccessDenied"):
        store.delete("manifest.json")
    assert len([each for each in place.proxy.requests if each.method == "POST"]) == 1
    place.proxy.inject(answer("SlowDown"), replace(answer(""), index=1, status=404))
    store.delete("manifest.json")
    assert "manifest.json" not in open_store(place.direct(1)).list()


@pytest.mark.parametrize("kind", ["lost", "reset", "500"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_failed_probe_is_repeated(place: Place, kind: str, index: int) -> None:
    place.proxy.inject(replace(KINDS[kind], index=index, methods=("PUT",), path="probe."))
    open_store(place.faulty(1, timeout=30)).publish("manifest.json", b"content", replace=False)
    assert any(request.fault for request in place.proxy.requests)
    assert open_store(place.direct(1)).read("manifest.json", limit=100) == b"content"
    assert place.server.keys(place.direct(1)) == ["manifest.json"]


@pytest.mark.parametrize("seconds", [1.5, pytest.param(8.0, marks=pytest.mark.long)])
def test_a_save_survives_an_outage(place: Place, seconds: float) -> None:
    sw.save(place.direct(1), state_of(1))
    with ThreadPoolExecutor(1) as pool:
        with place.proxy.outage():
            saved = pool.submit(save, place)
            time.sleep(seconds)
        saved.result(LONGEST)
    load_and_compare(place.direct(2), 2)


@pytest.mark.long
def test_requests_are_repeated_for_as_long_as_the_url_says(place: Place) -> None:
    sw.save(place.direct(1), state_of(1))
    store = open_store(place.faulty(1).replace("retry=10", "retry=60"))
    with ThreadPoolExecutor(1) as pool:
        with place.proxy.outage():
            begin = time.monotonic()
            read = pool.submit(store.read, "manifest.json", limit=10**6)
            time.sleep(30)
            assert not read.done()
        assert read.result(60)
    assert time.monotonic() - begin < 60


def test_an_outage_that_lasts_is_an_error(place: Place) -> None:
    sw.save(place.direct(1), state_of(1))
    begin = time.monotonic()
    with place.proxy.outage(), pytest.raises(OSError, match="manifest"):
        open_store(place.faulty(1).replace("retry=10", "retry=1")).read(
            "manifest.json", limit=10**6
        )
    assert time.monotonic() - begin < LONGEST
    load_and_compare(place.faulty(1), 1)
