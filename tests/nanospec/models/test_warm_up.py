"""Prompts of any length compile no kernel after the start."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from nanospec.config import SamplingParams
from nanospec.device import worker
from nanospec.device.messages import Admission
from nanospec.drafters import draft_model
from nanospec.kernels.batch import Chunk
from nanospec.kernels.launch import GPUS, forced
from tests.drive import make_engine
from tests.tiny import tiny_model

LENGTH = 1024
OF_LAYERS = {"_gemm", "_attend", "_combine", "_rope_cache", "_residual_add"}  # not run here


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Call the listener of Triton's compiler when the launcher would compile a kernel, and yield the kernels
    compiled so far. Skip those of layers. With few multiprocessors, a small model has all tilings."""
    backend, run = make_backend(GPUTarget("cuda", 90, 32)), InterpretedFunction.run
    binders, compiled = dict[str, Any](), set[tuple[str, str]]()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if (name := self.fn.__name__) not in binders:
            function = JITFunction(self.fn, do_not_specialize=self.kwargs.get("do_not_specialize"))
            binders[name] = create_function_from_signature(function.signature, function.params, backend)
        key = name, str(binders[name](*args, **kwargs)[1:])
        if key not in compiled:
            compiled.add(key)
            triton.knobs.compilation.listener()
        if name not in OF_LAYERS:
            run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    with forced("triton", GPUS["sm_90"]._replace(multiprocessors=16)):
        yield compiled


def compiled_by_prompts() -> int:
    """Return the number of kernels compiled for prompts of all sizes, by the target and by a draft model."""
    sizes: dict[str, Any] = {"head_dim": 64, "intermediate_size": 1280, "max_position_embeddings": LENGTH}
    model, draft = (tiny_model(dtype=torch.bfloat16, hidden_size=n, **sizes) for n in (128, 64))
    options: dict[str, Any] = {"max_model_len": LENGTH, "max_num_seqs": 3, "enforce_eager": False}
    engine = make_engine(model, 1, draft_model=draft, spec={"method": "draft"}, **options)
    run = engine.worker
    for size in range(1, LENGTH, 3):
        run.prefill([Chunk(0, 0, size)])
        run.prefill([Chunk(0, LENGTH - size, size)])
        run.prefill([Chunk(0, LENGTH - size, size), Chunk(1, size // 2, size // 3 + 1)])
        blocks, reference = [*range(64)], np.empty(0, np.int32)
        run.admit(
            Admission(2, [0] * size, size, reference, LENGTH, blocks, 0, 0, (), SamplingParams(), 1, False)
        )
        for _ in range(2):  # without waiting for the device, the state of a row is read one call later
            run.drafters[0].catch_up([2])
        run.release(2)
    return engine.num_compiled


def test_prompts_compile_no_kernel(compiled: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_by_prompts() == 0
    compiled.clear()
    for module in (worker, draft_model):
        monkeypatch.setattr(module, "warm_up", lambda *args: None)
    assert compiled_by_prompts() > 10
