"""What the launchers share: the architecture they choose a configuration for, padded sizes, checks.

The architecture is that of the device, or the one named in `targeting(...)`, with which
`bench/compile.py` compiles every kernel for GPUs that are not there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E): GPUs compute powers of 2
# AMD has two shapes of matrix instruction and would choose by tile; one sum order needs one shape.
ONE_SHAPE = {"gfx942": {"matrix_instr_nonkdim": 16}}
_target: str | None = None


def arch(tensor: Tensor) -> str:
    """The table key for the GPU that holds `tensor`; of unknown GPUs, that of the nearest older one."""
    return _target or (_device_arch(tensor.device.index or 0) if tensor.is_cuda else "sm_90")


@cache
def _device_arch(index: int) -> str:
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(index)
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80"


@contextmanager
def targeting(name: str) -> Iterator[None]:
    """Choose configurations for the architecture `name` inside the `with` block."""
    global _target
    previous, _target = _target, name
    try:
        yield
    finally:
        _target = previous


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def check_cache(cache: Tensor, dtype: torch.dtype) -> None:
    """Refuse a cache [2, Hkv, num_blocks, block_size, D] that is not for keys of `dtype`, or whose slots are
    not D apart within a head."""
    if cache.dtype != dtype:
        raise ValueError(f"The keys and values are {dtype} but the cache is {cache.dtype}.")
    block_size, head_dim = cache.shape[3:]
    if cache.stride()[2:] != (block_size * head_dim, head_dim, 1):
        raise ValueError("The pages of a head must lie in the cache one after another.")
    if head_dim > 256 or head_dim % 2:
        raise ValueError(f"The head dimension must be even and at most 256, not {head_dim}.")


def check_attention(q: Tensor, cache: Tensor) -> None:
    """Refuse what the attention kernels would read wrongly."""
    check_cache(cache, q.dtype)
    _, num_kv_heads, _, _, head_dim = cache.shape
    if q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise ValueError(f"q {list(q.shape)} does not fit a cache of {list(cache.shape)}.")
    if not q.is_contiguous():
        raise ValueError("q must be contiguous.")
