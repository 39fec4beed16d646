// Token Recycling on a CPU: grow.py and learn.py of speculation/ say what is computed, recycled.py what is kept.

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

constexpr int PER_ENTRY = 8, ID_BITS = 18, CODES = 16, MOST_CODE = 4095, NO_TOKEN = -1, ANY = -2;
constexpr int NOBODY = -1, GUESSED = -2;
constexpr uint32_t ROWS = 1 << 19, OF_ROW = 0x68E31DA4, OF_TAG = 0x1B56C4E9;
enum Kind { FIRST, FURTHER, TOKEN, PAIR, KINDS };
constexpr float PRIOR = 2, DECAY = 0.95f, INFINITE = std::numeric_limits<float>::infinity();
const float LOG_TOKEN = std::log(0.5f), LOG_PAIR = std::log(0.8f), LOG_MOST = std::log(0.98f);

struct Recycled {
    int *entries, *tags, *salts;
    float* record;  // [S, KINDS, 2]
};

struct Marks {
    int* kind;
    float* expected;
};

// Where an entry is, and its tag.
struct Place {
    int row, tag;

    Place(int before, int token, int salt) {
        const uint32_t x = mix(mix(mix(OF_ROW ^ uint32_t(salt)) ^ uint32_t(before)) ^ uint32_t(token));
        row = x % ROWS, tag = mix(x ^ OF_TAG) | 1;
    }
};

// ---- grow.py ---------------------------------------------------------------------------------------

struct Node {
    int token, source, parent;
    float chance;  // this and what is expected are logarithms
    int kind;
    float expected;
};

struct Growing {
    const Table& table;
    const Recycled& state;
    const int s, length = table.num_tokens[s], salt = state.salts[s];
    const float temperature = table.temperature[s];
    float ratio[KINDS];
    std::vector<Node> candidates;  // of entries

    Growing(const Table& table, const Recycled& state, int s) : table(table), state(state), s(s) {
        const float* record = state.record + s * KINDS * 2;
        for (int kind = 0; kind < KINDS; kind++)
            ratio[kind] = std::log((record[2 * kind] + PRIOR) / (record[2 * kind + 1] + PRIOR));
    }

    float raised(float expected, int kind) const { return std::min(expected + ratio[kind], LOG_MOST); }

    // log E of a token that the target may draw behind a node of this depth.
    float noise(int depth, int token) const {
        const Noise at(table.seed[s], length + depth);
        return at.log_exponential(at.bits(token));
    }

    Node of_chain(int token, int source, int n, int i, float chance, int parent) const {
        const float p = n ? float(n + (i > 0)) / (n + 2) : 0.5f;
        const float expected = temperature > 0 ? std::exp(noise(i, token)) * (p - 1) / p : std::log(p);
        const int kind = i ? FURTHER : FIRST;
        return {token, source, parent, chance + raised(expected, kind), kind, expected};
    }

    void add_entry(float chance, int place, int depth, int before, int token) {
        const Place pair(before, token, salt), own(ANY, token, salt);
        const bool by_pair = state.tags[pair.row] == pair.tag;
        if (!by_pair && state.tags[own.row] != own.tag) return;
        const int* entry = state.entries + long(by_pair ? pair.row : own.row) * PER_ENTRY;
        float weights[PER_ENTRY], said = 0, mass = 0;
        int count = 0;
        for (; count < PER_ENTRY && entry[count] >= 0; count++) {
            const float log_p = -float(entry[count] >> ID_BITS) / CODES;
            float& weight = weights[count] = log_p;
            if (temperature > 0) weight -= temperature * noise(depth, entry[count] & ((1 << ID_BITS) - 1));
            said += std::exp(log_p), mass += std::exp(weight);
        }
        const float rest = std::max(1 - said, 0.0f), whole = std::log((mass + rest) / (said + rest));
        const int kind = by_pair ? PAIR : TOKEN;
        for (int i = 0; i < count; i++) {
            const float expected = std::min(weights[i] - whole, 0.0f) + (by_pair ? LOG_PAIR : LOG_TOKEN);
            const int id = entry[i] & ((1 << ID_BITS) - 1);
            candidates.push_back({id, GUESSED, place, chance + raised(expected, kind), kind, expected});
        }
    }

    std::vector<Node> operator()(const int* chain, const int* source, int count, int match, int wanted) {
        const int* text = table.tokens + s * table.max_context;
        std::vector<Node> nodes{{text[length - 1]}};  // place 0: the last token of the text
        std::vector<int> depths{0};
        add_entry(0, 0, 0, length > 1 ? text[length - 2] : NO_TOKEN, text[length - 1]);
        int at = 0;
        auto next = [&](float chance, int parent) {
            return at < count ? of_chain(chain[at], source[at], match, at, chance, parent) : Node{0, 0, 0, -INFINITE};
        };
        for (Node following = next(0, 0); int(nodes.size()) <= wanted;) {
            auto more = [](const Node& a, const Node& b) { return a.chance < b.chance; };
            const auto best = std::max_element(candidates.begin(), candidates.end(), more);  // the first of equals
            const bool by_entry = best != candidates.end() && best->chance > following.chance;
            if (!by_entry && at == count) break;
            const Node node = by_entry ? *best : following;
            if (by_entry) best->chance = -INFINITE;
            size_t place = 1;
            while (place < nodes.size() && !(nodes[place].parent == node.parent && nodes[place].token == node.token))
                place++;
            if (place == nodes.size()) {
                nodes.push_back(node);
                depths.push_back(depths[node.parent] + 1);
                if (int(place) < wanted)
                    add_entry(node.chance, place, depths[place], nodes[node.parent].token, node.token);
            }
            if (!by_entry) at++, following = next(node.chance, place);
        }
        return nodes;
    }
};

struct Grow {
    Table table;
    Proposal tree, base;
    Recycled state;
    Marks marks;
    float* chances;
    const int* rows;
};

// ---- learn.py --------------------------------------------------------------------------------------

struct Scored {
    float score;
    int id;
};

// The likeliest tokens, in `entry`, of V scores; none if a score is no number.
template <class Score>
void find_entry(const Score* x, long V, int* entry) {
    constexpr long BLOCK = 64;
    static thread_local std::vector<float> scores, maxima, sorted;
    static thread_local std::vector<Scored> found;
    std::fill_n(entry, PER_ENTRY, -1);
    scores.resize((V + BLOCK - 1) / BLOCK * BLOCK);
    for (long i = 0; i < V; i++) scores[i] = number(x[i]);
    std::fill(scores.begin() + V, scores.end(), -INFINITE);
    maxima.clear(), found.clear();
    for (size_t first = 0; first < scores.size(); first += BLOCK) {
        KeyRange keys;
        keys.add(&scores[first], BLOCK);
        if (keys.has_nan()) return;
        maxima.push_back(of_order_key(keys.high));
    }
    const float best = *std::max_element(maxima.begin(), maxima.end());
    if (!std::isfinite(best)) return;
    sorted = maxima;
    float bound = -INFINITE;  // so many blocks reach it, so as many scores do
    if (sorted.size() > PER_ENTRY) {
        std::nth_element(sorted.begin(), sorted.begin() + PER_ENTRY - 1, sorted.end(), std::greater<>());
        bound = sorted[PER_ENTRY - 1];
    }
    Part mass{};
    for (size_t i = 0; i < scores.size(); i += BYTES / sizeof(float))
        mass += exp2_of((*(const Part*)&scores[i] - best) * LOG2_E);
    float total = 0;
    for (size_t i = 0; i < BYTES / sizeof(float); i++) total += mass[i];
    for (long first = 0; first < V; first += BLOCK)
        if (maxima[first / BLOCK] >= bound)
            for (long i = first; i < std::min(first + BLOCK, V); i++)
                if (scores[i] >= bound && scores[i] > -INFINITE) found.push_back({scores[i], int(i)});
    const auto count = std::min<size_t>(found.size(), PER_ENTRY);
    std::partial_sort(found.begin(), found.begin() + count, found.end(), [](const Scored& a, const Scored& b) {
        return a.score != b.score ? a.score > b.score : a.id < b.id;
    });
    const float whole = best + std::log(total);
    for (size_t i = 0; i < count; i++) {
        const float code = std::floor((whole - found[i].score) * CODES + 0.5f);
        entry[i] = found[i].id | int(std::clamp<float>(code, 0, MOST_CODE)) << ID_BITS;
    }
}

struct Learn {
    Table table;
    Batch batch;
    Proposal proposal;
    Recycled state;
    Marks marks;  // null: nobody guessed
    const int *num_emitted, *path;
    const void* logits;
    int64_t stride, is_bf16, threads;
};

void count(const Learn& given, const Row& row, long b) {
    float* record = given.state.record + row.request * KINDS * 2;
    const int* path = given.path + b * given.batch.max_q_len;
    bool right[64] = {};
    for (int j = 0; j < given.num_emitted[b]; j++) right[path[j]] = true;
    for (int i = 0; i < 2 * KINDS; i++) record[i] *= DECAY;
    for (int i = 1; i < row.n; i++)
        if (right[row.parent(i)]) {
            const long at = b * given.proposal.k + i - 1;
            record[2 * given.marks.kind[at]] += right[i];
            record[2 * given.marks.kind[at] + 1] += given.marks.expected[at];
        }
}

template <class Score>
void learn(const Learn& given, const Score* logits) {
    const Batch& batch = given.batch;
    const Recycled& state = given.state;
    std::vector<int> entries(batch.num_tokens * PER_ENTRY, -1);
    std::vector<bool> scored(batch.num_tokens);
    for (long b = 0; b < batch.num_rows; b++)
        if (const Row row(batch, b); row.request >= 0) std::fill_n(scored.begin() + row.start, row.n, true);
    for_each(given.threads, batch.num_tokens, [&](long t) {
        if (scored[t]) find_entry(logits + t * given.stride, given.table.vocab_size, &entries[t * PER_ENTRY]);
    });
    for (long b = 0; b < batch.num_rows; b++) {
        const Row row(batch, b);
        if (row.request < 0) continue;
        if (given.marks.kind && row.n > 1 && given.proposal.drafter[b] != NOBODY) count(given, row, b);
        const int base = batch.base_len[b];
        for (int i = 0; i < row.n; i++) {
            const int* entry = &entries[(row.start + i) * PER_ENTRY];
            if (entry[0] < 0) continue;
            int before = base ? given.table.tokens[row.request * given.table.max_context + base - 1] : NO_TOKEN;
            if (i) before = row.ids[row.parent(i)];
            for (const int context : {ANY, before}) {
                const Place at(context, row.ids[i], state.salts[row.request]);
                std::copy_n(entry, PER_ENTRY, state.entries + long(at.row) * PER_ENTRY);
                state.tags[at.row] = at.tag;
            }
        }
    }
}

}  // namespace

extern "C" {

void nanospec_grow(const Grow* given) {
    const Proposal &tree = given->tree, &base = given->base;
    const Table& table = given->table;
    for (long b = 0; b < tree.num_rows; b++) {
        const int s = given->rows[b];
        int wanted = 0;
        if (s >= 0) wanted = std::min(table.limit[s], table.max_len[s] - table.num_tokens[s] - 1);
        wanted = std::clamp<int>(wanted, 0, tree.k);
        std::vector<Node> nodes{{}};
        if (wanted) {
            const int *chain = base.drafts + b * base.k, *source = base.source + b * base.k;
            Growing growing(table, given->state, s);
            nodes = growing(chain, source, std::clamp(base.num_drafts[b], 0, wanted), base.match_len[b], wanted);
        }
        const int made = nodes.size() - 1;
        tree.num_drafts[b] = made, tree.drafter[b] = made ? 0 : NOBODY;
        for (int i = 1; i <= made; i++)
            if (nodes[i].kind <= FURTHER) tree.drafter[b] = base.drafter[b] + 1;
        nodes.resize(tree.k + 1, {0, GUESSED, 0, -INFINITE, 0, -INFINITE});
        for (long i = 0, at = b * tree.k; i < tree.k; i++, at++) {
            const Node& node = nodes[i + 1];
            tree.drafts[at] = node.token, tree.source[at] = node.source, tree.parents[at] = node.parent;
            given->chances[at] = std::exp(node.chance);
            given->marks.kind[at] = node.kind, given->marks.expected[at] = std::exp(node.expected);
        }
    }
}

void nanospec_learn(const Learn* given) {
    if (given->is_bf16) learn(*given, (const bf16*)given->logits);
    else learn(*given, (const float*)given->logits);
}
}
