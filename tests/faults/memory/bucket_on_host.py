"""A bucket on a separate host: `python bucket_on_host.py serve PORT`, or `… look URL`.

`serve` prints "ready" once the server answers, and runs until it is killed. `look` verifies the
checkpoints below a URL, and prints as JSON which steps are committed, and which other files there
are.
"""

from __future__ import annotations

import json
import signal
import sys

import shardwise as sw
from shardwise.kernel.engine.root import Root
from shardwise.kernel.manifest.manifest import MANIFEST, step_directory, step_of_directory
from shardwise.kernel.store import open_store
from tests.store.servers import BUCKET, s3_client


def serve(port: int) -> None:
    """Serve a bucket to all hosts."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="0.0.0.0", port=port, verbose=False)
    server.start()
    s3_client(f"http://127.0.0.1:{port}").create_bucket(Bucket=BUCKET)
    print("ready", flush=True)
    signal.pause()


def look(url: str) -> tuple[list[int], list[str]]:
    """Return the committed steps, and the files that belong to none of these."""
    root = open_store(url)
    steps, strays = Root(root).steps(), []
    for step in steps:
        sw.open(url, step=step).verify()
    for name in root.list():
        step = step_of_directory(name)
        if step is None:
            continue
        store = root.at(step_directory(step))
        entries = sw.open(store).layout.files if step in steps else ()
        known = {MANIFEST, *(each.name for each in entries)}
        strays += [f"{name}/{each}" for each in store.list() if each not in known]
    return steps, strays


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    print(json.dumps(look(sys.argv[2])), flush=True)
