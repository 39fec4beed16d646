"""The C++ forward pass: accuracy, bitwise reproducibility, trees, and memory it must not read."""

import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.drafters.dflash import as_block
from nanospec.kernels import native
from nanospec.kernels.launch import forced
from nanospec.kernels.layer.quantized import Quantized, quantize
from nanospec.kernels.speculation.layout import lay_out
from nanospec.models.config import ModelConfig, Rope
from nanospec.models.cpu import CompiledModel, computed_by, model_class
from nanospec.models.decoder import GetWeight, Model
from tests.random_weights import random_weights
from tests.tiny import GEMMA, ModelRunner, tiny_config, tiny_model
from tests.util import assert_close

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler: install g++")

BF16 = torch.bfloat16
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"hidden_size": 96, "head_dim": 32},
    "odd-sizes": {"hidden_size": 50, "vocab_size": 65, "head_dim": 34, "num_heads": 3, "num_kv_heads": 1},
    "mqa-d80-biases": {
        "num_heads": 8, "num_kv_heads": 1, "head_dim": 80, "qkv_bias": True, "o_bias": True, "mlp_bias": True
    },
    "qk-norm-window9": {"qk_norm": True, "windows": (9, None), "head_dim": 64, "num_heads": 2},
    "group16-window20": {"windows": (20, 20), "num_heads": 16, "num_kv_heads": 1, "head_dim": 32},
    "window300": {"windows": (300, 300), "head_dim": 32},
    "partly-rotated": {"rope": Rope(part=0.75), "head_dim": 32, "num_heads": 4, "num_kv_heads": 4},
    "rows-4-kb-apart": {"hidden_size": 2048, "head_dim": 32, "num_layers": 1},
    **GEMMA,
    "group20-d256": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 256, "num_layers": 1},
    "int8-biases": {"head_dim": 64, "num_heads": 2, "hidden_size": 96, "qkv_bias": True},
    "int4-gelu": {**GEMMA["gemma3"], "hidden_size": 96, "head_dim": 32, "intermediate_size": 640},
}  # fmt: skip
TOLERANCE = 0.014  # PyTorch in bfloat16: up to 0.013


def config_of(name: str) -> ModelConfig:
    return tiny_config(**{"intermediate_size": 96, "max_position_embeddings": 1024, **MODELS[name]})


def bits_of(config: ModelConfig) -> int:
    return next((int(name[3]) for name in MODELS if name[:3] == "int" and config_of(name) == config), 16)


def weights(config: ModelConfig) -> GetWeight:
    """Return random weights with gates far from zero, if they have biases."""
    get, bits = random_weights(config, BF16, "cpu", 0), bits_of(config)

    def changed(name: str) -> Any:
        tensor = get(name)
        if name.endswith("gate_proj.bias"):
            tensor[::3], tensor[1::3] = -200, 200
        if bits < 16 and tensor.dim() == 2 and "embed" not in name:
            return quantize(tensor, bits)
        return tensor

    return changed


def compiled(config: ModelConfig) -> CompiledModel:
    return CompiledModel(config, BF16, "cpu", weights(config))


@cache
def build_model(name: str) -> CompiledModel:
    assert model_class(config_of(name), BF16, "cpu") is CompiledModel
    return compiled(config_of(name))


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> CompiledModel:
    return build_model(request.param)


@pytest.fixture(scope="module")
def window_model() -> CompiledModel:
    return build_model("qk-norm-window9")


def tokens(model: Model, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=generator)


def exact(model: Model) -> Model:
    """Return the model in float64 and PyTorch."""
    get = weights(model.config)

    def get_exact(name: str) -> Tensor:
        weight = get(name)
        return (weight.dequantize() if isinstance(weight, Quantized) else weight).double()

    with forced("naive"):
        return Model(model.config, torch.float64, "cpu", get_exact)


def test_logits_are_close_to_float64(model: Model) -> None:
    """Test prompts longer than a span, one and several tokens, with and without room for more."""
    steps: list[dict[str, Any]] = [
        {"chunks": {0: tokens(model, 330), 1: tokens(model, 5, 1), 2: tokens(model, 255, 2)}},
        {"chunks": {0: tokens(model, 1, 3), 1: tokens(model, 13, 4), 2: tokens(model, 3, 5)}},
        {"chunks": {1: tokens(model, 2, 6), 0: tokens(model, 7, 7)}, "room": 9},
    ]
    runner, other = ModelRunner(model, 3, 640, 16), ModelRunner(model, 3, 640, 64)
    wanted = ModelRunner(exact(model), 3, 640)
    for step in steps:
        actual, same = runner.step(**step), other.step(**step)
        with forced("naive"):
            expected = wanted.step(**step)
        for row, logits in expected.items():
            assert torch.equal(actual[row], same[row])
            error = (actual[row].double() - logits).norm() / logits.norm()
            assert error < (0.03 if model.config.mlp_bias or bits_of(model.config) < 16 else TOLERANCE)


@pytest.mark.usefixtures("other_library")
def test_accuracy_on_other_processors() -> None:
    for name in MODELS:
        test_logits_are_close_to_float64(build_model(name))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_results_are_bitwise_independent_of_the_batch(window_model: Model, seed: int) -> None:
    """Chunks of any size, other rows, padding and threads give the results of chunks of 64 bitwise."""
    model, length, rng = window_model, 700, random.Random(seed)
    text, runner = tokens(model, length), ModelRunner(model, 4, 704)
    expected = torch.cat([runner.step({0: part})[0] for part in text.split(64)])
    runner = ModelRunner(model, 4, 704)
    while (start := runner.length[0]) < length:
        n = min(rng.choice([1, 2, 5, 12, 13, 63, 200, 400]), length - start)
        others = rng.sample([1, 2, 3], rng.randint(0, 3))
        chunks = {row: tokens(model, rng.choice([1, 3, 11])) for row in others}
        chunks[0] = text[start : start + n]
        pad = n + rng.randint(0, 3) if not others and n < 60 else None
        with threads(rng.randint(1, 4)):
            logits = runner.step(chunks, room=pad)[0]
        runner.length[1:] = [0, 100, 300]  # the cache still holds values there
        assert torch.equal(logits, expected[start : start + n]), (start, n)


BASES = (0, 1, 14, 15, 16, 17, 31, 63, 64, 200, 239, 240, 246, 254, 255, 256, 257, 265, 272, 300, 511, 512)


def poisoned(model: Model, block_size: int) -> ModelRunner:
    """Return three rows whose unwritten keys are NaN and unwritten values the largest number."""
    runner = ModelRunner(model, 3, 640, block_size)
    runner.cache[:, :, :, 0] = torch.nan
    runner.cache[:, :, :, 1] = torch.finfo(BF16).max
    return runner


@pytest.mark.parametrize("name", ["gqa", "mqa-d80-biases", "group20-d256"])
def test_blocks_are_close_to_float64(name: str) -> None:
    """Queries of a block attend to later ones, also with more queries than a tile of attention."""
    model, base, count = build_model(name), (250, 0, 61), (20, 3, 1)
    outputs, rows = list[Tensor](), torch.arange(3, dtype=torch.int32)
    for runner in (ModelRunner(exact(model), 3, 640), poisoned(model, 16), poisoned(model, 64)):
        runner.step({row: tokens(model, n, row) for row, n in enumerate(base) if n})
        first, q_len = (torch.tensor(numbers, dtype=torch.int32) for numbers in (base, count))
        batch = as_block(lay_out(runner.table, rows, first, q_len, 20))
        ids = (torch.arange(batch.num_tokens) % 9).int()
        with forced("naive" if runner.model.dtype == torch.float64 else "auto"), threads(len(outputs) + 1):
            hidden = runner.model.forward(replace(batch, input_ids=ids), runner.cache)
        outputs.append(hidden.double())
    assert_close(outputs[1], outputs[0], 0.03 if "biases" in name else TOLERANCE)
    assert torch.equal(outputs[1], outputs[2])


def path_to(node: int, parents: list[int]) -> list[int]:
    """Return the nodes of a tree from node 0 to `node`."""
    return [*path_to(parents[node - 1], parents), node] if node else [0]


@settings(max_examples=40)
@given(
    name=st.sampled_from([name for name in MODELS if name != "rows-4-kb-apart"]), seed=st.integers(0, 2**32)
)
def test_tree_nodes_match_chains_bitwise(name: str, seed: int) -> None:
    """Test rows of trees at boundaries of tiles, blocks and spans, on any number of threads."""
    model, rng = build_model(name), random.Random(seed)
    block_size, k = rng.choice((16, 64)), rng.choice((1, 4, 8, 30, 63))
    base = [rng.choice(BASES) for _ in range(3)]
    count = [rng.choice((k, k, rng.randint(0, k))) for _ in base]
    near = rng.choice((1, 2, 5, 64))  # deep or wide trees, or chains
    trees = [[rng.randint(max(i - near, 0), i - 1) for i in range(1, k + 1)] for _ in base]
    texts = [tokens(model, n + 1, seed + i) for i, n in enumerate(base)]
    drafts = tokens(model, 3 * k, seed + 9).view(3, k).int()
    runner, chains = poisoned(model, block_size), poisoned(model, block_size)
    for one in (runner, chains):
        if prompts := {row: text[:-1] for row, text in enumerate(texts) if len(text) > 1}:
            one.step(prompts)
    for row, text in enumerate(texts):
        runner.table.tokens[row, : len(text)] = text
        runner.table.num_tokens[row] = len(text)
    runner.table.max_len.fill_(640)
    first, q_len = runner.table.num_tokens[:3] - 1, torch.tensor(count, dtype=torch.int32) + 1
    parents, rows = torch.tensor(trees, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    batch = lay_out(runner.table, rows, first, q_len, k + 1, drafts, parents)
    with threads(rng.randint(1, 3)):
        logits = model.logits(model.forward(batch, runner.cache))
    for row, start in enumerate(batch.q_start.tolist()):
        for node in {count[row], rng.randint(0, count[row]), rng.randint(0, count[row])}:
            path = path_to(node, trees[row])
            ids = torch.cat((texts[row][-1:], drafts[row]))[path]
            alone = chains.step({row: ids}, keep=0)[row]
            assert torch.equal(logits[start:][path], alone), (row, base[row], path)


def test_masked_entries_have_no_effect(model: Model) -> None:
    """Other blocks, later entries and later drafts have no effect, even with NaN keys and logits and the
    largest finite values."""
    broken, bad = compiled(model.config), model.config.vocab_size - 1
    broken.embedding[bad] = torch.nan
    prompt, drafts = tokens(model, 270) % bad, tokens(model, 6, 1) % bad
    with_nan = drafts.clone()
    with_nan[3] = bad
    clean = ModelRunner(broken, 3, 640)
    clean.cache.zero_()
    results = []
    for runner, ids in (clean, drafts), (poisoned(broken, 16), drafts), (poisoned(broken, 16), with_nan):
        runner.step({0: prompt})
        results.append(runner.step({0: ids})[0])
    assert results[0].isfinite().all()
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2][:3], results[0][:3])
    assert results[2][3].isnan().all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_has_its_own_threads(window_model: Model) -> None:
    """Tensors are small, since PyTorch's threads do not survive a fork."""
    ids = tokens(window_model, 9)
    parent, child_runner = ModelRunner(window_model, 1, 32), ModelRunner(window_model, 1, 32)
    with threads(3):
        expected = parent.step({0: ids})[0]  # starts the threads
        if not (child := os.fork()):
            signal.alarm(60)  # in case it hangs
            is_equal = torch.equal(child_runner.step({0: ids})[0], expected)
            os._exit(0 if is_equal and len(os.listdir("/proc/self/task")) == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_supported_shapes() -> None:
    fits = {"num_heads": 64, "num_kv_heads": 1, "head_dim": 256, "intermediate_size": 96}
    assert model_class(tiny_config(**fits), BF16, "cpu") is CompiledModel
    assert model_class(tiny_config(**{**fits, "head_dim": 32}), BF16, "cpu") is CompiledModel
    assert model_class(tiny_config(**fits), torch.float32, "cpu") is Model
    for change in {"num_heads": 65}, {"head_dim": 30}, {"hidden_size": 33}, {"intermediate_size": 90}:
        assert model_class(tiny_config(**{**fits, **change}), BF16, "cpu") is Model


def test_computed_by(window_model: Model) -> None:
    assert re.fullmatch(
        r"C\+\+ \((AMX|avx512_bf16|AVX-512|AVX-VNNI|AVX2|no AVX)\)", computed_by(window_model)
    )
    assert computed_by(tiny_model()) == "PyTorch"  # in float32
    assert "products in C++ (" in computed_by(tiny_model(dtype=BF16, intermediate_size=90))
    with forced("triton"):
        assert computed_by(tiny_model()) == "Triton"
