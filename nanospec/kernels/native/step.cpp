// Trims, lays out, verifies and commits a step on a CPU, as specified in speculation/trim.py, layout.py and verify.py.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "step.h"

namespace {

constexpr int NUM_THRESHOLDS = 32, LONGEST = 8, NUM_COSTS = 16;  // as in speculation/trim.py

// Returns how many of `count` emitted tokens are kept if the request may get `left` more; sets `code`.
int kept(const int* run, int count, int left, const int* stops, int num_stops, int8_t& code) {
    for (int n = 0; n < std::min(count, left); n++) {
        if (run[n] == NAN_TOKEN) return code = NOT_A_NUMBER, n;
        if (std::find(stops, stops + num_stops, run[n]) != stops + num_stops) return code = STOPPED, n + 1;
    }
    code = count >= left ? LENGTH : RUNNING;
    return std::min(count, left);
}

int append(const Table& table, int s, const int* run, int count) {
    int& length = table.num_tokens[s];
    const int left = std::max(table.max_len[s] - length, 0);
    const int n = kept(run, count, left, table.stop_ids + s * table.num_stops, table.num_stops, table.finished[s]);
    memcpy(table.tokens + s * table.max_context + length, run, n * sizeof(int));
    for (int i = 0; i < n; i++) table.output_counts[s * table.vocab_size + run[i]]++;
    length += n;
    return n;
}

// Estimates of speculation/trim.py.
struct Estimates {
    const float *keep_unmatched, *keep_matched, *probe, *shared, *own, *margin, *min_match, *base_ms;
    const float *cost_at, *cost_slope, *first, *further, *factor, *accepted;

    float ms(int num_tokens) const {
        float sum = *base_ms;
        for (int i = 0; i < NUM_COSTS; i++) sum += cost_slope[i] * std::max(num_tokens - cost_at[i], 0.f);
        return sum;
    }
};

struct Trim {
    Table table;
    Proposal proposal;
    const int* rows;
    Estimates estimates;
    int64_t num_drafters;  // 0: no estimates
    int* q_len;            // result: [B]
};

// Returns the number of valid drafts of batch row b; -1 if it is inactive.
int num_valid(const Trim& args, long b) {
    const Table& table = args.table;
    const Proposal& p = args.proposal;
    const int s = args.rows[b], *drafts = p.drafts + b * p.k, *parents = p.parents ? p.parents + b * p.k : nullptr;
    if (s < 0 || table.finished[s] != RUNNING) return -1;
    const long limit = std::min<long>({p.k, p.num_drafts[b], table.max_len[s] - table.num_tokens[s] - 1});
    int count = 0;
    while (count < limit && drafts[count] >= 0 && drafts[count] < table.vocab_size &&
           (!parents || (parents[count] >= 0 && parents[count] <= count)))
        count++;
    return count;
}

// Reduces q_len to the drafts with the most expected tokens per ms.
void keep_most_profitable(const Trim& args) {
    const Estimates& e = args.estimates;
    const Proposal& p = args.proposal;
    const long B = p.num_rows;
    std::vector<float> chance(B * p.k), rank(B * p.k, -1);
    float num_rows = 0, least = INFINITY;
    for (long b = 0; b < B; b++) {
        const bool matched = p.match_len[b] > 0;
        const long length = std::clamp<long>(p.match_len[b], 0, LONGEST);
        const long at = std::clamp<long>(p.drafter[b], 0, args.num_drafters - 1) * (LONGEST + 1) + length;
        const float keep = matched ? *e.keep_matched : *e.keep_unmatched;
        float c = std::min(e.first[at] * e.factor[3 * b + matched], 1.f), total = 0;
        for (int i = 0; i < args.q_len[b] - 1; i++, c *= e.further[at]) {
            chance[b * p.k + i] = c, total += c;
            rank[b * p.k + i] = i < keep ? 2 : c;
        }
        if (args.q_len[b]) num_rows++, least = std::min(least, std::max(total, e.accepted[3 * b]));
    }
    float best = 2, best_rate = -1;
    for (int i = NUM_THRESHOLDS; i > 0; i--) {
        const float threshold = float(i) / (NUM_THRESHOLDS - 1);
        float gain = 0;
        int kept = 0;
        for (size_t j = 0; j < rank.size(); j++)
            if (rank[j] >= threshold) kept++, gain += chance[j];
        const float ms = e.ms(num_rows + kept), allowed = *e.shared * gain + *e.own * least + *e.margin;
        const float rate = (num_rows + gain) / ms;
        if (rate > best_rate && (i == NUM_THRESHOLDS || ms - e.ms(num_rows) <= allowed)) best = threshold, best_rate = rate;
    }
    bool probes = *e.probe >= 0;
    for (long i = 0; i < B; i++) {  // in the order of probing
        const long b = (i + std::max(long(*e.probe), 0L)) % B;
        const float* row = rank.data() + b * p.k;
        const int count = args.q_len[b], kept = std::count_if(row, row + p.k, [&](float r) { return r >= best; });
        const bool more = probes && 1 + kept < count;
        if (count) args.q_len[b] = 1 + kept + more;
        probes &= !more;
    }
}

struct Layout {
    Table table;
    const int *rows, *first, *q_len, *drafts, *parents;  // parents: null in chains
    int64_t k;
    Batch out;
    int64_t longest, kv_len;  // results: max_q_len, max_kv_len
};

struct Commit {
    Table table;
    Batch batch;
    Proposal proposal;
    const int* targets;
    int *report, *num_emitted, *paths;  // results: [B, 6 + 2 Q], [B], [B, Q]
};

}  // namespace

extern "C" {

// trim.py: chooses the number of drafts of each row.
void nanospec_trim(const Trim* args) {
    for (long b = 0; b < args->proposal.num_rows; b++) args->q_len[b] = num_valid(*args, b) + 1;
    if (args->num_drafters && args->proposal.k) keep_most_profitable(*args);
}

// layout.py: lays out rows of text and drafts.
void nanospec_lay_out(Layout* args) {
    const Table& table = args->table;
    const Batch& out = args->out;
    long t = 0;
    args->longest = args->kv_len = 1;
    for (long b = 0; b < out.num_rows; b++) {
        const int n = args->q_len[b], base = args->first[b], row = std::max(args->rows[b], 0);
        const int *blocks = table.block_table + row * table.max_blocks, *text = table.tokens + row * table.max_context;
        const int *drafts = args->drafts + b * args->k, *parents = args->parents + b * args->k;
        out.rows[b] = n ? row : -1, out.q_start[b] = t, out.q_len[b] = n, out.base_len[b] = base;
        std::copy_n(blocks, table.max_blocks, out.block_table + b * table.max_blocks);
        int depth[64] = {0};
        int64_t mask[64] = {1};
        for (int i = 0; i < n; i++, t++) {
            const int index = base + i, parent = i && args->parents ? parents[i - 1] : 0;
            if (i && args->parents) depth[i] = depth[parent] + 1, mask[i] = mask[parent] | int64_t(1) << i;
            const int draft = args->k ? index - table.num_tokens[row] : -1;
            out.input_ids[t] = draft < 0 ? text[index] : drafts[draft];
            out.positions[t] = base + (args->parents ? depth[i] : i);
            out.slots[t] = blocks[index / table.block_size] * table.block_size + index % table.block_size;
            if (args->parents) out.parents[t] = parent, out.ancestors[t] = mask[i];
        }
        args->longest = std::max<long>(args->longest, n), args->kv_len = std::max<long>(args->kv_len, base + n);
    }
}

// verify.py: verifies and commits.
void nanospec_commit(const Commit* args) {
    const Batch& batch = args->batch;
    const Proposal& proposal = args->proposal;
    const long Q = batch.max_q_len, width = 6 + 2 * Q;
    for (long b = 0; b < batch.num_rows; b++) {
        const Row row(batch, b);
        int *line = args->report + b * width, *run = line + 6, *source = run + Q;
        int* path = args->paths + b * Q;
        int count = 0, s = row.request, n = 0;
        std::fill_n(path, Q, 0);
        std::fill_n(run, Q, -1);
        std::fill_n(source, Q, FROM_TARGET);
        row.walk([&](int node) {
            if (node) source[count - 1] = proposal.source[b * proposal.k + node - 1];
            path[count] = node;
            return run[count++] = args->targets[row.start + node];
        });
        if (s >= 0 && count && args->table.finished[s] == RUNNING) n = append(args->table, s, run, count);
        const int code = s >= 0 ? args->table.finished[s] : RUNNING;
        const int columns[] = {
            n, std::max(row.n - 1, 0), std::max(count - 1, 0), proposal.drafter[b], proposal.match_len[b], code};
        std::copy_n(columns, 6, line);
        args->num_emitted[b] = count;
    }
}
}
