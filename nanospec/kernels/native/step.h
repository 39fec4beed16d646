// The data of a step in the layout of `__init__.py`: the fields of kernels/table.py, kernels/batch.py and
// speculation/proposal.py. Each is an 8-byte word, the address of a tensor or a number.

#pragma once
#include <algorithm>
#include <cstdint>

constexpr int RUNNING = 0, STOPPED = 1, LENGTH = 2, NOT_A_NUMBER = 3;  // as in kernels/__init__.py
constexpr int NAN_TOKEN = -1, FROM_TARGET = -1, FROM_REFERENCE = -3;

struct Table {
    int *tokens, *num_tokens, *max_len, *reference, *num_reference, *block_table;
    int8_t* finished;
    int *max_k, *min_n, *max_n, *tree_width;
    bool* typical;
    float* temperature;
    int* top_k;
    float *top_p, *min_p;
    int64_t* seed;
    int *min_len, *stop_ids;
    float *repetition, *presence, *frequency;
    bool* penalized;
    float* bias;
    bool* in_prompt;
    int* output_counts;
    int64_t max_context, max_blocks, num_stops, vocab_size, block_size;
};

struct Batch {
    int *rows, *input_ids, *positions, *slots, *block_table, *q_start, *q_len, *base_len;
    int64_t* ancestors;
    int* parents;  // null: chains
    int64_t num_rows, num_tokens, max_q_len, max_blocks;
};

struct Proposal {
    int *drafts, *num_drafts, *source, *match_len, *drafter;
    int* parents;  // null: chains
    int64_t num_rows, k;
};

// Returns how many drafts request row s can use, as `draft_limits` of speculation/proposal.py.
inline int draft_limit(const Table& table, long s) {
    if (s < 0 || table.finished[s] != RUNNING) return 0;
    return std::max(std::min(table.max_k[s], table.max_len[s] - table.num_tokens[s] - 1), 0);
}

// A row of a batch: node 0 is the last committed token, the other nodes are the drafts. See kernels/batch.py.
struct Row {
    int request, n;
    long start;
    const int *ids, *parents;  // by node; parents: null in a chain

    Row(const Batch& batch, long b) : request(batch.rows[b]), n(batch.q_len[b]), start(batch.q_start[b]) {
        ids = batch.input_ids + start;
        parents = batch.parents ? batch.parents + start : nullptr;
    }

    int parent(int node) const { return parents ? parents[node] : node - 1; }

    // Returns the first child of `node` with this token, or 0.
    int next(int node, int token) const {
        if (!parents) return node + 1 < n && ids[node + 1] == token ? node + 1 : 0;
        for (int c = 1; c < n; c++)
            if (parents[c] == node && ids[c] == token) return c;
        return 0;
    }

    // Calls target(node) for each node on the path of verification: the next is the first child with the returned token.
    template <class Target>
    void walk(Target target) const {
        for (int count = 0, node = 0; count < n; count++) {  // ends even if parents form a cycle
            node = next(node, target(node));
            if (!node) return;
        }
    }
};
