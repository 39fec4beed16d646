// EAGLE-3 on a CPU: reading hidden states and drafting chains, each in one call. The specification is in
// drafters/eagle3.py.

#include <vector>

#include "amx.h"
#include "forward.h"
#include "noise.h"

namespace {

struct Drafter {
    const Model* model;
    Cache cache;
    Weight fc, lm_head;
    const int64_t* token_map;  // [lm_head.rows], null: the index
    Norm hidden_norm;          // of the features
    long norm_before_residual;  // whether the residual stream begins with the norm of the features
    Rows features;             // [S + 1, H], of the last entry of each request row
    int* entry;                // [S + 1], the index of that entry
    Rows pending;              // [(S + 1) * block_size, n * H], hidden states of the entries that follow
    int* num_pending;          // [S + 1]
    long contenders;
    double least_chance;       // a chain ends where the product of `Draft::probability` falls below this
    long threads;
    Table table;
};

struct ReadArgs {
    Drafter drafter;
    Batch batch;
    Rows hidden;
};

struct DraftArgs {
    Drafter drafter;
    const int* rows;
    int *drafts, *num_drafts;  // [rows, k] and [rows]; num_drafts: the maximum, replaced by the number
    long num_rows, k;
};

struct Draft {
    long token;
    float probability;  // of the largest logit
};

// Returns the token with the largest of n logits, or at a temperature above 0 the one with the largest sum of logit and
// noise among the `contenders` with the largest logits.
Draft choose(const Drafter& d, const bf16* logits, long n, long row, int position) {
    const float temperature = d.table.temperature[row];
    using Scored = std::pair<float, long>;
    std::vector<Scored> top(temperature > 0 ? d.contenders : 1, {-INFINITY, 0});  // the largest logits, descending
    for (long j = 0; j < n; j++) {
        const float x = to_float(logits[j]);
        if (!(x > top.back().first)) continue;
        top.back() = {x, j};
        for (auto at = top.end() - 1; at != top.begin() && at[-1] < *at; at--) std::iter_swap(at - 1, at);
    }
    const float largest = top[0].first;
    Floats sums{};
    long i = 0;
    for (; i + LANES <= n; i += LANES) sums += exp2_of((load(logits + i) - largest) * LOG2_E);
    float total = sum(sums);
    for (; i < n; i++) total += std::exp(to_float(logits[i]) - largest);
    const Noise noise(d.table.seed[row], position);
    for (auto& [score, id] : top) {
        if (d.token_map) id = d.token_map[id];
        if (temperature > 0) score -= temperature * noise.log_exponential(noise.bits(id));
    }
    return {std::max_element(top.begin(), top.end())->second, 1 / total};
}

// Runs the layer on tokens with these features, and writes its output, if `outputs` is given, and the norm of the output,
// if `hidden` is.
void run_layer(const Drafter& d, const Batch& batch, Rows features, Rows hidden, Rows outputs) {
    const Model& m = *d.model;
    const long H = m.hidden;
    const Buffer inputs(batch.num_tokens, 2 * H);  // the norms of embedding and features
    {
        const FpuMode mode;
        for (long t = 0; t < batch.num_tokens; t++) {
            bf16 *embedded = inputs[t], *normed = embedded + H;
            embed(m, batch.input_ids[t], normed);  // not yet the norm of the features
            normalize(normed, H, m.layers[0].input_norm, m.eps, embedded);
            normalize(features[t], H, d.hidden_norm, m.eps, normed);
        }
    }
    const State output{1, outputs};
    const Forward pass{d.model, d.cache, batch, hidden, &output, outputs.data != nullptr, d.threads};
    forward(pass, d.norm_before_residual ? Rows{inputs.data + H, inputs.stride} : features, inputs);
}

// A request row with hidden states to read: the pending ones, then `count` of a batch.
struct Span {
    long row;
    Rows hidden;
    long first, count;  // tokens of the batch
};

// Computes the entries of all spans in one pass.
void read(const Drafter& d, const std::vector<Span>& spans) {
    const Table& table = d.table;
    const long H = d.model->hidden, columns = d.fc.columns, B = spans.size(), size = table.block_size;
    std::vector<bf16> states, features;
    std::vector<int> ids, positions, slots, blocks, q_start(B), q_len(B), base_len(B);
    for (long i = 0; i < B; i++) {
        const auto& [row, hidden, first, count] = spans[i];
        const int *tokens = table.tokens + row * table.max_context, *own = table.block_table + row * table.max_blocks;
        const int base = d.entry[row] + 1, pending = d.num_pending[row];
        q_start[i] = ids.size(), q_len[i] = pending + count, base_len[i] = base;
        blocks.insert(blocks.end(), own, own + table.max_blocks);
        for (int t = base; t < base + q_len[i]; t++) {
            const long j = t - base;
            const bf16* from = j < pending ? d.pending[row * size + j] : hidden[first + j - pending];
            states.insert(states.end(), from, from + columns);
            ids.push_back(tokens[std::min<long>(t + 1, table.max_context - 1)]);
            positions.push_back(t), slots.push_back(own[t / size] * size + t % size);
        }
    }
    const long T = ids.size();
    if (!T) return;
    features.resize(T * H);
    const Rows inputs{features.data(), H};
    const Linear product{d.fc, {states.data(), columns}, inputs, T, d.threads};
    nanospec_linear(&product);
    const int most = *std::max_element(q_len.begin(), q_len.end());
    const Batch batch{nullptr, ids.data(), positions.data(), slots.data(), blocks.data(), q_start.data(), q_len.data(),
                      base_len.data(), nullptr, nullptr, B, T, most, table.max_blocks};
    run_layer(d, batch, inputs, {}, {});
    for (long i = 0; i < B; i++) {
        const long row = spans[i].row;
        std::copy_n(inputs[q_start[i] + q_len[i] - 1], H, d.features[row]);
        d.entry[row] += q_len[i], d.num_pending[row] = 0;
    }
}

}  // namespace

// Computes the entries of rows that complete a block of the cache; keeps the hidden states of the others.
extern "C" void nanospec_eagle3_read(const ReadArgs* args) {
    const Drafter& d = args->drafter;
    const Batch& batch = args->batch;
    const long size = d.table.block_size;
    std::vector<Span> spans;
    for (long b = 0; b < batch.num_rows; b++) {
        const long row = batch.rows[b], first = batch.q_start[b], n = batch.q_len[b], base = batch.base_len[b];
        if (!n) continue;
        int& pending = d.num_pending[row];
        if (d.entry[row] + 1 + pending != base) d.entry[row] = base - 1, pending = 0;  // a new request
        if ((base + n) / size > (base - pending) / size) {
            spans.push_back({row, args->hidden, first, n});
        } else {
            for (long i = 0; i < n; i++)
                std::copy_n(args->hidden[first + i], d.fc.columns, d.pending[row * size + pending++]);
        }
    }
    read(d, spans);
}

// Computes the entries of the hidden states that were kept, then drafts chains.
extern "C" void nanospec_eagle3_draft(const DraftArgs* args) {
    const Drafter& d = args->drafter;
    const Table& table = d.table;
    const long H = d.model->hidden, V = d.lm_head.rows, size = table.block_size, width = table.max_blocks;
    std::vector<long> active;  // indices of the rows that draft
    std::vector<Span> spans;
    for (long b = 0; b < args->num_rows; b++) {
        const long s = args->rows[b];
        const bool ready = s >= 0 && d.entry[s] + d.num_pending[s] == table.num_tokens[s] - 2;
        if (ready && d.num_pending[s]) spans.push_back({s, {}, 0, 0});
        args->num_drafts[b] = ready ? std::min(args->num_drafts[b], draft_limit(table, s)) : 0;
        if (args->num_drafts[b]) active.push_back(b);
    }
    read(d, spans);
    const long B = active.size();
    std::vector<int> ids(B), at(B), slots(B), q_start(B), q_len(B), blocks(B * width);
    std::vector<bf16> inputs(B * H), outputs(B * H), hidden(B * H), logits(B * V);
    std::vector<float> chance(B, 1);
    for (long i = 0; i < B; i++) {
        const long s = args->rows[active[i]];
        ids[i] = table.tokens[s * table.max_context + table.num_tokens[s] - 1];
        std::copy_n(d.features[s], H, inputs.data() + i * H);
        std::copy_n(table.block_table + s * width, width, blocks.data() + i * width);
        q_start[i] = i;
    }
    for (int j = 0;; j++) {
        for (long i = 0; i < B; i++) {
            q_len[i] = j < args->num_drafts[active[i]];
            at[i] = q_len[i] ? table.num_tokens[args->rows[active[i]]] - 2 + j : 0;
            slots[i] = q_len[i] ? blocks[i * width + at[i] / size] * size + at[i] % size : -1;
        }
        if (std::find(q_len.begin(), q_len.end(), 1) == q_len.end()) return;
        const Batch batch{nullptr, ids.data(), at.data(), slots.data(), blocks.data(), q_start.data(), q_len.data(),
                          at.data(), nullptr, nullptr, B, B, 1, width};
        run_layer(d, batch, {inputs.data(), H}, {hidden.data(), H}, {outputs.data(), H});
        const Linear product{d.lm_head, {hidden.data(), H}, {logits.data(), V}, B, d.threads};
        nanospec_linear(&product);
        for (long i = 0; i < B; i++) {
            if (!q_len[i]) continue;
            const long b = active[i];
            const Draft draft = choose(d, logits.data() + i * V, V, args->rows[b], at[i] + 2);
            if ((chance[i] *= draft.probability) < d.least_chance) args->num_drafts[b] = j;
            else ids[i] = args->drafts[b * args->k + j] = draft.token;
        }
        std::swap(inputs, outputs);
    }
}
