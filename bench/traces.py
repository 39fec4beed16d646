"""Traces of n-gram lookup on real text, without a model: the input of `simulate.py`.

A reference text replaces the target's output. The engine's lookup runs after each token; a `Trace` has the
match length and the number of leading drafts that equal the reference. With K drafts, min(K, that number) are
accepted. Synthetic traces accept each draft with a given probability instead.

Workloads: the answer of a code edit after its instruction and code; a passage after the request to repeat it
(short and long); and the last quarter of a news article, of retrieved passages or of a scene of Shakespeare
after the first three quarters. The last three continue human text, which repeats words and names but hardly
any phrases: the worst case. `answers` are outputs of a model.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench import common
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.kernels.speculation import ngram
from nanospec.kernels.table import Table
from nanospec.text.tokenizer import Tokenizer

MAX_DRAFTS = 16
Text = tuple[list[int], list[int]]
"""The token ids of a prompt and of the reference that continues it."""


@dataclass(frozen=True)
class Trace:
    """The results of n-gram lookup for one request, at each position of its output.

    Attributes:
        match: the match length, 0 for no match.
        run: the number of leading drafts that are correct, at most MAX_DRAFTS.
    """

    match: list[int]
    run: list[int]

    def __len__(self) -> int:
        return len(self.match)

    def drafts(self, position: int, k: int) -> int:
        """Return the number of drafts at a position: 0 without a match and at the last token."""
        return min(k, len(self.match) - position - 1) if self.match[position] else 0


def replay(text: Text, min_n: int, max_n: int) -> Trace:
    """Run the engine's lookup over a text: the longest match, and the latest of equally long ones."""
    reference = text[1]
    table = after_each_token(text, MAX_DRAFTS, min_n=min_n, max_n=max_n)
    found = ngram.naive(table, torch.arange(len(reference)), MAX_DRAFTS, max_n)
    matches = found.match_len.tolist()
    runs = [
        common_prefix(drafts, reference[i : i + MAX_DRAFTS]) if matches[i] else 0
        for i, drafts in enumerate(found.drafts.tolist())
    ]
    return Trace(matches, runs)


def after_each_token(text: Text, k: int, **rows: int) -> Table:
    """Return a table with a row for each prefix of the reference; `rows` are values of further columns."""
    prompt, reference = text
    tokens, count = torch.tensor([prompt + reference], dtype=torch.int32), len(reference)
    table = Table.empty(count, 1, 16, 0, "cpu")
    values = {"max_k": k, "max_len": tokens.shape[1] + k + 1, **rows}
    for name, value in values.items():
        getattr(table, name).fill_(value)
    lengths = torch.arange(len(prompt), tokens.shape[1], dtype=torch.int32)
    return table._replace(tokens=tokens.expand(count, -1), num_tokens=lengths, max_context=tokens.shape[1])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def workloads(tokenizer: Tokenizer, count: int = 40) -> dict[str, list[Text]]:
    """Return real texts by workload; see the module docstring."""

    def answer(message: str, reply: str) -> Text:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": message}])
        return tokenizer.encode(chat, add_special_tokens=False), tokenizer.encode(reply, False)

    def rest(passage: str) -> Text:
        tokens = tokenizer.encode(passage)
        return tokens[: 3 * len(tokens) // 4], tokens[3 * len(tokens) // 4 :]

    scenes, size = common.shakespeare(), 4000
    passages = [scenes[i : i + size] for i in range(0, len(scenes) - size, size)]
    random.Random(0).shuffle(passages)
    quote = "Repeat this text word for word:\n\n"
    return {
        "code edits": [answer(*pair) for pair in common.code_edit_pairs(count)],
        "quotation": [answer(m, m.removeprefix(quote)) for m in common.quotations(count)],
        "long quotation": [answer(quote + p, p) for p in passages[: -(-count // 4)]],
        "retrieval": [rest(p) for p in common.spec_bench(count, "rag")],
        "news": [rest(p) for p in common.spec_bench(count, "summarization")],
        "Shakespeare": [rest(p) for p in passages[-count:]],
    }


def answers(name: str, count: int, max_tokens: int = 96) -> dict[str, list[Text]]:
    """Return greedy outputs of a model by workload."""
    llm = LLM(name, spec=SpecConfig(method="none"), max_num_seqs=16, max_model_len=2048)
    params, found = SamplingParams(temperature=0, max_tokens=max_tokens), {}
    for kind, group in {"answers, code": "coding", "answers, maths": "math_reasoning"}.items():
        prompts = [common.chat_prompt(llm.tokenizer, text) for text in common.spec_bench(count, group)]
        outputs = llm.generate(prompts, params)
        found[kind] = [(prompt, out.token_ids) for prompt, out in zip(prompts, outputs, strict=True)]
    return found


def synthetic(acceptance: float, match: float, tokens: int, seed: int = 0) -> Trace:
    """Return a random trace: lookup matches with probability `match`, and each draft is accepted with
    probability `acceptance`."""
    rng = random.Random(seed)
    matches, runs = [], []
    for _ in range(tokens):
        run = 0
        while run < MAX_DRAFTS and rng.random() < acceptance:
            run += 1
        found = rng.random() < match
        matches.append(3 if found else 0)
        runs.append(run if found else 0)
    return Trace(matches, runs)
