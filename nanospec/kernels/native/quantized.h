// Products with weights of 8 or 4 bits. Rows of x are quantized to 8 bits, in groups of the same columns as the weight.
//
// The codes of the weight are unsigned, those of x signed. Their products are summed exactly in int32 over a group; the
// groups are scaled and added in ascending order in float. So the result of a row does not depend on other rows.

#pragma once
#include "amx.h"
#include "structs.h"
#include "threads.h"

constexpr long MAX_PRODUCT_ROWS = 32;  // rows of x that are multiplied at once

// Vectors of int32 with one lane per row of the weight.
#ifdef __AVX512VNNI__
constexpr int ROW_BYTES = 64, VECTORS = 2;  // vectors that are processed together: their codes fit in registers
#else
constexpr int ROW_BYTES = 32, VECTORS = 1;
#endif
constexpr int ROW_LANES = ROW_BYTES / 4, QUADS = 8;
typedef int32_t RowInts __attribute__((vector_size(ROW_BYTES), aligned(4), may_alias));
typedef uint32_t RowWords __attribute__((vector_size(ROW_BYTES), aligned(4), may_alias));
typedef float RowFloats __attribute__((vector_size(ROW_BYTES), aligned(4), may_alias));
typedef uint16_t RowHalves __attribute__((vector_size(ROW_BYTES / 2), aligned(2), may_alias));

// GROUP columns of 32 rows of a weight, followed by float16 scales and minima: the layout of `packed.py`.
template <int BITS_, bool MINIMUM_, int GROUP_>
struct Block {
    static constexpr int BITS = BITS_, GROUP = GROUP_, PARTS = GROUP / (4 * QUADS);
    static constexpr bool MINIMUM = MINIMUM_;
    static constexpr long CODES = GROUP * WIDTH * BITS / 8, SIZE = CODES + WIDTH * 2 * (1 + MINIMUM);
    const char* data;

    // Loads 32 columns of ROW_LANES rows from `row` on: byte b of lane i of codes[q] is column 32 part + 4 q + b of row + i.
    void load(long row, int part, RowInts* codes) const {
        const char* from = data + row / LANES * (CODES / 2) + row % LANES * 4 + part * (QUADS * 64 * BITS / 8);
#pragma GCC unroll 8
        for (int q = 0; q < QUADS * BITS / 8; q++) {
            const RowWords both = *(const RowWords*)(from + q * 64);
            if (BITS == 8) codes[q] = (RowInts)both;
            else codes[q] = (RowInts)(both & 0x0F0F0F0F), codes[q + QUADS / 2] = (RowInts)(both >> 4 & 0x0F0F0F0F);
        }
    }

    RowFloats scales(long row) const { return to_floats(CODES + row * 2); }
    RowFloats minima(long row) const { return to_floats(CODES + (WIDTH + row) * 2); }

  private:
    RowFloats to_floats(long at) const {
        const RowHalves halves = *(const RowHalves*)(data + at);
#ifdef __AVX512VNNI__
        return (RowFloats)_mm512_cvtph_ps((__m256i)halves);
#elif defined __F16C__
        return (RowFloats)_mm256_cvtph_ps((__m128i)halves);
#else
        const RowWords bits = __builtin_convertvector(halves, RowWords);
        return (RowFloats)((bits & 0x8000) << 16 | (bits & 0x7FFF) << 13) * 0x1p112f;
#endif
    }
};

// For a group of a row of x: its scale times the factor of the weight, and a correction for the offset or the minima.
struct Factor {
    float scale;
    union {
        int correction;  // without minima: the sum of the codes times -offset, to be added to the products of codes
        float sum;       // with minima: the sum of the codes times `scale`, to be multiplied by the minima
    };
};

// Quantized rows of x.
struct QuantizedRows {
    int8_t* codes;    // [columns / group][tokens][group]
    Factor* factors;  // [columns / group][tokens]
    long tokens;
};

// Quantizes row t of x for a product with w: the scale of a group is its largest absolute value / 127, stored times
// w.factor. A group with a NaN or an infinity gets a NaN or infinite scale. A group of values below 4e-37 is treated as
// 0, because 127 / x overflows.
template <int GROUP>
static inline void quantize_row(const bf16* x, const Weight& w, const QuantizedRows& to, long t) {
    const float unit = w.factor / 127;
    for (long g = 0; g < w.columns / GROUP; g++, x += GROUP) {
        uint16_t most = 0;  // without signs, bfloat16 are ordered like their bits
        for (int i = 0; i < GROUP; i++) most = std::max<uint16_t>(most, x[i] & 0x7FFF);
        const float largest = to_float(most), steps = largest < 4e-37f ? 0 : 127 / largest;
        int8_t* codes = to.codes + (g * to.tokens + t) * GROUP;
        uint32_t sum = 0;  // arbitrary in a group with a NaN
        for (int i = 0; i < GROUP; i++) {  // adding 1.5 * 2^23 rounds to an integer, the low bits of the result
            const uint32_t code = std::bit_cast<uint32_t>(to_float(x[i]) * steps + 12582912.0f) - 0x4B400000;
            codes[i] = code;
            sum += code;
        }
        Factor& factor = to.factors[g * to.tokens + t];
        factor.scale = largest * unit;
        if (w.has_minima) factor.sum = factor.scale * int(sum);
        else factor.correction = -sum << (w.bits - 1);
    }
}

// Adds to each lane of sums[v] the 32 products of a row of the weight, codes[v], with x.
template <int BITS>
static inline void dot(RowInts (&sums)[VECTORS], const RowInts (&codes)[VECTORS][QUADS], const int8_t* x) {
    typedef int32_t Quad __attribute__((aligned(1), may_alias));
#if defined __AVX512VNNI__ || defined __AVXVNNI__
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; q++)
        for (int v = 0; v < VECTORS; v++) {
            const RowInts quad = RowInts{} + ((const Quad*)x)[q];
#ifdef __AVX512VNNI__
            sums[v] = (RowInts)_mm512_dpbusd_epi32((__m512i)sums[v], (__m512i)codes[v][q], (__m512i)quad);
#else
            sums[v] = (RowInts)_mm256_dpbusd_avx_epi32((__m256i)sums[v], (__m256i)codes[v][q], (__m256i)quad);
#endif
        }
#elif defined __AVX2__
    // The products of a pair are added in int16, which holds the sum of 8 pairs of 4 bits times 8 bits.
    const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    __m256i sum = {}, high = {};
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; q++) {
        const __m256i code = (__m256i)codes[0][q], with = _mm256_set1_epi32(((const Quad*)x)[q]);
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(BITS == 4 ? code : code & low, with));
        if (BITS == 8) high = _mm256_add_epi16(high, _mm256_maddubs_epi16(_mm256_srli_epi16(code, 4) & low, with));
    }
    sums[0] += (RowInts)_mm256_madd_epi16(sum, one);
    if (BITS == 8) sums[0] += (RowInts)_mm256_madd_epi16(high, one) << 4;
#else
    const uint8_t* bytes = (const uint8_t*)codes;
    for (int i = 0; i < QUADS * ROW_BYTES; i++) sums[0][i % ROW_BYTES / 4] += bytes[i] * x[i / ROW_BYTES * 4 + i % 4];
#endif
}

// Adds the scaled products of a group to `sum`.
template <bool MINIMUM>
static inline void add(float* sum, RowInts products, RowFloats scale, RowFloats minimum, const Factor& factor) {
    RowFloats all = *(RowFloats*)sum + __builtin_convertvector(products, RowFloats) * (scale * factor.scale);
    if (MINIMUM) all += minimum * factor.sum;
    *(RowFloats*)sum = all;
}

// Computes the sums of m tokens of x from t on and a strip of w; prefetches `step` bytes from `ahead` on per group.
template <class Block>
static void multiply_groups(
    const QuantizedRows& x, long t, long m, const char* strip, long groups, const char* ahead, long step, Sums sums) {
    RowInts products[MAX_PRODUCT_ROWS][VECTORS];
    for (long i = 0; i < m; i++) memset(sums[i], 0, WIDTH * sizeof(float));
    for (long g = 0; g < groups; g++, ahead += step) {
        const Block block{strip + g * Block::SIZE};
        const Factor* factors = x.factors + g * x.tokens + t;
        for (long i = 0; i < step; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        for (long row = 0; row < WIDTH; row += VECTORS * ROW_LANES) {
            RowInts codes[VECTORS][QUADS];
            RowFloats scales[VECTORS], minima[VECTORS] = {};
            for (int v = 0; v < VECTORS; v++) {
                scales[v] = block.scales(row + v * ROW_LANES);
                if (Block::MINIMUM) minima[v] = block.minima(row + v * ROW_LANES);
            }
            for (int part = 0; part < Block::PARTS; part++) {
                for (int v = 0; v < VECTORS; v++) block.load(row + v * ROW_LANES, part, codes[v]);
                const int8_t* with = x.codes + (g * x.tokens + t) * Block::GROUP + part * 4 * QUADS;
                for (long i = 0; i < m; i++, with += Block::GROUP) {  // if there is one part, products stay in registers
                    if (part == 0)
                        for (RowInts& sum : products[i]) sum = RowInts{} + (Block::MINIMUM ? 0 : factors[i].correction);
                    dot<Block::BITS>(products[i], codes, with);
                    if (part < Block::PARTS - 1) continue;
                    for (int v = 0; v < VECTORS; v++)
                        add<Block::MINIMUM>(sums[i] + row + v * ROW_LANES, products[i][v], scales[v], minima[v], factors[i]);
                }
            }
        }
    }
}

#if defined __AMX_INT8__ && defined __AVX512VNNI__
// `multiply_groups` with AMX. In an iteration, the matrix unit multiplies group g while the other units scale the
// products of group g - 1 and unpack the codes of group g + 2: a tile cannot be loaded before its codes are in the cache.
template <class Block>
static void multiply_tiles(
    const QuantizedRows& x, long t, long m, const char* strip, long groups, const char* ahead, long step, Sums sums) {
    constexpr int BITS = Block::BITS, GROUP = Block::GROUP, PARTS = Block::PARTS;
    constexpr bool MINIMUM = Block::MINIMUM;
    alignas(64) RowInts codes[4][2][PARTS][QUADS], products[2][2][MAX_PRODUCT_ROWS];  // [g % 4 or 2][rows of the weight / 16]
    const auto block_of = [&](long g) { return Block{strip + g * Block::SIZE}; };
    const auto unpack = [&](long g) {  // codes of 8 bits are tiles already
        for (int i = 0; BITS == 4 && g < groups && i < 2 * PARTS; i++)
            block_of(g).load(i / PARTS * LANES, i % PARTS, codes[g % 4][i / PARTS][i % PARTS]);
    };
    const long upper = std::min<long>(m, LANES), lower = m - upper;
    shape.set(upper, lower, PARTS * QUADS);
    for (long i = 0; i < m; i++) memset(sums[i], 0, WIDTH * sizeof(float));
    unpack(0);
    unpack(1);
    for (long g = 0; g <= groups; g++, ahead += step) {
        for (long i = 0; i < step; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        asm volatile("" ::: "memory");  // GCC does not know that these instructions access memory
        if (g < groups) {
            const int8_t* with = x.codes + (g * x.tokens + t) * GROUP;
            const char* tiles = BITS == 4 ? (const char*)codes[g % 4] : block_of(g).data;
            _tile_loadd(6, tiles, 64);
            _tile_loadd(7, tiles + PARTS * QUADS * 64, 64);
            _tile_loadd(4, with, GROUP);
            _tile_zero(0);
            _tile_zero(1);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_stored(0, products[g % 2][0], 64);
            _tile_stored(1, products[g % 2][1], 64);
            if (lower) {
                _tile_loadd(5, with + LANES * GROUP, GROUP);
                _tile_zero(2);
                _tile_zero(3);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
                _tile_stored(2, products[g % 2][0] + LANES, 64);
                _tile_stored(3, products[g % 2][1] + LANES, 64);
            }
        }
        asm volatile("" ::: "memory");
        unpack(g + 2);
        if (!g) continue;
        const auto block = block_of(g - 1);
        const RowFloats scales[] = {block.scales(0), block.scales(LANES)};
        const RowFloats minima[] = {MINIMUM ? block.minima(0) : RowFloats{}, MINIMUM ? block.minima(LANES) : RowFloats{}};
        const Factor* factor = x.factors + (g - 1) * x.tokens + t;
        for (long i = 0; i < m; i++, factor++)
            for (int v = 0; v < 2; v++) {
                const RowInts all = products[(g - 1) % 2][v][i] + (MINIMUM ? 0 : factor->correction);
                add<MINIMUM>(sums[i] + v * LANES, all, scales[v], minima[v], *factor);
            }
    }
}
#endif

// Calls f with an empty block of the type that the weight has.
template <class F>
static void with_block(const Weight& w, F f) {
    const bool wide = w.group == 64;
    if (w.bits == 4 && w.has_minima) wide ? f(Block<4, true, 64>{}) : f(Block<4, true, 32>{});
    else if (w.bits == 4) wide ? f(Block<4, false, 64>{}) : f(Block<4, false, 32>{});
    else if (w.has_minima) wide ? f(Block<8, true, 64>{}) : f(Block<8, true, 32>{});
    else wide ? f(Block<8, false, 64>{}) : f(Block<8, false, 32>{});
}

// A packed weight and quantized rows of x, the operands of `multiply_all`.
struct QuantizedOperands {
    const Weight& w;
    QuantizedRows x;

    static bool prefetches(long) { return true; }         // 1.4 times as fast for one row
    static long most_rows() { return MAX_PRODUCT_ROWS; }  // amortizes unpacking; the sums stay in the L1 cache
    void multiply(long t, long m, long strip, const char* ahead, long bytes, Sums sums) const {
        const long groups = w.columns / w.group;
        with_block(w, [&]<class Block>(Block) {
            auto f = multiply_groups<Block>;
#if defined __AMX_INT8__ && defined __AVX512VNNI__
            if (m >= (w.group == 64 ? 2 : 6) && has_amx()) f = multiply_tiles<Block>;  // slower for fewer rows
#endif
            f(x, t, m, w.strip(strip), groups, ahead, bytes / groups, sums);
        });
    }
};

// Dequantizes row `id` of a packed weight, times `scale`.
static inline void dequantize_row(const Weight& w, long id, float scale, bf16* out) {
    const long row = id % WIDTH / ROW_LANES * ROW_LANES, lane = id % ROW_LANES;
    const int offset = w.has_minima ? 0 : 1 << (w.bits - 1);
    with_block(w, [&]<class Block>(Block) {
        for (long k = 0; k < w.columns; k += 4 * QUADS) {
            const Block block{w.strip(id / WIDTH) + k / Block::GROUP * Block::SIZE};
            RowInts codes[QUADS];
            block.load(row, k % Block::GROUP / (4 * QUADS), codes);
            const float unit = w.factor * scale, by = block.scales(row)[lane] * unit;
            const float least = Block::MINIMUM ? block.minima(row)[lane] * unit : 0;
            for (int i = 0; i < 4 * QUADS; i++)
                out[k + i] = to_bf16(((codes[i / 4][lane] >> i % 4 * 8 & 0xFF) - offset) * by + least);
        }
    });
}
