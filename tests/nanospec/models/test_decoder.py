"""The decoder matches the logits of transformers, however its tokens are split into steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanospec.kernels.launch import forced
from nanospec.models.decoder import Model
from nanospec.models.weights import load_model
from tests.tiny import (
    VARIANTS,
    ModelRunner,
    checkpoint,
    num_parameters,
    reference_logits,
    tiny_config,
    tiny_model,
)
from tests.util import assert_close, error_ratio

LENGTHS = (100, 37)  # tokens of the two sequences


class Case:
    """Two texts and their logits by transformers; `step` runs a part of each and compares."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder, torch.float32, "cpu")
        self.vocab_size = self.model.config.vocab_size
        generator = torch.Generator().manual_seed(3)
        self.ids = [torch.randint(self.vocab_size, (n,), generator=generator) for n in LENGTHS]
        self.expected = [reference_logits(folder, sequence) for sequence in self.ids]

    def step(
        self, runner: ModelRunner, chunks: dict[int, Tensor], right: int = 1000, pad: int | None = None
    ) -> None:
        """Run a step of which the first `right` tokens of each chunk belong to the text."""
        starts = list(runner.length)
        keep = None if right == 1000 else right
        for row, logits in runner.step(chunks, keep=keep, pad_to=pad).items():
            start, what = starts[row], f"{len(logits)} tokens of row {row} from {starts[row]}"
            expected = self.expected[row][start : start + min(right, len(logits))]
            largest = assert_close(logits[:right], expected, 1e-5, what)
            assert largest < 1e-4, f"{what}: off by {largest:.3g}"


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(checkpoint(tmp_path_factory.mktemp(request.param), request.param))


def test_prefill_and_chunks_of_odd_sizes(case: Case) -> None:
    case.step(ModelRunner(case.model, 2, 112), dict(enumerate(case.ids)))
    runner = ModelRunner(case.model, 2, 112)
    for size in (1, 31, 7, 17, 3, 41):
        starts = runner.length
        parts = {row: ids[starts[row] : starts[row] + size + 4 * row] for row, ids in enumerate(case.ids)}
        case.step(runner, {row: part for row, part in parts.items() if len(part)})
    assert tuple(runner.length) == LENGTHS


def test_steps_with_rejected_drafts(case: Case) -> None:
    """Steps of one token and its drafts; the last ones are rejected and overwritten by the next step."""
    runner, drafts = ModelRunner(case.model, 2, 112), 4
    runner.step({0: case.ids[0][:21], 1: case.ids[1][:6]})
    generator = torch.Generator().manual_seed(5)
    for turn in range(10):
        padded, accepted = turn % 4 > 1, turn % (drafts + 1) + 1
        chunks = {}
        for row in (1, 0):  # the order of rows in a batch is free
            right = case.ids[row][runner.length[row] :][:accepted]
            wrong = torch.randint(case.vocab_size, (drafts,), generator=generator)
            # In a grid, row 1 has fewer drafts than row 0 and is padded.
            width = max(accepted, drafts + 1 - (row if padded else 0))
            chunks[row] = torch.cat((right, wrong))[:width]
        case.step(runner, chunks, accepted, drafts + 1 if padded else None)


def test_padding_and_rows_without_tokens_have_no_effect() -> None:
    """Padding leaves the cache bitwise unchanged, and the logits of real tokens."""
    model, ids = tiny_model(), torch.arange(10)
    plain, padded = ModelRunner(model, 3, 64), ModelRunner(model, 3, 64)
    first = plain.step({0: ids[:5], 1: ids[5:10]})
    second = padded.step({0: ids[:5], 2: ids[:0], 1: ids[5:10]}, pad_to=7)
    assert torch.equal(plain.cache, padded.cache)
    for row in (0, 1):
        assert_close(second[row], first[row], 1e-6)
    third = ModelRunner(model, 3, 64).step({2: ids[:0], 0: ids[:5]})
    assert_close(third[0], first[0], 1e-6)
    padded.step({0: ids[:0], 1: ids[:0]}, pad_to=3)
    assert torch.equal(padded.cache, plain.cache)


def test_smollm2(smollm2: Path) -> None:
    ids = torch.randint(49152, (60,), generator=torch.Generator().manual_seed(7))
    expected = reference_logits(smollm2, ids, torch.float32)
    runner = ModelRunner(load_model(smollm2, torch.float32, "cpu"), 1, 64)
    logits = torch.cat([runner.step({0: chunk})[0] for chunk in ids.split([50, 1, 1, 5, 3])])
    largest = assert_close(logits, expected, 3e-6, "SmolLM2")
    assert largest < 5e-4  # logits reach 33; transformers itself is 1e-4 from float64
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_random_models_are_neither_flat_nor_peaked() -> None:
    ids = torch.arange(64)
    logits = [ModelRunner(model, 1, 64).step({0: ids})[0] for model in (tiny_model(0), tiny_model(1))]
    assert error_ratio(logits[1], logits[0]) > 0.5
    assert 1 < logits[0].std() < 4
    assert len(logits[0].argmax(-1).unique()) > 10
    half = ModelRunner(tiny_model(0, torch.bfloat16), 1, 64).step({0: ids})[0]
    assert error_ratio(half, logits[0]) < 0.05, "a seed means the same weights in every dtype"


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_is_loaded_and_counted_once(tied: bool) -> None:
    flags = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "out_norms"), not tied)
    config = tiny_config(tie_word_embeddings=tied, **flags)
    shapes, taken = config.parameter_shapes(), list[str]()

    def get(name: str) -> Tensor:
        taken.append(name)
        return torch.zeros(shapes[name])

    with forced("triton"):  # does not pack a copy of a tied lm_head
        model = Model(config, torch.float32, "cpu", get)
    assert sorted(taken) == sorted(shapes)
    assert model.weight_bytes == 4 * num_parameters(config)
