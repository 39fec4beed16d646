"""Scenarios as plain data, which can be saved, replayed and shrunk."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from campaigns.simulate.model import Mock
from campaigns.simulate.oracle import TEXT_VOCAB, Oracle, tokenizer
from nanospec.config import SamplingParams, SpecConfig
from nanospec.drafters.methods import resolve_drafters
from tests.nanospec.extras.grammar.guided import FORMATS

METHODS = ("none", "ngram", "draft", "dflash", "ngram+draft", "ngram+dflash")
CUSTOM = ("random", "mostly-correct")  # custom drafters: random drafts, and mostly correct drafts
CALLS = ("admit", "prefill", "step", "fetch")


@dataclass
class Scenario:
    """A simulation.

    Attributes:
        seed: the seed of the model and of all random choices during the run.
        engine: the settings from which `driver.py` creates the engine.
        jobs: the requests: {"prompt", "params", "arrives": the step of arrival, "ends": the number of steps
            until it is aborted or None, "index": the number of the output if n > 1, "salt": the cache salt}.
        faults: {"call": a method of the worker or "propose", "number": which call of it, "kind": "interrupt",
            "error", "memory" (out of memory), "panic", "abort" (of "job", in the middle of a step) or "clock"
            (a jump by "seconds"), "late": after the call instead of before}; or {"kind": "nan", "job",
            "number"}: the logits after `number` output tokens are NaN.
        threads: the number of threads that share the engine; 0 for a single loop.
    """

    seed: int
    engine: dict[str, Any]
    jobs: list[dict[str, Any]]
    faults: list[dict[str, Any]] = field(default_factory=list)
    threads: int = 0

    @classmethod
    def from_seed(cls, seed: int, text: bool = False) -> Scenario:
        """Generate the scenario of a seed. If `text`, it always has a tokenizer."""
        rng = random.Random(seed)
        engine = _engine(rng)
        engine["vocab"] = TEXT_VOCAB if text else engine["vocab"]
        jobs = [_job(rng, engine, seed) for _ in range(rng.choice((1, 2, 4, 7, 12, 20)))]
        more = random.Random(f"{seed}, more")  # a second generator, so that older seeds keep their scenarios
        if more.random() < 0.15:
            _outgrow(more, engine, jobs)
        _share_beginnings(rng, engine, jobs)
        _stop_inside(rng, engine, jobs, seed)
        _add_rare(more, engine, jobs, seed)
        faults = [_fault(rng, len(jobs)) for _ in range(rng.choice((0, 0, 0, 1, 2, 4)))]
        faults += _rare_faults(more, len(jobs))
        return cls(seed, engine, jobs, faults, rng.choice((0, 0, 0, 2, 3)))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        return cls(**json.loads(text))


def model_of(engine: dict[str, Any], seed: int) -> Mock:
    """Return the target model."""
    dtype = getattr(torch, engine["dtype"])
    return Mock(engine["vocab"], engine["window"], seed, engine["surprise"], dtype)


def oracle_of(model: Mock, engine: dict[str, Any], job: dict[str, Any]) -> Oracle:
    return Oracle(model, job["prompt"], params_of(job), engine, job.get("index", 0))


def params_of(job: dict[str, Any]) -> SamplingParams:
    params = dict(job["params"])
    bias = {int(token): value for token, value in params.pop("logit_bias", {}).items()}
    return SamplingParams(**params, logit_bias=bias)


def _engine(rng: random.Random) -> dict[str, Any]:
    size = rng.choice((16, 16, 32))
    window = rng.choice((rng.randint(2, 20), rng.randint(20, 60), *[rng.randint(60, 200)] * 4))
    rows = rng.choice((1, 2, 3, 5, 8))
    each = -(-window // size)
    method = rng.choice(METHODS * 2 + CUSTOM)
    engine = {
        "vocab": rng.choice((2, 3, 5, 17, 31, 64, TEXT_VOCAB, TEXT_VOCAB)),
        "window": window,
        "surprise": rng.choice((0.3, 1.0, 3.0)),
        "dtype": rng.choice(("float32", "bfloat16")),
        "method": method,
        "blur": rng.choice((0.0, 0.5, 2.0)),
        "k": rng.choice((0, 1, 2, 4, 8, 8, 13, 63, "auto", "auto")),
        "min_n": rng.choice((1, 1, 2, 3)),
        "tree_width": rng.choice((1, 1, 2, 4)),
        "acceptance": rng.choice(("exact", "exact", "exact", "typical", "typical")),
        "rows": rows,
        "blocks": rng.randint(each, rng.choice((each + 2, each + 2, each * rows + 1, 2 * each * rows))),
        "block_size": size,
        "budget": rng.choice((1, 5, 17, 64, 2048)),
        "caching": rng.random() < 0.7,
        "async_scheduling": rng.random() < 0.5,
        "captured": rng.random() < 0.4,
        "trace": rng.random() < 0.2,
    }
    if "draft" in method and engine["k"] == 63:
        engine["k"] = 16  # each draft takes a forward pass
    if not _fits(engine):
        engine["tree_width"] = 1
    return engine


def _fits(engine: dict[str, Any]) -> bool:
    """Return whether the drafting method supports the tree width."""
    if engine["method"] in CUSTOM or engine["tree_width"] > engine["vocab"]:
        return bool(engine["tree_width"] == 1)
    try:
        resolve_drafters(SpecConfig(method=engine["method"], tree_width=engine["tree_width"]), None)
    except ValueError:
        return False
    return True


def _job(rng: random.Random, engine: dict[str, Any], seed: int) -> dict[str, Any]:
    prompt = _prompt(rng, engine["vocab"], engine["window"] - 1)
    ends = rng.randint(0, 25) if rng.random() < 0.15 else None
    arrives = rng.choice((0, rng.randint(0, 5), rng.randint(0, 40)))
    params = _params(rng, engine)
    return {"prompt": prompt, "params": params, "arrives": arrives, "ends": ends}


def _prompt(rng: random.Random, vocab: int, longest: int) -> list[int]:
    phrase = [rng.randrange(vocab) for _ in range(rng.randint(1, 9))]
    prompt: list[int] = []
    for _ in range(rng.choice((1, 3, 9, 30))):
        prompt = prompt + phrase + [rng.randrange(vocab) for _ in range(rng.randint(0, 4))]
    return prompt[: rng.choice((1, longest, *[rng.randint(1, longest)] * 4))]


def _params(rng: random.Random, engine: dict[str, Any]) -> dict[str, Any]:
    vocab = engine["vocab"]
    limit = rng.randint(1, rng.choice((20, 60)))
    optional: dict[str, Callable[[], Any]] = {
        "top_p": lambda: rng.uniform(0.3, 1.0),
        "top_k": lambda: rng.randint(1, 10),
        "min_p": lambda: rng.uniform(0.0, 0.3),
        "stop_token_ids": lambda: [rng.randrange(vocab) for _ in range(rng.randint(1, 3))],
        "min_tokens": lambda: rng.randint(0, limit),
        "logprobs": lambda: rng.randint(0, min(5, vocab)),
        "presence_penalty": lambda: rng.uniform(-1, 1),
        "frequency_penalty": lambda: rng.uniform(-1, 1),
        "repetition_penalty": lambda: rng.uniform(0.7, 1.5),
        "logit_bias": lambda: {str(rng.randrange(vocab)): rng.uniform(-3, 5) for _ in range(3)},
        "num_speculative_tokens": lambda: rng.choice((0, 1, 5)),
        "tree_width": lambda: rng.randint(1, engine["tree_width"]),
    }
    probability = rng.choice((0.0, 0.1, 0.3))
    params = {name: value() for name, value in optional.items() if rng.random() < probability}
    params["temperature"] = rng.choice((0.0, 0.0, 0.3, 1.0))
    params["seed"] = rng.randrange(-(2**63), 2**63)
    params["max_tokens"] = limit if rng.random() < 0.9 else None
    if len(set(params.get("stop_token_ids", ()))) == vocab:
        params.pop("min_tokens", None)  # no token would be allowed
    if engine["acceptance"] != "exact" and engine["method"] != "none":
        params["acceptance"] = rng.choice((None, "exact", "exact", "typical"))
    if vocab == TEXT_VOCAB and rng.random() < 0.25:
        params["response_format"] = dict(rng.choice(FORMATS)[0])
        for name in ("min_tokens", "acceptance", "stop_token_ids", "logit_bias"):
            params.pop(name, None)
    return params


def _outgrow(rng: random.Random, engine: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
    """Let requests arrive together and outgrow the KV cache, so that some are preempted."""
    engine["window"] = max(engine["window"], 4 * engine["block_size"])
    engine["rows"] = rng.choice((3, 5, 8))
    engine["blocks"] = -(-engine["window"] // engine["block_size"]) + rng.randint(0, 2)
    for job in jobs:
        job["arrives"] = min(job["arrives"], rng.randint(0, 3))
        job["prompt"] = job["prompt"][: rng.randint(1, 2 * engine["block_size"])]
        params, limit = job["params"], rng.randint(30, 60)
        params["max_tokens"] = max(params["max_tokens"] or 0, params.get("min_tokens", 0), limit)


def _share_beginnings(rng: random.Random, engine: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
    """Give some prompts a prefix of another prompt, or all of it."""
    for job in jobs[1:]:
        if rng.random() < 0.4:
            other = rng.choice(jobs)["prompt"]
            begin = other[: rng.randint(1, len(other))] if rng.random() < 0.7 else other
            job["prompt"] = (begin + job["prompt"] * (rng.random() < 0.7))[: engine["window"] - 1]


def _stop_inside(
    rng: random.Random, engine: dict[str, Any], jobs: list[dict[str, Any]], seed: int, guided: bool = False
) -> None:
    """Let some requests, with a grammar if `guided`, stop at a token or string of their output."""
    model = model_of(engine, seed)
    for job in jobs:
        if rng.random() < 0.3 and guided == ("response_format" in job["params"]):
            expected = oracle_of(model, engine, job).run()
            if len(expected.text) > 1:
                at = rng.randrange(len(expected.text))
                job["params"]["stop"] = [expected.text[at : at + rng.randint(1, 4)], "no such text"]
            elif expected.token_ids:
                job["params"]["stop_token_ids"] = [rng.choice(expected.token_ids)]


def _fault(rng: random.Random, num_jobs: int) -> dict[str, Any]:
    kind = rng.choice(("interrupt", "error", "memory", "abort", "abort", "clock"))
    fault: dict[str, Any] = {"call": rng.choice(CALLS), "number": rng.randint(0, 12), "kind": kind}
    fault["late"] = rng.random() < 0.5
    if kind == "abort":
        fault["job"] = rng.randrange(num_jobs)
    if kind == "clock":
        fault["seconds"] = rng.choice((-86400.0, -1.0, 1.0, 86400.0))
    return fault


def _add_rare(rng: random.Random, engine: dict[str, Any], jobs: list[dict[str, Any]], seed: int) -> None:
    """Add rare features: several outputs, cache salts, EOS ignored, failing grammars."""
    for job in jobs[1:]:
        if rng.random() < 0.1:  # another output of an earlier request
            other = rng.choice(jobs)
            if other["params"].get("response_format") is None:
                same = {name: other[name] for name in ("prompt", "params", "arrives")}
                job.update(json.loads(json.dumps(same)), index=rng.randint(1, 3))
    if rng.random() < 0.2:
        for job in jobs:
            job["salt"] = rng.choice(("", "", "a", "b"))
    if engine["vocab"] == TEXT_VOCAB:
        if rng.random() < 0.2:
            _let_grammars_fail(rng, engine, jobs)
        for job in jobs:
            if "response_format" not in job["params"]:
                job["params"] |= {"ignore_eos": True} if rng.random() < 0.15 else {}
            elif rng.random() < 0.3:
                job["params"]["stop_token_ids"] = [rng.randrange(engine["vocab"]) for _ in range(3)]
        _stop_inside(rng, engine, jobs, seed, guided=True)


def _let_grammars_fail(rng: random.Random, engine: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
    """Add an ambiguous grammar, whose parses exceed the limit as the text gets longer."""
    engine["items"] = 60
    [end] = tokenizer().encode(";", add_special_tokens=False)
    rng.choice(jobs)["params"]["response_format"] = {}
    for job in jobs:
        if "response_format" in job["params"]:
            ambiguous = {"type": "grammar", "grammar": 'start: x ";"\nx: "a" | x x'}
            job["params"] = {name: job["params"][name] for name in ("temperature", "seed")}
            job["params"] |= {"max_tokens": 60, "response_format": ambiguous, "logit_bias": {str(end): -50.0}}


def _rare_faults(rng: random.Random, num_jobs: int) -> list[dict[str, Any]]:
    faults: list[dict[str, Any]] = []
    if rng.random() < 0.25:
        kind = rng.choice(("panic", "panic", "error", "interrupt"))
        late, number = rng.random() < 0.5, rng.randint(0, 12)
        faults.append({"call": rng.choice((*CALLS, "propose")), "number": number, "kind": kind, "late": late})
    if rng.random() < 0.15:
        faults.append({"kind": "nan", "job": rng.randrange(num_jobs), "number": rng.randint(0, 30)})
    return faults
