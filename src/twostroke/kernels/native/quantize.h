// kernels/matrix.py has the plain reference.
#pragma once
#include <cstdint>

namespace ts {

// Symmetric int8 of the outputs [first, last) of a row-major weight (n, k), fp32 or bf16: weight ≈ codes·scale, scale =
// max|row|/127, 1 for a row of zeros. A row that holds a NaN or an infinity gets such a scale.
void quantize_columns(bool bf16, const void* weight, int64_t k, int64_t first, int64_t last, int8_t* codes,
                      float* scales);

}  // namespace ts
