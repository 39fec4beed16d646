"""The picture of the server's page: its first example, answered with guesses and then without.

    python bench/playground_picture.py [--model NAME] [--out docs/pictures/playground.png]

Needs playwright and Chromium. The server is traced, so that wrong guesses are shown too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from playwright.sync_api import ViewportSize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.browser import picture
from bench.load.client import HOST
from bench.load.servers import Lane, Server, command, free_port
from nanospec.models.hub import resolve_model

SIZE: ViewportSize = {"width": 1280, "height": 900}
WITHIN = 60_000  # ms for an answer


def draw(url: str, out: Path) -> None:
    """Take the picture."""
    with picture(url, SIZE, out) as tab:
        for button in ("Edit code", "New chat", "Edit code", "Again without guessing"):  # the first warms up
            tab.get_by_role("button", name=button, exact=True).click(timeout=WITHIN)
        tab.get_by_text("The texts are equal").first.wait_for(timeout=WITHIN)


def main() -> None:
    """Command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/playground.png"))
    args = parser.parse_args()
    port = free_port()
    run = [*command(Lane("nanospec", "auto"), resolve_model(args.model).resolve(), port, 2048), "--trace"]
    with Server("nanospec", run, port, {}):
        draw(f"http://{HOST}:{port}/", args.out)
    print(args.out)


if __name__ == "__main__":
    main()
