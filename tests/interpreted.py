"""Importing this, before triton is imported, has kernels run in Triton's interpreter if there is no GPU."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import interpreter

    interpreter.find_builtins_once()
    interpreter.replace_once()
    interpreter.remember_types()
    interpreter.keep_conditions()
    interpreter.run_programs_in_any_order()
    interpreter.refuse_what_lies_outside()


def order_programs_by(name: str) -> None:
    """Have the programs of kernels run in orders of its own for each name."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.programs.test = name
