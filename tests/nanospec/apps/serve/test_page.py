"""The server's page in a browser: rendering of responses, and buttons."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.alphabet import ALPHABET, after, make
from tests.browser import browser, texts_of
from tests.nanospec.apps.serve.conftest import Served, serving
from tests.util import eventually

__all__ = ["browser"]
pytestmark = pytest.mark.slow  # they start a browser
Open = Callable[..., Any]
PROMPT = "say to be or not"  # each character is one token, so source 4 is the "t" of "to"


def step(*pieces: tuple[str, int], drafted: int = 0, rejected: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the chunk of one step; a piece is a token's text and its source, as in `outputs.Piece`."""
    choice = {"index": 0, "delta": {"content": "".join(text for text, _ in pieces)}, "finish_reason": None}
    accepted = sum(source != -1 for _, source in pieces)
    speculation = {"index": 0, "pieces": pieces, "drafted": drafted, "accepted": accepted, "drafter": "ngram"}
    return {"choices": [choice], "speculation": {**speculation, "rejected": rejected}}


def end(tokens: int, steps: int, drafted: int, accepted: int, reason: str = "stop") -> list[dict[str, Any]]:
    """Return the last two chunks of an answer to `PROMPT`."""
    counts = {"num_steps": steps, "num_drafted": drafted, "num_accepted": accepted}
    rates = {"tokens_per_step": tokens / steps, "acceptance_rate": accepted / max(drafted, 1)}
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": tokens, "speculation": {**counts, **rates}}
    finish = {"index": 0, "delta": {}, "finish_reason": reason}
    return [{"choices": [finish]}, {"choices": [], "usage": usage}]


ANSWER = [
    step(("So", -1)),
    step((" to", 4), (" be", 6), (",", -1), drafted=4, rejected=(" or", " not")),
    step((" well", -2), (".", -1), drafted=1),
    step((" End", -1), drafted=5, rejected=("a", "b", "c", "d", "e")),
]
WHOLE = [*ANSWER, *end(7, 4, 10, 3)]
PLAIN = [*(step((text, -1)) for text in ("So", " to", " be", ",", " well", ".", " End")), *end(7, 7, 0, 0)]


@pytest.fixture
def show(browser: Any) -> Iterator[Open]:
    """Open the page of a server; errors and requests to other servers fail the test.

    If there are `answers`, the nth one is the response to the nth chat request: chunks of a stream, which is
    incomplete if the last one is None, or a status and an error message. `requests` collects the requests."""
    wrong: list[str] = []
    context = browser.new_context()

    def show(server: Served, answers: list[Any], requests: list[Any], expected: str = "nothing") -> Any:
        def answer(route: Any) -> None:
            given = answers[len(requests)]
            requests.append(route.request.post_data_json)
            if isinstance(given, tuple):
                status, text = given
                route.fulfill(status=status, json={"error": {"message": text}}, headers={"retry-after": "3"})
            else:
                parts = [f"data: {json.dumps(chunk)}\n\n" for chunk in given if chunk is not None]
                last = "" if given[-1] is None else "data: [DONE]\n\n"
                route.fulfill(body="".join(parts) + last, content_type="text/event-stream")

        page, allowed = context.new_page(), (server.url, "data:")
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: None if expected in line.text else wrong.append(line.text))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda sent: None if sent.url.startswith(allowed) else wrong.append(sent.url))
        if answers:
            page.route("**/v1/chat/completions", answer)
        page.goto(server.url)
        return page

    yield show
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
    raise AssertionError(f"timed out: {what}")


def answered(page: Any) -> None:
    until(page, "document.getElementById('status').textContent.startsWith('Done')")


def test_sources_of_tokens_and_statistics(show: Open, server: Served) -> None:
    copied, requests = step(("So", len(PROMPT)), ("!", -1), drafted=1), list[Any]()
    page = show(server, [[*ANSWER, copied, *end(9, 5, 11, 4, "length")]], requests)
    assert "alphabet · n-gram lookup · K 5" in page.inner_text("h1")
    send(page)
    answered(page)
    assert (page.inner_text("#per-step"), page.inner_text("#acceptance")) == ("1.8", "36 %")
    assert page.inner_text("#counts") == "4 drafts accepted, 7 rejected; 5 tokens from the model."
    assert "reached max tokens" in page.inner_text(".note")
    assert texts_of(page, ".text .own") == ["So", ",", ".", " End", "!"]
    assert texts_of(page, ".text .copied") == [" to", " be", "So"]
    assert texts_of(page, ".text .generated") == [" well"]
    assert texts_of(page, ".step.many") == [" to be or not,", " well.", "So!"]
    assert texts_of(page, ".text .rejected") == [" or", " not", "a", "b", "c", "+2"]
    assert requests[0]["messages"] == [{"role": "user", "content": PROMPT}]
    assert requests[0]["stream_options"] == {"include_usage": True, "include_drafts": True}
    assert not {"num_speculative_tokens", "response_format"} & requests[0].keys()
    assert requests[0]["max_tokens"] == 128  # not 512, because the model's window is shorter
    marked = "[...(CSS.highlights.get('source') ?? [])].map(String)"
    page.locator(".text .copied").nth(0).hover()
    until(page, f"{marked}.length === 1")
    assert page.evaluate(marked) == ["t"]
    assert "copied from token 5 (ngram); step 2: 3 tokens, 2 of 4 drafts accepted" in page.inner_text("#tip")
    page.locator(".text .copied").nth(2).hover()
    page.wait_for_selector(".t.source")
    assert texts_of(page, ".t.source") == ["So"]


def test_stop_button_cancels_request(show: Open, server: Served) -> None:
    page = show(server, [], [])
    server.gate.clear()
    send(page)
    eventually(lambda: server.app.engine.num_outputs)
    page.click("#stop")
    until(page, "document.getElementById('status').textContent === 'Stopped.'")
    eventually(lambda: not server.app.engine.num_outputs)
    server.settle()
    assert "stopped" in page.inner_text(".note")


def test_api_key_form_and_retry(show: Open, folder: Path) -> None:
    with serving(make(folder), api_key=("secret-key",)) as server:
        page = show(server, [], [], expected="401")
        page.wait_for_selector("#key-form")
        send(page, after("abcd"))
        page.wait_for_selector(".error")
        for key in ("wrong-key", "secret-key"):
            page.wait_for_selector("#key-form", state="visible")
            page.fill("#key", key)
            page.press("#key", "Enter")
        answered(page)
        assert page.inner_text(".text") == ALPHABET[4:]
        assert page.locator(".text .copied").count() > 0
        assert not page.locator("#key-form").is_visible()
        assert page.locator(".error").count() == 0


def test_settings_and_rerun_without_speculation(show: Open, server: Served) -> None:
    requests: list[Any] = []
    page = show(server, [WHOLE, PLAIN, [step(("So no", -1)), *end(1, 1, 0, 0)], WHOLE], requests)
    values = {"#temperature": "0.5", "#max-tokens": "9", "#seed": "7", "#system": "Be brief."}
    for field, value in values.items():
        page.fill(field, value)
    page.select_option("#k", "2")
    page.select_option("#format", "json_schema")
    page.fill("#schema", "{nonsense")
    send(page)
    page.wait_for_selector(".error:has-text('The JSON schema is not valid JSON')")
    page.fill("#schema", '{"type": "object"}')
    page.click("button:has-text('Try again')")
    page.click("text=Repeat without speculation")
    page.wait_for_selector(".verdict")
    first, second = requests
    assert (first["temperature"], first["max_tokens"]) == (0.5, 9)
    assert (first["seed"], first["num_speculative_tokens"]) == (7, 2)
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert second == {**first, "num_speculative_tokens": 0}
    assert page.inner_text(".verdict p").endswith("as fast with speculation. The texts are identical.")
    page.select_option("#drafter", "off")
    send(page, "Once more")
    page.click("text=Repeat with speculation")
    until(page, "document.querySelectorAll('.verdict').length === 2")
    assert "The texts first differ at character 4." in page.locator(".verdict p").nth(1).inner_text()
    assert [request.get("num_speculative_tokens") for request in requests[2:]] == [0, None]
    contents = ["Be brief.", PROMPT, "So to be, well. End", "Once more"]
    assert [message["content"] for message in requests[2]["messages"]] == contents


def test_text_is_escaped_and_errors_are_shown_in_place(show: Open, server: Served) -> None:
    special = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>"]
    special += ["\u0000\u001b[31m", "天\u202e空", "&lt;b>"]
    pieces = [(text, i) for i, text in enumerate(special)]
    chunks = [step(*pieces, ("</div>", -1), drafted=9, rejected=("<img src=y onerror=alert(3)>",))]
    failed = [ANSWER[0], {"error": {"message": "<img src=z onerror=alert(5)>"}}, None]
    answers, requests = [[*chunks, *end(6, 1, 9, 5)], (429, "<b>Busy.</b>"), failed], list[Any]()
    page = show(server, [*answers, [ANSWER[0], None], PLAIN], requests, expected="429")
    send(page, "<img src=w onerror=alert(6)>")
    answered(page)
    page.uncheck("#show-rejected")
    shown = page.text_content(".text")
    assert "".join(special[:2]) in shown
    assert "\u2400\u241b[31m" in shown
    assert "&lt;b>" in shown
    send(page, "Again")
    for words in ("<b>Busy.</b> Try again in 3 s.", "<img src=z onerror=alert(5)>", "The connection closed"):
        page.wait_for_selector(f'.error:has-text("{words}")')
        page.click("button:has-text('Try again')")
    answered(page)
    assert page.locator(".error").count() == page.locator("img").count() == 0
    assert requests[1]["messages"][1]["content"] == "".join(special) + "</div>"
