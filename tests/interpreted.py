"""Import this before triton to run kernels in Triton's interpreter where there is no GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import interpreter

    interpreter.patch_modules_once()
    interpreter.cache_types()
    interpreter.keep_boolean_conditions()
    interpreter.shuffle_programs()
    interpreter.check_bounds()


def order_programs_by(name: str) -> None:
    """Seed the order of programs by `name`."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.running_test = name
