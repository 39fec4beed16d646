"""The decoder matches the logits of transformers, however its tokens are split into steps."""

from pathlib import Path

import pytest
import torch

from nanospec.models.weights import load_model
from tests.tiny import VARIANTS, ModelRunner, checkpoint, num_parameters, reference_logits, tiny_model
from tests.util import assert_close


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers_in_any_chunks(variant: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, variant)
    model, generator = load_model(folder, torch.float32, "cpu"), torch.Generator().manual_seed(3)
    texts = [torch.randint(model.config.vocab_size, (n,), generator=generator) for n in (100, 37)]
    expected = [reference_logits(folder, text) for text in texts]
    for sizes in (100,), (1, 31, 7, 17, 3, 41):
        runner = ModelRunner(model, 2, 112)
        for size in sizes:
            starts = tuple(runner.length)
            parts = {row: texts[row][starts[row] :][: size + 4 * row] for row in (1, 0)}  # in any order
            chunks = {row: part for row, part in parts.items() if len(part)}
            for row, logits in runner.step(chunks).items():
                wanted = expected[row][starts[row] : runner.length[row]]
                assert assert_close(logits, wanted, 1e-5, f"row {row} from {starts[row]}") < 1e-4
        assert tuple(runner.length) == (100, 37)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_tied_weights_count_once_unless_packed(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype, tie_word_embeddings=True)
    is_packed = model.lm_head.unpacked_weight is None
    packed = model.embedding.nbytes if is_packed else 0
    assert model.lm_head.nbytes == model.embedding.nbytes
    assert model.weight_bytes == num_parameters(model.config) * dtype.itemsize + packed
    assert is_packed == (dtype == torch.float32)


@pytest.mark.slow
def test_smollm2_matches_transformers(smollm2: Path) -> None:
    ids = torch.randint(49152, (60,), generator=torch.Generator().manual_seed(7))
    expected = reference_logits(smollm2, ids, torch.float32)
    runner = ModelRunner(load_model(smollm2, torch.float32, "cpu"), 1, 64)
    logits = torch.cat([runner.step({0: chunk})[0] for chunk in ids.split([50, 1, 1, 5, 3])])
    largest = assert_close(logits, expected, 3e-6, "SmolLM2")
    assert largest < 5e-4  # logits reach 33; transformers itself is 1e-4 from float64
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
