"""A trace as data and as a file: text is escaped, and only trace files are overwritten."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec import SamplingParams
from nanospec.extras.tracing.trace import Trace, check_target, embedded
from tests.drive import Job, cycle, cycle_model, make_engine, run
from tests.nanospec.extras.tracing.examples import SPECIAL_TEXTS, example
from tests.tiny import tiny_tokenizer


def test_lanes_of_outputs(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    engine = make_engine(cycle_model(tokenizer.vocab_size), 3, trace=True, tokenizer=tokenizer)
    params, prompt = SamplingParams(temperature=0, max_tokens=7), cycle(60, 9, tokenizer.vocab_size) * 2
    first, second = run(engine, [Job(prompt, params), Job([40, 2], params)])
    first.arrival_time = first.extension_data.arrival = second.extension_data.arrival - 0.5
    trace = Trace.of([request.completion() for request in (second, first)])
    for lane, request in zip(trace.lanes, (second, first), strict=True):
        assert "".join(lane.output) == tokenizer.decode(lane.token_ids) == request.text
        assert (lane.prompt_ids, lane.token_ids) == (request.prompt_ids, request.output_ids)
        begun, *later = lane.steps
        ms = begun.plain_ms * (len(begun.tokens) - 1) + sum(len(s.tokens) * s.plain_ms for s in later)
        assert lane.plain_seconds == pytest.approx(lane.first_token_seconds + ms / 1e3)
    assert [(lane.steps[0].method, lane.steps[0].batch) for lane in trace.lanes] == [("", 2), ("ngram", 2)]
    assert ([lane.start for lane in trace.lanes], trace.num_omitted) == ([pytest.approx(0.5), 0], 0)
    drafted = {token for lane in trace.lanes for step in lane.steps for token in step.tokens + step.drafts}
    assert trace.texts == {token: tokenizer.text_of(token) for token in sorted(drafted)}


@pytest.mark.slow
@given(st.lists(st.text() | st.integers() | st.none()))
def test_embedded_data_is_escaped(data: Any) -> None:
    text = embedded(data)
    assert json.loads(text) == data
    assert re.search(r"[<>&\u2028\u2029\x00]|[^\x20-\x7e]", text) is None


def test_page_is_self_contained() -> None:
    trace = example(texts=SPECIAL_TEXTS)
    trace.lanes[0].seconds = 1.23456789
    html = trace.html()
    [data] = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', html, re.DOTALL)
    assert json.loads(data) == json.loads(json.dumps(trace.to_dict()))
    assert json.loads(data)["lanes"][0]["seconds"] == 1.235  # rounded
    assert html.count("</script>") == 2
    code = html.replace("http://www.w3.org/2000/svg", "")  # an XML namespace, not a URL
    assert re.search(r"https?:|src=|@import|url\(|href=|fetch\(|import\(", code) is None


def test_only_trace_pages_are_overwritten(tmp_path: Path) -> None:
    page, notes = tmp_path / "trace.html", tmp_path / "notes.txt"
    page.touch()  # an empty file may be overwritten
    notes.write_text("mine")
    for trace in (example(), Trace()):
        trace.save(page)
        assert page.read_text() == trace.html()
    for path, error in ((notes, ValueError), (tmp_path, IsADirectoryError), (tmp_path / "no/x", OSError)):
        for action in (check_target, example().save):
            with pytest.raises(error, match=re.escape(str(path))):
                action(path)
    assert notes.read_text() == "mine"
    example().save("/dev/null")
