"""The request rows: the device state of the running requests, one row each.

The host writes a row on admission, extends its block table, and marks it finished on release. The step
updates `tokens`, `num_tokens`, `output_counts` and `finished`. Invariants: `tokens[r, :num_tokens[r]]` holds
committed tokens only; the keys and values from position num_tokens - 1 on are garbage until a step computes
them; the entries of a block table row after the request's last block repeat that block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import MAX_STOP_IDS


class Table(NamedTuple):
    """S request rows on one device. All tensors are contiguous. A tuple, because kernels take it whole."""

    tokens: Tensor  # [S, max_context] int32, prompt followed by output
    num_tokens: Tensor  # [S] int32, number of committed tokens
    max_len: Tensor  # [S] int32, number of tokens at which the request ends
    reference: Tensor  # [S, max_context] int32, other texts for n-gram lookup, see `speculation/ngram.py`
    num_reference: Tensor  # [S] int32, number of tokens in the reference, 0 without one
    block_table: Tensor  # [S, max_blocks] int32, blocks of `block_size` tokens
    finished: Tensor  # [S] int8, RUNNING or why the request ended
    max_k: Tensor  # [S] int32, maximum number of drafts per step
    min_n: Tensor  # [S] int32, shortest n-gram to look up
    max_n: Tensor  # [S] int32, longest n-gram to look up
    tree_width: Tensor  # [S] int32, maximum number of branches in a draft tree
    typical: Tensor  # [S] bool, whether drafts are accepted by `sampling/typical.py`
    temperature: Tensor  # [S] float32
    top_k: Tensor  # [S] int32, 0 disables it
    top_p: Tensor  # [S] float32
    min_p: Tensor  # [S] float32
    seed: Tensor  # [S] int64
    min_len: Tensor  # [S] int32, stop tokens are masked at absolute positions below it
    stop_ids: Tensor  # [S, num_stops] int32, padded with -1
    repetition: Tensor  # [S] float32
    presence: Tensor  # [S] float32
    frequency: Tensor  # [S] float32
    penalized: Tensor  # [S] bool, whether bias, min_len or a penalty is set; other rows skip these
    bias: Tensor  # [S, vocab_size] float32, logit bias
    in_prompt: Tensor  # [S, vocab_size] bool, tokens that occur in the prompt
    output_counts: Tensor  # [S, vocab_size] int32, occurrences of each token in the committed output
    max_context: int
    max_blocks: int
    num_stops: int
    vocab_size: int
    block_size: int

    @classmethod
    def empty(
        cls, num_rows: int, max_context: int, block_size: int, vocab_size: int, device: torch.device | str
    ) -> "Table":
        """Return a table of unused rows: all zeros."""
        max_blocks = -(-max_context // block_size)
        widths = {"block_table": max_blocks, "stop_ids": MAX_STOP_IDS}
        widths |= dict.fromkeys(("tokens", "reference"), max_context)
        widths |= dict.fromkeys(("bias", "in_prompt", "output_counts"), vocab_size)
        floats = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias")
        dtypes = dict.fromkeys(floats, torch.float32) | {"seed": torch.int64}
        dtypes |= {"finished": torch.int8} | dict.fromkeys(("typical", "penalized", "in_prompt"), torch.bool)

        def zeros(name: str) -> Tensor:
            shape = (num_rows, widths[name]) if name in widths else (num_rows,)
            return torch.zeros(shape, dtype=dtypes.get(name, torch.int32), device=device)

        tensors = map(zeros, cls._fields[:-5])  # the last five fields are numbers
        return cls._make((*tensors, max_context, max_blocks, MAX_STOP_IDS, vocab_size, block_size))

    @property
    def num_rows(self) -> int:
        return self.num_tokens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.tokens.device
