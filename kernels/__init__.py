"""The hot path: one operation per file, each with `naive`, the plain PyTorch specification, and its
Triton kernel. Needs torch and triton only and knows nothing of the engine above it.

Reading order: `rows` (which tokens belong to which request), `linear`, `norm`, `rope_cache`,
`attention`, then the speculative part: `ngram`, `noise`, `sample`, `verify`, `commit`.
"""
