"""Engines on tiny models and shared test helpers: drafters, random requests, comparisons."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nanospec.config import EngineConfig, SamplingParams, SpecConfig
from nanospec.device.worker import Worker
from nanospec.drafters import Drafter, Target, draft_limits, make_proposal
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.hidden_states import HiddenStateDrafter
from nanospec.drafters.methods import Drafters, resolve_drafters
from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.extras import create_extensions
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from nanospec.outputs import Logprob
from nanospec.text.tokenizer import Tokenizer
from tests.random_weights import hidden_state_drafter
from tests.tiny import tiny_config

K = int | Literal["auto"] | None

# How steps run: eagerly, or as on a GPU: captured per bucket, with results collected one step later.
MODES: dict[str, dict[str, Any]] = {
    "plain": {"async_scheduling": False, "enforce_eager": True},
    "as-on-gpu": {"async_scheduling": True, "enforce_eager": False, "lazy_capture": True},
}


DEFAULTS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128}


class Job(NamedTuple):
    """A prompt and its sampling parameters."""

    prompt: list[int]
    params: SamplingParams


def greedy(max_tokens: int | None = 20, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


class Outcome(NamedTuple):
    """The part of a result that must not depend on speculation, the batch or the schedule."""

    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]]


def make_engine(
    model: Model, k: K = 4, *, num_blocks: int | None = None, min_n: int = 1,
    spec: dict[str, Any] | None = None, draft_model: Model | None = None,
    drafter: Drafters | None = None, tokenizer: Tokenizer | None = None, **options: Any,
) -> Engine:  # fmt: skip
    """Return an engine with k drafts per step (None: method "none") and `num_blocks` blocks. `spec` has
    further fields of its `SpecConfig`; `drafter` is as in `LLM`."""
    spec_config = make_spec(k, min_n, **(spec or {}))
    loaded: dict[str, Drafter] = {}
    if draft_model is not None:
        loaded["draft"] = ModelDrafter(spec_config, draft_model, model.config.vocab_size)
    made = drafters_of(spec_config, Target(model), loaded, drafter)
    if num_blocks is not None:
        size = options.get("block_size", EngineConfig.block_size)
        per_token = model.config.kv_bytes_per_token(model.dtype) + sum(d.memory.kv_per_token for d in made)
        options["kv_cache_memory"] = num_blocks * per_token * size
    config = EngineConfig(spec=spec_config, **{**DEFAULTS, **options})
    return Engine(config, Worker(config, model, made, create_extensions(config, tokenizer)), tokenizer)


def drafters_of(
    spec: SpecConfig, target: Target, loaded: Mapping[str, Drafter], given: Drafters | None = None
) -> tuple[Drafter, ...]:
    """Return the drafters of `load_drafters`, but take those of the methods in `loaded` from there. Those
    that read hidden states have random weights unless `spec` names a folder."""

    def load(part: Drafter | type[Drafter]) -> Drafter:
        if isinstance(part, Drafter) or part.name in loaded:
            return part if isinstance(part, Drafter) else loaded[part.name]
        if issubclass(part, HiddenStateDrafter) and spec.draft_model is None:
            return hidden_state_drafter(
                part.name, target.model, spec, vocab=target.model.config.vocab_size * 3 // 4
            )
        return part.load(spec, target)

    return tuple(map(load, resolve_drafters(spec, given) if spec.max_k else ()))


def make_spec(k: K, min_n: int = 1, **fields: Any) -> SpecConfig:
    """Return a config with k drafts per step (None: method "none")."""
    if k is None:
        return SpecConfig(method="none")
    lookup = {"prompt_lookup_min": min_n, "prompt_lookup_max": 4}
    return SpecConfig(num_speculative_tokens=k, **{**lookup, **fields})


def finish(engine: Engine, max_steps: int = 5000) -> None:
    """Step until the engine has no more work."""
    for _ in range(max_steps):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError(f"work is left after {max_steps} steps")


def run(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    """Run all jobs concurrently, and check that the engine is idle afterwards."""
    requests = [engine.add(job.prompt, job.params) for job in jobs]
    finish(engine)
    assert_idle(engine)
    return requests


def outcome(request: Request) -> Outcome:
    assert request.is_finished
    return Outcome(request.output_ids, request.finish_reason, request.logprobs)


def run_alone(model: Model, jobs: Sequence[Job], **options: Any) -> list[Outcome]:
    """Return reference outcomes: each job run alone, without speculation, prefix cache and chunking. Results
    are cached."""
    given = tuple(sorted(options.items()))
    known = _alone.setdefault(model, {})
    if new := {key: job for job in jobs if (key := (given, repr(job))) not in known}:
        engine = make_engine(model, None, max_num_seqs=1, enable_prefix_caching=False, **options)
        known.update({key: outcome(run(engine, [job])[0]) for key, job in new.items()})
    return [known[given, repr(job)] for job in jobs]


_alone: WeakKeyDictionary[Model, dict[Any, Outcome]] = WeakKeyDictionary()


def assert_same(actual: Outcome, expected: Outcome, what: object = "") -> None:
    """Check that tokens and finish reason are equal, and log-probabilities equal up to rounding."""
    assert actual.token_ids == expected.token_ids, what
    assert actual.finish_reason == expected.finish_reason, what
    assert len(actual.logprobs) == len(expected.logprobs), what
    for got, wanted in zip(actual.logprobs, expected.logprobs, strict=True):
        assert next(iter(got)) == next(iter(wanted)), what
        for token in got.keys() & wanted.keys():
            assert abs(got[token].logprob - wanted[token].logprob) < 1e-3, what
        assert len(got) == len(wanted), what


def run_and_compare(engine: Engine, model: Model, jobs: Sequence[Job], what: object = "") -> list[Request]:
    """Run the jobs and check their outcomes against `run_alone`."""
    requests = run(engine, jobs)
    for request, wanted in zip(requests, run_alone(model, jobs), strict=True):
        assert_same(outcome(request), wanted, what)
    return requests


def assert_idle(engine: Engine) -> None:
    """Check that no request is left and no row or block is held."""
    pool, scheduler = engine.scheduler.pool, engine.scheduler
    assert not [*scheduler.waiting, *scheduler.running]
    assert pool.num_free == pool.num_blocks
    assert sorted(scheduler._free_rows) == list(range(engine.config.max_num_seqs))


def cycle_model(vocab_size: int = 32) -> Model:
    """Return a float32 model in which t + 1 follows token t, and 0 the last token, with probability 1."""
    config, weights = cycle_weights(vocab_size)
    return Model(config, torch.float32, "cpu", weights.__getitem__)


def cycle_weights(vocab_size: int) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the config and weights of `cycle_model`."""
    config = tiny_config(vocab_size=vocab_size, hidden_size=vocab_size, num_layers=1)
    weights = {name: torch.zeros(shape) for name, shape in config.parameter_shapes().items()}
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight.fill_(1)
    weights["model.embed_tokens.weight"] = torch.eye(vocab_size)
    weights["lm_head.weight"] = 8 * torch.eye(vocab_size).roll(1, 0)
    return config, weights


def cycle(start: int, count: int, vocab_size: int = 32) -> list[int]:
    """Return `count` tokens of the text that `cycle_model` generates, from `start` on."""
    return [(start + i) % vocab_size for i in range(count)]


class FunctionDrafter(Drafter):
    """A drafter that proposes `next_tokens(history, count)`, truncated to the request's limits."""

    def __init__(self, next_tokens: Callable[[list[int], int], Sequence[int]]) -> None:
        self.next_tokens = next_tokens

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        drafts = []
        for s, wanted in zip(rows.tolist(), draft_limits(table, rows, k).tolist()):
            history = table.tokens[s, : int(table.num_tokens[s])].tolist()
            drafts.append(list(self.next_tokens(history, wanted))[:wanted] if wanted else [])
        padded = [d + [0] * (k - len(d)) for d in drafts]
        count = torch.tensor([len(d) for d in drafts], dtype=torch.int32)
        tokens = torch.tensor(padded, dtype=torch.int32).view(len(drafts), k)
        return make_proposal(tokens, count)


def known_text_drafter(
    texts: Sequence[list[int]], wrong: Callable[[int], bool] = lambda at: False
) -> FunctionDrafter:
    """Return a drafter that proposes the continuation of the text (prompt + output) that starts with the
    history. At absolute positions `at` where `wrong(at)` holds, it proposes another token."""

    def next_tokens(history: list[int], wanted: int) -> list[int]:
        n = len(history)
        text = next((t for t in texts if t[:n] == history and len(t) > n), history)
        return [t + (1 if t == 0 else -1) if wrong(n + i) else t for i, t in enumerate(text[n : n + wanted])]

    return FunctionDrafter(next_tokens)


def random_drafter(vocab_size: int, seed: int = 0) -> FunctionDrafter:
    """Return a drafter that proposes a random number of random tokens."""
    rng = random.Random(seed)
    return FunctionDrafter(lambda _, wanted: rng.choices(range(vocab_size), k=rng.randint(0, wanted)))


def random_jobs(
    rng: random.Random, vocab_size: int, count: int, max_prompt: int = 60, max_tokens: int = 40
) -> list[Job]:
    """Return jobs with repetitive prompts, some sharing a prefix, and random sampling parameters."""
    common = [rng.randrange(vocab_size) for _ in range(rng.choice((0, 16, 33)))]
    return [
        Job(_prompt(rng, vocab_size, common, max_prompt), _params(rng, vocab_size, max_tokens))
        for _ in range(count)
    ]


def _prompt(rng: random.Random, vocab_size: int, common: list[int], longest: int) -> list[int]:
    phrase = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))]
    prompt = common * rng.randint(0, 1)
    for _ in range(rng.randint(1, 6)):
        prompt = prompt + phrase + [rng.randrange(vocab_size) for _ in range(rng.randint(0, 4))]
    return prompt[: rng.randint(1, longest)]


def _params(rng: random.Random, vocab_size: int, max_tokens: int) -> SamplingParams:
    def some(value: Any, default: Any = None) -> Any:
        return value if rng.random() < 0.3 else default

    def token() -> int:
        return rng.randrange(vocab_size)

    limit = rng.randint(1, max_tokens)
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.3, 1.0)), top_p=some(rng.uniform(0.3, 1.0), 1.0),
        top_k=some(rng.randint(1, 10), 0), min_p=some(rng.uniform(0.0, 0.3), 0.0),
        seed=rng.randrange(-(2**63), 2**63), max_tokens=some(None, limit),
        min_tokens=some(rng.randint(0, limit), 0), stop_token_ids=some([token() for _ in range(3)], ()),
        logprobs=some(rng.randint(0, 5)), presence_penalty=some(rng.uniform(-1, 1), 0.0),
        frequency_penalty=some(rng.uniform(-1, 1), 0.0), repetition_penalty=some(rng.uniform(0.7, 1.5), 1.0),
        logit_bias=some({token(): rng.uniform(-3, 5) for _ in range(3)}, {}),
        num_speculative_tokens=rng.choice((0, 1, 5, None, None, None)),
    )  # fmt: skip
