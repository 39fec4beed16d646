"""The trace of an engine's outputs, as plain data and as an HTML page.

    trace = llm.generate(...)[0].trace()
    trace.lanes[0].steps[0].drafts, trace.to_dict(), trace.save("trace.html")

A *lane* is one output. The page is a single HTML file that needs no network: the files of `page/` with the
data of `to_dict` among them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ...outputs import NOT_TRACED, Completion
from ...text.tokenizer import Detokenizer

DIGITS = 4  # of measured numbers, as they are written
SCRIPTS = ("data", "text", "steps", "tree", "arrows", "race", "lanes", "main")  # of `page/`, in this order


@dataclass(slots=True)
class StepRecord:
    """One step of one request.

    Attributes:
        at: seconds from the request's arrival to the end of the step.
        ms: the time of the whole step by stage, with prefill and host since the step before.
        batch: the number of requests in the step.
        tokens: the tokens of the step that the request kept.
        method, match_len: the name of the drafter; the length of its n-gram match, 0 for a model.
        drafts, sources, parents: all drafts; see `Proposal`. In a chain the parent of a draft is the place
            before: 0, 1, ...
        verified: how many of them, from the first on, were verified.
        accepted: the places (from 1 on) of the drafts among `tokens`.
        reason: why so many were verified: "off", "end" (the last token), "no match", "fixed", "pays",
            "does not pay", "probe".
        promised: the estimated tokens per ms of the whole step, divided by those of a step without drafts;
            None if the policy made no estimate.
        plain_ms: the estimated time of the step without drafts: its own time, scaled by the times that were
            measured at the start.
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
    promised: float | None
    plain_ms: float


@dataclass
class Record:
    """The steps of a request, and what a `Lane` needs besides its completion."""

    tokenizer: Any  # a `Tokenizer`, needed for a trace only
    about: dict[str, str]  # the engine's model and settings, for the page
    id: str
    prompt_ids: list[int]
    arrival: float
    num_tokens: int  # of the prompt and all steps
    steps: list[StepRecord] = field(default_factory=list)

    def trace(self, outputs: Sequence[Completion]) -> Trace:
        """Return the trace of outputs of this record's engine, which all have records."""
        return Trace.of(outputs)


@dataclass
class Lane:
    """The trace of one output.

    Attributes:
        name: the request's id.
        prompt, output: the text of each token; an output's is what the token completed, as in `Piece`.
        prompt_ids, token_ids: the ids of these tokens.
        steps: all steps; their tokens, joined, are `token_ids`.
        start: seconds from the first lane's arrival to this one's.
        seconds, first_token_seconds: as in `Completion`.
        plain_seconds: the time without drafts: measured, or estimated from the measured cost of steps without
            drafts; None if neither is known.
        plain_is_measured: whether it was measured.
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
    plain_is_measured: bool = False


@dataclass
class Trace:
    """The trace of some outputs of one engine.

    Attributes:
        about: the engine's model and settings.
        lanes: the outputs, in the order of their arrival.
        texts: the texts of all drafts and tokens, by id; U+FFFD for parts of characters.
        num_omitted: the number of outputs that were left out.
    """

    about: dict[str, str] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    texts: dict[int, str] = field(repr=False, default_factory=dict)
    num_omitted: int = 0

    @classmethod
    def of(cls, outputs: Sequence[Completion], num_omitted: int = 0) -> Trace:
        """Return the trace of outputs of one engine. Raises ValueError if it had no `trace=True`."""
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
        """Return everything as plain data, as JSON has it; times and rates are rounded."""
        text = json.dumps(asdict(self))
        data: dict[str, Any] = json.loads(text, parse_float=lambda x: float(f"{float(x):.{DIGITS}g}"))
        return data

    def html(self) -> str:
        """Return the page."""

        def part(name: str) -> str:
            return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")

        scripts = "\n".join(part(f"{name}.js") for name in SCRIPTS)
        page = part("page.html").replace("/* page.css */", part("page.css")).replace("/* scripts */", scripts)
        return page.replace("{data}", embedded(self.to_dict()))  # last: it has no places to fill

    def save(self, path: str | Path) -> None:
        """Write the page to a file, whole or not at all. Raises ValueError or OSError, see `check_target`."""
        check_target(path)
        page, target = self.html().encode(), Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe
            target.write_bytes(page)
            return
        new = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            new.write_bytes(page)
            os.replace(new, target)
        except OSError as error:  # a full disk has no name
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            new.unlink(missing_ok=True)


def check_target(path: str | Path) -> None:
    """Raise ValueError if a page cannot be written there, or if that would destroy something else."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it, such as {path / 'trace.html'}.")
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {path.parent} for the trace {path.name}; make or name one.")
    needed = [path] if path.exists() else []
    if not needed or path.is_file():  # a new file takes its place in the folder
        needed.append(Path(os.path.realpath(path)).parent)
    if not all(os.access(each, os.W_OK) for each in needed):
        raise ValueError(f"{path} cannot be written; name another file for the trace.")
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if not file.read(256).lstrip().lower().startswith((b"<!doctype html", b"<html")):
                raise ValueError(f"{path} exists and is no HTML page; name another file for the trace.")


def embedded(data: object) -> str:
    """Return JSON for a script element: ASCII, without characters that are special in HTML."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _lane(output: Completion, record: Record, begin: float) -> Lane:
    """Return the trace lane of an output; `begin` is when the first request of the trace arrived."""
    steps, detokenizer = record.steps, Detokenizer(record.tokenizer, skip_special_tokens=False)
    prompt = [detokenizer.push([token]) for token in record.prompt_ids]
    prompt[-1:] = [text + detokenizer.flush() for text in prompt[-1:]]
    token_ids = output.token_ids[: record.num_tokens - len(record.prompt_ids)]  # the last step may be missing
    later = sum(len(step.tokens) * step.plain_ms for step in steps)
    later -= steps[0].plain_ms if steps else 0.0  # the first token takes as long
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
