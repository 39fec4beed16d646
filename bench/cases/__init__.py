"""The production configurations of every kernel. `bench/compile.py` compiles them for several GPU
architectures, and `bench/kernels.py` times them on the local GPU.

To add a kernel, add its cases to `cases()` of a module.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

Call = Callable[[], object]


@dataclass
class Built:
    """A call with its inputs on a device, and its peers.

    Attributes:
        run: calls the public function of the kernel. It must not read device data on the host, so
            that it also runs on `meta` tensors.
        peers: other implementations to compare the time with, by name; called on a GPU only.
    """

    run: Call
    peers: Mapping[str, Call] = field(default_factory=dict)


@dataclass
class Case:
    """A kernel in one production configuration.

    Attributes:
        kernel, label: the name, such as "attention" and "qwen3-8b-B64-q5-L4096".
        build: creates new inputs on a device ("meta", "cuda").
        bytes, flops: the minimum memory traffic and FLOPs of the operation.
        dots: whether the kernel must use tensor-core instructions.
    """

    kernel: str
    label: str
    build: Callable[[str], Built]
    bytes: int = 0
    flops: int = 0
    dots: bool = False


def all_cases() -> Iterator[Case]:
    """Yield the cases of all modules."""
    for name in ("layer", "speculation"):
        yield from importlib.import_module(f"bench.cases.{name}").cases()
