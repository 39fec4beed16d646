"""Invariants of trace records."""

from nanospec.engine.request import Request
from nanospec.extras.tracing.trace import Record
from nanospec.kernels import FROM_REFERENCE, FROM_TARGET, GENERATED


def record_of(request: Request) -> Record:
    assert request.extension_data is not None
    return request.extension_data


def check(request: Request) -> None:
    """Check a request's record against its output and statistics."""
    steps = record_of(request).steps
    assert [token for step in steps for token in step.tokens] == request.output_ids
    sources = []
    for step in steps:
        own = [FROM_TARGET] * (len(step.tokens) - len(step.accepted))
        sources += [step.sources[place - 1] for place in step.accepted] + own
        assert len(own) <= 1
        assert [step.drafts[place - 1] for place in step.accepted] == step.tokens[: len(step.accepted)]
        assert 0 <= step.verified <= len(step.drafts) == len(step.sources) == len(step.parents)
        assert all(parent <= i for i, parent in enumerate(step.parents))
        text = request.tokens[: len(request.prompt_ids) + len(sources) - len(step.tokens)]
        known, other = text + step.drafts, request.reference.tolist()
        for draft, source in zip(step.drafts, step.sources):
            copied = other[FROM_REFERENCE - source] if source <= FROM_REFERENCE else known[source]
            assert source == GENERATED or copied == draft
        assert step.match_len or {*step.sources} <= {GENERATED}
        if step.match_len and step.method != "grammar":
            first = step.sources[0]
            before = other[: FROM_REFERENCE - first] if first <= FROM_REFERENCE else text[:first]
            assert text[-step.match_len :] == before[-step.match_len :]
        assert bool(step.method) == bool(step.drafts)
        assert step.plain_ms >= 0
        assert all(ms >= 0 for ms in step.ms.values())
    assert sources == request.draft_sources
    stats = request.stats
    assert len(steps) == stats.num_steps
    assert sum(step.verified for step in steps) == stats.num_drafted
    assert sum(len(step.accepted) for step in steps) == stats.num_accepted
    assert [step.at for step in steps] == sorted(step.at for step in steps)
