"""The hot path: one operation per file, each with `naive`, the plain PyTorch specification,
and `launch`, its Triton kernel; some have `native` too, which calls compiled C++ on a CPU. Needs torch and
triton only and knows nothing of the engine above it.

* `batch`, `table`: the tokens of a step; the request rows that a step reads and writes. Operations take
  both whole. `codes`: the numbers in them.
* `layer/`: a decoder layer.
* `speculation/`: propose drafts, lay out a batch of them, verify and commit, move the keys and values of
  accepted tree nodes.
* `sampling/`: draw the target's tokens, accept drafts by another rule than equality, report probabilities.
* `transfer`, `host_writes`: copies between host and device, without waiting.
* `native/`: the C++ for CPUs: the whole forward pass of bfloat16 models, drawing, lookup, masks.
* `dispatch`, `launch`: which implementation runs; what the launchers share.
"""

import os

# Products and sums are fused, as tritons up to 3.9 do; that one warns unless it is told, 3.10 will not fuse.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
