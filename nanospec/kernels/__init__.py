"""The hot path, about one operation per file. In most, `naive` is the specification in plain PyTorch,
`launch` the Triton kernel (that of `attention` is in `paged`, that of `sample` in `scan`), and `native`,
if any, the C++ on a CPU. This package depends on torch and triton only and does not import the engine;
`examples/nano.py` shows it in use.

* `batch`, `table`: the tokens of a step, and the request rows that it reads and writes. Operations take
  each of them as one argument.
* `layer/`: the operations of a decoder layer.
* `speculation/`: propose drafts, choose those to verify (`trim`), lay out the batch that scores them, verify
  and commit them (`verify`), move the keys and values of accepted tree nodes, and report the results of a
  step and log-probabilities to the host.
* `sampling/`: draw the target's tokens; typical acceptance.
* `transfer`: copies between host and device that do not synchronize.
* `native/`: C++ for CPUs: n-gram lookup, trim, layout, forward pass (bfloat16), sampling, token masks,
  commit.
* `launch`: selects the implementation of an operation; helpers that kernel launchers share.

Host and device share the constants below. They need no torch, so that settings can be checked without it.
"""

import os

# Fuse multiply-adds, as triton up to 3.9 does by default; 3.9 warns if this is unset, 3.10 does not fuse.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

MAX_DRAFTS = 63  # per request and step: with the last committed token, one bit each in an int64 mask
MAX_TREE_WIDTH = 8  # branches at the root of a draft tree
MAX_STOP_IDS = 32  # per request, including end-of-sequence tokens

RUNNING, STOPPED, LENGTH, NAN = 0, 1, 2, 3  # Table.finished: why a request ended
NO_DRAFTER = -1  # Proposal.drafter: no drafts
# Proposal.source if not an index of the text: the target's token; generated, not copied; FROM_REFERENCE - i:
# copied from index i of the row's reference.
FROM_TARGET, GENERATED, FROM_REFERENCE = -1, -2, -3
NAN_TOKEN = -1  # marks a position whose scores are NaN or infinite
