// Choosing tokens from rows of logits: the two passes over a whole vocabulary, for each instruction set (sample_*.cpp).
#pragma once

#include <cstdint>

namespace ts {

constexpr int64_t kSampleBlock =
    64;  // weights whose sum and largest are kept, so that a later look skips what is too small

struct SampleKernels {
    float (*largest)(const float* x, int64_t n);
    // weights[i] = exp((x[i] − largest)·inverse), and of each block of them the sum and the largest.
    void (*weigh)(const float* x, int64_t n, float largest, float inverse, float* weights, double* sums, float* most);
    // Weights become 0 but where x ≥ floor and (x − largest)·inverse ≥ least; the sums of the blocks follow.
    void (*keep)(const float* x, int64_t n, float largest, float inverse, float floor, float least, float* weights,
                 double* sums);
};

const SampleKernels& sample_kernels();  // for this processor
const SampleKernels& sample_kernels_plain();
const SampleKernels& sample_kernels_avx2();
const SampleKernels& sample_kernels_avx512();

}  // namespace ts
