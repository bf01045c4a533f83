// Sixteen lanes for products_body.h: four registers of NEON with its dot products (SDOT), and with USDOT and BFDOT
// where those are compiled for. Only for files compiled with it.
#pragma once
#include <arm_neon.h>

#include "blocks.h"
#include "step_lanes.h"

namespace ts {
namespace {

struct F32x16 {
    float32x4_t part[4];
};
struct I32x16 {
    int32x4_t part[4];
};

struct RegisterBlocking {
    static constexpr int kMaxRows = 4;
    static constexpr int panels_of(int r) { return r <= 2 ? 2 : 1; }  // four of 32 registers a panel
    static constexpr bool half_by_half(int) { return false; }
    static constexpr int64_t kWidensFrom = INT64_MAX;
};
struct Int4Blocking : RegisterBlocking {
    static constexpr int panels_at_once(int) { return 1; }
};

// {f of part 0, f of part 1, …}
#define TS_PARTS(F) {F(0), F(1), F(2), F(3)}

TS_INLINE F32x16 broadcast(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
TS_INLINE I32x16 broadcast(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}}; }
TS_INLINE F32x16 zero_floats() { return broadcast(0.0f); }
TS_INLINE I32x16 zero_words() { return broadcast(int32_t{0}); }
TS_INLINE F32x16 load_floats(const void* p) {
    const auto* from = static_cast<const float*>(p);
    return {{vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)}};
}
TS_INLINE I32x16 load_words(const void* p) {
    const auto* from = static_cast<const uint8_t*>(p);
#define TS_PART(I) vreinterpretq_s32_u8(vld1q_u8(from + 16 * I))
    return {TS_PARTS(TS_PART)};
#undef TS_PART
}
TS_INLINE F32x16 load_fp16(const void* p) {
    const auto* from = static_cast<const uint8_t*>(p);
#define TS_PART(I) vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 8 * I)))
    return {TS_PARTS(TS_PART)};
#undef TS_PART
}
TS_INLINE F32x16 load_uint8(const void* p) {
    const uint8x16_t bytes = vld1q_u8(static_cast<const uint8_t*>(p));
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))}};
}
TS_INLINE F32x16 load_first(const float* p, int64_t n) {
    if (n >= 16) return load_floats(p);
    float some[16] = {};
    if (n > 0) __builtin_memcpy(some, p, size_t(n) * 4);
    return load_floats(some);
}
TS_INLINE void store_floats(float* p, F32x16 v) {
    TS_EACH(i, 4) vst1q_f32(p + 4 * i, v.part[i]);
}
TS_INLINE void store_first(float* p, F32x16 v, int64_t n) {
    if (n >= 16) return store_floats(p, v);
    float some[16];
    store_floats(some, v);
    __builtin_memcpy(p, some, size_t(n) * 4);
}

#define TS_LANEWISE(NAME, TYPE, A, B, F)                                                                               \
    TS_INLINE TYPE NAME(A a, B b) {                                                                                    \
        return {{F(a.part[0], b.part[0]), F(a.part[1], b.part[1]), F(a.part[2], b.part[2]), F(a.part[3], b.part[3])}}; \
    }
TS_LANEWISE(add, F32x16, F32x16, F32x16, vaddq_f32)
TS_LANEWISE(multiply, F32x16, F32x16, F32x16, vmulq_f32)
TS_LANEWISE(subtract, I32x16, I32x16, I32x16, vsubq_s32)
TS_LANEWISE(greater_words, I32x16, I32x16, I32x16, vmaxq_s32)
#undef TS_LANEWISE

#define TS_PART(I) vfmaq_f32(c.part[I], a.part[I], b.part[I])
TS_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {TS_PARTS(TS_PART)}; }
#undef TS_PART
#define TS_PART(I) vfmsq_f32(c.part[I], a.part[I], b.part[I])
TS_INLINE F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) { return {TS_PARTS(TS_PART)}; }
#undef TS_PART
#define TS_PART(I) vcvtq_f32_s32(a.part[I])
TS_INLINE F32x16 to_floats(I32x16 a) { return {TS_PARTS(TS_PART)}; }
#undef TS_PART
#define TS_PART(I) vreinterpretq_s32_u64(vaddq_u64(vreinterpretq_u64_s32(a.part[I]), vreinterpretq_u64_s32(b.part[I])))
TS_INLINE I32x16 add_quads(I32x16 a, I32x16 b) { return {TS_PARTS(TS_PART)}; }
#undef TS_PART
TS_INLINE uint64_t sum_of_quads(I32x16 a) {
    uint64_t sum = 0;
    TS_EACH(i, 4) sum += vaddvq_u64(vreinterpretq_u64_s32(a.part[i]));
    return sum;
}

// What preparing rows needs. Of a float the bits without its sign, whose order is that of magnitudes, with NaN above
// all.
#define TS_PART(I) vreinterpretq_s32_f32(vabsq_f32(v.part[I]))
TS_INLINE I32x16 magnitude_bits(F32x16 v) { return {TS_PARTS(TS_PART)}; }
#undef TS_PART
TS_INLINE int32_t greatest_word(I32x16 a) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.part[0], a.part[1]), vmaxq_s32(a.part[2], a.part[3])));
}
// To nearest even; 0 from magnitudes of 127.5 on and for NaN.
TS_INLINE int32x4_t codes_of_floats(float32x4_t v) {
    return vandq_s32(vcvtnq_s32_f32(v), vreinterpretq_s32_u32(vcaltq_f32(v, vdupq_n_f32(127.5f))));
}
#define TS_PART(I) codes_of_floats(v.part[I])
TS_INLINE I32x16 codes_of_floats(F32x16 v) { return {TS_PARTS(TS_PART)}; }
#undef TS_PART
TS_INLINE int8x16_t narrow_codes(I32x16 a) {
    return vcombine_s8(vmovn_s16(vcombine_s16(vmovn_s32(a.part[0]), vmovn_s32(a.part[1]))),
                       vmovn_s16(vcombine_s16(vmovn_s32(a.part[2]), vmovn_s32(a.part[3]))));
}
// Stores 32 codes and returns their sum.
TS_INLINE int32_t store_codes(int8_t* p, I32x16 first, I32x16 second) {
    const int8x16_t low = narrow_codes(first), high = narrow_codes(second);
    vst1q_s8(p, low);
    vst1q_s8(p + 16, high);
    return vaddlvq_s8(low) + vaddlvq_s8(high);
}
// To nearest even, in integers: the bits of NaN are set apart.
TS_INLINE void store_bf16(uint16_t* p, F32x16 v) {
    TS_EACH(i, 4) {
        const uint32x4_t bits = vreinterpretq_u32_f32(v.part[i]), upper = vshrq_n_u32(bits, 16);
        const uint32x4_t odd = vandq_u32(upper, vdupq_n_u32(1));
        const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
        const uint32x4_t number = vceqq_f32(v.part[i], v.part[i]);
        vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(number, rounded, vorrq_u32(upper, vdupq_n_u32(0x40)))));
    }
}

TS_INLINE int8x16_t bytes_of(int32x4_t words) { return vreinterpretq_s8_s32(words); }
TS_INLINE int32x4_t signed_codes(int32x4_t words) { return veorq_s32(words, vdupq_n_s32(int32_t(0x80808080))); }

// Byte J of each word, a code + 128.
template <int J>
TS_INLINE F32x16 code_of(I32x16 w) {
#define TS_PART(I) vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(signed_codes(w.part[I]), 24 - 8 * J), 24))
    return {TS_PARTS(TS_PART)};
#undef TS_PART
}
#define TS_PART(I) vreinterpretq_s32_s8(vandq_s8(bytes_of(w.part[I]), vdupq_n_s8(15)))
TS_INLINE I32x16 low_nibbles(I32x16 w) { return {TS_PARTS(TS_PART)}; }
#undef TS_PART
#define TS_PART(I) vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(w.part[I]), 4))
TS_INLINE I32x16 high_nibbles(I32x16 w) { return {TS_PARTS(TS_PART)}; }
#undef TS_PART

// sum + Σ of 4 products in each of 16 words: unsigned·signed (USDOT), or both signed (SDOT) after 128 was taken off the
// weights.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int32_t kCodeExcess = 128;
TS_INLINE void add_code_products(I32x16& sum, I32x16 weights, I32x16 rows) {
    TS_EACH(i, 4) sum.part[i] = vusdotq_s32(sum.part[i], vreinterpretq_u8_s32(weights.part[i]), bytes_of(rows.part[i]));
}
#else
constexpr int32_t kCodeExcess = 0;
TS_INLINE void add_code_products(I32x16& sum, I32x16 weights, I32x16 rows) {
    TS_EACH(i, 4) sum.part[i] = vdotq_s32(sum.part[i], bytes_of(signed_codes(weights.part[i])), bytes_of(rows.part[i]));
}
#endif

// Sums of nibbles · codes, exact over kNibbleKRows rows of words.
using NibbleSum = I32x16;
constexpr int64_t kNibbleKRows = 1;
TS_INLINE NibbleSum nibble_sum(I32x16 sum) { return sum; }
TS_INLINE void add_nibble_products(NibbleSum& sum, I32x16 low, I32x16 high, I32x16 a, I32x16 b) {
    TS_EACH(i, 4) {
        sum.part[i] = vdotq_s32(sum.part[i], bytes_of(low.part[i]), bytes_of(a.part[i]));
        sum.part[i] = vdotq_s32(sum.part[i], bytes_of(high.part[i]), bytes_of(b.part[i]));
    }
}
TS_INLINE I32x16 with_nibbles(I32x16, NibbleSum sum) { return sum; }

// sum + both products of the pairs of bf16 in a word.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
TS_INLINE void add_bf16_products(F32x16& sum, I32x16 w, I32x16 a) {
    TS_EACH(i, 4)
        sum.part[i] = vbfdotq_f32(sum.part[i], vreinterpretq_bf16_s32(w.part[i]), vreinterpretq_bf16_s32(a.part[i]));
}
#else
TS_INLINE float32x4_t even_bf16(int32x4_t w) { return vreinterpretq_f32_s32(vshlq_n_s32(w, 16)); }
TS_INLINE float32x4_t odd_bf16(int32x4_t w) {
    return vreinterpretq_f32_s32(vandq_s32(w, vdupq_n_s32(int32_t(0xffff0000))));
}
TS_INLINE void add_bf16_products(F32x16& sum, I32x16 w, I32x16 a) {
    TS_EACH(i, 4) {
        sum.part[i] = vfmaq_f32(sum.part[i], even_bf16(a.part[i]), even_bf16(w.part[i]));
        sum.part[i] = vfmaq_f32(sum.part[i], odd_bf16(a.part[i]), odd_bf16(w.part[i]));
    }
}
#endif
#undef TS_PARTS

}  // namespace
}  // namespace ts
