// bfloat16 conversion, vectors of 16 lanes, and `multiply`, the inner kernel of all matrix products (the AMX version is
// in amx.h).

#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#ifdef __SSE__
#include <immintrin.h>
#endif

using bf16 = uint16_t;
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));

// Only AMD processors have SSE4a. The instruction that multiplies pairs of bfloat16 numbers is used on AMD only: on
// Intel it is half as fast as float instructions (bench/LOG.md).
#ifdef __SSE4A__
constexpr bool AMD = true;
#ifdef __AVX512BF16__
#define BY_PAIRS
#endif
#else
constexpr bool AMD = false;
#endif

constexpr float LOG2_E = 1.44269504f;
constexpr int LANES = 16;

// Vector size of the processor in bytes. GCC keeps wider vectors in memory and compares them element by element.
#ifdef __AVX512F__
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
typedef float Part __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef uint32_t PartWords __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t PartInts __attribute__((vector_size(BYTES), aligned(4), may_alias));

// Applies f to vectors of the processor's size, part by part. The arguments are pointers because in templates,
// references would imply an alignment of 64 bytes.
template <class F, class... Vectors>
static inline Floats by_parts(F f, const Vectors*... of) {
    Floats result;
    for (int i = 0; i < int(sizeof(Floats)) / BYTES; i++) ((Part*)&result)[i] = f(((const Part*)of)[i]...);
    return result;
}
constexpr int WIDTH = 2 * LANES;  // columns of a strip

static inline float to_float(bf16 x) {
    return std::bit_cast<float>(uint32_t(x) << 16);
}

static inline bf16 to_bf16(float value) {  // rounds to nearest, ties to even
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return value == value ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0;
}

static inline Floats splat(float value) { return Floats{} + value; }

static inline Floats load(const float* from) { return *(const Floats*)from; }

// memcpy, compiled to a single instruction if `bytes` is a whole vector.
template <long WHOLE>
static inline void copy_some(void* to, const void* from, long bytes) {
    bytes == WHOLE ? memcpy(to, from, WHOLE) : memcpy(to, from, bytes);
}

static inline Floats load(const bf16* from, long n = LANES) {
    Halves halves{};
    copy_some<sizeof halves>(&halves, from, n * sizeof(bf16));
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

static inline void store(Floats values, bf16* to, long n = LANES) {
#ifdef __AVX512BF16__
    const Halves halves = (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
    const Floats rounded = by_parts([](Part x) {
        const PartWords bits = (PartWords)x, near = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        return (Part)(x == x ? near : PartWords{} + 0x7FC0);
    }, &values);
    Halves halves = __builtin_convertvector((Words)rounded, Halves);
#endif
    copy_some<sizeof halves>(to, &halves, n * sizeof(bf16));
}

// Returns v with lane i exchanged with lane i ^ step.
static inline Floats swapped(Floats v, int step) {
    Ints lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i ^ step;
    return __builtin_shuffle(v, lanes);
}

static inline Floats max_of(Floats a, Floats b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return by_parts([](Part a, Part b) { return a > b ? a : b; }, &a, &b);
#endif
}

static inline Floats minus_abs(Floats x) { return (Floats)((Words)x | 0x80000000); }  // -|x|

static inline float sum(Floats v) {  // pairwise
#pragma GCC unroll 3
    for (int step : {8, 4, 2}) v += swapped(v, step);
    return v[0] + v[1];
}

static inline float largest(Floats v) {
#pragma GCC unroll 3
    for (int step : {8, 4, 2}) v = max_of(v, swapped(v, step));
    return v[0] > v[1] ? v[0] : v[1];
}

// Returns 2^x with an error of 3e-7 for -126 <= x <= 0; 0 for -infinity, NaN for NaN.
static inline Part exp2_of(Part x) {
#ifdef __AVX512BF16__
    const __m512 v = _mm512_max_ps(_mm512_set1_ps(-1000), (__m512)x), w = _mm512_roundscale_ps(v, 0), g = v - w;
    __m512 r = _mm512_set1_ps(1.5403530e-4f);
    for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        r = _mm512_fmadd_ps(r, g, _mm512_set1_ps(c));
    return (Part)_mm512_scalef_ps(r, w);
#else
    Part whole = x < -126 ? Part{} - 126 : x;
    whole = (whole + 12582912) - 12582912;  // rounds to an integer: 1.5 * 2^23 has no fraction bits
    Part f = x - whole, y = Part{} + 1.5403530e-4f;
    for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) y = y * f + c;
    const PartWords power = PartWords(__builtin_convertvector(whole, PartInts) + 127) << 23;
    return x < -126 ? Part{} : y * (Part)power;
#endif
}

#ifndef __AVX512F__
static inline Floats exp2_of(Floats x) { return by_parts([](Part x) { return exp2_of(x); }, &x); }
#endif

static inline Floats tanh_of(Floats x) {  // to 4e-7
    const Floats small = exp2_of(minus_abs(x) * (2 * LOG2_E)), size = (1 - small) / (1 + small);
    return (Floats)((Words)size ^ ((Words)x & 0x80000000));
}

// The output of `multiply`: 32 sums per row.
struct Sums {
    float* data;
    long stride;  // elements between rows

    float* operator[](long m) const { return data + m * stride; }
};

// 32 columns of a matrix, as pairs of rows: a word holds two consecutive elements of a column. Columns 0..15 of pair p
// are at left(p), columns 16..31 at right(p). Within a RUN of pairs, consecutive pairs are stride() bytes apart.
// prefetch(p, n) is called when pairs p .. p + n - 1 are processed, and prefetches later data.
struct Strip {
    const Words* data;  // [pairs][32]
    const char* ahead;  // data to prefetch, `step` bytes per pair
    long step;
    static constexpr long RUN = 16;

    static long stride() { return WIDTH * sizeof(uint32_t); }
    const void* left(long p) const { return data + 2 * p; }
    const void* right(long p) const { return data + 2 * p + 1; }
    void prefetch(long p, long count) const {  // into L2: a strip may be larger than L1
        for (long i = p * step; i < (p + count) * step; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    }
};

// A part of M rows of x. add(sums, m, w) returns `sums` plus the product of the current pair of row m with 16 columns;
// next() advances to the next pair.
#ifdef BY_PAIRS
constexpr long PART = 1 << 30;  // pairs

template <int M>
struct RowsPart {
    const bf16* at[(M + 2) / 3];  // one address per three rows: addressing modes add the stride
    const long stride;

    RowsPart(const bf16* x, long stride, long) : stride(stride) {
        for (int i = 0; i < (M + 2) / 3; i++) at[i] = x + 3 * i * stride;
    }
    void next() {
#pragma GCC unroll 4
        for (int i = 0; i < (M + 2) / 3; i++) {
            at[i] += 2;
            asm("" : "+r"(at[i]));  // otherwise GCC keeps the addresses in a vector in memory, 1/6 slower
        }
    }
    Floats add(Floats sums, int m, Words w) const {
        uint32_t pair;
        memcpy(&pair, at[m / 3] + m % 3 * stride, 4);
        return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)w, (__m512bh)_mm512_set1_epi32(pair));
    }
};
#else
constexpr long PART = 64;  // pairs; the floats of 12 rows, 6 KB, then stay in the L1 cache
static_assert(PART % LANES == 0);

template <int M>
struct RowsPart {
    alignas(64) float low[M][PART], high[M][PART];
    long p = 0;

    RowsPart(const bf16* x, long stride, long pairs) {
        for (int m = 0; m < M; m++, x += stride)
            for (long i = 0; i < pairs; i += LANES) {
                Words both{};
                copy_some<sizeof both>(&both, x + 2 * i, std::min<long>(LANES, pairs - i) * sizeof(uint32_t));
                *(Words*)(low[m] + i) = both << 16, *(Words*)(high[m] + i) = both & 0xFFFF0000;
            }
    }
    void next() { p++; }
    Floats add(Floats sums, int m, Words w) const {
        sums += (Floats)(w << 16) * low[m][p];
        return sums + (Floats)(w & 0xFFFF0000) * high[m][p];
    }
};
#endif

// Computes sums[m] = x[m] @ matrix for M rows x of 2 * pairs elements, `stride` apart, and 32 columns of a matrix. Pairs
// are added in ascending order for every M, so the result of a row does not depend on the other rows.
template <class Matrix, int M>
static void multiply(const bf16* x, long stride, const Matrix& matrix, long pairs, Sums sums) {
    Floats s[M][2] = {};  // in registers, because the loops over m are unrolled
    for (long from = 0; from < pairs; from += PART) {
        const long end = std::min(from + PART, pairs);
        RowsPart<M> rows(x + 2 * from, stride, end - from);
        for (long p = from; p < end; p++, rows.next()) {
            const Words a = *(const Words*)matrix.left(p), b = *(const Words*)matrix.right(p);
            matrix.prefetch(p, 1);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                s[m][0] = rows.add(s[m][0], m, a);
                s[m][1] = rows.add(s[m][1], m, b);
            }
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) *(Floats*)sums[m] = s[m][0], *(Floats*)(sums[m] + LANES) = s[m][1];
}

// `multiply` for processors with narrower vectors; bitwise identical to `multiply` without bfloat16 instructions.
#ifndef __AVX512F__
constexpr int ROWS_AT_ONCE = 4;  // the best with 16 registers of 32 bytes, by measurement

template <class Matrix, int M>
static void multiply_narrow(const bf16* x, long stride, const Matrix& matrix, long pairs, Sums sums) {
    constexpr int ROWS = M < ROWS_AT_ONCE ? M : ROWS_AT_ONCE, HALF = sizeof(Floats) / BYTES;
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
#endif
