"""The hot path: one operation per file, each with `naive`, the plain PyTorch specification and CPU path,
and `launch`, its Triton kernel. Needs torch and triton only and knows nothing of the engine above it.

* `batch`, `table`: the tokens of a step; the request rows that a step reads and writes. Operations take
  both whole. `codes`: the numbers in them.
* `layer/`: a decoder layer.
* `speculation/`: propose drafts, lay out a batch of them, verify and commit, move the keys and values of
  accepted tree nodes.
* `sampling/`: draw the target's tokens, accept drafts by another rule than equality, report probabilities.
* `upload`, `host_writes`: what the host sends, without waiting.
* `dispatch`, `launch`: which implementation runs; what the launchers share.
"""
