// N-gram lookup on a CPU. The specification is in speculation/ngram.py.

#include <algorithm>
#include <utility>
#include <vector>

#include "step.h"

namespace {

constexpr int LONG_MATCH = 3;  // a longer match gets all drafts

struct Lookup {
    Table table;
    Proposal out;  // trees if `parents` is set
    const int* rows;
};

// Returns the length of the best match for the last min_n to max_n tokens of a text, and the index of the token after
// it; {0, 0} without a match. Matches that are followed by a token in `used` are skipped.
std::pair<int, int> best_match(const int* text, int length, int min_n, int max_n, const std::vector<int>& used) {
    std::pair<int, int> best{0, 0};
    for (int p = 1; p < length; p++) {
        int n = 0;
        while (n < max_n && n < p && text[p - 1 - n] == text[length - 1 - n]) n++;
        if (n && n >= min_n && n >= best.first && !std::count(used.begin(), used.end(), text[p])) best = {n, p};
    }
    return best;
}

}  // namespace

extern "C" void nanospec_ngram(const Lookup* args) {
    const Table& table = args->table;
    const Proposal& out = args->out;
    const long k = out.k;
    std::vector<int> used;  // the first token of each branch
    for (long b = 0; b < out.num_rows; b++) {
        const long at = b * k, s = std::max(args->rows[b], 0);
        const int *text = table.tokens + s * table.max_context, length = table.num_tokens[s];
        const int left = std::min(table.max_k[s], table.max_len[s] - length - 1);
        const bool active = args->rows[b] >= 0 && table.finished[s] == RUNNING;
        const int limit = active ? std::clamp<int>(left, 0, k) : 0;
        std::fill_n(out.drafts + at, k, 0);
        std::fill_n(out.source + at, k, -1);
        if (out.parents) std::fill_n(out.parents + at, k, 0);
        out.num_drafts[b] = out.match_len[b] = out.drafter[b] = 0;
        used.clear();
        for (int begin = 0, width = std::max(table.tree_width[s], 1); int(used.size()) < width && begin < limit;) {
            const auto [n, p] = best_match(text, length, table.min_n[s], table.max_n[s], used);
            if (!n) break;
            for (int i = begin; i < limit; i++) {
                const int source = p + (i - begin) % (length - p);
                out.drafts[at + i] = text[source];
                out.source[at + i] = source;
                if (out.parents) out.parents[at + i] = i > begin ? i : 0;
            }
            out.num_drafts[b] = limit;
            out.match_len[b] = std::max(out.match_len[b], n);
            if (n > LONG_MATCH) break;
            used.push_back(text[p]);
            begin += (limit - begin + 1) / 2;
        }
    }
}
