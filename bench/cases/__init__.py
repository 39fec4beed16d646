"""Every production configuration of every kernel, stated once: `bench/compile.py` compiles them for
GPUs that are not there, `bench/kernels.py` times them on the one that is.

To add a kernel, add its cases to `cases()` of a module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

Call = Callable[[], object]


@dataclass
class Built:
    """One call with its inputs on a device, and what it is compared with.

    Attributes:
        run: calls the public function of the kernel. It must not read device data on the host, so
            that it runs on `meta` tensors too.
        peers: other ways to get the same result, by name; they are only ever timed on a GPU.
    """

    run: Call
    peers: Mapping[str, Call] = field(default_factory=dict)


@dataclass
class Case:
    """A kernel in one production configuration.

    Attributes:
        kernel, label: say what it is: "attention", "qwen3-8b-B64-q5-L4096".
        build: makes fresh inputs on a device ("meta", "cuda").
        bytes, flops: the least that the operation has to move and compute.
        dots: whether tensor-core instructions must be there.
    """

    kernel: str
    label: str
    build: Callable[[str], Built]
    bytes: int = 0
    flops: int = 0
    dots: bool = False


def all_cases() -> Iterator[Case]:
    """Return the cases of all modules."""
    for name in ("layer", "speculation"):
        yield from importlib.import_module(f"bench.cases.{name}").cases()
