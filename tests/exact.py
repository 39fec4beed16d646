"""Exact distributions of outputs, by enumerating a small vocabulary, and goodness-of-fit tests.

This file is independent of the engine: it reads `SamplingParams` and reimplements the documented sampling in
numpy and float64. The model is a function: output so far -> logits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanospec.config import SamplingParams

Output = tuple[int, ...]
Logits = dict[Output, np.ndarray]


def logits_by_output(folder: Path, prompt: Sequence[int], vocab: int, length: int) -> Logits:
    """Return transformers' float64 logits after the prompt and each output of fewer than `length` tokens."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    result: Logits = {}
    for n in range(length):
        outputs = list(np.ndindex(*[vocab] * n))
        ids = torch.tensor([[*prompt, *output] for output in outputs])
        with torch.no_grad():
            last = model(ids).logits[:, -1].numpy()
        result |= dict(zip(outputs, last, strict=True))
    return result


def next_token(
    logits: np.ndarray, prompt: Sequence[int], output: Output, params: SamplingParams
) -> np.ndarray:
    """Return the probabilities [V] of the token after prompt and output."""
    x = changed(logits, prompt, output, params)
    if params.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    p = np.exp((x - x.max()) / params.temperature)
    if params.top_k > 0:
        p = np.where([np.sum(x > own) < params.top_k for own in x], p, 0.0)
    above = np.array([p[p > own].sum() for own in p]) / p.sum()
    kept = p * ((above < params.top_p) & (p >= params.min_p * p.max()))
    return kept / kept.sum()


def changed(logits: np.ndarray, prompt: Sequence[int], output: Output, params: SamplingParams) -> np.ndarray:
    """Apply bias, masked tokens and penalties to the logits [V] after prompt and output."""
    x, repetition = logits.astype(np.float64), params.repetition_penalty
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(output) < params.min_tokens:
        x[list(params.stop_token_ids)] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def may_draw(x: np.ndarray, token: int, params: SamplingParams, slack: float = 1e-4) -> bool:
    """Return whether sampling may draw a token from changed scores that are off by at most `slack`."""
    above = x > x[token] + slack
    if params.temperature == 0 or not x[token] > -np.inf:
        return not above.any()
    most = min(params.top_k, len(x)) if params.top_k > 0 else len(x)
    p = np.exp((x - x.max()) / params.temperature)
    mass = p[x >= np.sort(x)[-most] - slack].sum()  # includes ties with the last of top_k
    kept = above.sum() < most and p[above].sum() < (params.top_p + slack) * mass
    return bool(kept and p[token] >= (params.min_p - slack) * p.max())


def joint(logits: Logits, prompt: Sequence[int], params: SamplingParams) -> dict[Output, float]:
    """Return the probability of every complete output: `max_tokens` tokens, or fewer up to a stop token."""
    unfinished: dict[Output, float] = {(): 1.0}
    done: dict[Output, float] = {}
    for n in range(params.max_tokens or 0):
        longer: dict[Output, float] = {}
        for output, p in unfinished.items():
            following = next_token(logits[output], prompt, output, params)
            for token in np.flatnonzero(following).tolist():
                extended = (*output, token)
                ended = token in params.stop_token_ids or n + 1 == params.max_tokens
                (done if ended else longer)[extended] = p * float(following[token])
        unfinished = longer
    return done


class Fit(NamedTuple):
    """Goodness of fit: Pearson's X^2, its degrees of freedom and p-value."""

    x2: float
    freedom: int
    p: float


def fit(result: Mapping[Output, float], expected: Mapping[Output, float]) -> Fit:
    """Return the fit of counts to probabilities; an impossible output gives p = 0."""
    n, p = round(sum(result.values())), np.array([*expected.values()])
    counts = np.array([result.get(output, 0) for output in expected], dtype=np.float64)
    rare = n * p < 5  # such outputs are pooled
    o, e = (np.append(x[~rare], x[rare].sum()) for x in (counts, n * p))
    if len(e) > 1 and e[-1] < 5:
        least = int(e[:-1].argmin())
        for x in (o, e):
            x[least] += x[-1]
        o, e = o[:-1], e[:-1]
    x2, freedom = float(((o - e) ** 2 / e).sum()), len(e) - 1
    return Fit(x2, freedom, tail(x2, freedom) if counts.sum() == n else 0.0)


def least_p(result: Mapping[Output, float], expected: Mapping[Output, float]) -> float:
    """Return the least p-value over prefix lengths, Bonferroni-corrected. Whole outputs best reveal wrong
    dependence on earlier tokens; short prefixes, with more samples each, other defects."""

    def prefixes(outputs: Mapping[Output, float], n: int) -> Counter[Output]:
        total: Counter[Output] = Counter()
        for output, share in outputs.items():
            total[output[:n]] += share  # type: ignore[assignment]
        return total

    longest = max(map(len, expected))
    return min(fit(prefixes(result, n), prefixes(expected, n)).p for n in range(1, longest + 1)) * longest


def combined_p(fits: Sequence[Fit]) -> float:
    """Return the p-value of independent fits together."""
    p = tail(sum(one.x2 for one in fits), sum(one.freedom for one in fits))
    return p if all(one.p > 0 for one in fits) else 0.0


def tail(x2: float, freedom: int) -> float:
    """Return the p-value of X^2 with the given degrees of freedom."""
    if freedom == 0:
        return 1.0
    a, x = torch.tensor([freedom, x2], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(a, x))
