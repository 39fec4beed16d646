"""Synthetic traces: a chain, a tree, drafts of a model, and a step without drafts."""

from collections.abc import Sequence
from typing import Any

from nanospec.extras.tracing.trace import Lane, StepRecord, Trace

WORDS = ["to", " be", " or", " not", " to", " sleep", ",", "\n", " that", " is"]
SPECIAL_TEXTS = ["</script><script>alert(1)</script>", "<!--", "&lt;b>", "\x00\x1b[31m", "\u2028", "\ufffd"]
SPECIAL_TEXTS += ["天空", "🎉"]
MS = {"prefill": 0.0, "propose": 0.5, "forward": 10.0, "verify": 0.5, "wait": 0.0, "host": 0.2}


def step(
    tokens: Sequence[int], drafts: Sequence[int] = (), accepted: Sequence[int] = (), **fields: Any
) -> StepRecord:
    K = len(drafts)
    result: dict[str, Any] = {
        "at": 0.0, "ms": MS, "batch": 1, "tokens": list(tokens), "method": "ngram" if K else "",
        "match_len": 2 if K else 0, "drafts": list(drafts), "sources": list(range(3, 3 + K)),
        "parents": list(range(K)), "verified": K, "accepted": list(accepted),
        "reason": "pays" if K else "no match",
        "plain_ms": 10.0,
    }  # fmt: skip
    return StepRecord(**{**result, **fields})


def steps() -> list[StepRecord]:
    made = [
        step([3, 4, 5], [3, 4, 9, 9], [1, 2]),
        step([6]),
        step([1, 2, 7], [0, 1, 2, 8], [2, 3], parents=[0, 0, 2, 1]),
        step([8, 9], [8, 3], [1], method="eagle3", match_len=0, sources=[-2, -2], reason="fixed"),
        step([0], [5, 5, 5], verified=0, reason="does not pay"),
        step([1, 2], [1, 2, 3], [1, 2], verified=2, reason="probe"),
    ]
    for number, one in enumerate(made):
        one.at = 0.1 + 0.05 * number
    return made


def lane(name: str, texts: Sequence[str]) -> Lane:
    taken, prompt = steps(), [0, 1, 2, 3, 4, 5, 0, 1]
    ids = [token for one in taken for token in one.tokens]
    shown = [texts[i % len(texts)] for i in range(10)]
    return Lane(
        name=name, prompt=[shown[i] for i in prompt], prompt_ids=prompt,
        output=[shown[i] for i in ids], token_ids=ids, steps=taken, start=0.0, seconds=taken[-1].at,
        first_token_seconds=0.1, finish_reason="length", acceptance="exact", plain_seconds=0.7,
    )  # fmt: skip


def example(lanes: int = 1, texts: Sequence[str] = WORDS) -> Trace:
    about = {"model": "tiny", "device": "cpu", "by": "PyTorch", "method": "ngram", "k": "auto"}
    shown = {i: texts[i % len(texts)] for i in range(10)}
    return Trace(about, [lane(f"request-{i}", texts) for i in range(lanes)], shown, num_omitted=lanes // 3)
