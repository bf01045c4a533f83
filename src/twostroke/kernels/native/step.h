// One step of the engine: the flat plan of engine/plan.py for any mix of prefill and decode rows, in one call.
// engine/native_runner.py mirrors these structures field by field.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace ts {

enum class OpKind : int32_t {
    Embed = 0,
    Normalise,
    ProjectHeads,
    NormaliseHeads,
    TurnAndStore,
    Attend,
    KeepSampledRows,
    AddMixed,
    Widen,
    AddNarrowed,
    Head
};

struct StepOp {
    OpKind kind;
    int32_t layer;
    int64_t window;  // Attend; 0: none
    int32_t choice;  // Embed: the table's type (0 fp32, 1 bf16, 2 fp16); TurnAndStore: 1 turns; Widen: 0 silu, 1 gelu,
                     // 2 gelu_tanh
    int32_t second;  // Embed: the type of the table of positions
    float eps;
    int32_t unused;
    const void* table;  // Embed
    const void* positions;
    const float* weight;  // Normalise (E), NormaliseHeads (H + K, D)
    const float*
        bias;  // Normalise: LayerNorm where there is one; TurnAndStore: (K, D), taken off the turned keys; null: none
    Matrix matrix;
    Matrix up;  // Widen, gated: `matrix` is the gate
};

struct StepModel {
    int64_t d_model, n_heads, n_kv_heads, head_dim, d_ff, vocab_size, n_layers;
    const float* frequencies;  // (D/2) radians a position; null where nothing turns
    const StepOp* ops;
    int64_t n_ops;
    int32_t kv_type, unused;
    int64_t page_tokens, n_slots;
    uint8_t* keys;  // (layers, K, tiles) of attention.h
    uint8_t* values;
    float* key_scales;  // int8: (layers, K, slots)
    float* value_scales;
};

struct StepBatch {
    int64_t n_requests;
    const int32_t* starts;  // first position of each request's rows
    const int32_t* counts;
    const int32_t* table_rows;  // row of the page table
    const int32_t* tokens;      // (rows), one request after another
    const int64_t* table;       // (slots of requests, table_stride)
    int64_t table_stride;
    const int64_t* kept;  // rows to have logits of; null: all
    int64_t n_kept;
    float* logits;         // (kept, V)
    float* best;           // (kept) the largest logit of each row, NaN where one is not finite; null: not wanted
    int64_t* best_tokens;  // (kept) its token
    float* trace;          // null, or (layers + 1, rows, E): x after the embedding and each block, for tests
    int64_t n_threads;     // 1: the caller alone; else all of the pool
};

}  // namespace ts

extern "C" {
// Copies what `model` and its ops say, not the arrays they point to. Null where memory is short.
void* ts_step_create(const ts::StepModel* model);
void ts_step_destroy(void* step);
// 0, or 1 where memory is short: nothing was computed.
int ts_step_run(void* step, const ts::StepBatch* batch);
}
