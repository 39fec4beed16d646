"""What is not used costs no memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec.config import SamplingParams
from nanospec.memory import zeros_on_demand
from tests.drive import finish, make_engine
from tests.tiny import tiny_model

MIB = 1 << 20
CPU = torch.device("cpu")


def resident() -> int:
    """Bytes of this process that are in memory."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not say what is in memory")
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_untouched_zeros_take_no_memory(dtype: torch.dtype) -> None:
    before = resident()
    zeros = zeros_on_demand((2, 1024, MIB // dtype.itemsize), dtype, CPU)  # 2 GiB
    assert (zeros.shape, zeros.dtype, zeros.device) == ((2, 1024, MIB // dtype.itemsize), dtype, CPU)
    assert resident() - before < 8 * MIB
    assert not zeros[:, ::100].any()  # reading takes none either
    zeros[0, ::64, 0] = 1  # one page of each of 16 stretches
    assert resident() - before < 8 * MIB
    zeros[1, :64] = 1
    assert 64 * MIB <= resident() - before < 80 * MIB
    assert zeros[1, 63].float().sum() == MIB // dtype.itemsize
    view = zeros[1, 32].view(torch.int8)
    del zeros
    assert view.any()
    assert resident() - before > 60 * MIB  # as long as anything looks at it
    del view
    assert resident() - before < 8 * MIB


def test_a_large_cache_costs_what_is_used_of_it() -> None:
    target, draft = tiny_model(), tiny_model(1)
    before = resident()
    options: dict[str, Any] = {"max_num_seqs": 4096, "max_model_len": 512, "kv_cache_memory": 2 << 30}
    engine = make_engine(target, 3, draft_model=draft, guess={"method": "draft"}, **options)
    assert engine.scheduler.pool.num_blocks * 16 * 1024 == 2 << 30
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    finish(engine)
    assert resident() - before < 200 * MIB
