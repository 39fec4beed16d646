"""A CUDA graph for tests without a GPU: records a step's launches and repeats them.

During capture, every PyTorch operation and every Triton launch (in the interpreter) is put on a tape with its
arguments: the tensors themselves, and the current host values. A replay runs the tape and writes the results
to the captured outputs. As in a real graph, values computed on the host are frozen, reading a tensor on the
host is an error, and outputs are overwritten by the next replay."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from nanospec.device.step import StepResult
from tests.dry import storage_of
from tests.waiting import READS


class Tape(TorchDispatchMode):
    """Records all launches of the `with` block in `entries`."""

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
    """A capture of `nanospec.device.graphs`."""

    def __init__(self, step: Callable[[], StepResult]) -> None:
        step()  # warm-up as for a real capture: allocations that persist are made outside
        with Tape() as tape:
            self.result = step()
        self.entries = tape.entries

    @torch.inference_mode()
    def replay(self) -> None:
        for entry in self.entries:
            entry()
