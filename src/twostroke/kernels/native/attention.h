// How keys and values lie in the cache, and what attention over them is asked for.
#pragma once

#include <cstdint>

namespace ts {

// Keys and values of one layer: slots of tokens in tiles of 16, whatever the page size, so that a page table of slots
// is all that attention follows. Keys of a tile are (pairs of D, 16 slots, pair), values (pairs of slots, D, pair); a
// pair is two neighbouring numbers in bf16 and int8, one in fp32. So sixteen keys are one vector and no sum crosses
// lanes.
//
// In int4 heads are turned by `hadamard` and each byte is two codes of one slot, the first in its lower bits, so that
// threads may write neighbouring slots: of keys (pairs of D, 16 slots) two neighbouring dimensions, of values
// (16 slots, half of D) dimensions d and half + d, half being D / 2 rounded up. A code c stands for c − 7.5 scales; a
// key adds to that the middle of its range.
enum class KvType : int32_t { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };
constexpr bool in_codes(KvType type) { return type == KvType::INT8 || type == KvType::INT4; }
constexpr int kTile = 16;
constexpr int kBlock =
    64;  // keys of one pass of the online softmax; block borders are multiples of it in every request
// Keys whose softmax is computed apart and combined in order: what threads may share out. The first two spans are half
// as long as the others, so that two threads have even parts of a short request whose KV heads are odd in number.
constexpr int kSpan = 256;
constexpr int64_t span_of(int64_t key) { return key < kSpan ? key / (kSpan / 2) : key / kSpan + 1; }
constexpr int64_t first_key_of(int64_t span) { return span < 2 ? span * (kSpan / 2) : (span - 1) * kSpan; }

struct KvLayout {
    KvType type;
    int64_t head_dim, page_tokens;
    int64_t key_tile_bytes, value_tile_bytes;  // of one head
};

struct KvHead {  // one key head and its value head in one layer
    uint8_t* keys;
    uint8_t* values;
    float* key_scales;  // int8: one number a slot; int4: two bf16 in its place, the scale and the middle of the range
    float* value_scales;
};

// Query tokens of one request against one KV head.
struct AttendTask {
    const float* queries;  // first token's first head of the group; tokens lie query_stride apart, heads head_dim
    int64_t query_stride;
    float* out;  // the same for the result
    int64_t out_stride;
    const int64_t* pages;  // the request's page table
    int64_t first_position;
    int32_t n_tokens, group;
    int64_t window;              // 0: none
    float cap;                   // of scores; 0: none
    const float* sinks;          // of the group's heads; null: none
    int64_t first_key, end_key;  // no row sees a key before or behind; shared out only by spans
    float* partial;  // null: write out; else for each span: a maximum and a sum of weights for each row, (rows, D)
                     // sums of values
};

}  // namespace ts
