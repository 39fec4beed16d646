"""Measure the engine's tokens per second with random weights and replayed outputs of real text.

    python bench/e2e.py [--shape qwen3-0.6b] [--batches 1 16 64] [--max-tokens 200] [--out bench/results]

The output of each request is a reference text (`ReplayWorker`), while the device does all the work of
decoding, so the matches and acceptance rates are those of real text. The texts are from this repository:
`code edits` repeats a file with one name changed, and `prose` continues a page of the documentation. A token
is a word or a punctuation mark; prompts have at most `--prompt` of them. A batch size may take about
`--seconds`. K = 0, fixed K and automatic K alternate; speedups over K = 0 are computed per round. Before, the
model's own outputs with and without speculation are compared.
"""

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import nanospec.device.step
import nanospec.device.worker
from bench import common, roofline
from bench.rows import Rows
from bench.rows import run as run_rows
from bench.steps import STEP_BYTES, cache_bytes, engine_config, load_shape
from nanospec import SamplingParams
from nanospec.config import EngineConfig
from nanospec.device.messages import Admission
from nanospec.device.step import Step, StepResult
from nanospec.device.worker import Worker
from nanospec.drafters import Drafter
from nanospec.drafters.ngram import NgramDrafter
from nanospec.engine.engine import Engine
from nanospec.kernels.batch import Batch
from nanospec.kernels.sampling.sample import sample
from nanospec.kernels.table import Table
from nanospec.kernels.transfer import write
from nanospec.models.decoder import Model

Text = tuple[list[int], list[int]]
"""The token ids of a prompt and of its output."""
ROWS = 8  # requests of the comparison with and without speculation
SYSTEMS: dict[str, int | str] = {"K=0": 0, "K=4": 4, "auto": "auto"}


class ReplayStep(Step):
    """A step that replaces the model's target tokens with those of reference texts.

    Attributes:
        texts, lengths: prompts with reference outputs by request row, and their lengths.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.texts = torch.zeros_like(self.table.tokens)
        self.lengths = torch.zeros_like(self.table.num_tokens)

    def __call__(self, *args: Any, **kwargs: Any) -> StepResult:
        with patch.object(nanospec.device.step, "sample", self._replayed):
            return super().__call__(*args, **kwargs)

    def _replayed(self, logits: Tensor, table: Table, batch: Batch) -> Tensor:
        t = torch.arange(batch.num_tokens, device=batch.q_start.device, dtype=batch.q_start.dtype)
        row = batch.rows.clamp(min=0)[torch.searchsorted(batch.q_start, t, right=True) - 1]
        at, drawn = batch.positions + 1, sample(logits, table, batch)
        known = at < self.lengths[row]
        return torch.where(known, self.texts[row, torch.where(known, at, 0)], drawn)


class ReplayWorker(Worker):
    """A worker that outputs a request's reference text, and continues with the model's own tokens after its
    end. Results are marked as `simulated`."""

    _step: ReplayStep

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        drafters: Sequence[Drafter],
        references: Mapping[tuple[int, ...], Sequence[int]],
    ) -> None:
        """Create the worker. `references` maps prompt ids to output ids."""
        self.references = references
        with patch.object(nanospec.device.worker, "Step", ReplayStep):
            super().__init__(config, model, drafters)

    def admit(self, request: Admission) -> None:
        super().admit(request)
        prompt = request.tokens[: request.num_prompt]
        text = [*prompt, *self.references[tuple(prompt)]][: self._step.texts.shape[1]]
        write(self._step.texts, request.row, text)
        self._step.lengths[request.row].fill_(len(text))


def texts(vocab_size: int, count: int, length: int) -> dict[str, list[Text]]:
    """Return `count` prompts of at most `length` tokens, with their outputs, by kind of text."""
    ids: dict[str, int] = {}

    def tokens(text: str) -> list[int]:
        return [ids.setdefault(word, len(ids)) % vocab_size for word in re.findall(r"\w+|[^\w\s]|\s+", text)]

    code = sorted(path.read_text(encoding="utf-8") for path in (common.ROOT / "nanospec").rglob("*.py"))
    pages = sorted(path.read_text(encoding="utf-8") for path in (common.ROOT / "docs").glob("*.md"))
    edits, prose = list[Text](), list[Text]()
    for text in (text for text in code if len(text) > 3000):
        names = re.findall(r"def (\w+)", text) or ["x"]
        edited = tokens(re.sub(rf"\b{names[0]}\b", f"new_{names[0]}", text))
        edits.append((tokens(text)[:length], edited))
    for page in pages:
        every = tokens(page)[: 4 * length // 3]
        prose.append((every[: 3 * len(every) // 4], every[3 * len(every) // 4 :]))
    return {"code edits": (edits * count)[:count], "prose": (prose * count)[:count]}


def measure(out: Rows, args: argparse.Namespace) -> None:
    model = load_shape(args.shape, out)
    args.window = args.prompt + args.max_tokens + 32
    what = f"{args.shape} with and without speculation"
    if out.fits(what, cache_bytes(model, ROWS, args.window) + STEP_BYTES) and out.begins(what):
        with out.attempt(what):
            check_identity(out, model, args)
    each = {batch: cache_bytes(model, batch, args.window) + STEP_BYTES for batch in args.batches}
    args.batches = [b for b, size in each.items() if out.fits(f"{args.shape} B={b}", len(SYSTEMS) * size)]
    if not args.batches:
        return
    texts_of_kind = texts(model.config.vocab_size, max(args.batches), args.prompt)
    references = {tuple(prompt): output for pairs in texts_of_kind.values() for prompt, output in pairs}
    engines: dict[str, Engine] = {}
    for name, k in SYSTEMS.items():
        with out.attempt(f"start of {args.shape} {name}"):
            start = time.perf_counter()
            config = engine_config(model, max(args.batches), args.window, k, lazy=k != "auto")
            worker = ReplayWorker(config, model, [NgramDrafter(config.spec)], references)
            engines[name] = Engine(config, worker)
            out.add(f"{args.shape} {name} starts in {time.perf_counter() - start:.1f} s")
    for batch in args.batches:
        for kind, pairs in texts_of_kind.items():
            what = f"{args.shape} {kind} B={batch}"
            if "K=0" in engines and out.begins(what, args.seconds):
                with out.attempt(what):
                    compare(out, engines, what, pairs[:batch], args)


def check_identity(out: Rows, model: Model, args: argparse.Namespace) -> None:
    """Compare outputs of a batch with K = 4 with those of one request at a time without speculation. These
    are the model's own tokens, with a bias towards few of them, so that some drafts are accepted."""
    vocab, count = model.config.vocab_size, min(args.max_tokens, 48)
    outputs: list[list[list[int]]] = []
    for batch, k in ((1, 0), (ROWS, 4)):
        config = engine_config(model, batch, args.window, k)
        engine, requests = Engine(config, Worker(config, model, [NgramDrafter(config.spec)])), []
        for i in range(ROWS):
            bias = dict.fromkeys(range(5, 6 + i), 10.0)
            params = SamplingParams(
                temperature=i % 2, seed=i, max_tokens=count, ignore_eos=True, logit_bias=bias
            )
            prompt = [(i + 1) * j**2 % vocab for j in range(args.prompt * (i + 1) // ROWS)]
            requests.append(engine.add(prompt, params))
        while engine.has_work:
            engine.step()
        outputs.append([request.output_ids for request in requests])
    same, accepted = outputs[0] == outputs[1], sum(request.stats.num_accepted for request in requests)
    wrong = not (same and accepted)
    out.failed += wrong
    text = f"{'WRONG ' * wrong}{args.shape}: outputs with K = 4 and K = 0 {'are equal' if same else 'differ'}"
    out.add(f"{text}, {accepted} accepted drafts", headline=True, wrong=wrong, accepted=accepted)


def compare(
    out: Rows, engines: dict[str, Engine], what: str, pairs: list[Text], args: argparse.Namespace
) -> None:
    """Write a row for each engine. The first round, which captures the steps, is not counted."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(args.repeats + 1):
        for name, engine in engines.items():
            runs[name].append(run(engine, pairs, args.max_tokens))
    for name in engines:
        rates, plain = ([r["tokens_per_second"] for r in runs[which][1:]] for which in (name, "K=0"))
        rate, ratio = common.spread(rates), common.spread([a / b for a, b in zip(rates, plain, strict=True)])
        last = runs[name][-1]
        text = f"{what:32} {name:5}{rate['median']:9.0f} tok/s {ratio['median']:5.2f}x "
        out.add(
            f"{text} {last['tokens_per_step']:.2f} tokens per step, {last['step_ms']:.3f} ms per step",
            headline=True, case=what, system=name, rate=rate, speedup=ratio, **last,
            simulated="replay",
        )  # fmt: skip


def run(engine: Engine, pairs: list[Text], max_tokens: int) -> dict[str, float]:
    """Run all requests as one batch."""
    steps, start = engine.metrics.num_forward_steps, time.perf_counter()
    requests = []
    for prompt, output in pairs:
        count = min(len(output), max_tokens)
        requests.append(engine.add(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    seconds, own = time.perf_counter() - start, [request.stats for request in requests]
    return {
        "tokens_per_second": sum(len(r.output_ids) for r in requests) / seconds,
        "tokens_per_step": round(sum(s.num_tokens for s in own) / max(sum(s.num_steps for s in own), 1), 3),
        "step_ms": round(1e3 * seconds / (engine.metrics.num_forward_steps - steps), 4),
    }


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, repeats=3, prompt=1024, max_tokens=200, seconds=15.0)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*roofline.MODELS, "tiny"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    run_rows("e2e", measure, parser, argv)


if __name__ == "__main__":
    main()
