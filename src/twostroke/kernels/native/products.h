// The same operations for each instruction set; dispatch.cpp chooses. See matrix.h for their meaning.
#pragma once
#include "matrix.h"

namespace ts {
constexpr float kSmallestMaximum =
    1e-30f;  // of a row, when its scale is computed: no division by zero, no infinite inverse
}

#define TS_DECLARE_PRODUCTS(TARGET)                                                                         \
    namespace ts::TARGET {                                                                                  \
    void product(const Matrix&, const Rows&, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add);      \
    void prepare_rows(Format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last);           \
    uint64_t sum_words(const uint64_t* words, int64_t n_words); /* for measuring how fast memory is read */ \
    }

TS_DECLARE_PRODUCTS(plain)
#if defined(__x86_64__)
TS_DECLARE_PRODUCTS(avx2)
TS_DECLARE_PRODUCTS(avxvnni)
TS_DECLARE_PRODUCTS(avx512)
TS_DECLARE_PRODUCTS(avx512bf16)
TS_DECLARE_PRODUCTS(amx)
namespace ts::amx {
bool emulates_tiles();  // compiled with plain C++ in the place of tiles
bool works();           // the products of tiles agree with those of AVX-512; only where there are tiles
}  // namespace ts::amx
#endif
