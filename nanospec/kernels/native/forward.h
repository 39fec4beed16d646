// The arguments of the forward pass and of a matrix product in decoder.cpp.

#pragma once
#include "cache.h"

// A copy of the residual stream after a number of layers.
struct State {
    long num_layers;
    Rows rows;
};

struct Forward {
    const Model* model;
    Batch batch;
    Cache cache;
    Rows hidden;  // output after the final norm; null to compute keys and values only
    Rows inputs;  // null if the model has none
    const State* states;
    long num_states;
    long threads;
};

struct Linear {
    Weight weight;
    Rows x, out;
    long tokens, threads;
};

extern "C" void nanospec_forward(const Forward* args);
extern "C" void nanospec_linear(const Linear* args);
