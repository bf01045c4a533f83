// Passes over logits, compiled for one instruction set (the file's name chooses the flags).
#include "sample_body.h"

const ts::SampleKernels& ts::sample_kernels_avx2() {
    static constexpr SampleKernels kernels{largest, weigh, keep};
    return kernels;
}
