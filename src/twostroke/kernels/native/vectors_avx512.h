// Sixteen lanes for products_body.h: one register of AVX-512 with VNNI. Only for files compiled with it.
#pragma once
#include <immintrin.h>

#include "step_lanes.h"

namespace ts {
namespace {

using F32x16 = __m512;
using I32x16 = __m512i;

struct RegisterBlocking {
    static constexpr int kMaxRows = 12;
    // As many as leave room for the weights in 32 registers, and enough chains for the latency of a sum.
    static constexpr int panels_of(int r) { return r <= 2 ? 8 : r <= 6 ? 4 : 2; }
    static constexpr bool half_by_half(int) { return false; }
    static constexpr int64_t kWidensFrom = INT64_MAX;
};
// Sums of a group and of all groups side by side: twice the registers for each row and panel.
struct Int4Blocking {
    static constexpr int kMaxRows = 8;
    static constexpr int panels_of(int r) { return r == 1 ? 8 : r <= 3 ? 4 : 2; }
    static constexpr int panels_at_once(int panels) { return panels; }
};

TS_INLINE F32x16 zero_floats() { return _mm512_setzero_ps(); }
TS_INLINE I32x16 zero_words() { return _mm512_setzero_si512(); }
TS_INLINE F32x16 broadcast(float x) { return _mm512_set1_ps(x); }
TS_INLINE I32x16 broadcast(int32_t x) { return _mm512_set1_epi32(x); }
TS_INLINE F32x16 load_floats(const void* p) { return _mm512_loadu_ps(p); }
TS_INLINE I32x16 load_words(const void* p) { return _mm512_loadu_si512(p); }
TS_INLINE F32x16 load_fp16(const void* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
TS_INLINE F32x16 load_uint8(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
TS_INLINE __mmask16 first_lanes(int64_t n) {
    return n >= 16 ? __mmask16(0xffff) : n > 0 ? __mmask16((1u << n) - 1) : __mmask16(0);
}
TS_INLINE F32x16 load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
TS_INLINE void store_first(float* p, F32x16 v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }

TS_INLINE F32x16 add(F32x16 a, F32x16 b) { return _mm512_add_ps(a, b); }
TS_INLINE F32x16 multiply(F32x16 a, F32x16 b) { return _mm512_mul_ps(a, b); }
TS_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fmadd_ps(a, b, c); }    // c + a·b
TS_INLINE F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fnmadd_ps(a, b, c); }  // c − a·b
TS_INLINE I32x16 subtract(I32x16 a, I32x16 b) { return _mm512_sub_epi32(a, b); }
TS_INLINE F32x16 to_floats(I32x16 a) { return _mm512_cvtepi32_ps(a); }
TS_INLINE I32x16 add_quads(I32x16 a, I32x16 b) { return _mm512_add_epi64(a, b); }
TS_INLINE uint64_t sum_of_quads(I32x16 a) { return uint64_t(_mm512_reduce_add_epi64(a)); }

// What preparing rows needs. Of a float the bits without its sign, whose order is that of magnitudes, with NaN above
// all.
TS_INLINE I32x16 magnitude_bits(F32x16 v) {
    return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
}
TS_INLINE I32x16 greater_words(I32x16 a, I32x16 b) { return _mm512_max_epi32(a, b); }
TS_INLINE int32_t greatest_word(I32x16 a) { return _mm512_reduce_max_epi32(a); }
// To nearest even; 0 from magnitudes of 127.5 on and for NaN.
TS_INLINE I32x16 codes_of_floats(F32x16 v) {
    return _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(127.5f), _CMP_LT_OQ), v);
}
// Stores 32 codes and returns their sum.
TS_INLINE int32_t store_codes(int8_t* p, I32x16 first, I32x16 second) {
    const __m256i codes = _mm256_set_m128i(_mm512_cvtepi32_epi8(second), _mm512_cvtepi32_epi8(first));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
    const __m256i words = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), codes);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
// To nearest even, in integers: the bits of NaN are set apart.
TS_INLINE void store_bf16(uint16_t* p, F32x16 v) {
    const __m512i bits = _mm512_castps_si512(v), upper = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), upper, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

// Byte J of each word, a code + 128.
template <int J>
TS_INLINE F32x16 code_of(I32x16 w) {
    const I32x16 codes = _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80)));
    return to_floats(_mm512_srai_epi32(_mm512_slli_epi32(codes, 24 - 8 * J), 24));
}
TS_INLINE I32x16 low_nibbles(I32x16 w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
TS_INLINE I32x16 high_nibbles(I32x16 w) { return low_nibbles(_mm512_srli_epi16(w, 4)); }

// sum + Σ of 4 products unsigned·signed, in each of 16 words. Written as an instruction because GCC 12 copies and
// stores every sum of its own intrinsic: a third of the speed for many rows.
constexpr int32_t kCodeExcess = 128;  // of the weights as add_code_products reads them
TS_INLINE void add_code_products(I32x16& sum, I32x16 weights, I32x16 rows) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(rows));
}

// Sums of nibbles · codes, exact over kNibbleKRows rows of words.
using NibbleSum = I32x16;
constexpr int64_t kNibbleKRows = 1;
TS_INLINE NibbleSum nibble_sum(I32x16 sum) { return sum; }
TS_INLINE void add_nibble_products(NibbleSum& sum, I32x16 low, I32x16 high, I32x16 a, I32x16 b) {
    add_code_products(sum, low, a);
    add_code_products(sum, high, b);
}
TS_INLINE I32x16 with_nibbles(I32x16, NibbleSum sum) { return sum; }

// sum + both products of the pairs of bf16 in a word.
#if defined(__AVX512BF16__)
TS_INLINE void add_bf16_products(F32x16& sum, I32x16 w, I32x16 a) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)a);
}
#else
TS_INLINE F32x16 even_bf16(I32x16 w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
TS_INLINE F32x16 odd_bf16(I32x16 w) {
    return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000))));
}
TS_INLINE void add_bf16_products(F32x16& sum, I32x16 w, I32x16 a) {
    sum = fma(even_bf16(a), even_bf16(w), sum);
    sum = fma(odd_bf16(a), odd_bf16(w), sum);
}
#endif

}  // namespace
}  // namespace ts
