"""The server's page in a browser: how it shows an answer while it streams, and what its buttons do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser import browser, texts_of
from tests.nanospec.apps.serve.fake_server import MODEL, Fake, end, step

__all__ = ["browser"]
Open = Callable[..., Any]
PROMPT = "Say: to be or not"
# "<user>" precedes the prompt, so source 11 is the "t" of "to".
ANSWER = [
    step(("So", -1)),
    step((" to", 11), (" be", 13), (",", -1), drafted=4, rejected=(" or", " not")),
    step((" well", -2), (".", -1), drafted=1),
    step((" End", -1), drafted=5, rejected=("a", "b", "c", "d", "e")),
]
PLAIN = [step((text, -1)) for text in ("So", " to", " be", ",", " well", ".", " End")]


@pytest.fixture
def server() -> Iterator[Fake]:
    server = Fake()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def show(browser: Any, server: Fake) -> Iterator[Open]:
    """Open the page; errors and requests to other servers fail the test.

    The browser logs a response with an error status itself; a test that causes one names it in `expected`.
    """
    wrong: list[str] = []
    contexts = []

    def note(sent: Any) -> None:
        if not sent.url.startswith((server.url, "data:")):
            wrong.append(sent.url)

    def show(scheme: str = "light", expected: str = "nothing") -> Any:
        contexts.append(browser.new_context(color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: None if expected in line.text else wrong.append(line.text))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", note)
        page.goto(server.url)
        return page

    yield show
    for context in contexts:
        context.close()
    assert wrong == []


def send(page: Any, text: str = PROMPT) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def until(page: Any, what: str) -> None:
    """Wait for a condition. Playwright's wait_for_function evaluates strings, which the CSP forbids."""
    for _ in range(500):
        if page.evaluate(what):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never: {what}")


def answered(page: Any) -> None:
    until(page, "document.getElementById('status').textContent.startsWith('Done')")


def test_token_colors_show_their_source(show: Open, server: Fake) -> None:
    echo = step(("So", len("<user>" + PROMPT)), ("!", -1), drafted=1)  # copied from the answer itself
    server.answers = [[*ANSWER, echo, *end(9, 5, 11, 4)]]
    page = show()
    assert "tiny · n-gram lookup · K auto" in page.inner_text("h1")
    send(page)
    answered(page)
    assert texts_of(page, ".text .own") == ["So", ",", ".", " End", "!"]
    assert texts_of(page, ".text .copied") == [" to", " be", "So"]
    assert texts_of(page, ".text .generated") == [" well"]
    assert texts_of(page, ".step.many") == [" to be or not,", " well.", "So!"]
    assert texts_of(page, ".text .rejected") == [" or", " not", "a", "b", "c", "+2"]
    style = "element => getComputedStyle(element).%s"
    assert page.locator(".text .rejected").first.evaluate(style % "textDecorationLine") == "line-through"
    kinds = ("own", "copied", "generated", "rejected")
    colours = {page.locator(f".text .{kind}").first.evaluate(style % "color") for kind in kinds}
    assert len(colours) == 4
    page.uncheck("#show-rejected")
    assert page.inner_text(".text") == "So to be, well. EndSo!"
    request = server.requests[0]
    assert request["messages"] == [{"role": "user", "content": PROMPT}]
    assert request["stream_options"] == {"include_usage": True, "include_drafts": True}
    assert not {"num_speculative_tokens", "response_format"} & request.keys()
    marked = "[...(CSS.highlights.get('source') ?? [])].map(String)"
    page.locator(".text .copied").nth(0).hover()
    until(page, f"{marked}.length === 1")
    assert page.evaluate(marked) == ["t"]
    assert "copied from token 12 (ngram); step 2: 3 tokens, 2 of 4 drafts accepted" in page.inner_text("#tip")
    page.locator(".text .copied").nth(2).hover()
    page.wait_for_selector(".t.source")
    assert texts_of(page, ".t.source") == ["So"]
    assert page.evaluate(marked) == []
    page.locator(".text .generated").hover()
    assert "accepted draft (ngram); step 3" in page.inner_text("#tip")
    page.mouse.move(0, 0)
    page.focus(".text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert texts_of(page, ".t.pointed") == [" to"]
    assert "copied from token 12" in page.inner_text("#status")
    page.keyboard.press("Escape")
    assert page.locator(".t.pointed").count() == 0
    assert not page.locator("#tip").is_visible()


def test_statistics_update_while_streaming(show: Open, server: Fake) -> None:
    gates = [threading.Event() for _ in range(2)]
    parts = [step((" to", 11)), step((" be", 13), (",", -1), (" it", 3), (" is", -1))]
    server.answers = [[*ANSWER[:2], gates[0], *ANSWER[2:], gates[1], *end(7, 5, 11, 3, "length")]]
    server.answers.append([*parts, *end(5, 2, 3, 3)])
    page = show()
    send(page)
    until(page, "document.getElementById('per-step').textContent === '2.0'")  # 4 tokens in 2 steps
    assert page.inner_text("#acceptance") == "50 %"
    assert page.inner_text("#counts") == "2 drafts accepted, 2 rejected; 2 tokens from the model."
    assert page.locator("#spark rect").count() == 2
    assert not page.locator("#send").is_visible()
    gates[0].set()
    until(page, "document.getElementById('acceptance').textContent === '30 %'")
    heights = "bars => bars.map((bar) => bar.height.baseVal.value)"
    assert page.locator("#spark rect").evaluate_all(heights) == [1, 3, 2, 1]
    gates[1].set()
    answered(page)
    until(page, "document.getElementById('per-step').textContent === '1.4'")  # the server's own figures
    assert page.inner_text("#acceptance") == "27 %"
    assert float(page.inner_text("#rate")) > 0
    assert "ms" in page.inner_text("#first") or "s" in page.inner_text("#first")
    assert "7 tokens in 5 steps" in page.inner_text(".note")
    assert "reached max tokens" in page.inner_text(".note")
    # Text that was held back joins its step, and a chunk with two steps is shown as two.
    send(page)
    until(page, "document.querySelectorAll('.note').length === 2")
    assert texts_of(page, ".text .step")[-2:] == [" to be,", " it is"]


def test_stop_button_cancels_request(show: Open, server: Fake) -> None:
    server.answers = [[ANSWER[0], threading.Event()], [*PLAIN, *end(7, 7, 0, 0)]]
    page = show()
    send(page)
    page.wait_for_selector(".text .own")
    page.click("#stop")
    until(page, "document.getElementById('status').textContent === 'Stopped.'")
    assert server.gone.wait(5)
    assert "stopped" in page.inner_text(".note")
    assert page.locator("#send").is_visible()
    send(page, "Go on")  # the stopped answer stays in the conversation
    answered(page)
    assert [message["content"] for message in server.requests[1]["messages"]] == [PROMPT, "So", "Go on"]


def test_api_key_form_and_retry(show: Open, server: Fake) -> None:
    server.key = "secret"
    server.answers = [[*PLAIN, *end(7, 7, 0, 0)]]
    page = show(expected="401")
    page.wait_for_selector("#key-form")
    assert page.inner_text("#status") == "This server needs an API key."
    send(page)
    page.wait_for_selector(".error")
    assert page.evaluate("document.activeElement.id") == "key"
    for key in ("wrong", "secret"):
        page.wait_for_selector("#key-form", state="visible")
        page.fill("#key", key)
        page.press("#key", "Enter")
    answered(page)
    assert page.inner_text(".text") == "So to be, well. End"
    assert not page.locator("#key-form").is_visible()
    assert page.locator(".error").count() == 0
    assert "tiny" in page.inner_text("h1")


def test_errors_are_shown_in_place(show: Open, server: Fake) -> None:
    server.answers = [
        (429, {"retry-after": "3"}, "The queue is full."),
        [ANSWER[0], {"error": {"message": "The engine failed."}}, "broken off"],
        [ANSWER[0], "broken off"],
        [*PLAIN, *end(7, 7, 0, 0)],
    ]
    page = show(expected="429")
    send(page)
    for words in ("The queue is full. Try again in 3 s.", "The engine failed.", "The connection closed"):
        page.wait_for_selector(f'.error:has-text("{words}")')
        assert page.locator('.error[role="alert"]').count() == 1
        page.click("button:has-text('Try again')")
    answered(page)
    assert page.locator(".error").count() == 0
    assert page.locator(".run").count() == 1


def test_rerun_without_speculation_in_all_themes_and_widths(show: Open, server: Fake) -> None:
    gate = threading.Event()
    slow = [PLAIN[0], gate, *PLAIN[1:]]
    other = [step(("So no", -1)), *end(1, 1, 0, 0)]
    server.answers = [[*ANSWER, *end(7, 4, 10, 3)], [*slow, *end(7, 7, 0, 0)], other]
    page = show(scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor.slice(4, -1)"
    colours = [page.evaluate(paper)]
    for _ in range(2):
        page.click("#theme")
        colours.append(page.evaluate(paper))
    dark, light, again = (sum(map(int, colour.split(","))) for colour in colours)
    assert dark == again < 150 < 600 < light
    send(page, "word" * 200)
    page.click("text=Repeat without speculation")
    until(page, "document.querySelectorAll('.run').length === 2")
    gate.set()
    page.wait_for_selector(".verdict")
    first, second = server.requests
    assert second == {**first, "num_speculative_tokens": 0}
    assert isinstance(first["seed"], int)
    assert texts_of(page, ".run h3") == ["With speculation", "Without speculation"]
    assert page.inner_text(".verdict p").endswith("as fast with speculation. The texts are identical.")
    assert page.locator(".track").count() == 2
    # A differing text is reported.
    page.select_option("#drafter", "off")
    send(page, "Once more")
    answered(page)
    server.answers.append([*ANSWER, *end(7, 4, 10, 3)])
    page.click("text=Repeat with speculation")
    until(page, "document.querySelectorAll('.verdict').length === 2")
    assert "The texts first differ at character 4." in page.locator(".verdict p").nth(1).inner_text()
    assert server.requests[2]["num_speculative_tokens"] == 0
    assert "num_speculative_tokens" not in server.requests[3]
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.click("#new")
    assert page.locator(".turn").count() == 0
    assert page.locator("#welcome").is_visible()


def test_settings_are_sent(show: Open, server: Fake) -> None:
    server.answers = [[*PLAIN, *end(7, 7, 0, 0)]] * 2
    page = show()
    nameless = """[...document.querySelectorAll("input, select, textarea, button")]
        .filter((e) => !e.labels?.length && !e.ariaLabel && !e.textContent.trim()).map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []
    assert page.locator('[role="status"]').count() == 1
    assert texts_of(page, "#k option") == ["auto", "1", "2", "3", "4"]
    values = {"#temperature": "0.5", "#max-tokens": "9", "#seed": "7", "#system": "Be brief."}
    for field, value in values.items():
        page.fill(field, value)
    page.select_option("#k", "2")
    page.select_option("#format", "json_schema")
    page.fill("#schema", "{nonsense")
    send(page)
    page.wait_for_selector(".error")
    assert page.inner_text(".error").startswith("The JSON schema is not valid JSON")
    page.fill("#schema", '{"type": "object"}')
    page.click("button:has-text('Try again')")
    answered(page)
    request = server.requests[0]
    assert (request["temperature"], request["max_tokens"]) == (0.5, 9)
    assert (request["seed"], request["num_speculative_tokens"]) == (7, 2)
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert request["response_format"]["json_schema"]["schema"] == {"type": "object"}
    page.select_option("#format", "regex")
    page.fill("#regex", "[a-z]+")
    page.fill("#temperature", "-1")
    send(page)
    page.wait_for_selector(".error")
    assert page.inner_text(".error").startswith("Temperature: ")
    page.fill("#temperature", "0")
    page.click("button:has-text('Try again')")
    until(page, "document.querySelectorAll('.note').length === 2")
    answered(page)
    assert server.requests[1]["response_format"] == {"type": "regex", "regex": "[a-z]+"}


def test_server_without_speculation_or_grammar(show: Open, server: Fake) -> None:
    none = {"method": "none", "max_tokens": 0, "tokens": 0}
    server.model = {**MODEL, "speculation": none, "structured_output": False}
    server.answers = [[*PLAIN, *end(7, 7, 0, 0)]]
    page = show()
    page.click("text=Extract JSON")
    answered(page)
    assert texts_of(page, "#drafter option") == ["off"]
    assert page.locator("#format").is_disabled()
    assert page.locator(".actions button").count() == 0
    assert "response_format" not in server.requests[0]


def test_text_is_escaped(show: Open, server: Fake) -> None:
    nasty = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>"]
    nasty += ["\u0000\u001b[31m", "天\u202e空", "&lt;b>"]
    pieces = [(text, i) for i, text in enumerate(nasty)]
    chunks = [step(*pieces, ("</div>", -1), drafted=9, rejected=("<img src=y onerror=alert(3)>",))]
    server.answers = [[*chunks, *end(6, 1, 9, 5)], (400, {}, "<img src=z onerror=alert(4)>")]
    server.model = {**MODEL, "id": "<b onclick=alert(5)>"}
    page = show(expected="400")
    send(page, "<img src=w onerror=alert(6)>")
    answered(page)
    page.uncheck("#show-rejected")
    shown = page.text_content(".text")
    assert "".join(nasty[:2]) in shown
    assert "\u2400\u241b[31m" in shown
    assert "&lt;b>" in shown
    send(page, "Again")
    page.wait_for_selector(".error")
    assert page.text_content(".error") == "<img src=z onerror=alert(4)>"
    assert page.locator("img").count() == 0
    assert server.requests[1]["messages"][1]["content"] == "".join(nasty) + "</div>"
