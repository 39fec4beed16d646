"""Requests replayed against what the target said: the steps of `recycle.py`.

The texts are the model's own answers to Spec-Bench's six groups and code edits, with what it finds likeliest
behind every token of prompt and answer. Steps are made with the operations of the engine: lookup, `grow`, the
choice of how many drafts to verify, the walk of verification, the record of `learn`. Only the target is
replaced by what it said. So of a rejected draft nothing is known, and nothing is kept, where the engine keeps
what the target says behind it, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import common
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.drafters.base import nothing
from nanospec.drafters.policy import Policy
from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.codes import NOBODY as NO_DRAFTER
from nanospec.kernels.speculation import grow, learn, ngram
from nanospec.kernels.speculation.recycled import ANY, ID_BITS, NO_TOKEN, Recycled, place
from nanospec.kernels.speculation.walk import Row
from nanospec.kernels.table import Table
from nanospec.models.kv_cache import empty_cache

GROUPS = ("chat", "translation", "summarization", "qa", "math_reasoning", "rag")
LONGEST = 1500  # tokens of a prompt
VOCABULARY = 1 << ID_BITS  # any
MIN_N, MAX_N = SpecConfig.prompt_lookup_min, SpecConfig.prompt_lookup_max
BLOCK = 16


class Text(NamedTuple):
    """A request: its prompt's length, the length at which it ends, all its tokens, and the entry
    (`recycled.py`) of what the target said behind each of them."""

    kind: str
    temperature: float
    seed: int
    prompt: int
    max_len: int
    tokens: list[int]
    entries: list[list[int]]


class Way(NamedTuple):
    """How drafts are made. Without `noise` as if the request were greedy; `start` says what is kept:

    cold         nothing
    prompt       nothing, but what the tokens of its own prompt gave is written first
    warm         all that earlier requests wrote, which is what the engine does
    warm+prompt  both
    """

    lookup: bool = True
    recycled: bool = True
    start: str = "warm"
    pairs: bool = True
    noise: bool = True
    grow: Callable[..., tuple[Any, grow.Marks]] = grow.grow


class Total(NamedTuple):
    """Of a request: tokens, steps, ms of its steps, and of steps without drafts."""

    tokens: int
    steps: int
    ms: float
    plain_ms: float


class Replay:
    """One request row of an engine, whose target says what it said."""

    def __init__(self, way: Way, k: int, max_context: int, policy: Policy) -> None:
        self.way, self.k, self.policy = way, k, policy
        self.state, self.rows = Recycled.empty(1, VOCABULARY, "cpu"), torch.zeros(1, dtype=torch.int32)
        self.table = Table.empty(1, max_context, BLOCK, 0, "cpu")
        self.table.min_n.fill_(MIN_N)
        self.table.max_n.fill_(MAX_N)

    def request(self, text: Text) -> Total:
        """Write the answer of a text."""
        table, tokens = self.table, text.tokens
        table.tokens[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        table.limit[0], table.max_len[0], table.seed[0] = self.k, text.max_len, text.seed
        table.temperature[0] = text.temperature if self.way.noise else 0.0
        if not self.way.start.startswith("warm"):
            self.state = Recycled.empty(1, VOCABULARY, "cpu")
        self.state.record[0].zero_()
        self.policy.reset(0)
        if self.way.start.endswith("prompt"):
            self._keep(text, range(text.prompt - 1))
        length, steps, ms = text.prompt, 0, 0.0
        while length < len(tokens):
            emitted, cost = self._step(text, length)
            self._keep(text, range(length - 1, length - 1 + emitted))
            length, steps, ms = length + emitted, steps + 1, ms + cost
        count, costs = len(tokens) - text.prompt, self.policy.costs
        return Total(count, steps, ms, count * costs.cost(1, 1) if costs else count)

    def _step(self, text: Text, length: int) -> tuple[int, float]:
        """How many tokens the next step emits, and how long it takes."""
        table, policy, costs = self.table, self.policy, self.policy.costs
        table.num_tokens[0] = length
        k = policy.choose([0], [min(self.k, text.max_len - length - 1)])
        drafts, parents, likely, marks, match = self._propose(k) if k else ([], [], [], None, 0)
        row = Row(0, 0, [text.tokens[length - 1], *drafts], [0, *parents])
        depth = [0]
        for parent in parents:
            depth.append(depth[parent] + 1)
        behind = [*text.tokens[length:], *[-1] * len(depth)]
        path = list(row.walk([behind[d] for d in depth]))
        if marks is not None and drafts:
            kinds, shares = marks.kind[0].tolist(), marks.expected[0].tolist()
            learn.count(self.state.record[0], row, set(path), kinds, shares)
        seen = 0 if drafts else NO_DRAFTER, match, len(drafts), len(path) - 1
        policy.observe(0, *seen, likely[: len(drafts)], min(k, text.max_len - length - 1))
        scored = k + 1 if costs and costs.captured else len(row.ids)
        return min(len(path), len(text.tokens) - length), costs.cost(1, scored) if costs else 1.0

    def _propose(self, k: int) -> tuple[list[int], list[int], list[float], grow.Marks | None, int]:
        """The drafts to verify, their parents and chances, what `grow` marks, and the length of the match."""
        base = ngram.propose(self.table, self.rows, k, MAX_N) if self.way.lookup else nothing(self.rows, k)
        tree, marks = base, None
        if self.way.recycled:
            tree, marks = self.way.grow(base, self.state, self.table, self.rows, k)
        count, match = int(tree.num_drafts[0]), int(tree.match_len[0])
        if count and not (self.policy.costs and self.policy.costs.captured):
            chances = None if tree.chances is None else tree.chances.tolist()
            count = self.policy.cut([0], [0], [count], [match], chances)[0]
        parents = [*range(count)] if tree.parents is None else tree.parents[0, :count].tolist()
        likely = [] if tree.chances is None else tree.chances[0, :count].tolist()
        return tree.drafts[0, :count].tolist(), parents, likely, marks, match

    def _keep(self, text: Text, positions: Iterable[int]) -> None:
        """Write the entries of these tokens, and of the pairs that they make with those before them."""
        if not self.way.recycled:
            return
        for i in positions:
            entry = torch.tensor(text.entries[i], dtype=torch.int32)
            before = text.tokens[i - 1] if i else NO_TOKEN
            for context in (ANY, before) if self.way.pairs else (ANY,):
                at = place(context, text.tokens[i], 0)
                self.state.entries[at.row], self.state.tags[at.row] = entry, at.tag


# ---- texts -------------------------------------------------------------------------------------


def collect(prompts: int, max_tokens: int) -> list[Text]:
    """Have the model answer, then score what it wrote."""
    llm = LLM("smollm2-135m-instruct", dtype="bfloat16", max_model_len=2048, max_num_seqs=8)
    kinds = {group: common.spec_bench(prompts, group) for group in GROUPS}
    kinds["code edits"] = common.code_edits(prompts)
    found = []
    for temperature in (0.0, 1.0):
        for kind, messages in kinds.items():
            chats = [llm.chat_prompt([{"role": "user", "content": text}])[-LONGEST:] for text in messages]
            sampled = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(prompts)
            ]
            for i, (chat, out) in enumerate(zip(chats, llm.generate(chats, sampled), strict=True)):
                tokens, end = [*chat, *out.token_ids], len(chat) + max_tokens
                entries = said(llm, tokens)
                found.append(Text(kind, temperature, i, len(chat), end, tokens, entries))
    return found


def said(llm: LLM, tokens: list[int]) -> list[list[int]]:
    """The entries of what the model says behind each token."""
    model, count = llm.engine.worker.model, len(tokens)
    blocks = -(-count // BLOCK)
    table = Table.empty(1, blocks * BLOCK, BLOCK, model.config.vocab_size, "cpu")
    table.tokens[0, :count], table.num_tokens[0] = torch.tensor(tokens, dtype=torch.int32), count
    table.block_table[0] = torch.arange(blocks)
    batch, cache = Batch.of_chunks(table, [Chunk(0, 0, count)]), empty_cache(model, blocks, BLOCK)
    with torch.inference_mode():
        hidden = model.forward(batch, cache)
        return [e for part in hidden.split(256) for e in learn.entries_of(model.logits(part)).tolist()]


def load(path: Path | None, prompts: int, max_tokens: int) -> list[Text]:
    """The texts of a file, or new ones, which it then keeps."""
    if path and path.is_file():
        return [Text(*row) for row in json.loads(path.read_text())]
    texts = collect(prompts, max_tokens)
    if path:
        path.write_text(json.dumps(texts))
    return texts
