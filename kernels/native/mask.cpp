// `mask` of sampling/mask.py on a CPU: a row is a task. Logits are handled as the bits they are.

#include <algorithm>
#include <cstdint>

#include "threads.h"

namespace {

struct Masking {
    void* logits;  // [T, V] bfloat16 or float32, rows `stride` apart
    int64_t stride, is_bf16, T, V;
    const uint32_t* allowed;  // [M, words], rows `width` apart
    int64_t width, words;
    const int* at;  // [T]
    int64_t threads;
};

template <class Bits>
void mask(const Masking& given, Bits* logits, Bits barred) {
    for_each(given.threads, given.T, [&](long t) {
        if (given.at[t] < 0) return;
        const uint32_t* allowed = given.allowed + given.at[t] * given.width;
        for (long first = 0; first < given.V; first += 32) {
            Bits* own = logits + t * given.stride + first;
            const int n = std::min(32L, given.V - first);
            const uint32_t word = first / 32 < given.words ? allowed[first / 32] : 0;
            if (word == 0) std::fill_n(own, n, barred);
            else if (word != ~0u)
                for (int i = 0; i < n; i++) {
                    const Bits keep = -Bits(word >> i & 1);
                    own[i] = (own[i] & keep) | (barred & ~keep);
                }
        }
    });
}

}  // namespace

extern "C" void nanospec_mask(const Masking* given) {  // -inf as bits
    if (given->is_bf16) mask<uint16_t>(*given, (uint16_t*)given->logits, 0xFF80);
    else mask<uint32_t>(*given, (uint32_t*)given->logits, 0xFF800000);
}
