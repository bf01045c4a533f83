// What the AVX-512 products share. Only for files compiled with AVX-512.
#pragma once
#include "blocks.h"

#include <immintrin.h>

namespace ts {
namespace {

struct Fit512 {
    static constexpr int kMaxRows = 12;
    // As many as leave room for the weights in 32 registers, and enough chains for the latency of a sum.
    static constexpr int tiles_of(int r) { return r <= 2 ? 8 : r <= 6 ? 4 : 2; }
};

// y[row, 16 outputs of the tile] = value (+ bias) (+ what was there).
inline void write(const Walk& to, int64_t row, int64_t tile, __m512 value) {
    const int64_t n = tile * kPanelOutputs, left = to.w.n - n;
    const __mmask16 mask = left >= kPanelOutputs ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
    float* y = to.y + row * to.ldy + n;
    if (to.w.bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, to.w.bias + n));
    if (to.add) value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), value);
    _mm512_mask_storeu_ps(y, mask, value);
}

inline __m512i word(const void* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return _mm512_set1_epi32(bits);
}

inline __m512 scales_of(const Walk& to, int64_t tile) {
    return _mm512_loadu_ps(layout::output_scales(to.w) + tile * kPanelOutputs);
}

// sum + Σ of 4 products unsigned·signed, in each of 16 words. Written as an instruction because GCC 12 copies and
// stores every sum of its own intrinsic: a third of the speed for many rows.
inline void add_products(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

}  // namespace
}  // namespace ts
