"""Two clients of a real NFS server. `make nfs` starts them; otherwise, the tests are skipped."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.kernel.engine.buffers import aligned_buffer
from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.engine.root import Root
from shardwise.kernel.errors import ShardwiseError
from shardwise.kernel.store import LocalStore
from shardwise.testing.store_suite import KEY, content, write_file

CLIENTS = [Path(path) for path in os.environ.get("SHARDWISE_TESTS_NFS", "").split(":") if path]
SERVER_DISK = Path("/srv/disk")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(len(CLIENTS) != 2, reason="`make nfs` runs these tests on NFS"),
]


@pytest.fixture
def folders() -> tuple[Path, Path]:
    """The same new directory, as both clients see it."""
    name = f"two-clients-{time.monotonic_ns()}"
    (CLIENTS[0] / name).mkdir()
    return CLIENTS[0] / name, CLIENTS[1] / name


def state_of(seed: int, size: int = 100_003) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(size, generator=generator), "bias": torch.full((7,), seed)}


def load_and_compare(path: Path, seed: int, size: int = 100_003) -> None:
    state = {name: torch.zeros_like(value) for name, value in state_of(seed, size).items()}
    sw.load(path, state)
    for name, value in state_of(seed, size).items():
        assert torch.equal(state[name], value), name


def test_a_lock_of_one_client_holds_for_the_other(folders: tuple[Path, Path]) -> None:
    here, there = (LocalStore(folder) for folder in folders)
    with here.lock("lock") as held, there.lock("lock") as both:
        assert (held, both) == (True, False)
    with there.lock("lock", shared=True) as held, here.lock("lock", shared=True) as both:
        assert (held, both) == (True, True)
        with here.lock("lock") as alone:
            assert not alone


def test_a_killed_process_loses_its_lock(folders: tuple[Path, Path]) -> None:
    program = (
        "import sys, time\nfrom shardwise.kernel.store import LocalStore\n"
        "with LocalStore(sys.argv[1]).lock('lock') as held:\n"
        "    print(held, flush=True)\n    time.sleep(100)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, folders[1]], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        store = LocalStore(folders[0])
        with store.lock("lock") as held:
            assert not held
        holder.send_signal(signal.SIGKILL)
    with store.lock("lock") as held:
        assert held


def test_a_lock_that_the_other_client_deleted_is_not_held(folders: tuple[Path, Path]) -> None:
    here, there = (LocalStore(folder) for folder in folders)
    with here.lock("lock") as held:
        assert held
        there.delete("lock")
        with there.lock("lock") as other:
            assert other  # a new file
    with here.lock("lock") as held:
        assert held


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_lock_that_the_other_client_deletes_before_it_is_locked_is_not_held(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    lock, here = fcntl.flock, LocalStore(folders[0])

    def deleted_first(fd: int, operation: int) -> None:
        (folders[1] / "lock").unlink()
        if is_replaced:
            (folders[1] / "lock").touch()
        lock(fd, operation)

    with here.lock("lock") as held:
        assert held
    monkeypatch.setattr("shardwise.kernel.store.local_files.fcntl.flock", deleted_first)
    with here.lock("lock") as held:
        assert not held


def test_of_eight_writers_on_two_clients_one_wins(folders: tuple[Path, Path]) -> None:
    def publish(number: int) -> bool:
        try:
            data = b"manifest of %d" % number
            LocalStore(folders[number % 2]).publish("manifest.json", data, replace=False)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        published = list(pool.map(publish, range(8)))
    assert sum(published) == 1
    for folder in folders:
        found = LocalStore(folder).read("manifest.json", limit=100)
        assert found == b"manifest of %d" % published.index(True)
        assert os.listdir(folder) == ["manifest.json"]


def test_a_reader_sees_the_old_or_the_new_content(folders: tuple[Path, Path]) -> None:
    here, there = (LocalStore(folder) for folder in folders)
    versions = [bytes([number]) * 50_000 for number in range(2)]
    here.publish("manifest.json", versions[0], replace=False)
    done = threading.Event()

    def read() -> int:
        count = 0
        while not done.is_set():
            assert there.read("manifest.json", limit=50_000) in versions
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for number in range(50):
                here.publish("manifest.json", versions[(number + 1) % 2], replace=True)
        finally:
            done.set()
        assert all(reader.result() for reader in readers)
    here.publish("manifest.json", b"the newest", replace=True)
    assert there.read("manifest.json", limit=50_000) == b"the newest"


def test_a_step_is_loaded_by_the_other_client_at_once(folders: tuple[Path, Path]) -> None:
    here, there = folders
    for step in (1, 2):
        sw.save(here / f"step-{step:08d}", state_of(step), step=step)
        load_and_compare(there / f"step-{step:08d}", step)
    sw.save(here / "step-00000002", state_of(3), step=2, overwrite=True)
    load_and_compare(there / "step-00000002", 3)


def test_a_step_is_listed_when_it_is_committed(folders: tuple[Path, Path]) -> None:
    """Although the other client has looked for its manifest before."""
    here, there = (LocalStore(folder) for folder in folders)
    for step in range(1, 6):
        name = f"step-{step:08d}"
        write_file(here.at(name), KEY, content(100))
        assert Root(there).steps() == list(range(1, step))
        here.at(name).publish("manifest.json", b"manifest", replace=False)
        assert Root(there).steps() == list(range(1, step + 1))


def test_retention_spares_what_the_other_client_loads(folders: tuple[Path, Path]) -> None:
    here, there = folders
    sw.save(here / "step", state_of(1))
    with LocalStore(there / "step").lock("manifest.json", shared=True) as held:
        assert held
        assert not CheckpointDirectory(LocalStore(here / "step")).remove()
        load_and_compare(there / "step", 1)
    assert CheckpointDirectory(LocalStore(here / "step")).remove()
    with pytest.raises(ShardwiseError):
        load_and_compare(there / "step", 1)


def test_a_file_that_the_other_client_deletes_is_reported(folders: tuple[Path, Path]) -> None:
    here, there = (LocalStore(folder) for folder in folders)
    write_file(here, KEY, content(8 << 20))
    reader = there.open(KEY)
    buffer = aligned_buffer(1 << 20)
    assert reader.read_at(0, buffer) == 1 << 20
    here.delete(KEY)
    try:
        # The server keeps an open file for this client, unless it restarts.
        assert reader.read_at(7 << 20, buffer) == 1 << 20
        assert bytes(buffer) == bytes(content(8 << 20)[7 << 20 :])
    except FileNotFoundError as error:
        assert "deleted or replaced" in str(error)  # noqa: PT017 - both outcomes are right
    finally:
        reader.close()


def test_a_save_outlasts_a_restart_of_the_server(folders: tuple[Path, Path]) -> None:
    size = 30_000_000
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(sw.save, folders[0] / "step", state_of(1, size))
        time.sleep(0.3)
        subprocess.run(["rpc.nfsd", "0"], check=True)
        time.sleep(2)
        subprocess.run(["rpc.nfsd", "-N", "3", "8"], check=True)
        saved.result(120)
    load_and_compare(folders[1] / "step", 1, size)


@pytest.mark.parametrize("page_cache", [False, True])
def test_a_full_disk_of_the_server_is_reported(
    folders: tuple[Path, Path], page_cache: bool
) -> None:
    """Through the page cache, the server reports a full disk only at the sync."""
    here, there = folders
    size = 30_000_000
    sw.save(here / "old", state_of(1))
    filler = SERVER_DISK / "filler"
    disk = os.statvfs(SERVER_DISK)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - (16 << 20))
    option = "?page_cache=true" if page_cache else ""
    try:
        with pytest.raises(ShardwiseError, match="no room for this save"):
            sw.save(f"file://{here}/new{option}", state_of(2, size))
        with pytest.raises(OSError, match="No space left"):
            write_file(LocalStore(here, page_cache=page_cache), KEY, content(64 << 20))
    finally:
        filler.unlink()
    load_and_compare(there / "old", 1)
    sw.save(f"file://{here}/new{option}", state_of(2, size))
    load_and_compare(there / "new", 2, size)
    assert not [name for name in os.listdir(here / "new") if name.startswith(".nfs")]
