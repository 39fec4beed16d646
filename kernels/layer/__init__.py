"""A decoder layer, as 5 launches: the qkv product from norm to RoPE and cache write (`qkv_rope`), `attention`
(whose kernel is `paged`), the output product with its residual, the gate-and-up product with norm and SwiGLU,
the down product with its residual (`linear`). Products are computed as in `product`, cut into programs by
`tiling`; between them goes the residual `stream`. Norms behind attention and MLP, as Gemma has, are two more
(`residual_add`).

A row's bits depend neither on the batch nor on the number of drafts.
"""
