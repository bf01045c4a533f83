// The C interface of training_attention.h.
#include "training_attention.h"

#include "kernels.h"

using namespace ts;

extern "C" {

// 1 if the target in use has it.
int ts_trains_attention() { return kernels().train_attention != nullptr; }

void ts_attend(const TrainingAttention* shape, uint16_t* out, float* log_sums) {
    kernels().train_attention(*shape, out, log_sums);
}

void ts_attend_backward(const TrainingAttention* shape, const uint16_t* out, const float* log_sums,
                        const uint16_t* out_gradient, uint16_t* qkv_gradient, float* sink_gradient) {
    kernels().train_attention_backward(*shape, out, log_sums, out_gradient, qkv_gradient, sink_gradient);
}
}
