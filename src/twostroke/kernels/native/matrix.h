// Weight matrices in packed form and their products with few or many rows of activations.
#pragma once
#include <cstdint>

namespace ts {

enum class Format : int32_t {
    F32 = 0,
    BF16 = 1,
    W8A8 = 2,
    INT8 = 3 /* weights only */,
    INT4 = 4 /* group-wise, activations int8 per token */,
    INT8_GROUPS = 5 /* the same with 8-bit codes */,
    INT4_BLOCKS = 6 /* groups of 32 in blocks of 256, whose scales and minima are codes themselves */
};

// A matrix of n outputs and k inputs. `packed` is what pack() wrote (layout.h says how it lies); `bias` (n values) may
// be null. `group` is the number of inputs that share a scale in INT4 (32, 64 or 128) and INT8_GROUPS (16 or 32), that
// share a block in INT4_BLOCKS (256), and 0 in the other formats. W8A8 and INT8 are packed alike: one copy serves both.
struct Matrix {
    Format format;
    int32_t group;
    int64_t n, k;
    const void* packed;
    const float* bias;
};

// Input rows in the form a matrix's format reads, m of them:
//   F32, INT8   f32 (m, k)
//   BF16        bf16 (m, padded(k)), zeros behind k
//   others      codes (m, padded(k)), zeros behind k; scales (m); sums (m, sums_per_row(k)): first the sum of the row's
//   codes, then
//               the sums of 32 codes each
// Rows made for one of the others serve all of them.
struct Rows {
    int64_t m;
    const float* f32;
    const uint16_t* bf16;
    const int8_t* codes;
    const float* scales;
    const int32_t* sums;
};

static constexpr int64_t padded(int64_t k) { return (k + 31) / 32 * 32; }
static constexpr int64_t sums_per_row(int64_t k) { return 1 + padded(k) / 32; }

// Rows [first, first + n), or as many as there are, of those that a matrix of k inputs reads.
static inline Rows slice(const Rows& rows, int64_t k, int64_t first, int64_t n) {
    const auto at = [first](auto* p, int64_t stride) { return p == nullptr ? p : p + first * stride; };
    return Rows{first + n < rows.m ? n : rows.m - first,
                at(rows.f32, k),
                at(rows.bf16, padded(k)),
                at(rows.codes, padded(k)),
                at(rows.scales, 1),
                at(rows.sums, sums_per_row(k))};
}

// Quantise or round rows [first, last) of x (m, k) into the buffers that `out` points to. F32 and INT8 read x itself
// (set Rows.f32 = x): nothing is done. Codes are round-to-nearest-even of x·(127/max|row|), scales max|row|/127, with
// at least 1e-30 for the maximum. A row that holds a NaN or an infinity gets such a scale, so that its outputs are not
// finite either.
void prepare_rows(Format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last);

// y[0:m, n0:n1] = rows · matrixᵀ (+ bias), or += where `add`: called by every thread with its own range of outputs.
// fp32 with row stride ldy; y points to output 0. Each value is computed in one order whatever m, n0 and n1 are, so
// that a row's result does not depend on its neighbours; W8A8: (float(Σ codes·codes) · row scale) · column scale (+
// bias), the same bits on every target.
void product(const Matrix&, const Rows&, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add);

// The outputs [n0, n1) of thread `thread` of `n_threads`.
void share_outputs(const Matrix&, int thread, int n_threads, int64_t& n0, int64_t& n1);

// Fetch the first `bytes` of what product(matrix, ., n0, n1) will read into the second-level cache: for the time before
// a barrier.
void prefetch(const Matrix&, int64_t n0, int64_t n1, int64_t bytes);

int64_t packed_bytes(Format, int32_t group, int64_t n, int64_t k);

// Pack outputs [n0, n1) of a plain row-major weight (n, k): float, bf16 bits, int8 codes, or for INT4 and INT4_BLOCKS
// one code 0..15 a byte. `packed` has packed_bytes bytes, should be aligned to 64, and is written everywhere once all
// outputs were packed. scales and zeros, unused where they are not named:
//   W8A8, INT8   scales (n)
//   INT4         scales (n, ceil(k / group)), rounded to 11 bits of mantissa; zeros, of the same shape, codes that
//                stand for 0, or null for 8 everywhere
//   INT8_GROUPS  scales as INT4's, of either sign
//   INT4_BLOCKS  scales (n, ceil(k / 256), 2): the units of scales and of minima, rounded to fp16; zeros
//                (n, ceil(k / 32), 2): how many of either
void pack(Format, int32_t group, int64_t n, int64_t k, const void* weight, const float* scales, const uint8_t* zeros,
          void* packed, int64_t n0, int64_t n1);

}  // namespace ts
