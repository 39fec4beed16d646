// Drafts of EAGLE-3 in chains, all passes in one call. The specification is in drafters/eagle3.py.

#include <numeric>
#include <vector>

#include "forward.h"
#include "noise.h"

namespace {

struct Chains {
    const Model* model;
    Batch batch;  // the first pass: one token per row
    Cache cache;
    Rows features;  // inputs of the first pass
    Weight lm_head;
    const int64_t* token_map;  // [lm_head.rows], null: the index
    const int* num_drafts;     // [rows]
    const int64_t* seeds;      // [rows]
    const float* temperature;  // [rows]
    int* drafts;               // [rows, k]
    long k, contenders, threads;
};

// Returns the index of the best of n logits, of which `contenders` get noise at a temperature above 0.
long best_of(const bf16* logits, long n, const Chains& args, long row, int position) {
    const auto id = [&](long i) { return args.token_map ? args.token_map[i] : i; };
    const auto more = [&](long a, long b) { return to_float(logits[a]) > to_float(logits[b]); };
    long best = 0;
    for (long i = 1; i < n; i++)
        if (more(i, best)) best = i;
    const float temperature = args.temperature[row];
    if (temperature <= 0) return best;
    std::vector<long> order(n);
    std::iota(order.begin(), order.end(), 0);
    const long most = std::min(args.contenders, n);
    std::partial_sort(order.begin(), order.begin() + most, order.end(), more);
    const Noise noise(args.seeds[row], position);
    const auto score = [&](long i) { return to_float(logits[i]) - temperature * noise.log_exponential(noise.bits(id(i))); };
    for (long i = 0; i < most; i++)
        if (score(order[i]) > score(best)) best = order[i];
    return best;
}

}  // namespace

extern "C" void nanospec_draft_chains(const Chains* args) {
    const Batch& batch = args->batch;
    const long B = batch.num_rows, H = args->model->hidden, V = args->lm_head.rows;
    std::vector<int> ids(batch.input_ids, batch.input_ids + B), positions(B), slots(B), q_len(B), base_len(B);
    std::vector<bf16> inputs(B * H), outputs(B * H), hidden(B * H), logits(B * V);
    for (long b = 0; b < B; b++) std::copy_n(args->features[b], H, inputs.data() + b * H);
    for (long j = 0; j < args->k; j++) {
        for (long b = 0; b < B; b++) {
            const long at = batch.base_len[b] + j, size = args->cache.block_size;
            const bool active = j < args->num_drafts[b];
            base_len[b] = at, q_len[b] = active, positions[b] = active ? at : 0;
            slots[b] = active ? batch.block_table[b * batch.max_blocks + at / size] * size + at % size : -1;
        }
        Batch step = batch;
        step.input_ids = ids.data(), step.positions = positions.data(), step.slots = slots.data();
        step.q_len = q_len.data(), step.base_len = base_len.data();
        const State state{1, {outputs.data(), H}};
        const Forward pass{args->model, step, args->cache, {hidden.data(), H}, {inputs.data(), H}, &state, 1, args->threads};
        nanospec_forward(&pass);
        const Linear product{args->lm_head, {hidden.data(), H}, {logits.data(), V}, B, args->threads};
        nanospec_linear(&product);
        for (long b = 0; b < B; b++) {
            if (!q_len[b]) continue;
            const long best = best_of(logits.data() + b * V, V, *args, b, base_len[b] + 2);
            ids[b] = args->drafts[b * args->k + j] = args->token_map ? args->token_map[best] : best;
        }
        std::swap(inputs, outputs);
    }
}
