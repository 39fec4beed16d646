// Lays out, verifies and commits a step on a CPU. The specification is in speculation/proposal.py and verify.py.

#include <algorithm>
#include <cstring>

#include "step.h"

namespace {

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

struct Layout {
    Table table;
    Proposal proposal;
    const int* rows;
    int64_t packed;
    Batch out;
    int64_t tokens, longest, kv_len;  // results: num_tokens, max_q_len, max_kv_len
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

// proposal.py: lays out rows of k + 1 nodes, or packed ones.
void nanospec_lay_out(Layout* args) {
    const Table& table = args->table;
    const Proposal& proposal = args->proposal;
    const Batch& out = args->out;
    const long k = proposal.k;
    args->tokens = 0, args->longest = args->kv_len = 1;
    for (long b = 0; b < proposal.num_rows; b++) {
        const int s = args->rows[b], row = std::max(s, 0), base = std::max(table.num_tokens[row] - 1, 0);
        const int *blocks = table.block_table + row * table.max_blocks, *drafts = proposal.drafts + b * k;
        const int* parents = proposal.parents ? proposal.parents + b * k : nullptr;
        const auto valid = [&](int i) {
            return drafts[i] >= 0 && drafts[i] < table.vocab_size && (!parents || (parents[i] >= 0 && parents[i] <= i));
        };
        const long most = std::min<long>({k, proposal.num_drafts[b], table.max_len[row] - base - 2});
        int count = 0;  // valid drafts
        while (count < most && valid(count)) count++;
        const int n = s >= 0 && table.finished[s] == RUNNING ? count + 1 : 0;
        out.rows[b] = n ? s : -1, out.q_start[b] = args->tokens, out.q_len[b] = n, out.base_len[b] = base;
        std::copy_n(blocks, table.max_blocks, out.block_table + b * table.max_blocks);
        int depth[64] = {0};
        int64_t mask[64] = {1};
        for (int i = 0; i < (args->packed ? n : k + 1); i++) {
            const long t = args->tokens++, index = base + i;
            const bool drafted = i && i <= count;
            const int parent = drafted && parents ? parents[i - 1] : 0;
            if (i && parents) depth[i] = depth[parent] + 1, mask[i] = mask[parent] | int64_t(1) << i;
            out.input_ids[t] = drafted ? drafts[i - 1] : i ? 0 : table.tokens[row * table.max_context + index];
            out.positions[t] = i < n ? base + (parents ? depth[i] : i) : 0;
            out.slots[t] = i < n ? blocks[index / table.block_size] * table.block_size + index % table.block_size : -1;
            if (parents) out.parents[t] = parent, out.ancestors[t] = mask[i];
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
