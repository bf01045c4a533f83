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
        for (int64_t i = begin; i < end; i += kLanes) {
            const int n_here = end - i < kLanes ? static_cast<int>(end - i) : kLanes;
            const Floats given = n_here == kLanes ? load(x + i) : load_some(x + i, n_here);
            Floats w = exp_of((given - all(largest)) * all(inverse));
            if (n_here < kLanes) w = lane_numbers() < (Ints)all_words(static_cast<uint32_t>(n_here)) ? w : all(0.0f);
            store_some(weights + i, w, n_here);
            sum += w;
            high = greater(w, high);
        }
        sums[block] = static_cast<double>(sum_of(sum));
        block_max[block] = max_of(high);
    }
}

void keep(const float* x, int64_t n, float largest, float inverse, float floor, float least, float* weights,
          double* sums) {
    for (int64_t begin = 0, block = 0; begin < n; begin += ts::kSampleBlock, block++) {
        const int64_t end = begin + ts::kSampleBlock < n ? begin + ts::kSampleBlock : n;
        Floats sum = all(0.0f);
        for (int64_t i = begin; i < end; i += kLanes) {
            const int n_here = end - i < kLanes ? static_cast<int>(end - i) : kLanes;
            const Floats given = load_some(x + i, n_here), before = load_some(weights + i, n_here);
            const Ints kept = (given >= all(floor)) & ((given - all(largest)) * all(inverse) >= all(least));
            const Floats w = (Floats)((Ints)before & kept);
            store_some(weights + i, w, n_here);
            sum += w;
        }
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
