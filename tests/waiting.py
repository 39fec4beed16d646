"""Detects operations that would make the host wait for a GPU, even without one.

    with NoWaiting():
        engine.step()

Rejects operations that read results on the host or have data-dependent sizes (`item`, `nonzero`, boolean
masks, ...), tensors created from Python numbers, which are copied from pageable memory, and on a GPU all
other copies from pageable memory, which `torch.cuda.set_sync_debug_mode` does not detect. Allows `upload`
(from pinned memory), `to_host` (waits only for the step that is due), and replaying a captured step."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from nanospec.kernels.transfer import to_host, upload

READS = {
    "_local_scalar_dense", "is_nonzero", "item", "equal", "allclose", "nonzero", "masked_select", "argwhere",
    "repeat_interleave", "bincount", "unique_dim", "unique_consecutive", "_unique", "_unique2", "lift_fresh",
}  # fmt: skip
MASKED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}


class NoWaiting(TorchDispatchMode):
    """Rejects waiting operations (see above). Enter it before the engine runs; `replays` are also allowed.
    Counts calls of `upload` in `uploads`."""

    def __init__(self, *replays: tuple[type, str]) -> None:
        super().__init__()
        self._replays, self.uploads = replays, 0

    def _upload(self, *args: Any, **kwargs: Any) -> Tensor:
        self.uploads += 1
        return upload(*args, **kwargs)

    def __enter__(self) -> Any:
        self._patches = ExitStack()
        change = lambda *where: self._patches.enter_context(mock.patch.object(*where))  # noqa: E731
        for function, free in ((upload, allowed(self._upload)), (to_host, allowed(to_host))):
            for module in [m for name, m in sys.modules.items() if name.startswith("nanospec")]:
                if getattr(module, function.__name__, None) is function:
                    change(module, function.__name__, free)
        for owner, name in ((GridExecutor, "__call__"), *self._replays):
            change(owner, name, allowed(getattr(owner, name)))
        for name in ("tolist", "numpy", "cpu"):  # TorchDispatchMode does not intercept these on a CPU
            change(Tensor, name, refused(name, getattr(Tensor, name)))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in READS, f"{name} waits for the device"
        if name in MASKED:
            masks = any(t.dtype in (torch.bool, torch.uint8) for t in args[1] if t is not None)
            assert not masks, f"{name} with a mask waits for the device"
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            devices = (getattr(leaf, "device", leaf) for leaf in tree_leaves((args, kwargs)))
            if any(isinstance(each, torch.device) and each.type == "cuda" for each in devices):
                free = source.is_cuda or source.numel() <= 1 or source.is_pinned()
                assert free, "a copy from memory that is not pinned waits for the device"
        return func(*args, **(kwargs or {}))


def allowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with checks disabled during its calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def refused(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reading method of tensors that raises while the mode is active."""

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        on_device = tensor.is_cuda or not torch.cuda.is_available()  # without a GPU, every tensor counts
        assert not (on_device and torch._C._len_torch_dispatch_stack()), f"{name} waits for the device"
        return function(tensor, *args, **kwargs)

    return run
