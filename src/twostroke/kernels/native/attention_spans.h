// What attention does around a span of keys: queries in the form that it reads, and results of spans put together in
// order.
#pragma once

#include "attention.h"
#include "hadamard.h"
#include "step_lanes.h"

namespace {

constexpr float kLog2e = 1.44269504f;

// Rounded numbers of a query, as products read them: floats on AVX2, whose products spread single ones, else halves.
#if defined(__AVX2__) && !defined(__AVX512F__)
using QueryNumber = float;
TS_INLINE void store_rounded(QueryNumber* to, Words rounded, int lanes) {
    store_some(to, (Floats)(rounded << 16), lanes);
}
#else
using QueryNumber = uint16_t;
TS_INLINE void store_rounded(QueryNumber* to, Words rounded, int lanes) {
    store_halves(to, low_halves(rounded), lanes);
}
#endif

// Queries times scale·log₂e, so that weights are powers of 2, in the words that the format's products read. Over int4
// they are turned as its keys are, in `turned` (D), and `query_sums` (rows) are what the middles of keys are
// multiplied with.
void prepare_queries(const ts::KvLayout& kv, const ts::AttendTask& task, float scale, uint32_t* q, int64_t q_words,
                     float* turned, float* query_sums) {
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
            QueryNumber* numbers = reinterpret_cast<QueryNumber*>(to);
            if (i + 1 < task.n_tokens)
                for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(from + task.query_stride + d);
            if (kv.type == ts::KvType::INT4) {
                std::memcpy(turned, from, static_cast<size_t>(D) * 4);
                hadamard(turned, D);
                from = turned;
            }
            Floats sum = all(0.0f);
            each_vector(D, [&](int64_t d, int lanes) TS_INLINED {
                const Words rounded = bf16_words(load_some(from + d, lanes) * all(factor));
                sum += (Floats)(rounded << 16);
                store_rounded(numbers + d, rounded, lanes);
            });
            if (kv.type == ts::KvType::INT4) query_sums[i * task.group + g] = sum_of(sum);
            if (D % 2) numbers[D] = 0;
        }
}

// One span joins those before it: both are sums relative to their own maximum.
TS_INLINE void merge_span(float* total, float& total_max, float& total_denominator, const float* sums,
                          float running_max, float denominator, int64_t n) {
    if (!(running_max > -__builtin_inff()) && denominator == 0.0f) return;  // nothing visible in it
    const float now = running_max > total_max ? running_max : total_max;
    const Floats a = exp2_of(all(total_max > -__builtin_inff() ? total_max - now : -200.0f)),
                 b = exp2_of(all(running_max - now));
    each_vector(n, [&](int64_t d, int lanes) TS_INLINED {
        store_some(total + d, fma(load_some(total + d, lanes), a, load_some(sums + d, lanes) * b), lanes);
    });
    total_denominator = total_denominator * a[0] + denominator * b[0];
    total_max = now;
}

// Row r of a task: its sums of values, turned back, over its sum of weights, which its head's sink is part of.
TS_INLINE void divide_by_denominator(const ts::KvLayout& kv, const ts::AttendTask& task, int64_t r, const float* total,
                                     float running_max, float denominator) {
    const int64_t head_dim = kv.head_dim;
    if (task.sinks != nullptr) denominator += exp2_of(all(task.sinks[r % task.group] * kLog2e - running_max))[0];
    float* out = task.out + r / task.group * task.out_stride + r % task.group * head_dim;
    const Floats factor = all(1.0f / denominator);
    each_vector(head_dim, [&](int64_t d, int lanes)
                              TS_INLINED { store_some(out + d, load_some(total + d, lanes) * factor, lanes); });
    if (kv.type == ts::KvType::INT4) hadamard(out, head_dim);
}

// The spans of one token's group of heads, computed by whichever threads, put together in order. The first span serves
// as the sum.
void combine(const ts::KvLayout& kv, const ts::AttendTask& task, int64_t n_spans) {
    const int64_t D = kv.head_dim, n_rows = static_cast<int64_t>(task.n_tokens) * task.group;
    float* first = task.partial;
    for (int64_t r = 0; r < n_rows; r++) {
        float running_max = -__builtin_inff(), denominator = 0.0f;
        float* total = first + 2 * n_rows + r * D;
        const float first_max = first[2 * r], first_denominator = first[2 * r + 1];
        if (first_denominator != 0.0f) running_max = first_max, denominator = first_denominator;
        for (int64_t i = 1; i < n_spans; i++) {
            const float* span = first + i * n_rows * (D + 2);
            merge_span(total, running_max, denominator, span + 2 * n_rows + r * D, span[2 * r], span[2 * r + 1], D);
        }
        divide_by_denominator(kv, task, r, total, running_max, denominator);
    }
}

}  // namespace
