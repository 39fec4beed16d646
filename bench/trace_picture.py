"""The picture of a trace: the demo's code edit, as its page shows it in a browser.

    python bench/trace_picture.py [--model NAME] [--out docs/pictures/trace.png] [--page FILE.html]

Needs playwright and Chromium. The request runs with guesses and without, so that both times are measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import ViewportSize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.browser import picture
from nanospec import LLM, SamplingParams
from nanospec.apps.cli.demo import REQUESTS
from nanospec.extras.tracing.trace import Trace

SIZE: ViewportSize = {"width": 1280, "height": 1230}
SHOWN = 10  # a step of at least so many tokens is selected, and its longest guess pointed at


def run(model: str) -> Trace:
    """The trace of the code edit."""
    llm = LLM(model, trace=True, enable_prefix_caching=False)
    prompt = llm.chat_prompt([{"role": "user", "content": REQUESTS["code edit"]}])
    params = SamplingParams(temperature=0, max_tokens=240)
    plain = SamplingParams(temperature=0, max_tokens=240, num_speculative_tokens=0)
    llm.generate(prompt, params)  # to warm up
    [output], [without] = llm.generate(prompt, params), llm.generate(prompt, plain)
    return Trace.of(output.outputs, ["code edit"], without.outputs)


def draw(page: Path, step: int, place: int, out: Path) -> None:
    """Take a picture of the page with a step selected and one of its guesses pointed at."""
    with picture(page.resolve().as_uri(), SIZE, out) as tab:
        tab.keyboard.press("Home")
        for _ in range(step):
            tab.keyboard.press("ArrowDown")
        for _ in range(place):
            tab.keyboard.press("ArrowRight")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/trace.png"))
    parser.add_argument("--page", type=Path, help="keep the page here too")
    args = parser.parse_args()
    trace = run(args.model)
    steps = trace.lanes[0].steps
    first = next((i for i, step in enumerate(steps) if len(step.tokens) >= SHOWN), 0)
    with tempfile.TemporaryDirectory() as folder:
        page = args.page or Path(folder) / "trace.html"
        trace.save(page)
        right = steps[first].accepted or [1]
        longest = max(right, key=lambda place: len(trace.texts[steps[first].drafts[place - 1]].strip()))
        draw(page, first, longest, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
