// `multiply` of arithmetic.h with AMX, the matrix unit of Intel processors. An instruction multiplies 16 rows of 32
// elements with 16 columns. Its order of summation is different: even and odd elements are summed separately and then
// added to the accumulator. It is therefore used for single rows too, so that results do not depend on the batch.

#pragma once
#include "arithmetic.h"

constexpr long MAX_AMX_ROWS = 2 * LANES;  // maximum number of rows

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

// Returns whether the operating system permits the use of the AMX registers.
inline bool has_amx() {
    static const bool permitted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return permitted;
}

// The tile configuration of a thread: registers 0 and 1 hold the sums of `upper` rows, 2 and 3 those of `lower` rows, 4
// and 5 these rows of x, and 6 and 7 `pairs` pairs of rows of the matrix.
struct Shape {
    int upper = 0, lower = 0, pairs = 0;

    void set(int upper, int lower, int pairs) {
        if (upper == this->upper && lower == this->lower && pairs == this->pairs) return;
        *this = {upper, lower, pairs};
        const uint8_t line = LANES * 4, run = pairs * 4;  // bytes per row of a register
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16];
            uint8_t rows[16];
        } all{.bytes = {line, line, line, line, run, run, line, line}};
        const int more = std::max(lower, 1);  // a register without rows is an error
        const int rows[] = {upper, upper, more, more, upper, more, pairs, pairs};
        std::copy(rows, rows + 8, all.rows);
        asm volatile("" ::: "memory");  // GCC does not know that the instruction reads all of it
        _tile_loadconfig(&all);
    }

    void release() {
        if (pairs) _tile_release();
        *this = {};
    }
};

inline constinit thread_local Shape shape;

// `multiply` for m <= MAX_AMX_ROWS rows. RUN must divide `pairs`.
template <class Matrix>
static void multiply_amx(long m, const bf16* x, long stride, const Matrix& matrix, long pairs, Sums sums) {
    constexpr long RUN = Matrix::RUN;
    const long row = stride * sizeof(bf16), step = matrix.stride(), to = sums.stride * sizeof(float);
    const int upper = std::min<long>(m, LANES), lower = m - upper;
    shape.set(upper, lower, RUN);
    asm volatile("" ::: "memory");  // GCC does not know that these instructions read memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long p = 0; p < pairs; p += RUN) {
        matrix.prefetch(p, RUN);
        _tile_loadd(6, matrix.left(p), step);
        _tile_loadd(4, x + 2 * p, row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, matrix.right(p), step);
        _tile_dpbf16ps(1, 4, 7);
        if (!lower) continue;
        _tile_loadd(5, x + LANES * stride + 2 * p, row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], to);
    _tile_stored(1, sums[0] + LANES, to);
    if (!lower) return;
    _tile_stored(2, sums[LANES], to);
    _tile_stored(3, sums[LANES] + LANES, to);
}
#else
constexpr bool has_amx() { return false; }

template <class Matrix>
static void multiply_amx(long, const bf16*, long, const Matrix&, long, Sums) {}
#endif

// Sets a thread's floating-point mode. The destructor frees AMX state, which would slow context switches.
struct FpuMode {
#ifdef __SSE__
    // Flushes denormals to zero, as bfloat16 instructions always do; with float instructions, denormals take ten times
    // as long.
    const unsigned before = _mm_getcsr();
    FpuMode() { _mm_setcsr(before | 0x8040 /* flush to zero, denormals are zero */); }
#endif
    ~FpuMode() {
#ifdef __SSE__
        _mm_setcsr(before);
#endif
#ifdef __AMX_BF16__
        shape.release();
#endif
    }
};
