"""The trace of an engine's outputs, as plain data and as an HTML page.

    trace = llm.generate(...)[0].trace()
    trace.lanes[0].steps[0].drafts, trace.to_dict(), trace.save("trace.html")

A *lane* is one output. The page is a single HTML file that works offline: the files of `page/` with the data
of `to_dict` embedded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ...outputs import NOT_TRACED, Completion
from ...text.tokenizer import Detokenizer

DIGITS = 4  # significant digits of floats in the output
SCRIPTS = ("data", "text", "steps", "tree", "arrows", "race", "lanes", "main")  # in load order


@dataclass(slots=True)
class StepRecord:
    """One step of one request.

    Attributes:
        at: seconds from the request's arrival to the end of the step.
        ms: milliseconds of the whole step by stage; prefill and host cover the time since the last step.
        batch: the number of requests in the step.
        tokens: the tokens that the step added to the output.
        method, match_len: the name of the drafter; the length of its n-gram match, 0 for other drafters.
        drafts, sources, parents: all drafts; see `Proposal`. In a chain, the parents are 0, 1, 2, ...
        verified: the number of verified drafts, which are the first ones.
        accepted: 1-based indices into `drafts` of the accepted ones, in order of depth.
        reason: what determined `verified`: "off", "end" (only one token was left to generate), "no match",
            "fixed", "pays", "does not pay" or "probe".
        plain_ms: the estimated milliseconds of the step without drafts: its measured time, scaled by the
            ratio of the step costs measured at startup.
    """

    at: float
    ms: dict[str, float]
    batch: int
    tokens: list[int]
    method: str
    match_len: int
    drafts: list[int]
    sources: list[int]
    parents: list[int]
    verified: int
    accepted: list[int]
    reason: str
    plain_ms: float


@dataclass
class Record:
    """The steps of a request, and the data for its `Lane` that `Completion` does not have."""

    tokenizer: Any  # a `Tokenizer`; only `trace` uses it
    about: dict[str, str]  # the engine's model and settings
    id: str
    prompt_ids: list[int]
    arrival: float
    num_tokens: int  # in the prompt and all steps
    steps: list[StepRecord] = field(default_factory=list)

    def trace(self, outputs: Sequence[Completion]) -> Trace:
        """Return the trace of `outputs`, which must be from this record's engine."""
        return Trace.of(outputs)


@dataclass
class Lane:
    """The trace of one output.

    Attributes:
        name: the request id.
        prompt, output: the text of each token; in the output, what the token completed, as in `Piece`.
        prompt_ids, token_ids: the token ids of the prompt and the output.
        steps: all steps; their concatenated tokens are `token_ids`.
        start: seconds from the arrival of the first lane to the arrival of this one.
        seconds, first_token_seconds: see `Completion`.
        plain_seconds: the time without speculation, estimated from the cost of steps without drafts; None if
            unknown.
    """

    name: str
    prompt: list[str]
    prompt_ids: list[int]
    output: list[str]
    token_ids: list[int]
    steps: list[StepRecord]
    start: float
    seconds: float
    first_token_seconds: float
    finish_reason: str
    acceptance: str
    plain_seconds: float | None


@dataclass
class Trace:
    """A trace of an engine's outputs.

    Attributes:
        about: the engine's model and settings.
        lanes: the outputs, in order of arrival.
        texts: the text of every token and draft, by id; U+FFFD for incomplete characters.
        num_omitted: the number of earlier outputs that are not in `lanes`.
    """

    about: dict[str, str] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    texts: dict[int, str] = field(repr=False, default_factory=dict)
    num_omitted: int = 0

    @classmethod
    def of(cls, outputs: Sequence[Completion], num_omitted: int = 0) -> Trace:
        """Return the trace of outputs of one engine. Raises ValueError unless it had `trace=True`."""
        if not outputs:
            return cls()
        records: list[Any] = [output.extension_data for output in outputs]
        if None in records:
            raise ValueError(NOT_TRACED)
        tokenizer, first = records[0].tokenizer, min(record.arrival for record in records)
        lanes = [_lane(*each, first) for each in zip(outputs, records)]
        ids = {i for record in records for step in record.steps for i in (*step.tokens, *step.drafts)}
        return cls(records[0].about, lanes, {i: tokenizer.text_of(i) for i in sorted(ids)}, num_omitted)

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as data that JSON can represent. Floats are rounded to `DIGITS` digits."""
        text = json.dumps(asdict(self))
        data: dict[str, Any] = json.loads(text, parse_float=lambda x: float(f"{float(x):.{DIGITS}g}"))
        return data

    def html(self) -> str:
        """Return the HTML page."""

        def part(name: str) -> str:
            return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")

        scripts = "\n".join(part(f"{name}.js") for name in SCRIPTS)
        page = part("page.html").replace("/* page.css */", part("page.css")).replace("/* scripts */", scripts)
        return page.replace("{data}", embedded(self.to_dict()))  # last, as data may contain placeholders

    def save(self, path: str | Path) -> None:
        """Write the HTML page to a file. Raises OSError, or ValueError (see `check_target`)."""
        check_target(path)
        Path(path).write_text(self.html(), encoding="utf-8")


def check_target(path: str | Path) -> None:
    """Raise OSError if `path` cannot be written, ValueError if it is a file with other contents than HTML."""
    path = Path(path)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if not file.read(256).lstrip().lower().startswith((b"<!doctype html", b"<html")):
                raise ValueError(f"{path} is not an HTML file; specify another file for the trace.")
    path.open("ab").close()


def embedded(data: object) -> str:
    """Return JSON to embed in a script element: ASCII, with the special characters of HTML escaped."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _lane(output: Completion, record: Record, begin: float) -> Lane:
    """Return the lane of an output. `begin` is the arrival time of the first request in the trace."""
    steps, detokenizer = record.steps, Detokenizer(record.tokenizer, skip_special_tokens=False)
    prompt = [detokenizer.push([token]) for token in record.prompt_ids]
    prompt[-1:] = [text + detokenizer.flush() for text in prompt[-1:]]
    token_ids = output.token_ids[: record.num_tokens - len(record.prompt_ids)]  # may lack the last step
    later = sum(len(step.tokens) * step.plain_ms for step in steps)
    later -= steps[0].plain_ms if steps else 0.0  # speculation does not change the time to first token
    return Lane(
        name=record.id,
        prompt=prompt,
        prompt_ids=record.prompt_ids,
        output=[piece.text for piece in output.pieces[: len(token_ids)]],
        token_ids=token_ids,
        steps=steps,
        start=record.arrival - begin,
        seconds=output.seconds,
        first_token_seconds=output.first_token_seconds,
        finish_reason=output.finish_reason,
        acceptance=output.stats.acceptance,
        plain_seconds=output.first_token_seconds + later / 1e3 if later > 0 else None,
    )
