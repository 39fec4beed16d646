"""Tests for a GPU without one: the memory of a step, captures, and operations that wait for the device."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from nanospec.config import SpecConfig
from nanospec.device.step import Step, StepResult
from nanospec.drafters.ngram import NgramDrafter
from nanospec.kernels.table import Table
from nanospec.kernels.transfer import to_host, upload
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model

READS = {
    "_local_scalar_dense", "is_nonzero", "item", "equal", "allclose", "nonzero", "masked_select", "argwhere",
    "repeat_interleave", "bincount", "unique_dim", "unique_consecutive", "_unique", "_unique2", "lift_fresh",
}  # fmt: skip
MASKED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}


class DryRun(TorchDispatchMode):
    """Measures the memory of the `with` block: `peak` is the maximum bytes of live tensors created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and storage_of(leaf) not in given:
                storage = leaf.untyped_storage()
                self._alive[storage_of(leaf)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.alive)
        return out

    @property
    def alive(self) -> int:
        """Return the bytes of live tensors created inside."""
        return sum(size for reference, size in self._alive.values() if not reference.expired())


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def meta_step(config: ModelConfig, spec: SpecConfig, num_rows: int) -> Step:
    """Return a step of a bfloat16 model on `meta` tensors, with its maximum context length."""
    shapes, length = config.parameter_shapes(), config.max_position_embeddings

    def weight(name: str) -> Tensor:
        return torch.empty(shapes[name], dtype=torch.bfloat16, device="meta")

    model = Model(config, torch.bfloat16, "meta", weight)
    table = Table.empty(num_rows, length, 16, config.vocab_size, "meta")
    kv_cache = model.allocate_kv_cache(num_rows * length // 16, 16)
    return Step(model, kv_cache, table, [NgramDrafter(spec)], (), spec.acceptance == "exact")


class Tape(TorchDispatchMode):
    """Records all launches of the `with` block in `entries`.

    Every PyTorch operation and every Triton launch (in the interpreter) is put on a tape with its arguments:
    the tensors themselves, and the current host values. Reading a tensor on the host is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []

    def __enter__(self) -> Any:
        tape, self._launch = self, GridExecutor.__call__

        def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                tape._launch(executor, *args, **kwargs)
            tape.entries.append(lambda: tape._launch(executor, *args, **kwargs))

        GridExecutor.__call__ = launch
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        GridExecutor.__call__ = self._launch
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        assert name not in READS, f"{name} makes the host wait for the device"
        out = func(*args, **kwargs)
        if name.startswith(("empty", "new_empty")):  # has no contents to recompute
            return out
        given = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        # Views and in-place results are updated through the memory they share.
        leaves = enumerate(tree_leaves(out))
        own = [i for i, leaf in leaves if isinstance(leaf, Tensor) and storage_of(leaf) not in given]

        def again() -> None:
            old, new = tree_leaves(out), tree_leaves(func(*args, **kwargs))
            for i in own:
                old[i].copy_(new[i])

        self.entries.append(again)
        return out


class TapeCapture:
    """A capture of `nanospec.device.graphs`, in place of a CUDA graph. A replay runs the tape and writes the
    results to the captured outputs. As in a real graph, values computed on the host are frozen, and outputs
    are overwritten by the next replay."""

    def __init__(self, step: Callable[[], StepResult]) -> None:
        step()  # warm-up as for a real capture: allocations that persist are made outside
        with Tape() as tape:
            self.result = step()
        self.entries = tape.entries

    @torch.inference_mode()
    def replay(self) -> None:
        for entry in self.entries:
            entry()


class NoWaiting(TorchDispatchMode):
    """Rejects operations in the `with` block that would make the host wait for a GPU, even without one.

    These are operations that read results on the host or have data-dependent sizes (`item`, `nonzero`,
    boolean masks, ...), tensors created from Python numbers, which are copied from pageable memory, and on a
    GPU all other copies from pageable memory, which `torch.cuda.set_sync_debug_mode` does not detect. Allows
    `upload` (from pinned memory), `to_host` (waits only for the step that is due), and the given `replays`.
    Counts calls of `upload` in `uploads`. Enter it before the engine runs."""

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
