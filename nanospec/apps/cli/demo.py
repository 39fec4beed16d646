"""The demo (`make run`): three requests with and without speculation, compared in a table."""

from __future__ import annotations

from dataclasses import replace

from ...config import SamplingParams
from ...llm import LLM, RequestOutput
from .console import DIM, Console

CODE = """\
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
"""
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


def run_demo(llm: LLM, console: Console) -> None:
    """Answer the built-in requests greedily with and without speculation, and print a comparison."""
    console.show_drafts = console.color
    if console.color:
        console.line("Green: accepted drafts.", DIM)
    speculative = SamplingParams(temperature=0.0, max_tokens=240)
    plain = replace(speculative, num_speculative_tokens=0)
    llm.generate("Warm up.", plain)
    rows = []
    for name, question in REQUESTS.items():
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
        console.line(f"\n--- {name}: {question.splitlines()[0]}", DIM)
        outputs: list[RequestOutput] = []
        for pieces in llm.stream_pieces(prompt, speculative, outputs.append):
            console.pieces(pieces)
        console.line()
        rows.append(_row(name, llm.generate(prompt, plain)[0], outputs[0]))
    columns = "request", "tokens", "plain tok/s", f"{llm.config.spec.method} tok/s", "speedup"
    console.line()
    console.table((*columns, "tokens/step", "accepted", "equal"), rows)


def _row(name: str, plain: RequestOutput, spec: RequestOutput) -> tuple[str, ...]:
    """Return one row of the table."""
    before, after = _decode_rate(plain), _decode_rate(spec)
    stats = spec.stats
    return (
        name, str(len(spec.token_ids)), f"{before:.1f}", f"{after:.1f}", f"{after / before:.2f}x",
        f"{stats.tokens_per_step:.2f}", f"{stats.acceptance_rate:.0%}" if stats.num_drafted else "-",
        "yes" if plain.token_ids == spec.token_ids else "NO",
    )  # fmt: skip


def _decode_rate(output: RequestOutput) -> float:
    """Return the decoding speed in tokens per second, excluding the step of the first token."""
    seconds = output.seconds - output.first_token_seconds
    return (len(output.token_ids) - 1) / max(seconds, 1e-9)
