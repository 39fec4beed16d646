"""The operations of a CPU step in C++, compiled on the user's machine.

To be read in this order: `build` (how it is compiled and called), `step.h`, the types at the beginning of
`arithmetic.h` and `structs.h` (what is passed), `models/cpu.py` (the caller);
then the forward pass, `decoder.cpp`, and below it `attention.h`, `cache.h`, `product.h`, `arithmetic.h` (or
`amx.h`) and `threads.h`; beside it `sampling.cpp`, `step.cpp` and `ngram.cpp`.
`packed` lays weights and the KV cache out, on large pages.
"""
