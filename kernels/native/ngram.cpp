// Lookup of drafts on a CPU: speculation/ngram.py and ngram_tree.py say what is computed.

#include <algorithm>
#include <utility>
#include <vector>

#include "step.h"

namespace {

constexpr int LONG_MATCH = 3;  // longer matches are not branched

struct Lookup {
    Table table;
    Proposal out;  // with parents: a tree
    const int* rows;
    int64_t max_width;
};

// An occurrence of the last n tokens of a text, and the index p of the token after it.
using Match = std::pair<int, int>;

struct Node {
    int token, source, parent;
};

// The text of a request row and how it may be used.
struct History {
    const int* text;
    int length, room, min_n, max_n, width;

    History(const Lookup& given, int s) {
        const Table& table = given.table;
        text = table.tokens + s * table.max_context;
        length = table.num_tokens[s];
        const int left = std::min(table.limit[s], table.max_len[s] - length - 1);
        room = table.finished[s] == RUNNING ? std::clamp<int>(left, 0, given.out.k) : 0;
        min_n = table.min_n[s], max_n = table.max_n[s], width = std::clamp<int>(table.width[s], 1, given.max_width);
    }

    // Returns all matches of min_n to max_n tokens, in ascending order of p.
    std::vector<Match> matches() const {
        std::vector<Match> found;
        for (int p = 1; p < length; p++) {
            int n = 0;
            while (n < max_n && n < p && text[p - 1 - n] == text[length - 1 - n]) n++;
            if (n && n >= min_n) found.push_back({n, p});
        }
        return found;
    }

    // Returns the index that draft i of the match at p is copied from: at the end of the text, go back to p.
    int source(int p, int i) const { return p + (p + i < length ? i : i % (length - p)); }

    // Returns the best matches that continue differently, best first: `width` of them, or one if it is long.
    std::vector<Match> different_matches() const {
        std::vector<Match> rest = matches(), chosen;
        while (!rest.empty() && int(chosen.size()) < width) {
            const auto [n, p] = chosen.emplace_back(*std::max_element(rest.begin(), rest.end()));
            if (n > LONG_MATCH || int(chosen.size()) == width) break;
            std::erase_if(rest, [&, p = p](const Match& m) {  // those that continue alike
                int i = 0;
                while (i < room && text[source(p, i)] == text[source(m.second, i)]) i++;
                return i == room;
            });
        }
        return chosen;
    }

    // Returns the nodes of the tree of these matches' chains, by place - 1.
    std::vector<Node> tree(const std::vector<Match>& chains) const {
        std::vector<Node> nodes;
        for (size_t c = 0; c < chains.size(); c++) {
            const int rest = room - nodes.size();
            const size_t end = nodes.size() + (c + 1 == chains.size() ? rest : (rest + 1) / 2);
            int place = 0;
            for (int i = 0; i < room; i++) {
                const int from = source(chains[c].second, i), token = text[from], parent = place;
                place = 0;
                for (size_t j = 0; j < nodes.size() && !place; j++)
                    if (nodes[j].parent == parent && nodes[j].token == token) place = j + 1;
                if (place) continue;
                if (nodes.size() == end) break;
                nodes.push_back({token, from, parent});
                place = nodes.size();
            }
        }
        return nodes;
    }
};

}  // namespace

extern "C" void nanospec_ngram(const Lookup* given) {
    const Proposal& out = given->out;
    const long k = out.k;
    for (long b = 0; b < out.num_rows; b++) {
        std::vector<Node> nodes;
        out.match_len[b] = out.drafter[b] = 0;
        if (const int s = given->rows[b]; s >= 0)
            if (const History history(*given, s); history.room) {
                const std::vector<Match> chains = history.different_matches();
                nodes = history.tree(chains);
                if (nodes.size()) out.match_len[b] = chains[0].first;
            }
        out.num_drafts[b] = nodes.size();
        nodes.resize(k, {0, -1, 0});
        for (long i = 0; i < k; i++) {
            out.drafts[b * k + i] = nodes[i].token;
            out.source[b * k + i] = nodes[i].source;
            if (out.parents) out.parents[b * k + i] = nodes[i].parent;
        }
    }
}
