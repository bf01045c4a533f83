// Products, transpositions and rotations of blocks for training_attention_avx512bf16.cpp, and only for files compiled
// as it is.
//
// A product's left operand is read as 32-bit words, each two neighbouring bf16 of the summed dimension, and broadcast;
// its right operand holds such words in rows of columns ("pairs"). Which operand a block becomes decides how it is laid
// out:
//   scores   Q · Kᵀ     left: rows of Q          right: K as words, transposed
//   output   P · V      left: rows of P          right: V, pairs of rows interleaved
//   ∂P       ∂O · Vᵀ    left: rows of ∂O         right: V as words, transposed
//   ∂Q       ∂S · K     left: rows of ∂S         right: K, pairs of rows interleaved
//   ∂Vᵀ      ∂Oᵀ · P    left: interleaved ∂O, transposed    right: P interleaved
//   ∂Kᵀ      Qᵀ · ∂S    left: interleaved Q, transposed     right: ∂S interleaved
// so that P and ∂S are never transposed: both gradients of keys come out transposed, once.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace ts {
namespace {

constexpr int64_t kBlock = 64, kPairs = kBlock / 2, kLanes = 16;
constexpr float kLog2e = 1.4426950408889634f;

// c (rows × 16·Vectors) (+)= left · right; left has `left_stride` words a row, right `right_stride` words a pair.
// `rows` is a multiple of 4.
template <int Vectors>
inline void product_columns(const uint32_t* left, int64_t left_stride, const uint32_t* right, int64_t right_stride,
                            int64_t n_pairs, int64_t rows, float* c, int64_t c_stride, bool add) {
    constexpr int kRowsAtOnce = 4;
    for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
        __m512 sums[kRowsAtOnce][Vectors];
        for (int i = 0; i < kRowsAtOnce; ++i)
            for (int j = 0; j < Vectors; ++j)
                sums[i][j] = add ? _mm512_loadu_ps(c + (r + i) * c_stride + j * kLanes) : _mm512_setzero_ps();
        const uint32_t* a = left + r * left_stride;
        const uint32_t* b = right;
        for (int64_t p = 0; p < n_pairs; ++p, b += right_stride) {
            __m512bh columns[Vectors];
            for (int j = 0; j < Vectors; ++j) columns[j] = (__m512bh)_mm512_loadu_si512(b + j * kLanes);
            for (int i = 0; i < kRowsAtOnce; ++i) {
                const __m512bh word = (__m512bh)_mm512_set1_epi32(int(a[i * left_stride + p]));
                for (int j = 0; j < Vectors; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], word, columns[j]);
            }
        }
        for (int i = 0; i < kRowsAtOnce; ++i)
            for (int j = 0; j < Vectors; ++j) _mm512_storeu_ps(c + (r + i) * c_stride + j * kLanes, sums[i][j]);
    }
}

inline void product(const uint32_t* left, int64_t left_stride, const uint32_t* right, int64_t columns, int64_t n_pairs,
                    int64_t rows, float* c, bool add) {
    int64_t done = 0;
    for (; done + 64 <= columns; done += 64)
        product_columns<4>(left, left_stride, right + done, columns, n_pairs, rows, c + done, columns, add);
    if (done < columns)
        product_columns<2>(left, left_stride, right + done, columns, n_pairs, rows, c + done, columns, add);
}

inline __m512 widen(const uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline __m512i words(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// 2^x for x ≤ 0 or small; relative error below 10⁻⁶.
inline __m512 exp2_ps(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.3333558e-3f);
    for (float c : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, whole);
}

// tanh(x) by x·P(x²)/Q(x²) of degrees 13 and 6, which is ±1 in fp32 beyond the limit (Eigen's generic_fast_tanh_float):
// relative error below 10⁻⁶, so also of small scores, which a difference of exponentials would round away.
inline __m512 tanh_ps(__m512 x) {
    const __m512 limit = _mm512_set1_ps(7.90531110763549805f);
    x = _mm512_max_ps(_mm512_min_ps(x, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    const __m512 square = _mm512_mul_ps(x, x);
    __m512 above = _mm512_set1_ps(-2.76076847742355e-16f);
    for (float c : {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f, 1.48572235717979e-05f,
                    6.37261928875436e-04f, 4.89352455891786e-03f})
        above = _mm512_fmadd_ps(above, square, _mm512_set1_ps(c));
    __m512 below = _mm512_set1_ps(1.19825839466702e-06f);
    for (float c : {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f})
        below = _mm512_fmadd_ps(below, square, _mm512_set1_ps(c));
    return _mm512_div_ps(_mm512_mul_ps(x, above), below);
}

// n scores, a multiple of 16, as tanh(score·factor).
inline void tanh_of(float* scores, int64_t n, float factor) {
    const __m512 by = _mm512_set1_ps(factor);
    for (int64_t i = 0; i < n; i += kLanes)
        _mm512_store_ps(scores + i, tanh_ps(_mm512_mul_ps(_mm512_load_ps(scores + i), by)));
}

// 16 × 16 words, rows `from_stride` apart, transposed to rows `to_stride` apart.
inline void transpose16(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // r[4a + i] holds, of rows 4a…4a+3, columns i, 4 + i, 8 + i, 12 + i
        const __m512i low01 = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88),
                      high01 = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        const __m512i low23 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88),
                      high23 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(low01, low23, 0x88));
        _mm512_storeu_si512(to + (4 + i) * to_stride, _mm512_shuffle_i32x4(high01, high23, 0x88));
        _mm512_storeu_si512(to + (8 + i) * to_stride, _mm512_shuffle_i32x4(low01, low23, 0xdd));
        _mm512_storeu_si512(to + (12 + i) * to_stride, _mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
}

// rows × columns words transposed; both multiples of 16.
inline void transpose(const uint32_t* from, int64_t rows, int64_t columns, uint32_t* to) {
    for (int64_t i = 0; i < rows; i += 16)
        for (int64_t j = 0; j < columns; j += 16) transpose16(from + i * columns + j, columns, to + j * rows + i, rows);
}

// 64 rows of bf16 as 32 rows of words: (row 2p, row 2p + 1) at each column.
inline void interleave(const uint16_t* rows, int64_t width, uint32_t* to) {
    for (int64_t p = 0; p < kPairs; ++p)
        for (int64_t d = 0; d < width; d += kLanes)
            _mm512_storeu_si512(to + p * width + d,
                                words(_mm256_loadu_si256((const __m256i*)(rows + 2 * p * width + d)),
                                      _mm256_loadu_si256((const __m256i*)(rows + (2 * p + 1) * width + d))));
}

// One row of `from` (bf16) times `scale`, rotated by its angle, or back where `sign` is −1.
inline void rope_row(const uint16_t* from, const float* cos, const float* sin, int64_t half, uint16_t* to) {
    for (int64_t d = 0; d < half; d += kLanes) {
        const __m512 a = widen(from + d), b = widen(from + half + d), c = _mm512_loadu_ps(cos + d),
                     s = _mm512_loadu_ps(sin + d);
        _mm256_storeu_si256((__m256i*)(to + d), narrow(_mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s))));
        _mm256_storeu_si256((__m256i*)(to + half + d), narrow(_mm512_add_ps(_mm512_mul_ps(b, c), _mm512_mul_ps(a, s))));
    }
}

// A gradient of rotated values, times `scale`, rotated back and rounded.
inline void rope_back(const float* from, float scale, const float* cos, const float* sin, int64_t width, uint16_t* to) {
    const __m512 factor = _mm512_set1_ps(scale);
    if (!cos) {
        for (int64_t d = 0; d < width; d += kLanes)
            _mm256_storeu_si256((__m256i*)(to + d), narrow(_mm512_mul_ps(_mm512_loadu_ps(from + d), factor)));
        return;
    }
    const int64_t half = width / 2;
    for (int64_t d = 0; d < half; d += kLanes) {
        const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(from + d), factor),
                     b = _mm512_mul_ps(_mm512_loadu_ps(from + half + d), factor);
        const __m512 c = _mm512_loadu_ps(cos + d), s = _mm512_loadu_ps(sin + d);
        _mm256_storeu_si256((__m256i*)(to + d), narrow(_mm512_add_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s))));
        _mm256_storeu_si256((__m256i*)(to + half + d), narrow(_mm512_sub_ps(_mm512_mul_ps(b, c), _mm512_mul_ps(a, s))));
    }
}

}  // namespace
}  // namespace ts
