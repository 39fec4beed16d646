// The random bits of noise.py; logarithms may differ in the last place.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

inline uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

struct Noise {
    uint32_t first, second;

    Noise(int64_t seed, int position) {
        const uint32_t low = mix(uint32_t(seed) ^ 0x9E3779B9u), high = mix(uint32_t(seed >> 32) ^ 0x85EBCA6Bu);
        first = mix(mix(low ^ position) ^ high);
        second = mix(mix(high ^ position ^ 0xC2B2AE35u) ^ low);
    }

    int bits(int token) const { return mix(mix(token ^ first) ^ second) & 0x7FFFFFFF; }

    static float log_exponential(int bits) {
        const float u = (float(bits) + 0.5f) * 0x1p-31f;
        const float series = u * (1 + u * (0.5f + u * (1.0f / 3)));
        return std::log(u < 1e-3f ? series : -std::log(std::max(1 - u, 0x1p-32f)));
    }
};
