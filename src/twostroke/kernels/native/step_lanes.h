// Sixteen floats at a time, on any CPU: GCC's vector types, with the few operations where an instruction set does
// better by hand. Included once by each elementwise_*.cpp, which is compiled for one instruction set; everything here
// is local to that file, so that the linker cannot put a wide version of a function where a narrow one is needed. No
// standard templates for that reason.
#pragma once

#include <cstdint>
#include <cstring>
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors wider than the CPU's never cross a file
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 about its own _mm512_max_ps
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define TS_INLINE static inline __attribute__((always_inline))
#define TS_INLINED __attribute__((always_inline))  // of a lambda

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float LooseFloats __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint32_t LooseWords __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t LooseHalves __attribute__((vector_size(32), aligned(1), may_alias));
typedef int8_t LooseBytes __attribute__((vector_size(16), aligned(1), may_alias));

TS_INLINE Floats load(const float* p) { return *reinterpret_cast<const LooseFloats*>(p); }
TS_INLINE Words load_words(const uint32_t* p) { return *reinterpret_cast<const LooseWords*>(p); }
TS_INLINE void store(float* p, Floats v) { *reinterpret_cast<LooseFloats*>(p) = v; }
TS_INLINE Floats all(float x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(x);
#else
    return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#endif
}
TS_INLINE Words all_words(uint32_t x) {
#if defined(__AVX512F__)
    return (Words)_mm512_set1_epi32(static_cast<int>(x));
#else
    return Words{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#endif
}
TS_INLINE Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

#if defined(__AVX2__) && !defined(__AVX512F__)
// GCC takes its own vectors apart lane by lane where it compares and selects, so halves are worked on by hand.
union Split {
    Floats whole;
    Words words;
    __m256 half[2];
    __m256i word_half[2];
};
typedef int32_t HalfInts __attribute__((vector_size(32)));
#define TS_HALVES(i) for (int i = 0; i < 2; i++)
TS_INLINE __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
TS_INLINE __m256 greater(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
#endif

// a·b + c, rounded once where the CPU can.
TS_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    Split x{a}, y{b}, z{c};
    TS_HALVES(i) z.half[i] = fma(x.half[i], y.half[i], z.half[i]);
    return z.whole;
#else
    return a * b + c;
#endif
}

TS_INLINE Floats greater(Floats a, Floats b) {  // the larger of each pair
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    Split x{a}, y{b};
    TS_HALVES(i) x.half[i] = greater(x.half[i], y.half[i]);
    return x.whole;
#else
    return a > b ? a : b;
#endif
}

// a / b to 2 units in the last place, 0 or exact where b is beyond 2¹²⁶; division proper takes as long as all of an
// exponential.
TS_INLINE Floats quotient(Floats a, Floats b) {
#if defined(__AVX512F__)
    const __m512 rough = _mm512_rcp14_ps((__m512)b);
    const __m512 error = _mm512_fnmadd_ps((__m512)b, rough, _mm512_set1_ps(1.0f));
    return a * (Floats)_mm512_fmadd_ps(error, rough, rough);
#else
    return a / b;
#endif
}

TS_INLINE Floats magnitude(Floats a) { return (Floats)((Words)a & 0x7fffffffu); }

// The first n ≤ 16 numbers at p, zeros behind them, and nothing beyond them read.
TS_INLINE Floats load_some(const float* p, int n) {
    if (n >= kLanes) return load(p);
    Floats v = all(0.0f);
    std::memcpy(&v, p, static_cast<size_t>(n) * 4);
    return v;
}
TS_INLINE void store_some(float* p, Floats v, int n) {
    if (n >= kLanes) {
        store(p, v);
    } else {
        std::memcpy(p, &v, static_cast<size_t>(n) * 4);
    }
}

// body(i, lanes) for each vector of n numbers, of which the last may have fewer lanes than the others. These are
// compiled apart: with a number of lanes that is known only at run time GCC keeps AVX2's vectors in memory, and the
// prompt of a model without gates took 5 to 13% longer.
template <typename Body>
TS_INLINE void each_vector(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, static_cast<int>(n - i));
}

// Sums and maxima of the lanes, in one fixed order.
TS_INLINE float sum_of(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
    const Split x{v};
    const __m256 eight = _mm256_add_ps(x.half[0], x.half[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float a[kLanes];
    store(a, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
#endif
}
TS_INLINE float max_of(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
    const Split x{v};
    const __m256 eight = _mm256_max_ps(x.half[0], x.half[1]);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
    float a[kLanes];
    store(a, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
    return a[0];
#endif
}

// 2ˣ for x ≤ 127, relative error below 2e-7; exactly 1 at 0 and exactly 0 below -126. Cephes-style: 2^(n+f), |f| ≤ 1/2,
// a polynomial of degree 6 (Taylor coefficients ln(2)^k/k! are within 1e-8 of the best ones on this interval).
template <typename Some>
TS_INLINE Some exp2_of_fraction(Some f) {
    Some p = Some{} + 1.5403530e-4f;
    p = fma(p, f, Some{} + 1.3333558e-3f);
    p = fma(p, f, Some{} + 9.6181291e-3f);
    p = fma(p, f, Some{} + 5.5504109e-2f);
    p = fma(p, f, Some{} + 2.4022651e-1f);
    p = fma(p, f, Some{} + 6.9314718e-1f);
    return fma(p, f, Some{} + 1.0f);
}
#if defined(__AVX512F__)
TS_INLINE Floats exp2_of(Floats x) {
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // NaN comes through
    const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Floats)_mm512_maskz_scalef_ps(counts, (__m512)exp2_of_fraction(x - whole), (__m512)whole);
}
#else
template <typename Whole, typename Some>
TS_INLINE Some exp2_of_some(Some x) {
    const Some magic = Some{} + 12582912.0f;  // 1.5·2²³: adding it rounds to a whole number, kept in the low bits
    const Some bounded = greater(Some{} - 127.0f, x);  // in this order NaN comes through
    const Some shifted = bounded + magic;
    const Whole n = (Whole)shifted - (Whole)magic;
    const Some result = exp2_of_fraction(bounded - (shifted - magic)) * (Some)((n + 127) << 23);
    return x < Some{} - 126.0f ? Some{} : result;
}
#if defined(__AVX2__)
TS_INLINE __m256 exp2_of_half(__m256 x) { return exp2_of_some<HalfInts>(x); }
TS_INLINE Floats exp2_of(Floats x) {
    Split v{x};
    TS_HALVES(i) v.half[i] = exp2_of_half(v.half[i]);
    return v.whole;
}
#else
TS_INLINE Floats exp2_of(Floats x) { return exp2_of_some<Ints>(x); }
#endif
#endif

TS_INLINE Floats exp_of(Floats x) {
    // Cut off at 88 (e⁸⁸ is finite), with NaN let through: the comparison is false for it.
    const Floats bounded = -greater(all(-88.0f), -x);
    return exp2_of(bounded * all(1.44269504f));
}

// cap·tanh(x/cap) by tanh|u| = (1 − e⁻²ᵘ)/(1 + e⁻²ᵘ): within 1e-6 of the cap.
TS_INLINE Floats bounded(Floats x, float cap) {
    const Floats t = exp2_of(magnitude(x) * all(-2.88539008f / cap));
    const Floats y = quotient(all(cap) * (all(1.0f) - t), all(1.0f) + t);
    return x < all(0.0f) ? -y : y;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
TS_INLINE __m256i bf16_words_of_half(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v), upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), nan);
}
#endif
// bf16 of a float, to nearest even; NaN stays NaN. The result is in the low half of each word.
TS_INLINE Words bf16_words(Floats v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    Split x{v};
    TS_HALVES(i) x.word_half[i] = bf16_words_of_half(x.half[i]);
    return x.words;
#else
    const Words bits = (Words)v;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words quiet = (bits >> 16) | 0x40u;
    return (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
#endif
}
TS_INLINE Halves low_halves(Words w) { return __builtin_convertvector(w, Halves); }
TS_INLINE void store_halves(uint16_t* p, Halves h, int n) {
    if (n >= kLanes) {
        *reinterpret_cast<LooseHalves*>(p) = h;
    } else {
        std::memcpy(p, &h, static_cast<size_t>(n) * 2);
    }
}
TS_INLINE Floats from_bf16(const uint16_t* p) {
    return (Floats)(__builtin_convertvector(*reinterpret_cast<const LooseHalves*>(p), Words) << 16);
}

inline uint16_t bf16_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float float_of_bf16(uint16_t h) {
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline float float_of_fp16(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u;
    float x;
    if (exponent == 0) {  // zero or denormal: fraction·2⁻²⁴
        x = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        bits |= sign;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    const uint32_t bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (fraction << 13);
    std::memcpy(&x, &bits, 4);
    return x;
}

// accumulator + a pair of bf16 products in each lane: a and b hold two bf16 a word, the even one in the low half.
TS_INLINE Floats dot_pairs(Floats accumulator, Words a, Words b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)accumulator, (__m512bh)a, (__m512bh)b);
#else
    const Floats even = fma((Floats)(a << 16), (Floats)(b << 16), accumulator);
    return fma((Floats)(a & 0xffff0000u), (Floats)(b & 0xffff0000u), even);
#endif
}

}  // namespace
