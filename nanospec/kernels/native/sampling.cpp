// `sample` of sampling/sample.py on a CPU: the target's own token after each scored token. The specification is in
// noise.py, scores.py and top_k_top_p.py.
//
// Each row is a task. Its queries are sampled in order, with `lazy` only those that verification reads. A query first
// computes the maximum of its logits. Sampling then processes them in blocks of 64 and skips blocks that cannot contain
// the winner, because the noise is at least LEAST_NOISE. In the other blocks, a cheap bound on the random bits excludes
// most tokens before any logarithm is computed.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "arithmetic.h"
#include "noise.h"
#include "step.h"
#include "threads.h"

namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr long BLOCK = 64;
constexpr float LEAST_NOISE = -22.3f;

struct Best {
    float score;
    int token;  // NAN_TOKEN if a score is NaN or the largest is infinite
};

// ---- argmax ----------------------------------------------------------------------------------------

float as_float(float x) { return x; }
float as_float(bf16 x) { return to_float(x); }

// Returns an integer that orders like the float, with NaN beyond infinity. GCC vectorizes comparisons of integers only.
int32_t order_key(float x) {
    const int32_t bits = std::bit_cast<int32_t>(x);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

float from_order_key(int32_t key) { return std::bit_cast<float>(key ^ (key >> 31 & 0x7FFFFFFF)); }

// Returns the maximum of n scores, and the lowest token that attains it.
template <class Score>
Best argmax(const Score* x, long n) {
    constexpr long CHUNK = 1024;
    Best best{-INFINITE, NAN_TOKEN};
    long where = 0;
    for (long first = 0; first < n; first += CHUNK) {
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (long i = first; i < std::min(first + CHUNK, n); i++) {
            const int32_t key = order_key(as_float(x[i]));
            low = std::min(low, key), high = std::max(high, key);
        }
        if (high > 0x7F800000 || low < ~0x7F800000) return best;  // NaN
        if (const float score = from_order_key(high); score > best.score) best.score = score, where = first;
    }
    if (!std::isfinite(best.score)) return best;
    while (as_float(x[where]) != best.score) where++;
    best.token = where;
    return best;
}

// ---- one query -------------------------------------------------------------------------------------

// The scores of a query, padded with -inf to whole blocks, and buffers for selected ones.
struct Scratch {
    std::vector<float> scores, maxima, some, band;
};

struct Query {
    const Table& table;
    int s, position;  // request row, and the position of the target
    Scratch& at;

    const long V = table.vocab_size, padded = (V + BLOCK - 1) / BLOCK * BLOCK;
    const float temperature = table.temperature[s];

    template <class Score>
    void read(const Score* logits) {
        at.scores.resize(padded);
        for (long i = 0; i < V; i++) at.scores[i] = as_float(logits[i]);
        std::fill(at.scores.begin() + V, at.scores.end(), -INFINITE);
    }

    // Applies bias, masked stop tokens and penalties after `read`, given the drafts on the path to a node.
    template <class Score>
    void penalize(const Score* logits, const Row& row, int node) {
        const float* bias = table.bias + s * V;
        const bool* in_prompt = table.in_prompt + s * V;
        const int* counts = table.output_counts + s * V;
        const float repetition = table.repetition[s], presence = table.presence[s], frequency = table.frequency[s];
        auto penalized = [=](float score, float bias, int in_prompt, int count) {
            score += bias;
            const float divided = score / repetition, multiplied = score * repetition;
            const float repeated = score > 0 ? divided : multiplied, again = count > 0 ? presence : 0;
            return ((count > 0) | in_prompt ? repeated : score) - frequency * count - again;
        };
        float* __restrict scores = at.scores.data();
        for (long i = 0; i < V; i++) scores[i] = penalized(scores[i], bias[i], in_prompt[i], counts[i]);
        for (int p = node; p; p = row.parent(p)) {
            int token = row.ids[p], count = counts[token];
            for (int q = node; q; q = row.parent(q)) count += row.ids[q] == token;
            scores[token] = penalized(as_float(logits[token]), bias[token], in_prompt[token], count);
        }
        if (position < table.min_len[s])
            for (long i = 0; i < table.num_stops; i++)
                if (int stop = table.stop_ids[s * table.num_stops + i]; stop >= 0 && stop < V) scores[stop] = -INFINITE;
    }

    // For each depth, sums exp((score - best) / temperature) over those of n scores that are at least
    // best - depth * temperature.
    template <size_t N>
    void masses(const float* scores, long n, float best, const float (&depths)[N], double (&sums)[N]) const {
        constexpr long PART = 1024;
        const float scale = LOG2_E / temperature;
        std::fill_n(sums, N, 0.0);
        for (long first = 0; first < n; first += PART) {
            Floats parts[N] = {};
            for (long i = first; i < std::min(first + PART, n); i += LANES) {
                Floats s = splat(-INFINITE);
                memcpy(&s, scores + i, std::min<long>(LANES, n - i) * sizeof(float));
                const Floats weight = exp2_of((s - best) * scale);
                for (size_t d = 0; d < N; d++) parts[d] += s >= best - depths[d] * temperature ? weight : Floats{};
            }
            for (size_t d = 0; d < N; d++) sums[d] += sum(parts[d]);
        }
    }

    // Copies those of n scores that are in [low, high) to `selected`.
    static void gather(const float* scores, long n, float low, float high, std::vector<float>& selected) {
        size_t count = 0;
        for (long first = 0; first < n; first += BLOCK) {
            const long end = std::min(first + BLOCK, n);
            int some = 0;
            for (long i = first; i < end; i++) some |= (scores[i] >= low) & (scores[i] < high);
            if (!some) continue;
            selected.resize(count + BLOCK);
            for (long i = first; i < end; i++) {  // without an unpredictable branch
                selected[count] = scores[i];
                count += (scores[i] >= low) & (scores[i] < high);
            }
        }
        selected.resize(count);
    }

    // Returns the threshold of top-k, top-p and min-p: scores of at least this are kept.
    float threshold(float best) {
        const long k = table.top_k[s];
        const float top_p = table.top_p[s], min_p = table.min_p[s];
        const bool by_count = k > 0 && k < V;
        float least = by_count ? kth_largest(k) : -INFINITE;
        if (top_p < 1) least = nucleus(top_p, best, by_count ? at.some : at.scores);
        if (min_p > 0) least = std::max(least, best + float(double(temperature) * std::log(double(min_p))));
        return least;
    }

    // Returns the k-th largest score, and stores the scores that are at least that in at.some.
    float kth_largest(long k) {
        float bound = -INFINITE;
        if (k <= padded / BLOCK) {  // at least k scores reach the k-th largest block maximum
            at.maxima.clear();
            for (long first = 0; first < padded; first += BLOCK) {
                Floats most = load(&at.scores[first]);
                for (long i = first + LANES; i < first + BLOCK; i += LANES) {
                    Floats s = load(&at.scores[i]);
                    most = s > most ? s : most;
                }
                at.maxima.push_back(largest(most));
            }
            bound = kth(at.maxima, k);
        }
        gather(at.scores.data(), padded, bound, INFINITE, at.some);
        const float least = kth(at.some, k);
        auto below = std::remove_if(at.some.begin(), at.some.end(), [=](float s) { return s < least; });
        at.some.erase(below, at.some.end());
        return least;
    }

    static float kth(std::vector<float>& values, long k) {
        std::nth_element(values.begin(), values.begin() + k - 1, values.end(), std::greater<>());
        return values[k - 1];
    }

    // Returns the smallest score of the nucleus: of the most likely scores whose probability sums to top_p.
    float nucleus(float top_p, float best, const std::vector<float>& scores) {
        constexpr int N = 7;
        constexpr float DEPTHS[N] = {1, 2, 4, 6, 8, 10, INFINITE};  // below the best, in temperatures
        double held[N], above = 0;
        masses(scores.data(), scores.size(), best, DEPTHS, held);
        const double target = top_p * held[N - 1];
        int d = 0;  // the smallest kept score is within this depth, but not within the previous one
        while (d < N - 1 && held[d] < target) d++;
        if (d) above = held[d - 1];
        const float high = d ? best - DEPTHS[d - 1] * temperature : INFINITE;
        gather(scores.data(), scores.size(), best - DEPTHS[d] * temperature, high, at.band);
        // Halve the range that contains it.
        float *first = at.band.data(), *last = first + at.band.size();
        while (last - first > 1) {
            float* middle = first + (last - first) / 2;
            std::nth_element(first, middle, last, std::greater<>());
            double upper[1];
            masses(first, middle - first, best, {INFINITE}, upper);
            if (above + *upper >= target) last = middle;
            else above += *upper, first = middle;
        }
        return *first;
    }

    int draw(Best best) {
        const float least = threshold(best.score), inverse = LOG2_E / temperature;
        const Noise noise(table.seed[s], position);
        Best winner{best.score - temperature * noise.log_exponential(noise.bits(best.token)), best.token};
        for (long first = 0; first < padded; first += BLOCK) {
            const float* scores = &at.scores[first];
            const float floor = std::max(least, winner.score + LEAST_NOISE * temperature);
            int some = 0;
            for (long i = 0; i < BLOCK; i++) some |= scores[i] >= floor;
            if (!some) continue;
            int bits[BLOCK], candidates[BLOCK];
            for (long i = 0; i < BLOCK; i++) bits[i] = noise.bits(first + i);
            some = 0;
            for (long i = 0; i < BLOCK; i += LANES) {
                // score - T log E > winner needs E < exp((score - winner) / T), and u < E; 1.01 for rounding
                Floats reach = (load(scores + i) - winner.score) * inverse;
                Floats bound = exp2_of(reach < 0 ? reach : Floats{}) * 1.01f;
                Ints drawn;
                memcpy(&drawn, bits + i, sizeof drawn);
                Ints may = (__builtin_convertvector(drawn, Floats) * 0x1p-31f < bound) & (load(scores + i) >= floor);
                memcpy(candidates + i, &may, sizeof may);
            }
            for (long i = 0; i < BLOCK; i++) some |= candidates[i];
            if (!some) continue;
            for (long i = 0; i < BLOCK; i++) {
                if (!candidates[i]) continue;
                const float value = scores[i] - temperature * noise.log_exponential(bits[i]);
                if (value > winner.score || (value == winner.score && first + i < winner.token))
                    winner = {value, int(first + i)};
            }
        }
        return winner.token;
    }
};

template <class Score>
int target_of(const Table& table, const Row& row, int node, int position, const Score* logits, Scratch& at) {
    Best best = argmax(logits, table.vocab_size);
    const bool penalized = row.request >= 0 && table.penalized[row.request];
    // With penalties, the NaN may be that of a masked stop token.
    if (row.request < 0 || (best.token == NAN_TOKEN && !penalized)) return best.token;
    Query query{table, row.request, position, at};
    if (!penalized && query.temperature <= 0) return best.token;
    query.read(logits);
    if (penalized) {
        query.penalize(logits, row, node);
        best = argmax(at.scores.data(), query.V);
    }
    return query.temperature <= 0 || best.token == NAN_TOKEN ? best.token : query.draw(best);
}

struct Sampling {
    Table table;
    Batch batch;
    const void* logits;  // bfloat16 or float32, rows `stride` apart
    int64_t stride, is_bf16, lazy;
    int* targets;  // [T]
    int64_t threads;
};

template <class Score>
void sample(const Sampling& args, const Score* logits) {
    const Batch& batch = args.batch;
    std::fill_n(args.targets, batch.num_tokens, 0);
    for_each(args.threads, batch.num_rows, [&](long b) {
        static thread_local Scratch at;
        const Row row(batch, b);
        auto target = [&](int node) {
            const long t = row.start + node;
            const Score* line = logits + t * args.stride;
            return args.targets[t] = target_of(args.table, row, node, batch.positions[t] + 1, line, at);
        };
        if (args.lazy) row.walk(target);
        else
            for (int node = 0; node < row.n; node++) target(node);
    });
}

// ---- masks of allowed tokens: one task per row; logits are processed as integers ------------------------

struct Masking {
    void* logits;  // [T, V] bfloat16 or float32, rows `stride` apart
    int64_t stride, is_bf16, T, V;
    const uint32_t* allowed;  // [M, words], rows `width` apart
    int64_t width, words;
    const int* at;  // [T], row of `allowed` for each token, -1: no mask
    int64_t threads;
};

template <class Bits>
void mask(const Masking& args, Bits* logits, Bits masked) {
    for_each(args.threads, args.T, [&](long t) {
        if (args.at[t] < 0) return;
        const uint32_t* allowed = args.allowed + args.at[t] * args.width;
        for (long first = 0; first < args.V; first += 32) {
            Bits* block = logits + t * args.stride + first;
            const int n = std::min(32L, args.V - first);
            const uint32_t word = first / 32 < args.words ? allowed[first / 32] : 0;
            if (word == 0) std::fill_n(block, n, masked);
            else if (word != ~0u)
                for (int i = 0; i < n; i++) {
                    const Bits keep = -Bits(word >> i & 1);
                    block[i] = (block[i] & keep) | (masked & ~keep);
                }
        }
    });
}

}  // namespace

extern "C" void nanospec_sample(const Sampling* args) {
    if (args->is_bf16) sample(*args, (const bf16*)args->logits);
    else sample(*args, (const float*)args->logits);
}

extern "C" void nanospec_mask(const Masking* args) {  // sets masked logits to the bits of -inf
    if (args->is_bf16) mask<uint16_t>(*args, (uint16_t*)args->logits, 0xFF80);
    else mask<uint32_t>(*args, (uint32_t*)args->logits, 0xFF800000);
}
