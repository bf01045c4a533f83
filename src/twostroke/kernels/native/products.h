// The products of each instruction set as part of its table. matrix.h has their meaning.
#pragma once
#include "kernels.h"

namespace ts {
constexpr float kSmallestMaximum =
    1e-30f;  // of a row, when its scale is computed: no division by zero, no infinite inverse
}

#define TS_DECLARE_PRODUCTS(TARGET)                                                                    \
    namespace ts::TARGET {                                                                             \
    void product(const Matrix&, const Rows&, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add); \
    void prepare_rows(Format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last);      \
    uint64_t sum_words(const uint64_t* words, int64_t n_words);                                        \
    static constexpr Kernels with_products(Kernels k) {                                                \
        k.product = product;                                                                           \
        k.prepare_rows = prepare_rows;                                                                 \
        k.sum_words = sum_words;                                                                       \
        return k;                                                                                      \
    }                                                                                                  \
    }

TS_DECLARE_PRODUCTS(plain)
#if defined(__x86_64__)
TS_DECLARE_PRODUCTS(avx2)
TS_DECLARE_PRODUCTS(avxvnni)
TS_DECLARE_PRODUCTS(avx512)
#endif
