// Norms, rotary turn, cache, activations and attention, compiled for one instruction set (the file's name chooses the
// flags).
#include "attention_body.h"
#include "elementwise_body.h"

const ts::StepKernels& ts::step_kernels_avx2() {
    static constexpr StepKernels kernels{
        task_rows, embed, rms_norm, layer_norm, turn, store_kv, activate, best, attend_scratch_bytes, attend, combine};
    return kernels;
}
