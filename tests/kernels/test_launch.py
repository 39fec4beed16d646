"""Launch kernels through Triton's launcher, up to the call of the GPU's driver."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from bench.cases import all_cases
from nanospec.kernels import launch

class Driver:
    get_current_device = get_current_stream = lambda self, device=0: 0
    get_current_target = lambda self: GPUTarget("cuda", 86, 32)

run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **named: run(self, *args, grid=grid, warmup=True, **named)
triton.runtime.driver.set_active(Driver())
for case in all_cases():
    if case.label in ("H576-T1", "smollm2-135m-qkv-T1", "smollm2-135m-B1-q1", "smollm2-135m-B8-q5-L4096"):
        with launch.forced("triton", launch.GPUS["sm_86"]):
            case.build("meta").run()
print(launch.num_compiled)
"""


@pytest.mark.slow
def test_launches_compile_each_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", SCRIPT]
    for _ in range(2):  # the second process loads them from Triton's cache
        result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
        assert result.stdout == "6\n", result.stderr[-3000:]
