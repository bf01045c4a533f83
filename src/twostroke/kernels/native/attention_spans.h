// What attention does around a span of keys: queries in the form that it reads, and results of spans put together in
// order.
#pragma once

#include "attention.h"
#include "step_lanes.h"

namespace {

constexpr float kLog2e = 1.44269504f;

// Queries times scale·log₂e, so that weights are powers of 2, in the words that the format's products read.
void prepare_queries(const ts::KvLayout& kv, const ts::AttendTask& task, float scale, uint32_t* q, int64_t q_words) {
    const int64_t D = kv.head_dim;
    const float factor = scale * kLog2e;
    for (int64_t i = 0; i < task.n_tokens; i++)
        for (int64_t g = 0; g < task.group; g++) {
            const float* from = task.queries + i * task.query_stride + g * D;
            uint32_t* to = q + (i * task.group + g) * q_words;
            if (kv.type == ts::KvType::F32) {
                for (int64_t d = 0; d < D; d++) reinterpret_cast<float*>(to)[d] = from[d] * factor;
                continue;
            }
            uint16_t* halves = reinterpret_cast<uint16_t*>(to);
            if (i + 1 < task.n_tokens)
                for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(from + task.query_stride + d);
            for (int64_t d = 0; d < D; d += kLanes) {
                const int left = D - d < kLanes ? static_cast<int>(D - d) : kLanes;
                store_halves(halves + d, low_halves(bf16_words(load_some(from + d, left) * all(factor))), left);
            }
            if (D % 2) halves[D] = 0;
        }
}

// One span joins those before it: both are sums relative to their own maximum.
TS_INLINE void join(float* total, float& total_most, float& total_count, const float* sums, float most, float count,
                    int64_t n) {
    if (!(most > -__builtin_inff()) && count == 0.0f) return;  // nothing visible in it
    const float now = most > total_most ? most : total_most;
    const Floats a = exp2_of(all(total_most > -__builtin_inff() ? total_most - now : -200.0f)),
                 b = exp2_of(all(most - now));
    for (int64_t d = 0; d < n; d += kLanes) {
        const int left = n - d < kLanes ? static_cast<int>(n - d) : kLanes;
        store_some(total + d, fma(load_some(total + d, left), a, load_some(sums + d, left) * b), left);
    }
    total_count = total_count * a[0] + count * b[0];
    total_most = now;
}

TS_INLINE void finish(const float* total, float count, int64_t head_dim, float* mixed) {
    const Floats factor = all(1.0f / count);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        const int left = head_dim - d < kLanes ? static_cast<int>(head_dim - d) : kLanes;
        store_some(mixed + d, load_some(total + d, left) * factor, left);
    }
}

// The spans of one token's group of heads, computed by whichever threads, put together in order. The first span serves
// as the sum.
void combine(const ts::KvLayout& kv, const ts::AttendTask& task, int64_t n_spans) {
    const int64_t D = kv.head_dim, n_rows = static_cast<int64_t>(task.n_tokens) * task.group;
    float* first = task.partial;
    for (int64_t r = 0; r < n_rows; r++) {
        float most = -__builtin_inff(), count = 0.0f;
        float* total = first + 2 * n_rows + r * D;
        const float first_most = first[2 * r], first_count = first[2 * r + 1];
        if (first_count != 0.0f) most = first_most, count = first_count;
        for (int64_t i = 1; i < n_spans; i++) {
            const float* span = first + i * n_rows * (D + 2);
            join(total, most, count, span + 2 * n_rows + r * D, span[2 * r], span[2 * r + 1], D);
        }
        finish(total, count, D, task.mixed + r / task.group * task.mixed_stride + r % task.group * D);
    }
}

}  // namespace
