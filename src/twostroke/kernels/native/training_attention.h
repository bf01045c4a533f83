// Causal attention of training over packed documents: forward, and backward from what forward kept.
//
// Queries, keys and values lie side by side as the projection writes them: qkv[b][t][heads + 2·kv_heads][width] in
// bf16, queries first. Query t sees keys first[b][t] … t, where `first` never falls along a row: so documents and
// sliding windows are the same thing here, and whole blocks of keys outside are not computed. With `cos` and `sin`
// ([rows of them][tokens][width/2] fp32; one row serves all where rope_rows is 1), queries and keys are rotated by
// halves as they are read, and gradients are rotated back.
//
// With `cap` scores are bounded to cap·tanh(score/cap). With `sinks` each head has one more score, as it is, without a
// value: it takes a share of the softmax and gives nothing. Both cost the plain case one comparison a block.
//
// Products are bf16 with fp32 sums, everything between them fp32. Work is shared by key heads, each by one thread from
// beginning to end, so results depend neither on the number of threads nor on what else runs.
#pragma once
#include <cstdint>

namespace ts {

struct TrainingAttention {
    int64_t n_rows, n_tokens, n_heads, n_kv_heads, width;  // width: of a head, a multiple of 32
    float scale;                                           // of scores, 1/√width as a rule
    const uint16_t* qkv;
    const int32_t* first;    // [n_rows][n_tokens]
    const float *cos, *sin;  // null: no rotation
    int64_t rope_rows;       // 1 or n_rows
    float cap;               // 0: scores are not bounded
    const float* sinks;      // [n_heads]; null: none
};

// What a target's table has for it.
//   train_attention            out [b][t][heads][width] bf16; log_sums [b][heads][t], of base 2, which backward needs.
//   train_attention_backward   qkv_gradient in the layout of qkv, all of it written; with sinks their gradients by row,
//                              sink_gradient [b][heads], else null.
}  // namespace ts
