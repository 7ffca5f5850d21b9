"""The pictures of the console in its page: ``python tools/pictures.py`` draws them from the store of the demo.

They show times, so that each drawing differs; draw them again after a change of the pages. Chromium is needed, and the
package playwright, which moves it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

PICTURES: Final = Path(__file__).resolve().parent.parent / "docs" / "pictures"
VIEWS: Final = (("console", "light", 1100, 640), ("console-dark", "dark", 400, 800))
"""Name, colours, width and height of each picture."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Make the demo's shop in an empty folder, and serve it; yield the link to it."""
    command = [sys.executable, "-P", "-m", "librmq"]
    subprocess.run([*command, "demo", "--keep", "here"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with subprocess.Popen([*command, "console", "here/shop"], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def draw(browser: Any, target: Path) -> None:  # noqa: ANN401 (a browser of a package that librmq lacks)
    """Draw all pictures into a folder, by a Chromium of playwright."""
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as link:
        for name, scheme, width, height in VIEWS:
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
            page = context.new_page()
            page.goto(link, wait_until="load")
            page.screenshot(path=target / f"{name}.png")
            context.close()


def main() -> None:
    """Draw the pictures of the page."""
    from playwright.sync_api import sync_playwright

    path = next(path for name in ("chromium", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        draw(browser, PICTURES)
        browser.close()


if __name__ == "__main__":
    main()
