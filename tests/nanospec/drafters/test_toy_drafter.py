"""A new way of guessing is one class: it registers itself, has options and help, and rides every step."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nanospec.apps.cli.options import parse, spec_config
from nanospec.config import SpecConfig
from nanospec.drafters.base import METHODS, Drafter, Option, Target, guesses, registered, room
from nanospec.drafters.loading import who_guesses
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from tests.drive import MODES, make_engine, random_jobs, run_as_alone
from tests.tiny import tiny_model


@pytest.fixture(autouse=True)
def toy() -> Iterator[type[Drafter]]:
    """What a file in `nanospec/drafters` would hold."""

    length = Option("toy_length", "how often the last token is guessed (default: 3)", int, "N")

    class Toy(Drafter, method="toy", help="the last token again", options=[length]):
        def __init__(self, length: int) -> None:
            self.max_drafts = length

        @classmethod
        def load(cls, spec: SpecConfig, target: Target) -> Toy:
            return cls(spec.options.get("toy_length", 3))

        def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
            index = rows.clamp(min=0)
            last = table.tokens[index, (table.num_tokens[index] - 1).clamp(min=0)]
            return guesses(last[:, None].repeat(1, k), room(table, rows, k))

    yield Toy
    del METHODS["toy"]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["toy", "ngram+toy", "toy+ngram"])
def test_its_output_is_that_of_decoding_alone(model: Model, method: str, mode: str) -> None:
    jobs = random_jobs(random.Random(method), 64, 6)
    engine = make_engine(model, 4, guess={"method": method}, **MODES[mode])
    run_as_alone(engine, model, jobs)
    assert engine.metrics.spec.by_drafter["toy"][1] > 0


def test_its_option_is_its_own(model: Model) -> None:
    engine = make_engine(model, 9, guess={"method": "toy", "options": {"toy_length": 2}})
    assert engine.worker.max_k == 2
    with pytest.raises(ValueError, match=r"toy_length=2 is of no use to method='ngram'"):
        who_guesses(SpecConfig(method="ngram", options={"toy_length": 2}), None)
    for options, what in (
        ({"toy_width": None}, r"toy_width=None is of no use"),
        ({"draft_model": "x"}, r"holds the field 'draft_model'"),
        (None, "options=None must map names to values"),
    ):
        with pytest.raises(ValueError, match=what):
            who_guesses(SpecConfig(method="toy", options=options), None)  # type: ignore[arg-type]
    assert hash(SpecConfig(method="toy", options={"toy_length": 2})) is not None
    with pytest.raises(ValueError, match=r"tree_width=2 is of no use to toy, which"):
        who_guesses(SpecConfig(method="toy", tree_width=2), None)
    with pytest.raises(ValueError, match=r"method='toyy' is unknown; did you mean 'toy'\? .*ngram\+toy"):
        who_guesses(SpecConfig(method="toyy"), None)


def test_every_method_says_what_it_is() -> None:
    for name, method in registered().items():
        assert method.drafter.name == name
        assert method.help
        assert all(option.help for option in method.options)


def test_tensors_of_a_proposal_have_the_documented_types() -> None:
    drafts = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    found = guesses(drafts, torch.tensor([2, 0], dtype=torch.int32))
    assert found.source.tolist() == [[-2, -2], [-2, -2]]  # without drafts it says nothing
    assert found.drafter.tolist() == [0, -1]
    assert all(part.dtype == torch.int32 for part in found[:5])


def test_the_command_line_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_config(parse(["--prompt", "a", "--spec", "ngram+toy", "--toy-length", "2"]))
    assert (spec.method, spec.options) == ("ngram+toy", {"toy_length": 2})
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--toy-length N for --spec toy: how often the last token is guessed" in shown
    assert '"toy": the last token again.' in shown
