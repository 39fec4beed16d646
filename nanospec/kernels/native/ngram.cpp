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

// Returns the length of the best match for the last min_n to max_n tokens of a text in source[0 .. size), and the index
// of the token after it; {0, 0} without a match. Matches that are followed by -1 or a token in `used` are skipped.
std::pair<int, int> best_match(const int* text, int length, const int* source, int size, int min_n, int max_n,
                               const std::vector<int>& used) {
    std::pair<int, int> best{0, 0};
    const int most = std::min(max_n, length);
    for (int p = 1; p < size; p++) {
        int n = 0;
        while (n < most && n < p && source[p - 1 - n] == text[length - 1 - n]) n++;
        if (n && n >= min_n && n >= best.first && source[p] >= 0 && !std::count(used.begin(), used.end(), source[p]))
            best = {n, p};
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
        const int *reference = table.reference + s * table.max_context, size = table.num_reference[s];
        const int min_n = table.min_n[s], max_n = table.max_n[s];
        const int limit = std::min<long>(draft_limit(table, args->rows[b]), k);
        out.num_drafts[b] = out.match_len[b] = out.drafter[b] = 0;
        used.clear();
        for (int begin = 0, width = std::max(table.tree_width[s], 1); int(used.size()) < width && begin < limit;) {
            const auto own = best_match(text, length, text, length, min_n, max_n, used);
            const auto other = best_match(text, length, reference, size, min_n, max_n, used);
            const bool copied = other.first > own.first;  // from the reference
            const auto [n, p] = copied ? other : own;
            if (!n) break;
            int i = begin;
            for (; i < limit; i++) {
                const int index = p + (copied ? i - begin : (i - begin) % (length - p));
                if (copied && (index >= size || reference[index] < 0)) break;
                out.drafts[at + i] = copied ? reference[index] : text[index];
                out.source[at + i] = copied ? FROM_REFERENCE - index : index;
                if (out.parents) out.parents[at + i] = i > begin ? i : 0;
            }
            out.num_drafts[b] = i;
            out.match_len[b] = std::max(out.match_len[b], n);
            if (n > LONG_MATCH) break;
            used.push_back(out.drafts[at + begin]);
            begin = std::min(begin + (limit - begin + 1) / 2, i);
        }
        for (int i = out.num_drafts[b]; i < k; i++) {  // a branch may be shorter than the previous one was
            out.drafts[at + i] = 0;
            out.source[at + i] = -1;
            if (out.parents) out.parents[at + i] = 0;
        }
    }
}
