// One table of functions a target, kernels_<target>() of targets.h. kernels_<target>.cpp fills it, from the bodies
// that are compiled for it and from the table of a lesser target for what it has no better way to do.
#pragma once

#include <cstdint>

#include "attention.h"
#include "matrix.h"
#include "step.h"
#include "training_attention.h"

namespace ts {

// The largest of some numbers and its first place; NaN where one of them is not finite.
struct Best {
    float value;
    int64_t index;
};

// Of a row, when its scale is computed: no division by zero, no infinite inverse.
constexpr float kSmallestMaximum = 1e-30f;

constexpr int64_t kSampleBlock =
    64;  // weights whose sum and largest are kept, so that a later look skips what is too small

// What a row's codes sum up to: those that a product reads, both digits apart.
struct SplitSums {
    int32_t high, low;
};

// Rows in 15 bits: a number is scale · (128 · high + low), each a code in 8 bits. What belongs to row r lies r ·
// `stride` bytes behind that of row 0.
struct SplitRows {
    const int8_t *high, *low;
    const float* scale;
    const SplitSums* sums;
    int64_t stride;
    SplitRows from(int64_t r) const {
        const auto at = [bytes = r * stride](auto* p) {
            return reinterpret_cast<decltype(p)>(reinterpret_cast<const char*>(p) + bytes);
        };
        return {at(high), at(low), at(scale), at(sums), stride};
    }
};
constexpr float kSplitUnits = 127.0f * 128.0f;

struct Kernels {
    // Matrix products: matrix.h has their meaning.
    void (*product)(const Matrix&, const Rows&, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add);
    void (*prepare_rows)(Format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last);
    uint64_t (*sum_words)(const uint64_t* words, int64_t n_words);  // for measuring how fast memory is read

    // Rows of activations.
    void (*embed)(const void* table, int32_t type, int64_t token, int64_t n, float* x, bool add);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* y);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y);
    void (*rope)(float* head, const float* cosines, const float* sines, int64_t head_dim);
    void (*cache_write)(const KvLayout&, const KvHead&, float* key, float* value, int64_t slot);  // may change both
    void (*activate)(Activation, const float* gate, const float* up, int64_t n, float* y);
    void (*bound)(float* x, int64_t n, float cap);  // to cap·tanh(x/cap)
    Best (*best)(const float* x, int64_t n);

    // Outputs [n0, n1) of m rows: y[r] (+)= x[r]·Wᵀ for a W (n, k) with few inputs or few outputs. W lies in panels of
    // 16 outputs, each k times 16 numbers; outputs behind n are 0. A row's result does not depend on m, n0 or n1.
    void (*thin_f32)(const float* packed, int64_t k, const float* const* x, int64_t m, int64_t n0, int64_t n1,
                     float* const* y, bool add);

    // The same for codes in 8 bits: a number is a word of four neighbouring inputs, each code + 128, and k counts
    // words; 128 stands behind n and k. Outputs are multiplied with `scales` (of whole panels), unless null. The same
    // bits on every target.
    void (*thin_codes)(const void* packed, int64_t k, const float* scales, const SplitRows& x, int64_t m, int64_t n0,
                       int64_t n1, float* const* y, bool add);
    // A row of k numbers for it, zeros up to a multiple of 32, and their sums. The largest is 127 · 128 units; a row
    // that holds a NaN or an infinity gets such a scale.
    void (*split_row)(const float* x, int64_t k, int8_t* high, int8_t* low, float* scale, SplitSums* sums);

    // Attention over the cache. task_rows: query rows (tokens × heads of a group) of one task, one token's heads at
    // least.
    int64_t (*task_rows)(const KvLayout&);
    int64_t (*attend_scratch_bytes)(const KvLayout&, int64_t group);
    void (*attend)(const KvLayout&, const KvHead&, const AttendTask&, float scale, void* scratch);
    void (*combine)(const KvLayout&, const AttendTask&, int64_t n_spans);

    // Passes over a row of logits. weigh: weights[i] = exp((x[i] − largest)·inverse), and of each block of them the sum
    // and the largest. keep: weights become 0 but where x ≥ floor and (x − largest)·inverse ≥ least; the sums of the
    // blocks follow.
    float (*largest)(const float* x, int64_t n);
    void (*weigh)(const float* x, int64_t n, float largest, float inverse, float* weights, double* sums,
                  float* block_max);
    void (*keep)(const float* x, int64_t n, float largest, float inverse, float floor, float least, float* weights,
                 double* sums);

    // Attention of training (training_attention.h); null where a target has none.
    void (*train_attention)(const TrainingAttention&, uint16_t* out, float* log_sums);
    void (*train_attention_backward)(const TrainingAttention&, const uint16_t* out, const float* log_sums,
                                     const uint16_t* out_gradient, uint16_t* qkv_gradient, float* sink_gradient);
};

const Kernels& kernels();  // of the target in use

#if defined(__x86_64__)
bool amx_is_emulated();  // compiled with plain C++ in the place of its registers
bool amx_works();        // its products agree with those of AVX-512; asked only where there is AMX
// Parts of a table in files of their own.
Kernels with_avx512bf16_training(Kernels);
Kernels with_amx_attention(Kernels);
#endif

}  // namespace ts
