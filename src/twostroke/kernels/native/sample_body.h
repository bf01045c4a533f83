// The passes of sample.h, compiled for one instruction set (the including file's name chooses the flags).
#pragma once

#include "kernels.h"
#include "step_lanes.h"

namespace {

float largest(const float* x, int64_t n) {
    Floats highest = all(-__builtin_inff());
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) highest = greater(load(x + i), highest);
    float found = max_of(highest);
    for (; i < n; i++) found = x[i] > found ? x[i] : found;
    return found;
}

void weigh(const float* x, int64_t n, float largest, float inverse, float* weights, double* sums, float* block_max) {
    for (int64_t begin = 0, block = 0; begin < n; begin += ts::kSampleBlock, block++) {
        const int64_t end = begin + ts::kSampleBlock < n ? begin + ts::kSampleBlock : n;
        Floats sum = all(0.0f), high = all(0.0f);
        each_vector(end - begin, [&](int64_t i, int lanes) TS_INLINED {
            Floats w = exp_of((load_some(x + begin + i, lanes) - all(largest)) * all(inverse));
            if (lanes < kLanes) w = lane_numbers() < (Ints)all_words(static_cast<uint32_t>(lanes)) ? w : all(0.0f);
            store_some(weights + begin + i, w, lanes);
            sum += w;
            high = greater(w, high);
        });
        sums[block] = static_cast<double>(sum_of(sum));
        block_max[block] = max_of(high);
    }
}

void keep(const float* x, int64_t n, float largest, float inverse, float floor, float least, float* weights,
          double* sums) {
    for (int64_t begin = 0, block = 0; begin < n; begin += ts::kSampleBlock, block++) {
        const int64_t end = begin + ts::kSampleBlock < n ? begin + ts::kSampleBlock : n;
        Floats sum = all(0.0f);
        each_vector(end - begin, [&](int64_t i, int lanes) TS_INLINED {
            const Floats given = load_some(x + begin + i, lanes), before = load_some(weights + begin + i, lanes);
            const Ints kept = (given >= all(floor)) & ((given - all(largest)) * all(inverse) >= all(least));
            const Floats w = (Floats)((Ints)before & kept);
            store_some(weights + begin + i, w, lanes);
            sum += w;
        });
        sums[block] = static_cast<double>(sum_of(sum));
    }
}

constexpr ts::Kernels with_sampling(ts::Kernels k) {
    k.largest = largest;
    k.weigh = weigh;
    k.keep = keep;
    return k;
}

}  // namespace
