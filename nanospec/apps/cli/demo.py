"""Three requests with and without speculation, side by side: what `make run` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...config import SamplingParams, SpecConfig
from ...llm import LLM, RequestOutput
from .console import DIM, Console
from .trace import TraceFile

CODE = '''\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]

    def size(self):
        return len(self.items)
'''
STORY = """\
The lighthouse keeper rose before dawn, as she had done every day for thirty years. She climbed the \
hundred and twelve steps, wiped the salt from the glass, and put out the lamp only when the sun had \
cleared the horizon. Then she wrote the weather in her book: wind from the north-west, a heavy swell, \
two ships far out. Nobody had ever asked to read the book, and still she never missed a day."""

REQUESTS = {
    "code edit": f"Rename the class Stack to Pile and return the whole code.\n\n```python\n{CODE}```",
    "quotation": f"Repeat this text word for word:\n\n{STORY}",
    "open question": "Why do people enjoy music?",
}


def run_demo(
    model: str | Path, spec: SpecConfig, console: Console, options: dict[str, Any], trace: TraceFile
) -> None:
    """Answer the built-in requests greedily, streaming them, and compare with speculation off."""
    options = {**options, "enable_prefix_caching": False}  # the second run must not profit from the first
    llm = LLM(model, spec=spec, **options)
    console.show_drafts = console.colour
    if console.colour:
        console.line("Green: guessed, and right.", DIM)
    plain = SamplingParams(temperature=0.0, max_tokens=240, num_speculative_tokens=0)
    speculative = SamplingParams(temperature=0.0, max_tokens=240)
    llm.generate("Warm up.", plain)
    rows = []
    for name, question in REQUESTS.items():
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
        console.line(f"\n--- {name}: {question.splitlines()[0]}", DIM)
        with_drafts: list[RequestOutput] = []
        for pieces in llm.stream_pieces(prompt, speculative, with_drafts.append):
            console.pieces(pieces)
        console.line()
        without = llm.generate(prompt, plain)[0]
        trace.add(name, with_drafts[0], without)
        rows.append(_row(name, without, with_drafts[0]))
    console.line()
    console.table(
        (
            "request", "tokens", "plain tok/s", f"{spec.method} tok/s", "speed-up", "tokens/step", "accepted",
            "equal",
        ),
        rows,
    )  # fmt: skip


def _row(name: str, plain: RequestOutput, spec: RequestOutput) -> tuple[str, ...]:
    """One line of the table. Tokens per second are counted from the first token on."""
    before, after = decode_rate(plain), decode_rate(spec)
    stats = spec.stats
    return (
        name,
        str(len(spec.token_ids)),
        f"{before:.1f}",
        f"{after:.1f}",
        f"{after / before:.2f}x",
        f"{stats.tokens_per_step:.2f}",
        f"{stats.acceptance_rate:.0%}" if stats.num_drafted else "-",
        "yes" if plain.token_ids == spec.token_ids else "NO",
    )


def decode_rate(output: RequestOutput) -> float:
    """Return tokens per second of decoding, without the step that gave the first token."""
    seconds = output.seconds - output.first_token_seconds
    return (len(output.token_ids) - 1) / max(seconds, 1e-9)
