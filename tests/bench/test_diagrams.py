"""The diagrams of docs/reading.md match the source code."""

from bench import diagrams


def test_committed_diagrams_are_current() -> None:
    for draw in (diagrams.architecture, diagrams.request):
        committed = diagrams.ROOT / "docs" / "pictures" / f"{draw.__name__}.svg"
        assert committed.read_text(encoding="utf-8") == draw(), "run `python -m bench.diagrams`"
