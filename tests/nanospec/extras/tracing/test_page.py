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


def test_tree_layout(show: Open) -> None:
    page = show(example())
    # The second of the root's two drafts is accepted, and so is one below it.
    forks = page.locator("#step-2 .tree > .forks > .fork")
    assert texts_of(page, "#step-2 .tree > .forks > .fork") == [" be or\u21b5", "to that"]
    assert "kept" in forks.nth(0).get_attribute("class")
    assert "kept" not in forks.nth(1).get_attribute("class")
    assert page.locator("#step-2 .rejected").count() == 2


def test_keyboard_navigation(show: Open) -> None:
    page = show(example())

    def selected() -> str | None:
        result: str | None = page.locator('.step[aria-selected="true"]').get_attribute("id")
        return result

    page.keyboard.press("Home")
    assert selected() == "step-0"
    assert "The first 2 drafts were accepted" in page.inner_text("#step-0 .story")
    assert "The expected speedup over a step without drafts was 1.4×" in page.inner_text("#step-0 .story")
    page.keyboard.press("ArrowDown")
    assert selected() == "step-1"
    assert page.locator(".detail").count() == 1
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "copied from token 5" in page.inner_text("#tip")
    chip, source = page.locator("#step-0 .g.pointed"), page.locator("#text .t.source")
    assert chip.get_attribute("data-place") == "2"
    assert source.evaluate("element => [...element.parentNode.children].indexOf(element)") == 4
    # The line runs from the draft to the token.
    start, end, box = page.evaluate(
        """() => { const path = document.getElementById("arrow"), n = path.getTotalLength();
        const box = (element) => { const b = element.getBoundingClientRect();
          return [b.left, b.top, b.right, b.bottom]; };
        return [path.getPointAtLength(0), path.getPointAtLength(n),
          [box(document.querySelector(".g.pointed")), box(document.querySelector(".t.source"))]]
          .map((p) => p.x === undefined ? p : [p.x, p.y]); }"""
    )
    for (x, y), (left, top, right, bottom) in zip((start, end), box, strict=True):
        assert left - 2 <= x <= right + 2
        assert top - 2 <= y <= bottom + 2
    page.keyboard.press("Escape")
    assert page.locator(".g.pointed").count() == 0
    assert not page.locator("#arrows").is_visible()


def test_pointing_shows_the_drafter(show: Open) -> None:
    page = show(example())
    page.locator("#step-3 .g.predicted").hover()
    assert "drafted by Medusa head 1; accepted" in page.inner_text("#tip")
    assert not page.locator("#arrows").is_visible()
    page.locator("#text .t.copied").first.hover()
    assert "copied from token 4" in page.inner_text("#tip")
    assert page.locator("#arrows").is_visible()


def test_replay_ends_with_the_whole_text(show: Open) -> None:
    page = show(example())
    assert texts_of(page, ".track .label") == ["without speculation", "with speculation"]
    note = page.inner_text("#race-note")
    assert "2.0× faster: decoding without speculation generates 5 of the 12 tokens in the same time" in note
    assert "estimated" in note
    page.keyboard.press(" ")
    page.wait_for_function("document.querySelectorAll('.t.future').length > 0")
    page.wait_for_function("document.querySelectorAll('.t.future').length === 0", timeout=20_000)
    assert texts_of(page, ".track .count")[1] == "350 ms, all 12 tokens"
    page.wait_for_function("document.querySelector('.track .count').textContent == '700 ms, all 12 tokens'")


def test_themes(show: Open) -> None:
    page = show(example(), scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.keyboard.press("t")
    light = page.evaluate(paper)
    assert sum(map(int, dark[4:-1].split(","))) < 150 < 600 < sum(map(int, light[4:-1].split(",")))
    page.click("#theme")
    assert page.evaluate(paper) == dark


def test_one_lane_per_request(show: Open) -> None:
    trace = example(lanes=3)
    trace.lanes[1].name = "a quotation"
    page = show(trace)
    assert page.inner_text("h1") == "3 requests: 36 tokens in 18 steps"
    assert texts_of(page, ".lane .name")[1] == "a quotation"
    assert "1 earlier request omitted" in page.inner_text("#omitted")
    page.keyboard.press("]")
    assert page.locator('.lane[aria-pressed="true"] .name').text_content() == "a quotation"
    page.locator(".lane").nth(2).click()
    assert page.locator('.lane[aria-pressed="true"]').count() == 1


def test_text_is_escaped(show: Open) -> None:
    page = show(example(texts=NASTY))
    shown = page.text_content("#text")
    assert "</script><script>alert(1)</script><!--&lt;b>" in shown
    assert "\u2400\u241b[31m" in shown
    assert "天空" in shown


def test_narrow_page_does_not_scroll_sideways(show: Open) -> None:
    page = show(example(lanes=2), width=420)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator("#text .t.source").is_visible()


def test_requests_without_steps_or_drafts(show: Open) -> None:
    empty = example()
    lane = empty.lanes[0]
    lane.steps, lane.output, lane.token_ids, lane.plain_seconds = [], [], [], None
    page = show(empty)
    assert page.inner_text("h1") == "0 tokens in 0 steps"
    plain = example()
    plain.lanes[0].steps = [plain.lanes[0].steps[1]]
    assert "nothing was drafted" in show(plain).inner_text("#lead")
