// Around the forward pass on a CPU: lay a step out, walk its drafts and commit. speculation/proposal.py and verify.py
// say what is computed.

#include <algorithm>
#include <cstring>

#include "step.h"

namespace {

// Returns how many of a run of tokens are kept where `room` more fit; sets the row's code.
int kept(const int* run, int count, int room, const int* stops, int num_stops, int8_t& code) {
    for (int n = 0; n < std::min(count, room); n++) {
        if (run[n] == NAN_TOKEN) return code = NOT_A_NUMBER, n;
        if (std::find(stops, stops + num_stops, run[n]) != stops + num_stops) return code = STOPPED, n + 1;
    }
    code = count >= room ? LENGTH : RUNNING;
    return std::min(count, room);
}

int append(const Table& table, int s, const int* run, int count) {
    int& length = table.num_tokens[s];
    const int room = std::max(table.max_len[s] - length, 0);
    const int n = kept(run, count, room, table.stop_ids + s * table.num_stops, table.num_stops, table.finished[s]);
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
    int* memory;    // the results, one part behind the other
    int64_t* masks;
    int64_t tokens, longest, kv_len;  // results; the last two are those of the longest rows
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

// proposal.py: k + 1 places to a row, or packed.
void nanospec_lay_out(Layout* given) {
    const Table& table = given->table;
    const Proposal& proposal = given->proposal;
    const long B = proposal.num_rows, k = proposal.k;
    int* part = given->memory;
    auto next_part = [&](long size) { return part += size, part - size; };
    int *rows = next_part(B), *q_start = next_part(B), *q_len = next_part(B), *base_len = next_part(B);
    int* block_table = next_part(B * table.max_blocks);
    given->tokens = 0, given->longest = given->kv_len = 1;
    for (long b = 0; b < B; b++) {
        const int s = given->rows[b], base = std::max(table.num_tokens[std::max(s, 0)] - 1, 0);
        const int drafts = std::clamp<int>(proposal.num_drafts[b], 0, proposal.k);  // a drafter's number is not trusted
        const int n = s >= 0 && table.finished[s] == RUNNING ? drafts + 1 : 0;
        rows[b] = n ? s : -1, q_start[b] = given->tokens, q_len[b] = n, base_len[b] = base;
        given->tokens += given->packed ? n : k + 1;
        given->longest = std::max<long>(given->longest, n), given->kv_len = std::max<long>(given->kv_len, base + n);
    }
    const long T = given->tokens;
    int *input_ids = next_part(T), *positions = next_part(T), *slots = next_part(T), *above = next_part(T);
    for (long b = 0; b < B; b++) {
        const long row = std::max(given->rows[b], 0), n = q_len[b];
        const int *pages = table.block_table + row * table.max_blocks, *drafts = proposal.drafts + b * k;
        const int* parents = proposal.parents ? proposal.parents + b * k : nullptr;
        std::copy_n(pages, table.max_blocks, block_table + b * table.max_blocks);
        int depth[64] = {0};
        int64_t mask[64] = {1};
        for (int i = 0; i < (given->packed ? n : k + 1); i++) {
            const long t = q_start[b] + i, index = base_len[b] + i;
            const int parent = i && parents ? parents[i - 1] : 0;
            if (i && parents) depth[i] = depth[parent] + 1, mask[i] = mask[parent] | int64_t(1) << i;
            input_ids[t] = i ? drafts[i - 1] : table.tokens[row * table.max_context + index];
            positions[t] = i < n ? base_len[b] + (parents ? depth[i] : i) : 0;
            slots[t] = i < n ? pages[index / table.block_size] * table.block_size + index % table.block_size : -1;
            if (parents) above[t] = parent, given->masks[t] = mask[i];
        }
    }
}

// verify.py
void nanospec_commit(const Commit* given) {
    const Batch& batch = given->batch;
    const Proposal& proposal = given->proposal;
    const long Q = batch.max_q_len, width = 6 + 2 * Q;
    for (long b = 0; b < batch.num_rows; b++) {
        const Row row(batch, b);
        int *line = given->report + b * width, *run = line + 6, *source = run + Q;
        int* path = given->paths + b * Q;
        int count = 0, s = row.request, n = 0;
        std::fill_n(path, Q, 0);
        std::fill_n(run, Q, -1);
        std::fill_n(source, Q, OWN);
        row.walk([&](int place) {
            if (place) source[count - 1] = proposal.source[b * proposal.k + place - 1];
            path[count] = place;
            return run[count++] = given->targets[row.start + place];
        });
        if (s >= 0 && count && given->table.finished[s] == RUNNING) n = append(given->table, s, run, count);
        const int code = s >= 0 ? given->table.finished[s] : RUNNING;
        const int columns[] = {
            n, std::max(row.n - 1, 0), std::max(count - 1, 0), proposal.drafter[b], proposal.match_len[b], code};
        std::copy_n(columns, 6, line);
        given->num_emitted[b] = count;
    }
}
}
