"""Take the pictures of the page at `/`, light and dark, from a run in a real Chromium.

python scripts/take_screenshots.py [--example NAME] [--num-drafts K] [--out FOLDER]

Needs Chromium on the PATH. The rates in the pictures are those of this machine at this time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "cpu"))

from browser_kit import Page, chromium, running_browser  # noqa: E402

WIDTH = 1200
SECONDS = 120


def python() -> tuple[list[str], dict[str, str]]:
    """The start of a command that runs this tree's package, and its environment."""
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Without -P the folder it is run in comes before all others.
    return [sys.executable, "-P"], {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def served(threads: int | None) -> Iterator[str]:
    """The address of a server of the bundled model."""
    start, environment = python()
    command = [*start, "-m", "paceline", "serve", "--port", "0", "--no-request-log"]
    if threads is not None:
        command += ["--num-threads", str(threads)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://[\w.]+:\d+/", line)
        if found is None:
            raise SystemExit(f"the server does not start: {line}")
        yield found[0]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def run(page: Page, example: str, num_drafts: int) -> None:
    """Choose an example and the drafts, run it, and wait until all is shown."""
    names = page.run("[...document.querySelectorAll('#examples button')].map((b) => b.textContent)")
    if example not in names:
        raise SystemExit(f"the example is {example!r}; there are {', '.join(names)}")
    page.click(f"#examples button:nth-child({names.index(example) + 1})")
    page.run("document.getElementById('drafts').focus()")
    page.press("Home")
    for _ in range(num_drafts):
        page.press("ArrowRight")
    page.click("#run")
    page.wait("!document.getElementById('run').disabled", SECONDS)
    if trouble := page.text("#problem"):
        raise SystemExit(trouble)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--example", default="Class")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    path = chromium()
    if path is None:
        raise SystemExit("no Chromium is on the PATH")
    args.out.mkdir(parents=True, exist_ok=True)
    with served(args.num_threads) as url, running_browser(path) as browser:
        page = browser.page(width=WIDTH, height=1400)
        page.go(url)
        page.wait("document.getElementById('served').textContent")
        # The first run of a server pays for what is made ready once.
        run(page, args.example, args.num_drafts)
        run(page, args.example, args.num_drafts)
        page.move(1, 1)
        page.run("document.activeElement.blur(); scrollTo(0, 0)")
        for scheme in ("light", "dark"):
            page.prefer(color_scheme=scheme)
            # Bars take a moment to arrive.
            time.sleep(0.5)
            picture = args.out / f"page-{scheme}.png"
            picture.write_bytes(page.picture())
            print(f"{picture}: {picture.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
