// Codes of one byte for whole matrices, when a model is packed at its first start.
#include "quantize.h"
#include "numbers.h"

namespace ts {
namespace {

float number(const float* row, int64_t i) { return row[i]; }
float number(const uint16_t* row, int64_t i) { return float_of_bf16(row[i]); }

// The bits of positive numbers lie in the order of the numbers, NaN's above all: a maximum of whole numbers, which
// needs no branch.
template <class T>
float largest_magnitude(const T* row, int64_t k) {
    int32_t highest = 0;
    for (int64_t i = 0; i < k; ++i) {
        const auto bits = int32_t(bits_of_float(number(row, i)) & 0x7fffffffu);
        highest = bits > highest ? bits : highest;
    }
    return float_of_bits(uint32_t(highest));
}

template <class T>
void quantize(const T* weight, int64_t k, int64_t first, int64_t last, int8_t* codes, float* scales) {
    constexpr float kRound =
        12582912.0f;  // 1.5·2^23: adding it rounds to nearest even, and its low byte is then the whole number
    for (int64_t n = first; n < last; ++n) {
        const T* row = weight + n * k;
        int8_t* out = codes + n * k;
        float scale = largest_magnitude(row, k) / 127.0f;
        if (scale == 0) scale = 1.0f;
        scales[n] = scale;
        for (int64_t i = 0; i < k; ++i) out[i] = int8_t(bits_of_float(number(row, i) / scale + kRound) & 0xff);
    }
}

}  // namespace

void quantize_columns(bool bf16, const void* weight, int64_t k, int64_t first, int64_t last, int8_t* codes,
                      float* scales) {
    if (bf16) quantize(static_cast<const uint16_t*>(weight), k, first, last, codes, scales);
    else quantize(static_cast<const float*>(weight), k, first, last, codes, scales);
}

}  // namespace ts
