"""A decoder layer, as 6 launches: the qkv product with the norm ahead of it (`linear`), RoPE and cache write
(`rope_cache`), `attention` (whose kernel is `paged`), the output product with its residual, the gate-and-up
product with norm and SwiGLU, the down product with its residual. Products are computed as in `product`;
between them goes the residual `stream`. Norms behind attention and MLP, as Gemma has, are two more
(`residual_add`).

A row's bits depend neither on the batch nor on the number of drafts.
"""
