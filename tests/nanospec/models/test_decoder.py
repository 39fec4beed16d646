"""The decoder matches the logits of transformers, however its tokens are split into steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanospec.models.decoder import Model
from nanospec.models.weights import load_model
from tests.tiny import VARIANTS, ModelRunner, checkpoint, reference_logits, tiny_config, tiny_model
from tests.util import assert_close, error_ratio

LENGTHS = (100, 37)  # tokens of the two sequences


@dataclass
class Case:
    model: Model
    ids: list[Tensor]
    expected: list[Tensor]

    def check(self, row: int, start: int, logits: Tensor, what: str) -> None:
        expected = self.expected[row][start : start + len(logits)]
        largest = assert_close(logits, expected, 1e-5, f"{what}, row {row}, from {start}")
        assert largest < 1e-4, f"{what}, row {row}, from {start}: off by {largest:.3g}"


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    model = load_model(folder, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(model.config.vocab_size, (n,), generator=generator) for n in LENGTHS]
    return Case(model, ids, [reference_logits(folder, sequence) for sequence in ids])


def test_single_prefill(case: Case) -> None:
    runner = ModelRunner(case.model, 2, 112)
    for row, logits in runner.step(dict(enumerate(case.ids))).items():
        case.check(row, 0, logits, "prefill")


def test_chunks_of_odd_sizes(case: Case) -> None:
    runner = ModelRunner(case.model, 2, 112)
    for size in (1, 31, 7, 17, 3, 41):
        chunks = {}
        for row, ids in enumerate(case.ids):
            start = runner.length[row]
            if start < len(ids):
                chunks[row] = ids[start : start + size + 4 * row]
        starts = list(runner.length)
        for row, logits in runner.step(chunks).items():
            case.check(row, starts[row], logits, f"chunk of {len(logits)}")
    assert tuple(runner.length) == LENGTHS


@pytest.mark.parametrize("k", [0, 4], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_steps_with_rejected_drafts(case: Case, k: int, padded: bool) -> None:
    """Steps of K+1 tokens; the last ones are rejected and overwritten by the next step."""
    runner = ModelRunner(case.model, 2, 112)
    prompt = {0: case.ids[0][:21], 1: case.ids[1][:6]}
    runner.step(prompt)
    generator = torch.Generator().manual_seed(5)
    for turn in range(10):
        accepted = turn % (k + 1) + 1
        chunks, starts = {}, list(runner.length)
        for row in (1, 0):  # the order of rows in a batch is free
            right = case.ids[row][starts[row] : starts[row] + accepted]
            wrong = torch.randint(case.model.config.vocab_size, (k,), generator=generator)
            # In a grid, row 1 has fewer drafts than row 0 and is padded.
            width = max(accepted, k + 1 - (row if padded else 0))
            chunks[row] = torch.cat((right, wrong))[:width]
        logits = runner.step(chunks, keep=accepted, pad_to=k + 1 if padded else None)
        for row in (0, 1):
            case.check(row, starts[row], logits[row][:accepted], f"step {turn}")


def test_rows_without_tokens() -> None:
    model = tiny_model()
    ids = torch.arange(12)
    expected = ModelRunner(model, 3, 64).step({1: ids})[1]
    for chunks in ({0: ids[:0], 1: ids}, {1: ids, 2: ids[:0]}):
        assert_close(ModelRunner(model, 3, 64).step(chunks)[1], expected, 1e-6)


def test_padding_has_no_effect() -> None:
    """Padding leaves the cache bitwise unchanged, and the logits of real tokens."""
    model = tiny_model()
    ids = torch.arange(40) % 64
    plain, padded = ModelRunner(model, 2, 64), ModelRunner(model, 2, 64)
    first = plain.step({0: ids[:5], 1: ids[5:10]})
    second = padded.step({0: ids[:5], 1: ids[5:10]}, pad_to=7)
    assert torch.equal(plain.cache, padded.cache)
    for row in (0, 1):
        assert_close(second[row], first[row], 1e-6)
    untouched = padded.cache.clone()
    padded.step({0: ids[:0], 1: ids[:0]}, pad_to=3)
    assert torch.equal(padded.cache, untouched)


@pytest.fixture(scope="module")
def real(smollm2: Path) -> tuple[Path, Tensor, Tensor]:
    """The folder of SmolLM2, 80 tokens, and their logits by transformers in float32."""
    ids = torch.randint(49152, (80,), generator=torch.Generator().manual_seed(7))
    return smollm2, ids, reference_logits(smollm2, ids, torch.float32)


def test_smollm2(real: tuple[Path, Tensor, Tensor]) -> None:
    folder, ids, expected = real
    runner = ModelRunner(load_model(folder, torch.float32, "cpu"), 1, 80)
    logits = torch.cat([runner.step({0: chunk})[0] for chunk in ids.split([70, 1, 1, 5, 3])])
    largest = assert_close(logits, expected, 3e-6, "SmolLM2")
    assert largest < 5e-4  # logits reach 33; transformers itself is 1e-4 from float64
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_smollm2_in_bfloat16(real: tuple[Path, Tensor, Tensor]) -> None:
    folder, ids, expected = real
    logits = ModelRunner(load_model(folder, torch.bfloat16, "cpu"), 1, 80).step({0: ids})[0]
    assert logits.dtype == torch.bfloat16
    assert_close(logits, expected, 0.05, "SmolLM2")  # transformers in bfloat16: 0.02


def test_random_models() -> None:
    first, same, other = tiny_model(0), tiny_model(0), tiny_model(1)
    ids = torch.arange(64)
    logits = [ModelRunner(model, 1, 64).step({0: ids})[0] for model in (first, same, other)]
    assert torch.equal(logits[0], logits[1])
    assert error_ratio(logits[2], logits[0]) > 0.5
    assert 1 < logits[0].std() < 4, "logits are neither flat nor peaked"
    assert len(logits[0].argmax(-1).unique()) > 10
    half = ModelRunner(tiny_model(0, torch.bfloat16), 1, 64).step({0: ids})[0]
    assert error_ratio(half, logits[0]) < 0.05, "a seed means the same weights in every dtype"


@pytest.mark.parametrize("variant", ["plain", "tied", "everything"])
def test_every_weight_is_loaded_once(variant: str) -> None:
    everything = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True}
    options = {"plain": {}, "tied": {"tie_word_embeddings": True}, "everything": everything}
    config = tiny_config(**options[variant])
    taken: list[str] = []

    def get(name: str) -> Tensor:
        taken.append(name)
        return torch.zeros(config.parameter_shapes()[name])

    Model(config, torch.float32, "cpu", get)
    assert sorted(taken) == sorted(config.parameter_shapes())
