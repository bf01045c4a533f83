// Sixteen lanes for products_body.h: two registers of AVX2, with AVX-VNNI where that is compiled for.
#pragma once
#include <immintrin.h>

#include "step_lanes.h"

namespace ts {
namespace {

struct F32x16 {
    __m256 low, high;
};
struct I32x16 {
    __m256i low, high;
};

struct RegisterBlocking {
    static constexpr int kMaxRows = 4;
    static constexpr int panels_of(int r) { return r == 1 ? 4 : r == 2 ? 2 : 1; }  // two of 16 registers a panel
    static constexpr bool half_by_half(int r) { return r == 2 || r == 3; }  // of bf16, whose floats take four registers
    static constexpr int64_t kWidensFrom = 24;                              // rows of bf16
};
struct Int4Blocking : RegisterBlocking {
    static constexpr int panels_at_once(int) { return 1; }  // there is no room for the nibbles of several
};

TS_INLINE F32x16 zero_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TS_INLINE I32x16 zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
TS_INLINE F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TS_INLINE I32x16 broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
TS_INLINE F32x16 load_floats(const void* p) {
    const auto* from = static_cast<const float*>(p);
    return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
TS_INLINE I32x16 load_words(const void* p) {
    const auto* from = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
TS_INLINE F32x16 load_fp16(const void* p) {
    const auto* from = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
TS_INLINE F32x16 load_uint8(const void* p) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
// All ones in the first n of 8 words.
TS_INLINE __m256i first_words(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TS_INLINE F32x16 load_first(const float* p, int64_t n) {
    if (n >= 16) return load_floats(p);
    return {_mm256_maskload_ps(p, first_words(n)), _mm256_maskload_ps(p + 8, first_words(n - 8))};
}
TS_INLINE void store_first(float* p, F32x16 v, int64_t n) {
    if (n >= 16) {
        _mm256_storeu_ps(p, v.low);
        _mm256_storeu_ps(p + 8, v.high);
        return;
    }
    _mm256_maskstore_ps(p, first_words(n), v.low);
    _mm256_maskstore_ps(p + 8, first_words(n - 8), v.high);
}

TS_INLINE F32x16 add(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
TS_INLINE F32x16 multiply(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
TS_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
TS_INLINE F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
TS_INLINE I32x16 add(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
TS_INLINE I32x16 subtract(I32x16 a, I32x16 b) {
    return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
TS_INLINE F32x16 to_floats(I32x16 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
TS_INLINE I32x16 add_quads(I32x16 a, I32x16 b) {
    return {_mm256_add_epi64(a.low, b.low), _mm256_add_epi64(a.high, b.high)};
}
TS_INLINE uint64_t sum_of_quads(I32x16 a) {
    uint64_t parts[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), _mm256_add_epi64(a.low, a.high));
    return parts[0] + parts[1] + parts[2] + parts[3];
}

// What preparing rows needs. Of a float the bits without its sign, whose order is that of magnitudes, with NaN above
// all.
TS_INLINE __m256i magnitude_bits(__m256 v) {
    return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
}
TS_INLINE I32x16 magnitude_bits(F32x16 v) { return {magnitude_bits(v.low), magnitude_bits(v.high)}; }
TS_INLINE I32x16 greater_words(I32x16 a, I32x16 b) {
    return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
}
TS_INLINE int32_t greatest_word(I32x16 a) {
    const __m256i eight = _mm256_max_epi32(a.low, a.high);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
// To nearest even; 0 from magnitudes of 127.5 on and for NaN.
TS_INLINE __m256i codes_of_floats(__m256 v) {
    const __m256 finite = _mm256_cmp_ps(_mm256_castsi256_ps(magnitude_bits(v)), _mm256_set1_ps(127.5f), _CMP_LT_OQ);
    return _mm256_cvtps_epi32(_mm256_and_ps(v, finite));
}
TS_INLINE I32x16 codes_of_floats(F32x16 v) { return {codes_of_floats(v.low), codes_of_floats(v.high)}; }
// Stores 32 codes and returns their sum.
TS_INLINE int32_t store_codes(int8_t* p, I32x16 first, I32x16 second) {
    const __m256i mixed =
        _mm256_packs_epi16(_mm256_packs_epi32(first.low, first.high), _mm256_packs_epi32(second.low, second.high));
    const __m256i codes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
    const __m256i words = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
TS_INLINE void store_bf16(uint16_t* p, F32x16 v) {
    const __m256i mixed = _mm256_packus_epi32(bf16_words_of_half(v.low), bf16_words_of_half(v.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}

// Byte J of each of 8 words, a code + 128.
template <int J>
TS_INLINE __m256 code_of_half(__m256i w) {
    const __m256i codes = _mm256_xor_si256(w, _mm256_set1_epi8(char(0x80)));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(codes, 24 - 8 * J), 24));
}
template <int J>
TS_INLINE F32x16 code_of(I32x16 w) {
    return {code_of_half<J>(w.low), code_of_half<J>(w.high)};
}
TS_INLINE I32x16 low_nibbles(I32x16 w) {
    return {_mm256_and_si256(w.low, _mm256_set1_epi8(15)), _mm256_and_si256(w.high, _mm256_set1_epi8(15))};
}
TS_INLINE I32x16 high_nibbles(I32x16 w) {
    return low_nibbles({_mm256_srli_epi16(w.low, 4), _mm256_srli_epi16(w.high, 4)});
}

constexpr int32_t kCodeExcess = 128;  // of the weights as add_code_products reads them

#if defined(__AVXVNNI__)

TS_INLINE void add_code_products(__m256i& sum, __m256i weights, __m256i rows) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(rows));
}

#else

// vpmaddubsw would cut sums of two products at 16 bits; 16-bit factors are exact.
TS_INLINE void add_code_products(__m256i& sum, __m256i weights, __m256i rows) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(rows, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(rows, 8));
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}

#endif

TS_INLINE void add_code_products(I32x16& sum, I32x16 weights, I32x16 rows) {
    add_code_products(sum.low, weights.low, rows.low);
    add_code_products(sum.high, weights.high, rows.high);
}

// Sums of nibbles · codes, exact over kNibbleKRows rows of words.
using NibbleSum = I32x16;
#if defined(__AVXVNNI__)

constexpr int64_t kNibbleKRows = 1;
TS_INLINE NibbleSum nibble_sum(I32x16 sum) { return sum; }
TS_INLINE void add_nibble_products(NibbleSum& sum, I32x16 low, I32x16 high, I32x16 a, I32x16 b) {
    add_code_products(sum, low, a);
    add_code_products(sum, high, b);
}
TS_INLINE I32x16 with_nibbles(I32x16, NibbleSum sum) { return sum; }

#else

// In 16 bits: of 4 rows of words 16 products of at most 15·128 each, in pairs, below 2^15.
constexpr int64_t kNibbleKRows = 4;
TS_INLINE NibbleSum nibble_sum(I32x16) { return zero_words(); }
TS_INLINE void add_nibble_products(__m256i& sum, __m256i low, __m256i high, __m256i a, __m256i b) {
    sum = _mm256_add_epi16(sum, _mm256_add_epi16(_mm256_maddubs_epi16(low, a), _mm256_maddubs_epi16(high, b)));
}
TS_INLINE void add_nibble_products(NibbleSum& sum, I32x16 low, I32x16 high, I32x16 a, I32x16 b) {
    add_nibble_products(sum.low, low.low, high.low, a.low, b.low);
    add_nibble_products(sum.high, low.high, high.high, a.high, b.high);
}
TS_INLINE I32x16 with_nibbles(I32x16 sum, NibbleSum narrow) {
    const __m256i ones = _mm256_set1_epi16(1);
    return add(sum, {_mm256_madd_epi16(narrow.low, ones), _mm256_madd_epi16(narrow.high, ones)});
}

#endif

// sum + both products of the pairs of bf16 in a word.
TS_INLINE void add_bf16_products(__m256& sum, __m256i w, __m256i a) {
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
    sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)),
                          sum);
    sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, upper)),
                          _mm256_castsi256_ps(_mm256_and_si256(w, upper)), sum);
}
TS_INLINE void add_bf16_products(F32x16& sum, I32x16 w, I32x16 a) {
    add_bf16_products(sum.low, w.low, a.low);
    add_bf16_products(sum.high, w.high, a.high);
}
// Panel t for all rows, one half after the other: the floats of both would leave a sum of two rows in memory.
template <int R, int T>
TS_INLINE void add_bf16_panel(F32x16 (&sum)[R][T], int t, I32x16 w, const I32x16 (&a)[R]) {
    for (int r = 0; r < R; r++) add_bf16_products(sum[r][t].low, w.low, a[r].low);
    for (int r = 0; r < R; r++) add_bf16_products(sum[r][t].high, w.high, a[r].high);
}

}  // namespace
}  // namespace ts
