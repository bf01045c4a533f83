// One step of the engine: the flat plan of engine/plan.py for any mix of prefill and decode rows, in one call.
// engine/native_structs.py mirrors these structures; ts_size_of lets it compare their sizes when the library is loaded.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace ts {

// The plan's operations, as plan.py describes them. An operation's structure holds what it alone knows.
enum class TableType : int32_t { F32 = 0, BF16 = 1, F16 = 2 };
enum class Activation : int32_t { Silu = 0, Gelu, GeluTanh, ClampedSwish /* of a gate and an up alone */ };

struct Embed {
    const void* table;
    const void* positions;  // null: none
    TableType table_type, positions_type;
    float scale;  // of the table's row
};
struct Norm {
    const float* weight;  // (E); null: a copy
    const float* bias;    // LayerNorm if there is one
    float eps;
};
struct QkvProjection {
    Matrix matrix;
};
// Latent attention's queries, key and value (engine/plan.py). `matrix` reads the normed rows, or where they are
// compressed what `down` makes of them.
struct LatentProjection {
    Matrix matrix;           // (H · (nope + rope), ·)
    Matrix down;             // packed null: queries are not compressed
    Matrix kv;               // (latent + rope, E)
    Matrix absorb;           // (H · latent, nope), F32 or BF16
    const float* down_norm;  // of what `down` makes
    const float* kv_norm;    // (latent)
    int64_t nope, rope, latent;
    float eps;
};
struct LatentValues {
    Matrix heads;  // (H · values, latent), F32 or BF16
    int64_t rope;  // numbers of a head that attention summed before the latent
};
struct QkNorm {
    const float* weight;  // (H + K, D)
    float eps;
    int32_t over_heads;  // all query heads together, and all key heads
};
struct RopeAndCacheWrite {
    const float* key_offset;  // (K, D), taken off the rotated keys; null: none
    int32_t rope;             // which angles; -1: none
};
struct PagedAttention {
    const float* sinks;  // (H), one more score of each head, without a value; null: none
    int64_t window;      // 0: none
    float cap;           // of scores, c·tanh(score/c); 0: none
};
struct GatherSampledRows {
    int64_t unused;
};
struct OutProjectionAdd {
    Matrix matrix;
    Norm norm;           // of what is added; weight null: none
    float scale;         // of what is added, after its norm
    int32_t ends_block;  // nothing of its block comes after it
    int32_t latent;      // it reads what LatentValues made
};
struct MlpUp {
    Matrix matrix;  // of the gate if there is `up`
    Matrix up;      // packed null: none
    Activation activation;
    int32_t shared;  // rows are multiplied with their share of the shared experts
};
struct MlpDownAdd {
    Matrix matrix;
    Norm norm;
    float scale;
    int32_t ends_block, unused;
};
struct RouteTokens {
    Matrix matrix;            // (X, E) in F32
    Matrix shared_gate;       // (1, E) in F32; packed null: none
    const float* correction;  // (X), added for the choice alone; null: none
    Format format;            // of the experts, whose rows are prepared here
    int32_t top_k, n_groups, top_groups, sigmoid, normalised;
    float scale;  // of the shares
};
struct ExpertsAdd {
    Matrix gate_up;  // (X · 2F, E), an expert's gate before its up
    Matrix down;     // (X · E, F)
    int64_t n_experts, top_k;
    Activation activation;
    float scale;  // of what is added
};
struct LmHead {
    Matrix matrix;
    float cap;  // of logits; 0: none
};

// A row each: the type and its name as a member. Python numbers the kinds in this order.
#define TS_OPS(ROW)                              \
    ROW(Embed, embed)                            \
    ROW(Norm, norm)                              \
    ROW(QkvProjection, qkv_projection)           \
    ROW(LatentProjection, latent_projection)     \
    ROW(LatentValues, latent_values)             \
    ROW(QkNorm, qk_norm)                         \
    ROW(RopeAndCacheWrite, rope_and_cache_write) \
    ROW(PagedAttention, paged_attention)         \
    ROW(GatherSampledRows, gather_sampled_rows)  \
    ROW(OutProjectionAdd, out_projection_add)    \
    ROW(MlpUp, mlp_up)                           \
    ROW(MlpDownAdd, mlp_down_add)                \
    ROW(RouteTokens, route_tokens)               \
    ROW(ExpertsAdd, experts_add)                 \
    ROW(LmHead, lm_head)

enum class OpKind : int32_t {
#define TS_OP(TYPE, NAME) TYPE,
    TS_OPS(TS_OP)
#undef TS_OP
};

struct StepOp {
    OpKind kind;
    int32_t layer;
    union {
#define TS_OP(TYPE, NAME) TYPE NAME;
        TS_OPS(TS_OP)
#undef TS_OP
    };
};

// f of the operation that `op` holds.
template <class F>
auto visit(const StepOp& op, F f) {
    switch (op.kind) {
#define TS_OP(TYPE, NAME) \
    case OpKind::TYPE: return f(op.NAME);
        TS_OPS(TS_OP)
#undef TS_OP
    }
    return f(op.gather_sampled_rows);  // no such kind: nothing to do
}

struct StepModel {
    int64_t d_model, n_heads, n_kv_heads, head_dim, d_ff, vocab_size, n_layers;
    float attention_scale;
    int32_t n_ropes;
    const float* angles;  // (ropes, 2, D/2): radians a position, and what sine and cosine are multiplied with
    const StepOp* ops;
    int64_t n_ops;
    int32_t kv_type, unused;
    int64_t page_tokens, n_slots;
    uint8_t* keys;  // (layers, K, tiles) of attention.h
    uint8_t* values;
    float* key_scales;  // int8, int4: (layers, K, slots)
    float* value_scales;
};

// What an adapter's numbers are: they themselves (Kernels::thin_f32), or codes in 8 bits (Kernels::thin_codes), a
// rank's with a scale in A and one in B, whose product is AdapterAt::scales.
enum class AdapterForm : int64_t { F32 = 0, CODES };

// A part of an adapter, beside outputs [begin, begin + n) of an operation's matrix, or of MlpUp's `up` where `second`:
// they gain `packed` (n, k) times numbers [first, first + k) of what AdapterAt made of a row.
struct AdapterPart {
    const void* packed;
    int64_t begin, n;
    int32_t first, k, second, unused;
};
// An adapter at one operation of the plan. n 0: it adds nothing there.
struct AdapterAt {
    const void* packed;   // (n, inputs of the operation)
    const float* scales;  // CODES: (n), of whole panels: what the products with `packed` are multiplied with
    int64_t n;
    int64_t n_parts;
    AdapterPart parts[3];
};
struct Adapter {
    const AdapterAt* at;  // of each operation of the plan
    AdapterForm form;     // the four numbers of a word of CODES are of one part
};

struct StepBatch {
    int64_t n_requests;
    const int32_t* starts;  // first position of each request's rows
    const int32_t* counts;
    const int32_t* table_rows;  // row of the page table
    const int32_t* tokens;      // (rows), one request after another
    const int64_t* table;       // (slots of requests, table_stride)
    int64_t table_stride;
    const int64_t* kept;  // rows to have logits of, then those whose hidden states are wanted; null: all, for logits
    int64_t n_kept;
    float* logits;         // (kept - n_hidden, V)
    float* best;           // (kept) the largest logit of each row, NaN where one is not finite; null: not wanted
    int64_t* best_tokens;  // (kept) its token
    float* trace;  // null, or (layers + 1, rows, E): the residual stream after the embedding and each block, for tests
    int64_t n_threads;         // 1: the caller alone; else all of the pool
    int64_t* expert_load;      // (layers, X): rows that chose each expert, added to what is there; null: not wanted
    int64_t* experts_touched;  // experts that the step reads, over all layers, added to what is there
    const Adapter* const* adapters;  // of each request, null where it has none; null: no request has one
    int64_t adapter_width;           // the most n of those, a multiple of 32
    float* hidden;                   // (n_hidden, E): the last n_hidden of the kept rows, as the head would read them
    int64_t n_hidden;                // they have no logits
};

}  // namespace ts

extern "C" {
// Copies what `model` and its ops say, not the arrays they point to. Null if memory is short.
void* ts_step_create(const ts::StepModel* model);
void ts_step_destroy(void* step);
// 0, or 1 if memory is short: nothing was computed.
int ts_step_run(void* step, const ts::StepBatch* batch);
}
