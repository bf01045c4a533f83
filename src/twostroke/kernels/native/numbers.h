// Conversions between bit patterns and numbers, without instructions that need a feature.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ts {

static inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of_bf16(uint16_t bits) { return float_of_bits(uint32_t{bits} << 16); }

// Round to nearest even; NaN stays NaN.
static inline uint16_t bf16_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    if (value != value) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float float_of_fp16(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | (mantissa << 13));
    if (exponent != 0) return float_of_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float value = float(mantissa) * 0x1p-24f;
    return sign ? -value : value;
}

// For 0 <= value <= 1: round to nearest even, to a multiple of 2^-24 where that is coarser.
static inline uint16_t fp16_of_unit(float value) {
    if (!(value > 0)) return 0;
    int exponent;
    std::frexp(value, &exponent);  // value = f·2^exponent, f in [0.5, 1)
    const int ulp = (exponent - 11 > -24) ? exponent - 11 : -24;
    const float units = std::nearbyint(std::ldexp(value, -ulp));  // up to 2^11
    if (ulp == -24) return uint16_t(units);  // a carry into the first normal number is the right bits too
    return uint16_t((uint32_t(ulp + 24) << 10) +
                    uint32_t(units));  // units carries the exponent's low bit: (ulp + 25) << 10 less 1 << 10
}

// For −1 <= value <= 1.
static inline uint16_t fp16_of_fraction(float value) {
    return uint16_t(fp16_of_unit(std::fabs(value)) | (value < 0 ? 0x8000 : 0));
}

// For a finite value that fp16 holds: to nearest even.
static inline uint16_t fp16_of_float(float value) {
    int exponent;
    std::frexp(value, &exponent);
    if (exponent <= 0) return fp16_of_fraction(value);
    const uint16_t unit = fp16_of_fraction(std::ldexp(value, -exponent));  // in [0.5, 1]
    return uint16_t(unit + (uint32_t(exponent) << 10));
}

}  // namespace ts
