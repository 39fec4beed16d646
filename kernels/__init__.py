"""The hot path: one operation per file, each with `naive`, the plain PyTorch specification, and its
Triton kernel. Needs torch and triton only and knows nothing of the engine above it.

Reading order: `rows` (which tokens belong to which request), `linear` (and its kernel, `skinny`),
`norm`, `rope_cache`, `attention` (and its kernels, `split_kv` for few queries per row and `prefill` for
many), then the speculative part: `ngram`, `noise`, `sample`, `verify`, `commit`, and `kv_move` for trees.

A decoder layer launches 7 kernels in the decode path: the qkv product with its norm, rope_cache, two of
attention, the output product with its residual, the gate-and-up product with norm and SwiGLU, the down
product with its residual. A row's bits depend neither on the batch nor on the number of drafts.
"""
