"""The trace page in a browser: its contents, and keyboard and pointer actions."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanospec.extras.tracing.trace import Trace
from tests.browser import browser, texts_of
from tests.nanospec.extras.tracing.examples import SPECIAL_TEXTS, example

__all__ = ["browser"]
pytestmark = pytest.mark.slow  # they start a browser
Open = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open a trace from a file; errors and network requests fail the test."""
    wrong: list[str] = []
    contexts = []

    def show(trace: Trace, width: int = 1280) -> Any:
        file = tmp_path / "trace.html"
        trace.save(file)
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda sent: None if sent.url == file.as_uri() else wrong.append(sent.url))
        page.goto(file.as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert wrong == []


def test_steps_show_accepted_and_rejected_drafts(show: Open) -> None:
    page = show(example())
    assert page.title().startswith("12 tokens in 6 steps")
    assert page.locator(".step").count() == 6
    assert texts_of(page, "#step-0 .copied") == [" not", " to"]
    assert texts_of(page, "#step-0 .g.sampled") == [" sleep"]
    assert texts_of(page, "#step-0 .rejected") == [" is", " is"]
    assert texts_of(page, "#step-3 .predicted") == [" that"]
    assert texts_of(page, "#step-4 .unverified") == [" sleep"] * 3
    assert page.text_content("#text") == "".join(example().lanes[0].prompt + example().lanes[0].output)
    assert texts_of(page, "#step-2 .tree > .forks > .fork") == [" be or\u21b5", "to that"]
    assert texts_of(page, "#step-2 .tree > .forks > .kept") == [" be or\u21b5"]
    page.locator("#step-3 .g.predicted").hover()
    assert "drafted by EAGLE-3; accepted" in page.inner_text("#tip")


def test_keyboard_navigation_and_replay(show: Open) -> None:
    page = show(example())
    page.keyboard.press("Home")
    assert "The first 2 drafts were accepted" in page.inner_text("#step-0 .story")
    for key in ("ArrowDown", "ArrowUp", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "copied from token 5" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert page.locator(".g.pointed").count() == 0
    assert "2.0× faster: decoding without speculation generates 5 of" in page.inner_text("#race-note")
    page.keyboard.press(" ")
    page.wait_for_function("document.querySelectorAll('.t.future').length > 0")
    page.wait_for_function("document.querySelectorAll('.t.future').length === 0", timeout=20_000)
    assert texts_of(page, ".track .count")[1] == "350 ms, all 12 tokens"


def test_one_lane_per_request(show: Open) -> None:
    """Text is escaped, and a narrow page does not scroll sideways."""
    trace = example(lanes=3, texts=SPECIAL_TEXTS)
    trace.lanes[1].name = "a quotation"
    page = show(trace, width=420)
    assert page.inner_text("h1") == "3 requests: 36 tokens in 18 steps"
    assert texts_of(page, ".lane .name")[1] == "a quotation"
    assert "1 earlier request omitted" in page.inner_text("#omitted")
    for text in ("</script><script>alert(1)</script><!--&lt;b>", "\u2400\u241b[31m", "天空"):
        assert text in page.text_content("#text")
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    page.keyboard.press("]")
    assert texts_of(page, '.lane[aria-pressed="true"] .name') == ["a quotation"]
