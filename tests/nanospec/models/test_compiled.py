"""The forward pass in C++: against exact arithmetic, its bits, what it must not read, and its fall-back."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.dispatch import forced
from nanospec.kernels.layer.linear import Weight, plain
from nanospec.kernels.native import build, call, packed
from nanospec.models.compiled import computed_by
from nanospec.models.decoder import Model
from nanospec.models.random_weights import random_weights
from tests.tiny import GEMMA, Pages, tiny_config, tiny_model

pytestmark = pytest.mark.skipif(build.library() is None, reason="there is no C++ compiler")

BF16 = torch.bfloat16
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"hidden_size": 96, "head_dim": 32},
    "odd-sizes": {"hidden_size": 50, "vocab_size": 61, "head_dim": 34, "num_heads": 3, "num_kv_heads": 1},
    "mqa-d80-biases": {
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 80,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    },
    "qk-norm-window9": {"qk_norm": True, "windows": (9, None), "head_dim": 64, "num_heads": 2},
    "window300": {"windows": (300, 300), "head_dim": 32},
    "rows-4-kb-apart": {"hidden_size": 2048, "intermediate_size": 2048, "head_dim": 32},
    **GEMMA,
    "group20-d256": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 256, "num_layers": 1},
}


def build_model(name: str) -> Model:
    fields = {"intermediate_size": 96, "max_position_embeddings": 1024, **MODELS[name]}
    model = tiny_model(dtype=BF16, **fields)
    assert model.runs_compiled
    return model


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return build_model(request.param)


@pytest.fixture(scope="module")
def window_model() -> Model:
    return build_model("qk-norm-window9")


def exact(model: Model) -> Model:
    """The same weights in float64, by PyTorch."""

    def wide(tensor: Weight) -> Tensor:
        if isinstance(tensor, packed.Packed):
            (N, K), data = tensor.shape, tensor.data
            tensor = data.transpose(1, 2).reshape(-1, K)[:N]
        return plain(tensor).double()

    source = model.layers

    def get(name: str) -> Tensor:
        if name == "model.embed_tokens.weight":
            return wide(model.embedding)
        if name == "model.norm.weight":
            return wide(model.norm.weight)
        if name == "lm_head.weight":
            return wide(model.lm_head)
        _, _, index, module, *rest = name.split(".")
        layer, kind = source[int(index)], rest[-1]
        D, heads = model.config.head_dim, model.config.num_heads
        kv, inner = model.config.num_kv_heads * D, model.config.intermediate_size
        norms = {
            "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.post_norm,
            "self_attn.out_norm": layer.o_norm,
            "mlp.out_norm": layer.down_norm,
        }
        if norm := norms.get(module if len(rest) == 1 else f"{module}.{rest[0]}"):
            return wide(norm.weight)
        if rest[0] in ("q_norm", "k_norm"):
            assert layer.qk_norms is not None
            return wide(layer.qk_norms[rest[0] == "k_norm"].weight)
        projection, first, size = {
            "q_proj": (layer.qkv, 0, heads * D),
            "k_proj": (layer.qkv, heads * D, kv),
            "v_proj": (layer.qkv, heads * D + kv, kv),
            "o_proj": (layer.o, 0, model.config.hidden_size),
            "gate_proj": (layer.gate_up, 0, inner),
            "up_proj": (layer.gate_up, inner, inner),
            "down_proj": (layer.down, 0, model.config.hidden_size),
        }[rest[0]]
        found = projection.weight if kind == "weight" else projection.bias
        assert found is not None
        return wide(found)[first : first + size]

    with forced("triton"):  # so that weights are not packed
        return Model(model.config, torch.float64, "cpu", get)


def tokens(model: Model, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=generator)


def error(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected).norm() / expected.norm()
    return float(difference)


@pytest.mark.parametrize("block_size", [16, 64])
def test_is_as_near_to_exact_arithmetic_as_pytorch(model: Model, block_size: int) -> None:
    """Prompts longer than a span, single tokens and several, packed and padded."""
    steps: list[dict[str, Any]] = [
        {"chunks": {0: tokens(model, 330), 1: tokens(model, 5, 1), 2: tokens(model, 255, 2)}},
        {"chunks": {0: tokens(model, 1, 3), 1: tokens(model, 13, 4), 2: tokens(model, 3, 5)}},
        {"chunks": {1: tokens(model, 2, 6), 0: tokens(model, 7, 7)}, "pad_to": 9},
    ]
    errors: dict[str, list[float]] = {}
    wanted = Pages(exact(model), 3, 640, block_size)
    runs = {}
    for name in ("naive", "native"):
        with forced(name):
            runs[name] = Pages(model, 3, 640, block_size)
    for step in steps:
        with forced("naive"):
            expected = wanted.step(**step)
        for name, pages in runs.items():
            with forced(name):  # type: ignore[arg-type]
                actual = pages.step(**step)
            errors.setdefault(name, []).extend(error(actual[row], expected[row]) for row in expected)
    for ours, theirs in zip(errors["native"], errors["naive"], strict=True):
        assert ours < max(1.3 * theirs, 0.01)
    assert max(errors["native"]) < 0.05


def tree(model: Model, pages: Pages, row: int, ids: Tensor, parents: list[int]) -> Batch:
    """A step of one row whose queries form a tree: parents by place, the first its own."""
    start = pages.length[row]
    pages.table.tokens[row, start : start + len(ids)] = ids
    batch = Batch.of_chunks(pages.table, [Chunk(row, start, len(ids))])
    masks, depths = [1], [0]
    for i, parent in enumerate(parents[1:], 1):
        masks.append(masks[parent] | 1 << i)
        depths.append(depths[parent] + 1)
    masks = [mask - (mask >> 63 << 64) for mask in masks]  # as signed numbers
    return replace(
        batch,
        prefill=False,
        ancestors=torch.tensor(masks),
        parents=torch.tensor(parents, dtype=torch.int32),
        positions=torch.tensor([start + depth for depth in depths], dtype=torch.int32),
    )


def test_trees_where_a_window_begins_beside_a_span() -> None:
    """In a tree later queries may lie before earlier ones, and so may what they see; the step's own tokens
    lie inside the window."""
    fields: dict[str, Any] = {"windows": (20, 20), "num_heads": 16, "num_kv_heads": 1, "head_dim": 32}
    model = tiny_model(dtype=BF16, intermediate_size=96, **fields)
    parents = [0, *range(30), 0, 0]  # a chain, then two more drafts at its root
    ids = tokens(model, len(parents), 1)
    for length in (246, 255, 265, 272):
        results = []
        for name in ("naive", "native"):
            with forced(name):
                pages = Pages(model, 1, 320)
                pages.step({0: tokens(model, length)})
                results.append(model.forward(tree(model, pages, 0, ids, parents), pages.cache))
        assert error(results[1], results[0].double()) < 0.03, length


def test_gates_far_from_zero() -> None:
    model = build_model("mqa-d80-biases")
    for layer in model.layers:
        assert layer.gate_up.bias is not None
        layer.gate_up.bias[:96:3], layer.gate_up.bias[1:96:3] = -200, 200
    wanted, pages, ids = Pages(exact(model), 1, 64), Pages(model, 1, 64), tokens(model, 9)
    with forced("naive"):
        expected = wanted.step({0: ids})[0]
    assert error(pages.step({0: ids})[0], expected) < 0.03


def first_values(pages: Pages) -> Tensor:
    """Of the first layer and row, heads of 32: [heads, 20, 32]."""
    tiles = pages.cache[pages.table.block_table[0, :2].long(), 0, :, 1, 0]  # [2, heads, 16, 32] as
    return tiles.view(2, -1, 8, 32, 2).permute(1, 0, 2, 4, 3).flatten(1, 3)[:, :20]


def test_values_that_overflow_are_the_largest_number_in_the_cache() -> None:
    """So that they stay numbers when they are multiplied by 0; what was not a number becomes 0."""
    config = tiny_config(intermediate_size=96, head_dim=32)
    plain = random_weights(config, BF16, "cpu", 0)

    def get(name: str) -> Tensor:
        return plain(name) * (3e38 if "v_proj.weight" in name else 1)

    pages = Pages(Model(config, BF16, "cpu", get), 1, 64)
    ids = tokens(pages.model, 20)
    pages.model.embedding[ids[-1]] = torch.nan
    pages.step({0: ids})
    values = first_values(pages)
    assert (values.min(), values.max()) == (torch.finfo(BF16).min, torch.finfo(BF16).max)
    assert not values[:, -1].any()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_bits_do_not_depend_on_the_batch(window_model: Model, seed: int) -> None:
    """In pieces of any size, beside others, padded, on any number of threads: the bits of 64 at a time."""
    model, length, rng = window_model, 700, random.Random(seed)
    text, pages = tokens(model, length), Pages(window_model, 4, 704)
    expected = torch.cat([pages.step({0: part})[0] for part in text.split(64)])
    pages = Pages(model, 4, 704)
    threads = torch.get_num_threads()
    try:
        while (start := pages.length[0]) < length:
            torch.set_num_threads(rng.randint(1, 4))
            n = min(rng.choice([1, 2, 5, 12, 13, 63, 200, 400]), length - start)
            others = rng.sample([1, 2, 3], rng.randint(0, 3))
            chunks = {row: tokens(model, rng.choice([1, 3, 11])) for row in others}
            chunks[0] = text[start : start + n]
            pad = n + rng.randint(0, 3) if len(chunks) == 1 and n < 60 else None
            logits = pages.step(chunks, pad_to=pad)[0]
            pages.length[1:] = [0, 100, 300]  # of whatever lies there
            assert torch.equal(logits, expected[start : start + n]), (start, n)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_helpers_of_its_own(window_model: Model) -> None:
    """Small tensors only: PyTorch's own threads do not survive a fork."""
    ids, threads = tokens(window_model, 9), torch.get_num_threads()
    ours, childs = Pages(window_model, 1, 32), Pages(window_model, 1, 32)
    torch.set_num_threads(3)
    try:
        expected = ours.step({0: ids})[0]  # from now on there are threads
        if not (child := os.fork()):
            right = torch.equal(childs.step({0: ids})[0], expected)
            os._exit(0 if right and len(os.listdir("/proc/self/task")) == 3 else 1)
        for _ in range(600):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                break
            time.sleep(0.1)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("hangs")
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        torch.set_num_threads(threads)


def test_hidden_states_are_never_4_kb_apart() -> None:
    """Nor are rows of other sizes padded."""
    for size, stride in ((2048, 2080), (96, 96)):
        model = tiny_model(dtype=BF16, hidden_size=size, intermediate_size=96, head_dim=32)
        pages = Pages(model, 1, 64)
        batch = Batch.of_chunks(pages.table, [Chunk(0, 0, 3)])
        assert model.forward(batch, pages.cache).stride() == (stride, 1)


def test_whose_code_runs_is_said(model: Model) -> None:
    assert re.fullmatch(r"C\+\+ \((AMX|avx512_bf16|AVX-512|AVX2|no AVX)\)", computed_by(model))
    assert computed_by(tiny_model()) == "PyTorch"  # in float32
    assert "products in C++ (" in computed_by(tiny_model(dtype=BF16, intermediate_size=90))
    with forced("triton"):
        assert computed_by(model) == "Triton"


def test_keys_and_values_alone(model: Model) -> None:
    caches = []
    for run in (model.forward, model.write_kv):
        pages = Pages(model, 2, 640)
        pages.table.tokens[:, :300] = torch.stack([tokens(model, 300), tokens(model, 300, 1)])
        run(Batch.of_chunks(pages.table, [Chunk(0, 0, 300), Chunk(1, 0, 7)]), pages.cache)
        caches.append(pages.cache)
    assert torch.equal(*caches)


def test_nothing_that_a_query_does_not_see_reaches_it(model: Model) -> None:
    """Neither other pages, nor later entries, nor a later draft, though keys and logits are NaN and values as
    large as numbers can be."""
    broken = Model.random(model.config, BF16)
    bad = model.config.vocab_size - 1
    broken.embedding[bad] = torch.nan
    prompt, drafts = tokens(model, 270) % bad, tokens(model, 6, 1) % bad
    poisoned = drafts.clone()
    poisoned[3] = bad
    results = []
    for poison, ids in ((False, drafts), (True, drafts), (True, poisoned)):
        pages = Pages(broken, 2, 640)
        pages.cache[:, :, :, 0] = torch.nan if poison else 0
        pages.cache[:, :, :, 1] = torch.finfo(BF16).max if poison else 0
        pages.step({0: prompt})
        results.append(pages.step({0: ids})[0])
    assert results[0].isfinite().all()
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2][:3], results[0][:3])
    assert results[2][3].isnan().all()


@pytest.mark.parametrize("K", [2, 50, 576])
@pytest.mark.parametrize("N", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("T", [1, 2, 11, 12, 13, 16, 17, 33, 97, 200])
def test_linear(T: int, N: int, K: int) -> None:
    generator = torch.Generator().manual_seed(T * N + K)
    x, weight, bias = (torch.randn(*s, generator=generator).to(BF16) for s in ((T, K), (N, K), (N,)))
    for b in (None, bias):
        out = packed.linear(x, packed.pack(weight), b)
        expected = x.double() @ weight.double().T + (0 if b is None else b.double())
        torch.testing.assert_close(out.double(), expected, rtol=1 / 200, atol=2e-5 * K)


def test_linear_of_rows_apart() -> None:
    weight, wide = packed.pack(torch.randn(70, 16).to(BF16)), torch.randn(30, 40).to(BF16)
    for x in (wide[:, 3:19], wide[::2, :16], wide[:16].T[:20], wide[:1, :16].expand(14, 16)):
        assert torch.equal(packed.linear(x, weight), packed.linear(x.contiguous(), weight))


# Processors by what the library says of itself: how GCC is told, and what the system calls the instructions.
PROCESSORS = {
    "AVX2": ("x86-64-v3", "avx2"),
    "AVX-512": ("x86-64-v4", "avx512vl"),
    "avx512_bf16": ("x86-64-v4 -mavx512bf16 -msse4a", "avx512_bf16"),  # AMD's
    "AMX": ("x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16", "amx_bf16"),
}


@pytest.fixture(scope="session")
def built_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles for what -march names, once for all processes that share the tests."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    @cache
    def built(option: str) -> Path:
        folder = shared / option.replace(" ", "")
        folder.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch, (folder / "lock").open("w") as lock:
            patch.setenv("CXX", f"{os.environ.get('CXX', 'g++')} -march={option}")
            fcntl.flock(lock, fcntl.LOCK_EX)
            return build.built(folder)

    return built


@pytest.fixture(scope="module", params=PROCESSORS)
def compiled_for(request: pytest.FixtureRequest, built_for: Callable[[str], Path]) -> ctypes.CDLL:
    """The library for a kind of processor."""
    option, flag = PROCESSORS[request.param]
    if platform.machine() != "x86_64" or flag not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"not a processor with {flag}")
    if build.target() == request.param:
        pytest.skip("the other tests run on it")
    library = ctypes.CDLL(str(built_for(option)))
    library.nanospec_target.restype = ctypes.c_char_p
    said = library.nanospec_target().decode()
    if (request.param, said) == ("AMX", "AVX-512"):
        pytest.skip("the system refuses AMX")
    assert said == request.param
    return library


@pytest.fixture
def other_library(compiled_for: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(call, "library", lambda: compiled_for)
    call._function.cache_clear()
    yield
    call._function.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86 processor")
@pytest.mark.parametrize("name", PROCESSORS)
def test_it_compiles_for_processors_that_are_not_here(
    built_for: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if PROCESSORS[name][1] in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("the other tests compile for it")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))  # in half the time
    assert ctypes.CDLL(str(built_for(PROCESSORS[name][0]))).nanospec_target


@pytest.mark.usefixtures("other_library")
def test_other_processors(model: Model) -> None:
    test_is_as_near_to_exact_arithmetic_as_pytorch(model, 16)


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("K", [200, 224])
def test_bits_do_not_depend_on_the_batch_on_other_processors(K: int, cancel: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(BF16) for shape in ((300, K), (70, K)))
    if (
        cancel
    ):  # the exact sums are 0: what is left is their rounding, which shows an order that bfloat16 hides
        order, half = torch.randperm(K, generator=generator), K // 2
        x = torch.cat([x[:, :half], x[:, :half]], 1)[:, order]
        weight = torch.cat([weight[:, :half], -weight[:, :half]], 1)[:, order]
    strips = packed.pack(weight)
    expected = packed.linear(x, strips)
    assert (expected != 0).float().mean() > 0.2
    torch.testing.assert_close(expected.double(), x.double() @ weight.double().T, rtol=1 / 200, atol=4e-3)
    for count in (*range(1, 35), 63, 64, 65, 96, 97, 257):
        assert torch.equal(packed.linear(x[:count], strips), expected[:count])
        assert torch.equal(packed.linear(x[-count:], strips), expected[-count:])


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize(("x", "weight"), [(1e-20, 1e-19), (1e-39, 1e20), (1e20, 1e-39)])
def test_what_is_too_small_for_a_normal_float_is_zero(x: float, weight: float) -> None:
    """As instructions for bfloat16 have it; those for floats would be ten times slower. PyTorch, in the same
    thread, still keeps such numbers."""
    strips = packed.pack(torch.full((40, 96), weight, dtype=BF16))
    for count in (1, 13):
        assert (packed.linear(torch.full((count, 96), x, dtype=BF16), strips) == 0).all()
    assert torch.tensor(1e-20) * torch.tensor(1e-19) > 0


@pytest.mark.usefixtures("other_library")
def test_so_it_is_in_the_whole_model() -> None:
    config = tiny_config(intermediate_size=96, head_dim=32)
    plain = random_weights(config, BF16, "cpu", 0)
    model = Model(config, BF16, "cpu", lambda name: plain(name) * (1e-38 if "v_proj" in name else 1))
    pages = Pages(model, 1, 64)
    pages.step({0: tokens(model, 20)})
    assert not first_values(pages).any()


def test_vectors_of_any_width_give_the_same_bits(
    built_for: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of AVX2 and AVX-512, whose exact values are 0: what is left shows their order."""
    if not {"avx2", "avx512vl"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("not a processor with both")
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(40, 200, generator=generator).to(BF16) for _ in range(2))
    x, weight = torch.cat([x, x], 1), torch.cat([weight, -weight], 1)
    found = []
    for name in ("AVX2", "AVX-512"):
        library = ctypes.CDLL(str(built_for(PROCESSORS[name][0])))
        monkeypatch.setattr(call, "library", lambda library=library: library)
        call._function.cache_clear()
        found.append(packed.linear(x, packed.pack(weight)))
    call._function.cache_clear()
    assert (found[0] != 0).float().mean() > 0.2
    assert torch.equal(*found)


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize("K", [2, 30, 100, 400])
def test_nothing_behind_the_last_row_is_read(K: int) -> None:
    """It ends where a page does, and the next one must not be touched."""
    page, weight = mmap.PAGESIZE, packed.pack(torch.randn(40, K).to(BF16))
    room = mmap.mmap(-1, 5 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address + 4 * page, page, 0) == 0
    for T in (1, 2, 12, 13):
        x = torch.frombuffer(room, dtype=BF16, count=T * K, offset=4 * page - 2 * T * K).view(T, K).normal_()
        assert torch.equal(packed.linear(x, weight), packed.linear(x.clone(), weight))


@pytest.mark.parametrize(
    ("options", "by_pairs"),
    [
        ("x86-64-v3 -msse4a", False),
        ("x86-64-v4", False),
        ("cooperlake", False),
        ("x86-64-v4 -mavx512bf16 -msse4a", True),
    ],
)
def test_only_processors_of_amd_multiply_bfloat16_in_pairs(options: str, by_pairs: bool) -> None:
    """Those of Intel are faster with floats."""
    if platform.machine() != "x86_64":
        pytest.skip("not an x86 processor")
    file = Path(build.__file__).with_name("arithmetic.h")
    command = [*build.find_compiler(), *f"-march={options} -std=c++20 -dM -E -x c++".split(), str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("#define BY_PAIRS" in result.stdout) == by_pairs


def test_products_of_pytorch_are_not_disturbed(window_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may use the same registers, of a shape of their own, in the same thread."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x, weight = torch.randn(130, 256).to(BF16), torch.randn(96, 256).to(BF16)
    strips, expected, results = packed.pack(weight), x @ weight.T, []
    for _ in range(3):
        pages = Pages(window_model, 1, 64)
        pages.table.tokens[0, :5] = tokens(window_model, 5)
        hidden = window_model.forward(Batch.of_chunks(pages.table, [Chunk(0, 0, 5)]), pages.cache)
        assert torch.equal(x @ weight.T, expected)
        results.append((hidden, packed.linear(x, strips)))
        assert torch.equal(x @ weight.T, expected)
    for hidden, product in results[1:]:
        assert torch.equal(hidden, results[0][0])
        assert torch.equal(product, results[0][1])


WITHOUT_PERMISSION = """
import ctypes, struct
def line(code, true, false, value): return struct.pack("HBBI", code, true, false, value)
# Of a call: its number; arch_prctl? its argument; ARCH_REQ_XCOMP_PERM? EPERM; else allowed.
filter = (line(0x20, 0, 0, 0) + line(0x15, 0, 3, 158) + line(0x20, 0, 0, 16) + line(0x15, 0, 1, 0x1023)
          + line(0x06, 0, 0, 0x00050001) + line(0x06, 0, 0, 0x7FFF0000))
lines = ctypes.create_string_buffer(filter)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(filter) // 8, ctypes.addressof(lines)))
prctl = ctypes.CDLL(None).prctl
allowed = not prctl(38, 1, 0, 0, 0) and not prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0)

import torch
from nanospec.kernels.native import build, packed
x, weight = torch.ones(5, 64, dtype=torch.bfloat16), torch.ones(3, 64, dtype=torch.bfloat16)
assert (packed.linear(x, packed.pack(weight)) == 64).all()
print(build.target() if allowed else "no filter")
"""


@pytest.mark.skipif(build.library() is None or build.target() != "AMX", reason="not a processor with AMX")
def test_where_the_system_refuses_the_matrix_unit_vectors_compute() -> None:
    """As a container may. The system is asked by a number that a filter of system calls answers with no."""
    child = [sys.executable, "-c", WITHOUT_PERMISSION]
    result = subprocess.run(child, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() in (["AVX-512"], ["no", "filter"])


def test_a_processor_named_in_cxx_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, wanted in (("-g", ["-g", "-march=native"]), ("-march=x86-64-v3", ["-march=x86-64-v3"])):
        monkeypatch.setenv("CXX", f"sh {options}")
        assert build.find_compiler()[1:] == wanted


# ---- the library ---------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    yield tmp_path / "nanospec"
    build.library.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no no-such"),
        ("false", "exit status 1"),
        ("sh -c 'echo in function; echo error: old >&2; exit 1' cxx", "error: old"),
        ("sh -c 'echo >&2; exit 1' cxx", ".+"),
        (r"sh -c 'printf \\344 >&2; exit 1' cxx", ".+"),
        ('g++ "', "No closing quotation"),
    ],
    ids=["none", "broken", "old", "newline", "latin-1", "quotation"],
)
def test_without_a_compiler_pytorch_runs(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=rf"PyTorch runs instead.*install g\+\+ 11.*\(.*{reason}"):
        model = tiny_model(dtype=BF16, intermediate_size=96)
    assert not model.runs_compiled
    pages = Pages(model, 1, 64)
    assert pages.step({0: tokens(model, 5)})[0].isfinite().all()
    assert not list(fresh.glob("*"))


@pytest.mark.parametrize("how", ["forced", "NANOSPEC_KERNELS"])
def test_who_asks_for_it_without_a_compiler_gets_an_error(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    message = r"could not be compiled, .*NANOSPEC_KERNELS=native.*; install g\+\+ 11.*no no-such-compiler"
    if how == "forced":
        with forced("native"), pytest.raises(OSError, match=message):
            tiny_model(dtype=BF16, intermediate_size=96)
        return
    monkeypatch.setenv("NANOSPEC_KERNELS", "native")
    code = "import torch; from nanospec.kernels.layer.linear import pack; pack(torch.ones(2, 2).bfloat16())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(message, result.stderr.splitlines()[-1])
    assert "Warning" not in result.stderr


def test_without_a_home_the_library_is_of_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert build.cache_folder() == Path(build._own_folder().name)


def test_what_was_compiled_is_kept_and_broken_files_are_compiled_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    compile_ = build._compile

    def run(command: list[str], folder: str) -> None:
        calls.append(command)
        compile_(command, folder)

    monkeypatch.setattr(build, "_compile", run)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))
    monkeypatch.setattr(build, "SOURCES", [path for path in build.SOURCES if path.name == "mask.cpp"])
    file = build.built(fresh)
    file.write_bytes(b"truncated")
    assert build.library() is not None
    assert list(fresh.glob("*")) == [file]
    count = len(calls)
    build.library.cache_clear()
    assert build.library() is not None
    assert 0 < count == len(calls)
    monkeypatch.setenv("CXX", "no-such-compiler")  # it may have been removed
    assert build.built(fresh) == file
    monkeypatch.setenv("CXX", "no-such-compiler -march=x86-64-v3")
    with pytest.raises(FileNotFoundError, match="there is no no-such-compiler"):
        build.built(fresh)
