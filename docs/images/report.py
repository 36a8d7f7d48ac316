"""Draw two pages of `shardwise report`: of a made-up save on 16,384 ranks, and of `make demo`.

They are report.png and demo_report.png. The script needs playwright, Pillow, an installed Chromium
and the folder that the demo wrote: `PYTHONPATH=. python docs/images/report.py demo-out`.
"""

from __future__ import annotations

import shutil
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import shardwise as sw
from tests.tools.telemetry_runs import save_of, without_stage, write_run

RANKS = 16_384
AXES = {"pp": 16, "dp": 128, "tp": 8}
STAGES = {"describe": 0.12, "plan": 0.3, "check_replicas": 1.2, "write": 12.0, "publish": 0.4}
NO_DITHER = Image.Dither.NONE
WIDTH = 1280
DEMO_STEP = 50
"""A save of the demo on four ranks; the newest one has one rank."""


def make_run(root: Path) -> None:
    """Make a run of six saves. In the last one, a host and a pipeline stage are slow."""
    slow = {
        "write": dict.fromkeys(range(9_384, 9_392), 2.6),
        "check_replicas": dict.fromkeys(range(5_120, 6_144), 3.8),
    }
    days = [f"2026-11-{day}T03:12:44+00:00" for day in range(20, 26)]
    saves = [
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
    ]
    # Rank 0 alone publishes.
    write_run(root, [without_stage(each, "publish", range(1, RANKS)) for each in saves])


def draw(
    browser: Browser, page_file: Path, name: str, *, root: str, step: int, height: int
) -> None:
    """Write a picture of the upper part of a page, beside this file.

    Args:
        name: the name of the picture.
        root: the path that the picture shows as that of the run.
        step: the save to show.
    """
    page = browser.new_page(viewport={"width": WIDTH, "height": height})
    page.goto(page_file.absolute().as_uri())
    page.wait_for_selector("html[data-ready]")
    choices = page.locator("select").first
    texts = choices.locator("option").all_inner_texts()
    choices.select_option(
        label=next(text for text in texts if text.startswith(f"save of step {step:,} "))
    )
    path = f"{root}/step-{step:08d}"
    page.evaluate("(t) => { document.querySelector('.title').textContent = t; }", root)
    page.evaluate(
        "(t) => { for (const e of document.querySelectorAll('#summary code')) e.textContent = t; }",
        path,
    )
    picture = Image.open(BytesIO(page.screenshot()))
    colours = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=NO_DITHER)
    colours.save(Path(__file__).with_name(name), optimize=True)


def main() -> None:
    """Write the pictures beside this file."""
    demo = Path(sys.argv[1]) / "report.html"
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        root = Path(folder) / "llama-405b"
        make_run(root)
        sw.report(root).write_page(root / "report.html")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        big = {"root": "runs/llama-405b", "step": 6000, "height": 1264}
        draw(browser, root / "report.html", "report.png", **big)
        small = {"root": "demo-out/story", "step": DEMO_STEP, "height": 1550}
        draw(browser, demo, "demo_report.png", **small)
        browser.close()


if __name__ == "__main__":
    main()
