"""`bench/before_after.py` runs two checkouts alternately and detects a single differing token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import before_after, common

PACKAGE = """
class SpecConfig:
    def __init__(self, method="ngram"):
        self.method = method
class SamplingParams:
    def __init__(self, **params):
        self.params = params
class Output:
    def __init__(self, token_ids):
        self.token_ids = token_ids
class LLM:
    def __init__(self, model, spec, **options):
        print("a message of the checkout")
        self.spec = spec
    def generate(self, prompts, params):
        params = params if isinstance(params, list) else [params] * len(prompts)
        return [Output([len(prompt), p.params.get("seed", 0), LAST]) for prompt, p in zip(prompts, params)]
"""
DIFFERING = {  # last token of the changed checkout, where its outputs differ
    "3": set[str](),
    "4 if p.params['temperature'] else 3": {"plain, seeded", "n-gram, seeded"},
    "3 if self.spec.method == 'none' else 4": {"n-gram, greedy", "n-gram, seeded"},
}


@pytest.mark.parametrize("last", DIFFERING)
def test_differing_outputs_are_detected(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("code_edits", "quotations", "spec_bench"):
        monkeypatch.setattr(common, name, lambda count, *group: [f"text {i}" for i in range(count)])
    for folder, token in (("before", "3"), ("after", last)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "nanospec.py").write_text(PACKAGE.replace("LAST", token))
    options = ["--rounds", "2", "--prompts", "5", "--out", str(tmp_path)]
    status = 0
    try:
        before_after.main([str(tmp_path / "before"), str(tmp_path / "after"), *options])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == bool(DIFFERING[last])
    table = json.loads((tmp_path / "before_after.json").read_text())["table"]
    cases = {name: row for name, row in table.items() if not name.startswith("start")}
    assert len(cases) == len(before_after.CASES)
    assert {name.rpartition(",")[0] for name, row in cases.items() if not row["equal"]} == DIFFERING[last]
    assert capsys.readouterr().out.count("OUTPUTS DIFFER") == 3 * len(DIFFERING[last])


def test_ratios_are_computed_within_a_round() -> None:
    name = before_after.name_of(before_after.CASES[0])

    def side(seconds: float) -> dict[str, Any]:
        times = {name: [seconds, 2 * seconds]}
        return {"start": {"plain": seconds}, "seconds": times, "outputs": {name: [[[1, 2]]] * 2}}

    rounds = [(side(a), side(b)) for a, b in ((1.0, 2.0), (10.0, 10.0), (4.0, 2.0))]
    table = before_after.compare(rounds)
    assert table["plain, greedy, B=1"]["ratio"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert table["start, plain"]["ratio"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert table["plain, greedy, B=1"]["equal"]
