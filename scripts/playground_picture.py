"""Takes the picture of the playground that the README shows: docs/images/playground.png.

Needs Chromium and playwright (`make test-browser` installs the latter), and a server with a drafter::

    dovetail serve engine.yaml &
    python scripts/playground_picture.py http://127.0.0.1:8000 --prompt "Once upon a time"
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "playground.png"
PATIENCE_MS = 120_000
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Opens the page, asks, and takes the picture once both arms have answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--temperature", default="0")
    parser.add_argument("--max-tokens", default="160")
    parser.add_argument("--size", default="1280x800")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--output", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        parser.error("no Chromium on the PATH: apt-get install chromium")
    width, height = map(int, arguments.size.split("x"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme="dark" if arguments.dark else "light"
        )
        page.set_default_timeout(PATIENCE_MS)
        page.goto(arguments.url)
        page.locator("#model:not(:empty)").wait_for()
        ask(page, arguments)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=arguments.output)
        browser.close()


def ask(page: Page, arguments: argparse.Namespace) -> None:
    """One prompt to all arms, one arm after the other, so that their times can be compared."""
    num_arms = page.locator(".arm:visible").count()
    for field, value in (("temperature", arguments.temperature), ("max_tokens", arguments.max_tokens)):
        for box in page.locator(f'.arm input[name="{field}"]').all():
            box.evaluate("(box, value) => { box.value = value; }", value)
    if num_arms > 1:
        page.check("#in-turn")
    page.fill("#prompt", arguments.prompt)
    page.press("#prompt", "Enter")
    page.locator(".answer.done").nth(num_arms - 1).wait_for()
    page.wait_for_timeout(1500)  # until the live metrics have the last tokens


if __name__ == "__main__":
    main()
