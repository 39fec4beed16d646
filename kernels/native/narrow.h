// `multiply` of arithmetic.h for processors whose vectors are narrower than 64 bytes, with the same bits as there
// without bfloat16 instructions.

#pragma once
#include "arithmetic.h"

constexpr int FEW = 4;  // rows at once, measured with 16 registers of 32 bytes

template <class Matrix, int M>
static void multiply_narrow(const bf16* x, long stride, const Matrix& matrix, long pairs, Sums sums) {
    constexpr int ROWS = M < FEW ? M : FEW, HALF = sizeof(Floats) / BYTES;
    Part s[ROWS][2 * HALF] = {};
    for (long p = 0; p < pairs; p++) {
        const PartWords *left = (const PartWords*)matrix.left(p), *right = (const PartWords*)matrix.right(p);
        matrix.prefetch(p, 1);
        Part low[ROWS], high[ROWS];
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++) {
            uint32_t pair;
            memcpy(&pair, x + m * stride + 2 * p, 4);
            const PartWords both = PartWords{} + pair;
            low[m] = (Part)(both << 16), high[m] = (Part)(both & 0xFFFF0000);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 2 * HALF; i++) {
            const PartWords w = i < HALF ? left[i] : right[i - HALF];
            const Part a = (Part)(w << 16), b = (Part)(w & 0xFFFF0000);
#pragma GCC unroll 4
            for (int m = 0; m < ROWS; m++) s[m][i] += a * low[m], s[m][i] += b * high[m];
        }
    }
    for (int m = 0; m < ROWS; m++) memcpy(sums[m], s[m], sizeof s[m]);
    if constexpr (M > ROWS)
        multiply_narrow<Matrix, M - ROWS>(x + ROWS * stride, stride, matrix, pairs, {sums[ROWS], sums.stride});
}
