"""The operations of a decoder layer, in 6 launches: the qkv product with the preceding norm (`linear`), RoPE
and cache write (`rope_cache`), `attention` (kernel in `paged`), and the o, gate-and-up and down products,
fused with norm, gate and residual. `product` has the kernel of all products, `residual` the residual stream.
"""
