// EAGLE-3 on a CPU: reading hidden states and drafting chains, each in one call. The specification is in
// drafters/eagle3.py.

#include <numeric>
#include <vector>

#include "forward.h"
#include "noise.h"

namespace {

struct Drafter {
    const Model* model;
    Cache cache;
    Weight fc, lm_head;
    const int64_t* token_map;  // [lm_head.rows], null: the index
    Rows features;             // of the last entry of each request row
    int* entry;                // that entry
    long contenders, threads;
};

struct Read {
    Drafter drafter;
    Table table;
    Batch batch;
    Rows hidden;
};

struct Draft {
    Drafter drafter;
    Table table;
    const int* rows;
    int *drafts, *num_drafts;  // [rows, k] and [rows]; num_drafts: at first an upper bound
    long num_rows, k;
};

// Returns the index of the best of n logits, of which `contenders` get noise at a temperature above 0.
long best_of(const bf16* logits, long n, const Draft& args, long row, int position) {
    const int64_t* map = args.drafter.token_map;
    const auto more = [&](long a, long b) { return to_float(logits[a]) > to_float(logits[b]); };
    long best = 0;
    for (long i = 1; i < n; i++)
        if (more(i, best)) best = i;
    const float temperature = args.table.temperature[row];
    if (temperature <= 0) return best;
    std::vector<long> order(n);
    std::iota(order.begin(), order.end(), 0);
    const long most = std::min(args.drafter.contenders, n);
    std::partial_sort(order.begin(), order.begin() + most, order.end(), more);
    const Noise noise(args.table.seed[row], position);
    const auto score = [&](long i) {
        return to_float(logits[i]) - temperature * noise.log_exponential(noise.bits(map ? map[i] : i));
    };
    for (long i = 0; i < most; i++)
        if (score(order[i]) > score(best)) best = order[i];
    return best;
}

}  // namespace

extern "C" void nanospec_read_hidden_states(const Read* args) {
    const Drafter& d = args->drafter;
    const Table& table = args->table;
    Batch batch = args->batch;
    const long T = batch.num_tokens, H = d.model->hidden;
    std::vector<bf16> features(T * H);
    std::vector<int> following(T);
    const Rows inputs{features.data(), H};
    const Linear product{d.fc, args->hidden, inputs, T, d.threads};
    nanospec_linear(&product);
    for (long b = 0; b < batch.num_rows; b++) {
        const int *tokens = table.tokens + batch.rows[b] * table.max_context, last = table.max_context - 1;
        for (int t = batch.q_start[b], end = t + batch.q_len[b]; t < end; t++)
            following[t] = tokens[std::min(batch.positions[t] + 1, last)];
    }
    batch.input_ids = following.data();
    const Forward pass{d.model, batch, d.cache, {}, inputs, nullptr, 0, d.threads};
    nanospec_forward(&pass);
    for (long b = 0; b < batch.num_rows; b++) {
        const int row = batch.rows[b], n = batch.q_len[b];
        if (!n) continue;
        std::copy_n(inputs[batch.q_start[b] + n - 1], H, d.features[row]);
        d.entry[row] = batch.base_len[b] + n - 1;
    }
}

extern "C" void nanospec_draft_chains(const Draft* args) {
    const Drafter& d = args->drafter;
    const Table& table = args->table;
    const long N = args->num_rows, H = d.model->hidden, V = d.lm_head.rows;
    std::vector<int> rows;  // those that draft, by index in args->rows
    int longest = 0;
    for (long b = 0; b < N; b++) {
        const long s = args->rows[b];
        const bool ready = s >= 0 && d.entry[s] == table.num_tokens[s] - 2;
        int& n = args->num_drafts[b];
        n = ready ? std::min(n, draft_limit(table, s)) : 0;
        if (n) rows.push_back(b), longest = std::max(longest, n);
    }
    const long B = rows.size();
    std::vector<int> ids(B), positions(B), slots(B), q_start(B), q_len(B), base_len(B), blocks(B * table.max_blocks);
    std::vector<bf16> inputs(B * H), outputs(B * H), hidden(B * H), logits(B * V);
    for (long i = 0; i < B; i++) {
        const long s = args->rows[rows[i]];
        ids[i] = table.tokens[s * table.max_context + table.num_tokens[s] - 1];
        std::copy_n(d.features[s], H, inputs.data() + i * H);
        std::copy_n(table.block_table + s * table.max_blocks, table.max_blocks, blocks.data() + i * table.max_blocks);
        q_start[i] = i;
    }
    for (int j = 0; j < longest; j++) {
        for (long i = 0; i < B; i++) {
            const long s = args->rows[rows[i]], at = table.num_tokens[s] - 2 + j, size = table.block_size;
            q_len[i] = j < args->num_drafts[rows[i]];
            base_len[i] = at, positions[i] = q_len[i] ? at : 0;
            slots[i] = q_len[i] ? blocks[i * table.max_blocks + at / size] * size + at % size : -1;
        }
        const Batch batch{nullptr, ids.data(), positions.data(), slots.data(), blocks.data(), q_start.data(), q_len.data(),
                          base_len.data(), nullptr, nullptr, B, B, 1, table.max_blocks};
        const State state{1, {outputs.data(), H}};
        const Forward pass{d.model, batch, d.cache, {hidden.data(), H}, {inputs.data(), H}, &state, 1, d.threads};
        nanospec_forward(&pass);
        const Linear product{d.lm_head, {hidden.data(), H}, {logits.data(), V}, B, d.threads};
        nanospec_linear(&product);
        for (long i = 0; i < B; i++) {
            if (!q_len[i]) continue;
            const long best = best_of(logits.data() + i * V, V, *args, args->rows[rows[i]], base_len[i] + 2);
            ids[i] = args->drafts[rows[i] * args->k + j] = d.token_map ? d.token_map[best] : best;
        }
        std::swap(inputs, outputs);
    }
}
