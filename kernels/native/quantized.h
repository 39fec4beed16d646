// Products with weights of 8 or 4 bits, and rows of x quantized to 8 bits in groups of 32 columns.
//
// A code of the weight is unsigned, a code of x signed. Their products are summed exactly in int32 over a group; the
// groups are scaled and added in ascending order in float. So the result of a row does not depend on other rows.

#pragma once
#include "amx.h"
#include "structs.h"
#include "threads.h"

constexpr long GROUP = 32;
constexpr long MAX_PRODUCT_ROWS = 32;  // rows of x that are multiplied at once

// Vectors of int32 with as many lanes as rows of the weight that are processed together.
#ifdef __AVX512VNNI__
constexpr int ROW_BYTES = 64, VECTORS = 2;
#else
constexpr int ROW_BYTES = 32, VECTORS = 1;
#endif
constexpr int ROW_LANES = ROW_BYTES / 4, QUADS = GROUP / 4;
typedef int32_t RowInts __attribute__((vector_size(ROW_BYTES), aligned(4), may_alias));
typedef uint32_t RowWords __attribute__((vector_size(ROW_BYTES), aligned(4), may_alias));
typedef float RowFloats __attribute__((vector_size(ROW_BYTES), aligned(4), may_alias));
typedef uint16_t RowHalves __attribute__((vector_size(ROW_BYTES / 2), aligned(2), may_alias));

// 32 columns of 32 rows of a weight, followed by float16 scales and minima: the layout of `packed.py`.
template <int BITS, bool MINIMUM>
struct Block {
    static constexpr long CODES = GROUP * WIDTH * BITS / 8, SIZE = CODES + WIDTH * 2 * (1 + MINIMUM);
    const char* data;

    // Loads the codes of ROW_LANES rows from `row` on: byte b of lane i of codes[q] is column 4 q + b of row i.
    void load(long row, RowInts (&codes)[QUADS]) const {
        const char* from = data + row / LANES * (CODES / 2) + row % LANES * 4;
        for (int q = 0; q < QUADS * BITS / 8; q++) {
            const RowWords both = *(const RowWords*)(from + q * 64);
            if constexpr (BITS == 8) codes[q] = (RowInts)both;
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

// A group of a row of x. `sum` is, for a weight without minima, -offset * the sum of its codes; else, as a float, `scale`
// times that sum. (AMX loads codes faster at multiples of 16 bytes.)
struct alignas(16) Group {
    int8_t codes[GROUP];
    float scale;
    int sum;
};

// Rows of x: [columns / GROUP][tokens].
struct Groups {
    Group* data;
    long tokens;

    Group* at(long group, long t) const { return data + group * tokens + t; }
};

// Quantizes a row x for a product with w: to the nearest multiples of 1/127 of the largest value of a group. A group with
// a NaN or an infinity gets such a scale.
static inline void quantize(const bf16* x, const Weight& w, const Groups& groups, long t) {
    const float unit = w.factor / 127;
    for (long g = 0; g < w.columns / GROUP; g++, x += GROUP) {
        uint16_t most = 0;
        for (int i = 0; i < GROUP; i++) most = std::max<uint16_t>(most, x[i] & 0x7FFF);
        const float largest = to_float(most), steps = most ? 127 / largest : 0;
        Group& to = *groups.at(g, t);
        int sum = 0;
        for (int i = 0; i < GROUP; i++) {  // adding 1.5 * 2^23 rounds to an integer, the low bits of the result
            to.codes[i] = int8_t(std::bit_cast<int>(to_float(x[i]) * steps + 12582912.0f));
            sum += to.codes[i];
        }
        to.scale = largest * unit;
        to.sum = w.has_minima ? std::bit_cast<int>(to.scale * sum) : -sum * (1 << (w.bits - 1));
    }
}

// Adds to each lane of `sums` the 32 products of a row of the weight with x. The chains of additions of all vectors overlap.
static inline void dot(
    RowInts (&sums)[VECTORS], const RowInts (&codes)[VECTORS][QUADS], const int8_t* x, [[maybe_unused]] int bits) {
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
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(bits == 4 ? code : code & low, with));
        if (bits == 8) high = _mm256_add_epi16(high, _mm256_maddubs_epi16(_mm256_srli_epi16(code, 4) & low, with));
    }
    sums[0] += (RowInts)_mm256_madd_epi16(sum, one);
    if (bits == 8) sums[0] += (RowInts)_mm256_madd_epi16(high, one) << 4;
#else
    const uint8_t* bytes = (const uint8_t*)codes;
    for (int i = 0; i < QUADS * ROW_BYTES; i++) sums[0][i % ROW_BYTES / 4] += bytes[i] * x[i / ROW_BYTES * 4 + i % 4];
#endif
}

// Adds the scaled products of a group to `sum`.
template <bool MINIMUM>
static inline void add(float* sum, RowInts products, RowFloats scale, RowFloats minimum, const Group& group) {
    RowFloats all = *(RowFloats*)sum + __builtin_convertvector(products, RowFloats) * (scale * group.scale);
    if (MINIMUM) all += minimum * std::bit_cast<float>(group.sum);
    *(RowFloats*)sum = all;
}

// Computes the sums of m tokens of x from t on and a strip of w; prefetches `step` bytes from `ahead` on per group.
template <int BITS, bool MINIMUM>
static void multiply_groups(
    const Groups& x, long t, long m, const char* strip, long groups, const char* ahead, long step, Sums sums) {
    for (long i = 0; i < m; i++) memset(sums[i], 0, WIDTH * sizeof(float));
    for (long g = 0; g < groups; g++, ahead += step) {
        const Block<BITS, MINIMUM> block{strip + g * Block<BITS, MINIMUM>::SIZE};
        for (long i = 0; i < step; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        for (long row = 0; row < WIDTH; row += VECTORS * ROW_LANES) {
            RowInts codes[VECTORS][QUADS];
            RowFloats scales[VECTORS], minima[VECTORS] = {};
            for (int v = 0; v < VECTORS; v++) {
                block.load(row + v * ROW_LANES, codes[v]);
                scales[v] = block.scales(row + v * ROW_LANES);
                if (MINIMUM) minima[v] = block.minima(row + v * ROW_LANES);
            }
            const Group* group = x.at(g, t);
            for (long i = 0; i < m; i++, group++) {
                RowInts products[VECTORS] = {};
                for (RowInts& each : products) each += MINIMUM ? 0 : group->sum;
                dot(products, codes, group->codes, BITS);
                for (int v = 0; v < VECTORS; v++)
                    add<MINIMUM>(sums[i] + row + v * ROW_LANES, products[v], scales[v], minima[v], *group);
            }
        }
    }
}

constexpr long MIN_TILE_ROWS = 6;  // for fewer, AMX is not faster

#if defined __AMX_INT8__ && defined __AVX512VNNI__
constexpr bool HAS_TILES = true;

// `multiply_groups` with AMX. In an iteration, the matrix unit multiplies group g while the other units scale the
// products of group g - 1 and unpack the codes of group g + 1.
template <int BITS, bool MINIMUM>
static void multiply_tiles(
    const Groups& x, long t, long m, const char* strip, long groups, const char* ahead, long step, Sums sums) {
    alignas(64) RowInts codes[2][2][QUADS], products[2][2][MAX_PRODUCT_ROWS];  // [g % 2][rows of the weight / 16]
    const auto block_of = [&](long g) { return Block<BITS, MINIMUM>{strip + g * Block<BITS, MINIMUM>::SIZE}; };
    const auto unpack = [&](long g) {  // codes of 8 bits are tiles already
        for (long half = 0; BITS == 4 && half < 2; half++) block_of(g).load(half * LANES, codes[g % 2][half]);
    };
    const long upper = std::min<long>(m, LANES), lower = m - upper;
    shape.set(upper, lower, QUADS);
    for (long i = 0; i < m; i++) memset(sums[i], 0, WIDTH * sizeof(float));
    unpack(0);
    for (long g = 0; g <= groups; g++, ahead += step) {
        for (long i = 0; i < step; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        asm volatile("" ::: "memory");  // GCC does not know that these instructions access memory
        if (g < groups) {
            const Group* group = x.at(g, t);
            const char* tiles = BITS == 4 ? (const char*)codes[g % 2] : block_of(g).data;
            _tile_loadd(6, tiles, 64);
            _tile_loadd(7, tiles + QUADS * 64, 64);
            _tile_loadd(4, group, sizeof(Group));
            _tile_zero(0);
            _tile_zero(1);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_stored(0, products[g % 2][0], 64);
            _tile_stored(1, products[g % 2][1], 64);
            if (lower) {
                _tile_loadd(5, group + LANES, sizeof(Group));
                _tile_zero(2);
                _tile_zero(3);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
                _tile_stored(2, products[g % 2][0] + LANES, 64);
                _tile_stored(3, products[g % 2][1] + LANES, 64);
            }
        }
        asm volatile("" ::: "memory");
        if (g + 1 < groups) unpack(g + 1);
        if (!g) continue;
        const auto block = block_of(g - 1);
        const RowFloats scales[] = {block.scales(0), block.scales(LANES)};
        const RowFloats minima[] = {MINIMUM ? block.minima(0) : scales[0], MINIMUM ? block.minima(LANES) : scales[0]};
        const Group* group = x.at(g - 1, t);
        for (long i = 0; i < m; i++, group++)
            for (int v = 0; v < 2; v++) {
                const RowInts all = products[(g - 1) % 2][v][i] + (MINIMUM ? 0 : group->sum);
                add<MINIMUM>(sums[i] + v * LANES, all, scales[v], minima[v], *group);
            }
    }
}
#else
constexpr bool HAS_TILES = false;

template <int BITS, bool MINIMUM>
static void multiply_tiles(const Groups&, long, long, const char*, long, const char*, long, Sums) {}
#endif

// Calls f<BITS, MINIMUM>() for the format of a weight.
template <class F>
static void with_format(const Weight& w, F f) {
    if (w.bits == 4) w.has_minima ? f.template operator()<4, true>() : f.template operator()<4, false>();
    else w.has_minima ? f.template operator()<8, true>() : f.template operator()<8, false>();
}

// A packed weight and quantized rows of x, the operands of `multiply_all`.
struct QuantizedOperands {
    const Weight& w;
    Groups x;

    static bool prefetches(long) { return true; }         // 1.4 times as fast for one row
    static long most_rows() { return MAX_PRODUCT_ROWS; }  // amortizes unpacking; the sums stay in the L1 cache
    void multiply(long t, long m, long strip, const char* ahead, long bytes, Sums sums) const {
        const long groups = w.columns / GROUP;
        with_format(w, [&]<int BITS, bool MINIMUM>() {
            const bool by_tiles = HAS_TILES && m >= MIN_TILE_ROWS && has_amx();
            const auto f = by_tiles ? multiply_tiles<BITS, MINIMUM> : multiply_groups<BITS, MINIMUM>;
            f(x, t, m, w.strip(strip), groups, ahead, bytes / groups, sums);
        });
    }
};

// Dequantizes row `id` of a packed weight, times `scale`.
static inline void dequantize_row(const Weight& w, long id, float scale, bf16* out) {
    const long row = id % WIDTH / ROW_LANES * ROW_LANES, lane = id % ROW_LANES;
    with_format(w, [&]<int BITS, bool MINIMUM>() {
        for (long g = 0; g < w.columns / GROUP; g++) {
            const Block<BITS, MINIMUM> block{w.strip(id / WIDTH) + g * Block<BITS, MINIMUM>::SIZE};
            RowInts codes[QUADS];
            block.load(row, codes);
            const float by = float(block.scales(row)[lane] * w.factor), least = MINIMUM ? block.minima(row)[lane] * w.factor : 0;
            for (int i = 0; i < GROUP; i++) {
                const int code = codes[i / 4][lane] >> i % 4 * 8 & 0xFF, offset = MINIMUM ? 0 : 1 << (BITS - 1);
                out[g * GROUP + i] = to_bf16(((code - offset) * by + least) * scale);
            }
        }
    });
}
