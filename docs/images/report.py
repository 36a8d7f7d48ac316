"""Draw report.png: the page of `shardwise report`, of a made-up save on 16,384 ranks.

It needs playwright, Pillow and an installed Chromium: `PYTHONPATH=. python docs/images/report.py`.
"""

from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import sync_playwright

import shardwise as sw
from tests.tools.telemetry_runs import save_of, write_run

RANKS = 16_384
AXES = {"pp": 16, "dp": 128, "tp": 8}
STAGES = {"describe": 0.12, "plan": 0.3, "write": 12.0, "sync": 1.2, "publish": 0.4}
NO_DITHER = Image.Dither.NONE
WINDOW = {"width": 1280, "height": 1264}


def make_run(root: Path) -> None:
    """Make a run of six saves. In the last one, a host and a pipeline stage are slow."""
    slow = {
        "write": dict.fromkeys(range(9_384, 9_392), 2.6),
        "sync": dict.fromkeys(range(5_120, 6_144), 3.8),
    }
    days = [f"2026-11-{day}T03:12:44+00:00" for day in range(20, 26)]
    write_run(
        root,
        [
            save_of(
                RANKS,
                step=1000 * k,
                seconds=STAGES,
                slow=slow if k == 6 else None,
                axes=AXES,
                seed=k,
                started=started,
            )
            for k, started in enumerate(days, start=1)
        ],
    )


def main() -> None:
    """Write the picture beside this file."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        root = Path(folder) / "llama-405b"
        make_run(root)
        sw.report(root).write_page(root / "report.html")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=WINDOW)
        page.goto(f"file://{root}/report.html")
        page.wait_for_selector("html[data-ready]")
        path = f"runs/{root.name}/step-00006000"
        page.evaluate("(t) => { document.querySelector('.title').textContent = t; }", root.name)
        page.evaluate("(t) => { document.querySelector('#summary code').textContent = t; }", path)
        picture = Image.open(BytesIO(page.screenshot()))
        browser.close()
    colours = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=NO_DITHER)
    colours.save(Path(__file__).with_suffix(".png"), optimize=True)


if __name__ == "__main__":
    main()
