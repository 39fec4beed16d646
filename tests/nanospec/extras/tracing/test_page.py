"""The trace page in a browser: its contents, and keyboard and pointer actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanospec.extras.tracing.trace import Trace
from tests.browser import browser, texts_of
from tests.nanospec.extras.tracing.examples import NASTY, example

__all__ = ["browser"]
Open = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open a trace from a file; errors and network requests fail the test."""
    wrong: list[str] = []
    contexts = []

    def show(trace: Trace, width: int = 1280, scheme: str = "light") -> Any:
        file = tmp_path / "trace.html"
        trace.save(file)
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
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
    assert "2.0 tokens per step" in page.inner_text("#lead")
    assert page.locator(".step").count() == 6
    assert texts_of(page, "#step-0 .copied") == [" not", " to"]
    assert texts_of(page, "#step-0 .g.sampled") == [" sleep"]
    assert texts_of(page, "#step-0 .rejected") == [" is", " is"]
    assert texts_of(page, "#step-1 .g") == [","]
    assert texts_of(page, "#step-3 .predicted") == [" that"]
    assert texts_of(page, "#step-4 .unverified") == [" sleep"] * 3
    assert texts_of(page, "#step-5 .g.sampled") == []
    style = "element => getComputedStyle(element).textDecorationLine"
    assert page.locator("#step-0 .rejected").first.evaluate(style) == "line-through"
    colours = {
        page.locator(f"#text .t.{kind}").first.evaluate("element => getComputedStyle(element).color")
        for kind in ("prompt", "sampled", "copied", "predicted")
    }
    assert len(colours) == 4
    assert page.text_content("#text") == "".join(example().lanes[0].prompt + example().lanes[0].output)
    # The second of the root's two drafts is accepted, and so is one below it.
    forks = page.locator("#step-2 .tree > .forks > .fork")
    assert texts_of(page, "#step-2 .tree > .forks > .fork") == [" be or\u21b5", "to that"]
    assert ["kept" in fork.get_attribute("class") for fork in forks.all()] == [True, False]
    assert page.locator("#step-2 .rejected").count() == 2
    # Pointing shows the drafter and the source.
    page.locator("#step-3 .g.predicted").hover()
    assert "drafted by Medusa head 1; accepted" in page.inner_text("#tip")
    assert not page.locator("#arrows").is_visible()
    page.locator("#text .t.copied").first.hover()
    assert "copied from token 4" in page.inner_text("#tip")
    assert page.locator("#arrows").is_visible()


def test_keyboard_navigation(show: Open) -> None:
    page = show(example())
    selected = page.locator('.step[aria-selected="true"]')
    page.keyboard.press("Home")
    assert selected.get_attribute("id") == "step-0"
    assert "The first 2 drafts were accepted" in page.inner_text("#step-0 .story")
    assert "The expected speedup over a step without drafts was 1.4×" in page.inner_text("#step-0 .story")
    page.keyboard.press("ArrowDown")
    assert selected.get_attribute("id") == "step-1"
    assert page.locator(".detail").count() == 1
    for key in ("ArrowUp", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "copied from token 5" in page.inner_text("#tip")
    chip, source = page.locator("#step-0 .g.pointed"), page.locator("#text .t.source")
    assert chip.get_attribute("data-place") == "2"
    assert source.evaluate("element => [...element.parentNode.children].indexOf(element)") == 4
    # The line runs from the draft to the token.
    line = "(path => { const p = path.getPointAtLength(%s); return [p.x, p.y]; })(window.arrow)"
    for at, end in (("0", chip), ("path.getTotalLength()", source)):
        box, (x, y) = end.bounding_box(), page.evaluate(line % at)
        assert box["x"] - 2 <= x <= box["x"] + box["width"] + 2
        assert box["y"] - 2 <= y <= box["y"] + box["height"] + 2
    page.keyboard.press("Escape")
    assert page.locator(".g.pointed").count() == 0
    assert not page.locator("#arrows").is_visible()


def test_replay_ends_with_the_whole_text(show: Open) -> None:
    page = show(example(), scheme="dark")
    assert texts_of(page, ".track .label") == ["without speculation", "with speculation"]
    note = page.inner_text("#race-note")
    assert "2.0× faster: decoding without speculation generates 5 of the 12 tokens in the same time" in note
    assert "estimated" in note
    page.keyboard.press(" ")
    page.wait_for_function("document.querySelectorAll('.t.future').length > 0")
    page.wait_for_function("document.querySelectorAll('.t.future').length === 0", timeout=20_000)
    assert texts_of(page, ".track .count")[1] == "350 ms, all 12 tokens"
    page.wait_for_function("document.querySelector('.track .count').textContent == '700 ms, all 12 tokens'")
    # The theme follows the system until the user changes it.
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.keyboard.press("t")
    light = page.evaluate(paper)
    assert sum(map(int, dark[4:-1].split(","))) < 150 < 600 < sum(map(int, light[4:-1].split(",")))
    page.click("#theme")
    assert page.evaluate(paper) == dark


def test_one_lane_per_request(show: Open) -> None:
    """Text is escaped, and a narrow page does not scroll sideways."""
    trace = example(lanes=3, texts=NASTY)
    trace.lanes[1].name = "a quotation"
    page = show(trace, width=420)
    assert page.inner_text("h1") == "3 requests: 36 tokens in 18 steps"
    assert texts_of(page, ".lane .name")[1] == "a quotation"
    assert "1 earlier request omitted" in page.inner_text("#omitted")
    for text in ("</script><script>alert(1)</script><!--&lt;b>", "\u2400\u241b[31m", "天空"):
        assert text in page.text_content("#text")
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator("#text .t.source").is_visible()
    page.keyboard.press("]")
    assert page.locator('.lane[aria-pressed="true"] .name').text_content() == "a quotation"
    page.locator(".lane").nth(2).click()
    assert page.locator('.lane[aria-pressed="true"]').count() == 1


def test_requests_without_steps_or_drafts(show: Open) -> None:
    empty, plain = example(), example()
    lane = empty.lanes[0]
    lane.steps, lane.output, lane.token_ids, lane.plain_seconds = [], [], [], None
    assert show(empty).inner_text("h1") == "0 tokens in 0 steps"
    plain.lanes[0].steps = [plain.lanes[0].steps[1]]
    assert "nothing was drafted" in show(plain).inner_text("#lead")
