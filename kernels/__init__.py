"""The hot path: one operation per file, each with `naive`, the plain PyTorch specification,
and `launch`, its Triton kernel; some have `native` too, which calls compiled C++ on a CPU. Needs torch and
triton only and knows nothing of the engine above it.

* `batch`, `table`: the tokens of a step; the request rows that a step reads and writes. Operations take
  both whole.
* `layer/`: a decoder layer.
* `speculation/`: propose drafts, lay out a batch of them, verify and commit, move the keys and values of
  accepted tree nodes.
* `sampling/`: draw the target's tokens, accept drafts by another rule than equality, report probabilities.
* `transfer`: copies between host and device, without waiting.
* `native/`: the C++ for CPUs: the whole forward pass of bfloat16 models, drawing, lookup, masks.
* `launch`: which implementation of an operation runs, and what launchers of kernels share.

The numbers below are what host and device agree on. They need no torch, so that settings are checked without.
"""

import os

# Products and sums are fused, as tritons up to 3.9 do; that one warns unless it is told, 3.10 will not fuse.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

MAX_DRAFTS = 63  # per request and step: with the last committed token, one bit each of an int64
MAX_TREE_WIDTH = 8  # continuations of a request in one step
MAX_STOP_IDS = 32  # per request, end-of-sequence tokens included

RUNNING, STOPPED, LENGTH, NAN = 0, 1, 2, 3  # Table.finished: how a request ended
EXACT, REJECTION, TYPICAL = 0, 1, 2  # Table.rule: which drafts are accepted, see `sampling/accept.py`
RULES = ("exact", "rejection", "typical")  # their names, by code
NO_DRAFTER = -1  # Proposal.drafter: no drafts
OWN, GUESSED = -1, -2  # Proposal.source in place of an index: the target's own token; a model's guess
NAN_TOKEN = -1  # in place of a token: there was nothing to draw from
