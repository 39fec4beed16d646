"""A decoder layer, as 7 launches where few rows are scored: the qkv product with its norm (`linear`, whose
kernel is `gemm`), `rope_cache`, two of `attention` (`split_kv`), the output product with its residual, the
gate-and-up product with norm and SwiGLU, the down product with its residual. Prompts go through `prefill`.

A row's bits depend neither on the batch nor on the number of drafts.
"""
