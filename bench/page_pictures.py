"""Take the pictures of pages that the documents show: a trace, and the server's own page.

    python bench/page_pictures.py [trace] [playground] [--model NAME] [--out docs/pictures]

Needs playwright and Chromium. trace.png is the demo's code edit; playground.png is the page's first example,
answered with guesses and without, by a server that traces, so that wrong guesses are shown too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec import LLM, SamplingParams
from nanospec.apps.cli.demo import REQUESTS
from nanospec.extras.tracing.trace import Trace

SHOWN = 10  # a step of at least so many tokens is selected, and its longest guess pointed at
WITHIN = 60_000  # ms for an answer
PORT = 18653


@contextmanager
def picture(url: str, height: int, out: Path) -> Iterator[Page]:
    """The page at `url` in a browser; at the end of the `with` block its picture is saved."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme="light")
        tab.goto(url)
        yield tab
        tab.screenshot(path=out)
        browser.close()
    print(out)


def trace(model: str, out: Path) -> None:
    llm = LLM(model, trace=True, enable_prefix_caching=False)
    prompt = llm.chat_prompt([{"role": "user", "content": REQUESTS["code edit"]}])
    params = SamplingParams(temperature=0, max_tokens=240)
    plain = SamplingParams(temperature=0, max_tokens=240, num_speculative_tokens=0)
    llm.generate(prompt, params)  # to warm up
    [output], [without] = llm.generate(prompt, params), llm.generate(prompt, plain)
    found = Trace.of(output.outputs, ["code edit"], without.outputs)
    steps = found.lanes[0].steps
    first = next((i for i, step in enumerate(steps) if len(step.tokens) >= SHOWN), 0)
    right = steps[first].accepted or [1]
    longest = max(right, key=lambda place: len(found.texts[steps[first].drafts[place - 1]].strip()))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "trace.html"
        found.save(page)
        with picture(page.as_uri(), 1230, out / "trace.png") as tab:
            for key, times in (("Home", 1), ("ArrowDown", first), ("ArrowRight", longest)):
                for _ in range(times):
                    tab.keyboard.press(key)


def playground(model: str, out: Path) -> None:
    url = f"http://127.0.0.1:{PORT}/"
    command = [sys.executable, "run.py", "serve", "--model", model, "--port", str(PORT), "--trace"]
    server = subprocess.Popen(command, cwd=common.ROOT)
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        with picture(url, 900, out / "playground.png") as tab:
            for button in (
                "Edit code",
                "New chat",
                "Edit code",
                "Again without guessing",
            ):  # the first warms up
                tab.get_by_role("button", name=button, exact=True).click(timeout=WITHIN)
            tab.get_by_text("The texts are equal").first.wait_for(timeout=WITHIN)
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", nargs="*", default=["trace", "playground"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=common.ROOT / "docs" / "pictures")
    args = parser.parse_args()
    for name in args.pictures:
        {"trace": trace, "playground": playground}[name](args.model, args.out)


if __name__ == "__main__":
    main()
