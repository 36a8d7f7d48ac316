"""Run a program on several ranks that are forked after the imports, so that imports run only once.

    forked.py RANKS MODULES PROGRAM ARGUMENT... [-- RANKS ARGUMENT...]

The arguments after `--` are for another run of the program, after the first one.
MODULES are the slow imports of the program, joined by commas. Ranks find each other as under
torchrun.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

PR_SET_PDEATHSIG = 1  # ends when the parent ends for any reason
LONGEST = timedelta(minutes=5)


def perform(rank: int, ranks: int, port: int, program: str) -> int:
    """Run the program as a rank; return its exit status."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent has the store
    }
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:  # any error is printed, and ends only this rank
        traceback.print_exc()
        return 1
    return 0


def import_all(modules: str, program: str) -> None:
    """Import what a program needs."""
    sys.path.insert(0, str(Path(program).parent))
    for name in filter(None, modules.split(",")):
        importlib.import_module(name)
    runpy.run_path(program)  # only for its imports


def run_on(ranks: int, program: str) -> int:
    """Start the ranks and wait for them. If one fails, kill the others."""
    pipes = [os.pipe() for _ in range(ranks)]
    children = []
    for rank, (receive, _) in enumerate(pipes):
        child = os.fork()
        if child == 0:
            port = int(os.read(receive, 16))
            status = perform(rank, ranks, port, program)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    # After the forks, because the store has threads.
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONGEST, wait_for_workers=False)
    for _, send in pipes:
        os.write(send, str(store.port).encode())
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    count, imported, path, *rest = sys.argv[1:]
    import_all(imported, path)
    while True:
        end = rest.index("--") if "--" in rest else len(rest)
        sys.argv = [path, *rest[:end]]
        if status := run_on(int(count), path):
            sys.exit(status)
        if end == len(rest):
            sys.exit(0)
        count, *rest = rest[end + 1 :]
