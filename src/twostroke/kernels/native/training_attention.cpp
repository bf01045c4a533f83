// The C interface of training_attention.h.
#include "training_attention.h"

#include "targets.h"

using namespace ts;

extern "C" {

// 1 where this processor runs it.
int ts_trains_attention() {
#if defined(__x86_64__)
    return holds(features(), Target::Avx512Bf16);
#else
    return 0;
#endif
}

#if defined(__x86_64__)
void ts_attend(const TrainingAttention* shape, uint16_t* out, float* log_sums) {
    avx512bf16::attend(*shape, out, log_sums);
}

void ts_attend_backward(const TrainingAttention* shape, const uint16_t* out, const float* log_sums,
                        const uint16_t* out_gradient, uint16_t* qkv_gradient) {
    avx512bf16::attend_backward(*shape, out, log_sums, out_gradient, qkv_gradient);
}
#else
void ts_attend(const TrainingAttention*, uint16_t*, float*) {}
void ts_attend_backward(const TrainingAttention*, const uint16_t*, const float*, const uint16_t*, uint16_t*) {}
#endif
}
