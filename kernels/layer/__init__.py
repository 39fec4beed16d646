"""The operations of a decoder layer. A layer takes 6 launches: the qkv product with the preceding norm
(`linear`), RoPE and cache write (`rope_cache`), `attention` (kernel in `paged`), the output product with its
residual, the gate-and-up product with norm and SwiGLU, and the down product with its residual. `product` has
the kernel of all products, `residual` the residual stream between them. Norms after attention and MLP, as in
Gemma, take two more launches (`residual_add`).

The result of a row is bitwise independent of the batch and the number of drafts (`naive`: see `attention`).
"""
