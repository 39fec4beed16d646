"""The hot path: one operation per file, each with `naive`, the plain PyTorch specification, and its
Triton kernel. Needs torch and triton only and knows nothing of the engine above it.

Reading order: `dispatch` and `rows`; a decoder layer: `linear` (its kernel: `skinny`), `norm`,
`rope_cache`, `attention` (its kernels: `split_kv` for few queries per row, `prefill` for many); then the
speculative step: a `proposal`, which `ngram` (chains) and `ngram_tree` make by lookup; `layout` makes a
batch of it, `sample` (with `scan`, `shaping`, `filters` and `noise`) draws the target's tokens, which
`accept` (with `law`) changes where a request asks for another rule, `verify` compares, `commit` appends,
`logprobs` reports, and `kv_move` puts accepted tree nodes in place.

A decoder layer launches 7 kernels in the decode path: the qkv product with its norm, rope_cache, two of
attention, the output product with its residual, the gate-and-up product with norm and SwiGLU, the down
product with its residual. A row's bits depend neither on the batch nor on the number of drafts.
"""
