// What speculation does around the forward pass on a CPU: look drafts up, lay a step out, walk it and commit. The
// files of speculation/ that are named below say what each does.

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "step.h"

namespace {

// ---- ngram.py, ngram_tree.py -----------------------------------------------------------------------

constexpr int LONG_MATCH = 3;

// A request row's text and what it may draft.
struct History {
    const int* text;
    int length, wanted, min_n, max_n, width;

    History(const Table& table, int s, int k, int most_n, int most_width) {
        text = table.tokens + s * table.max_context;
        length = table.num_tokens[s];
        wanted = std::clamp(std::min(table.limit[s], table.max_len[s] - length - 1), 0, k);
        min_n = table.min_n[s], max_n = std::min(table.max_n[s], most_n);
        width = std::min(table.width[s], most_width);
    }

    // How many of the tokens before p equal the last ones of the text, at most max_n.
    int matched(int p) const {
        int n = 0;
        while (n < max_n && n < p && text[p - 1 - n] == text[length - 1 - n]) n++;
        return n;
    }

    // The index that draft i of the match at p is copied from.
    int source(int p, int i) const { return p + (p + i < length ? i : i % (length - p)); }
};

struct Match {
    int n, p;  // its length, and the index behind it

    bool operator>(const Match& other) const { return n != other.n ? n > other.n : p > other.p; }
};

Match longest_match(const History& h) {
    Match best{0, -1};
    for (int p = h.length - 1; p > 0 && best.n < h.max_n; p--) {
        if (h.text[p - 1] != h.text[h.length - 1]) continue;
        const int n = h.matched(p);
        if (n >= h.min_n && n > best.n) best = {n, p};
    }
    return best;
}

// The first `width` matches that continue differently, best first.
std::vector<Match> different_matches(const History& h) {
    std::vector<Match> all, chosen;
    for (int p = 1; p < h.length; p++)
        if (h.text[p - 1] == h.text[h.length - 1])
            if (const int n = h.matched(p); n > 0 && n >= h.min_n) all.push_back({n, p});
    std::sort(all.begin(), all.end(), std::greater<>());
    const int width = all.size() && all[0].n > LONG_MATCH ? std::min(h.width, 1) : h.width;
    auto same = [&](const Match& a, const Match& b) {
        for (int i = 0; i < h.wanted; i++)
            if (h.text[h.source(a.p, i)] != h.text[h.source(b.p, i)]) return false;
        return true;
    };
    for (const Match& match : all) {
        if (int(chosen.size()) >= width) break;
        if (std::none_of(chosen.begin(), chosen.end(), [&](const Match& c) { return same(c, match); }))
            chosen.push_back(match);
    }
    return chosen;
}

struct Node {
    int token, source, parent;
};

// The nodes of the tree of these matches' chains, by place - 1.
std::vector<Node> grow(const History& h, const std::vector<Match>& matches) {
    std::vector<Node> nodes;
    for (size_t c = 0; c < matches.size(); c++) {
        const int rest = h.wanted - nodes.size();
        const size_t end = nodes.size() + (c + 1 == matches.size() ? rest : (rest + 1) / 2);
        int place = 0;
        for (int i = 0; i < h.wanted; i++) {
            const int source = h.source(matches[c].p, i), token = h.text[source], parent = place;
            place = 0;
            for (size_t j = 0; j < nodes.size() && !place; j++)
                if (nodes[j].parent == parent && nodes[j].token == token) place = j + 1;
            if (place) continue;
            if (nodes.size() == end) break;
            nodes.push_back({token, source, parent});
            place = nodes.size();
        }
    }
    return nodes;
}

// ---- verify.py -------------------------------------------------------------------------------------

// How many of a run of tokens are appended where `room` more fit, and the code of the row afterwards.
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

struct Lookup {
    Table table;
    Proposal out;  // with parents: a tree
    const int* rows;
    int64_t max_n, max_width;
};

struct Layout {
    Table table;
    Proposal proposal;
    const int* rows;
    int64_t packed;
    int* memory;    // what is made, one part behind the other
    int64_t* masks;
    int64_t tokens, longest, kv_len;  // results; the last two are those of the longest rows
};

struct Commit {
    Table table;
    Batch batch;
    Proposal proposal;
    const int* targets;
    int* memory;  // report [B, 6 + 2 Q], num_emitted [B], path [B, Q]
};

}  // namespace

extern "C" {

// ngram.py, and ngram_tree.py where the proposal has parents.
void nanospec_ngram(const Lookup* given) {
    const Proposal& out = given->out;
    const long k = out.k;
    for (long b = 0; b < out.num_rows; b++) {
        std::vector<Node> nodes;
        int n = 0;
        if (given->rows[b] >= 0) {
            const History h(given->table, given->rows[b], k, given->max_n, given->max_width);
            std::vector<Match> matches;
            if (h.wanted > 0 && out.parents)
                matches = different_matches(h);
            else if (h.wanted > 0)
                if (Match best = longest_match(h); best.n) matches = {best};
            nodes = grow(h, matches);
            if (nodes.size()) n = matches[0].n;
        }
        out.num_drafts[b] = nodes.size();
        out.match_len[b] = n;
        out.drafter[b] = 0;
        nodes.resize(k, {0, -1, 0});
        for (long i = 0; i < k; i++) {
            out.drafts[b * k + i] = nodes[i].token;
            out.source[b * k + i] = nodes[i].source;
            if (out.parents) out.parents[b * k + i] = nodes[i].parent;
        }
    }
}

// layout.py: k + 1 places to a row, or packed.
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
        const int drafts = std::clamp<int>(proposal.num_drafts[b], 0, proposal.k);  // whatever a drafter says
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
    int *num_emitted = given->memory + batch.num_rows * width, *paths = num_emitted + batch.num_rows;
    for (long b = 0; b < batch.num_rows; b++) {
        const Row row(batch, b);
        int *line = given->memory + b * width, *run = line + 6, *source = run + Q;
        int* path = paths + b * Q;
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
        num_emitted[b] = count;
    }
}
}
