// What the step needs beside matrix products: one table of functions for each instruction set (elementwise_*.cpp).
#pragma once

#include <cstdint>

namespace ts {

// How keys and values lie in memory, for one layer: slots of tokens in tiles of 16, whatever the page size, so that a
// page table of slots is all that attention follows. Keys of a tile are (pairs of D, 16 slots, pair), values (pairs of
// slots, D, pair); a pair is two neighbouring numbers in bf16 and int8, one in fp32. So sixteen keys are one vector and
// no sum crosses lanes.
enum class KvType : int32_t { F32 = 0, BF16 = 1, INT8 = 2 };
constexpr int kTile = 16;
constexpr int kBlock =
    64;  // keys of one pass of the online softmax; block borders are multiples of it in every request
constexpr int kSpan = 256;  // keys whose softmax is computed apart and combined in order: what threads may share out

struct KvLayout {
    KvType type;
    int64_t head_dim, page_tokens;
    int64_t key_tile_bytes, value_tile_bytes;  // of one head
};

struct KvHead {  // one key head and its value head in one layer
    uint8_t* keys;
    uint8_t* values;
    float* key_scales;  // int8: one number a slot
    float* value_scales;
};

// Query tokens of one request against one KV head.
struct AttendTask {
    const float* queries;  // first token's first head of the group; tokens lie query_stride apart, heads head_dim
    int64_t query_stride;
    float* mixed;  // the same for the result
    int64_t mixed_stride;
    const int64_t* pages;  // the request's page table
    int64_t first_position;
    int32_t n_tokens, group;
    int64_t window;              // 0: none
    int64_t first_key, end_key;  // no row sees a key before or behind; shared out only at multiples of kSpan
    float* partial;  // null: write mixed; else for each span: a maximum and a sum of weights for each row, (rows, D)
                     // sums of values
};

// The largest of some numbers and its first place; NaN where one of them is not finite.
struct Best {
    float value;
    int64_t index;
};

struct StepKernels {
    int64_t (*task_rows)(
        const KvLayout&);  // query rows (tokens × heads of a group) of one attention task, one token's heads at least
    void (*embed)(const void* table, int32_t type, int64_t token, int64_t n, float* x, bool add);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* y);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y);
    void (*turn)(float* head, const float* cosines, const float* sines, int64_t head_dim);
    void (*store_kv)(const KvLayout&, const KvHead&, const float* key, const float* value, int64_t slot);
    void (*activate)(int32_t activation, const float* gate, const float* up, int64_t n, float* y);
    Best (*best)(const float* x, int64_t n);
    int64_t (*attend_scratch_bytes)(const KvLayout&, int64_t group);
    void (*attend)(const KvLayout&, const KvHead&, const AttendTask&, float scale, void* scratch);
    void (*combine)(const KvLayout&, const AttendTask&, int64_t n_spans);
};

const StepKernels& step_kernels_plain();
const StepKernels& step_kernels_avx2();
const StepKernels& step_kernels_avx512();
const StepKernels& step_kernels_avx512bf16();
const StepKernels& step_kernels_amx();

}  // namespace ts
