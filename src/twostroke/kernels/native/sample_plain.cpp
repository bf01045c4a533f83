// Passes over logits, compiled for one instruction set (the file's name chooses the flags).
#include "sample_body.h"

const ts::SampleKernels& ts::sample_kernels_plain() {
    static constexpr SampleKernels kernels{largest, weigh, keep};
    return kernels;
}
