// What the AVX-512 products share: the walk over blocks of R rows and T tiles that stay in registers, and the writing of results.
// Only for files compiled with AVX-512; everything has internal linkage, so that no other file can be given code from here.
#pragma once
#include "layout.h"

#include <immintrin.h>
#include <utility>

namespace ts {
namespace {

using layout::STEP_BYTES;
using layout::TILE;

constexpr int MAX_R = 12;  // rows of a block

// Tiles of a block of r rows: as many as leave room for the weights in 32 registers, and enough chains for the latency of a sum.
constexpr int tiles_of(int r) { return r <= 2 ? 8 : r <= 6 ? 4 : 2; }

// How far ahead of their use weights are fetched into the first-level cache, in bytes of one tile's steps.
constexpr int64_t AHEAD_BYTES = 1024;

struct Target {
    const Matrix& w;
    const Rows& rows;
    float* y;
    int64_t ldy;
    bool add;
};

// y[row, 16 outputs of the tile] = value (+ bias) (+ what was there).
inline void write(const Target& to, int64_t row, int64_t tile, __m512 value) {
    const int64_t n = tile * TILE, left = to.w.n - n;
    const __mmask16 mask = left >= TILE ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
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

inline __m512 scales_of(const Target& to, int64_t tile) { return _mm512_loadu_ps(layout::output_scales(to.w) + tile * TILE); }

// sum + Σ of 4 products unsigned·signed, in each of 16 words. Written as an instruction because GCC 12 copies and stores every sum of
// its own intrinsic: a third of the speed for many rows.
inline void add_products(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// R rows by a few pointers: with one for each the processor's registers do not suffice.
template <class T, int R>
struct RowPointers {
    static constexpr int PER_POINTER = 3;
    const T* first[(R + PER_POINTER - 1) / PER_POINTER];
    int64_t stride;
    RowPointers(const T* rows, int64_t stride) : stride(stride) {
        for (int r = 0; r < R; r += PER_POINTER) {
            first[r / PER_POINTER] = rows + r * stride;
            __asm__("" : "+r"(first[r / PER_POINTER]));  // or the compiler finds out how they hang together and has R of them again
        }
    }
    const T* operator[](int r) const { return first[r / PER_POINTER] + (r % PER_POINTER) * stride; }
};

using Block = void (*)(const Target&, int64_t row, int64_t tile);

template <class Kernel, int... I>
constexpr void fill_blocks(Block (&whole)[MAX_R + 1], std::integer_sequence<int, I...>) {
    ((whole[I + 1] = &Kernel::template block<I + 1, tiles_of(I + 1)>), ...);
}

template <class Kernel, int R, int T>
void tail_of_tiles(const Target& to, int64_t row, int64_t tile, int64_t end) {
    if constexpr (T >= 1) {
        if (tile + T <= end) {
            Kernel::template block<R, T>(to, row, tile);
            tile += T;
        }
        if (tile < end) tail_of_tiles<Kernel, R, T / 2>(to, row, tile, end);
    }
}

template <class Kernel, int... I>
void tail_of_rows(const Target& to, int r, int64_t row, int64_t tile, int64_t end, std::integer_sequence<int, I...>) {
    using Tail = void (*)(const Target&, int64_t, int64_t, int64_t);
    static constexpr Tail tails[] = {&tail_of_tiles<Kernel, I + 1, tiles_of(I + 1) / 2>...};
    tails[r - 1](to, row, tile, end);
}

// All rows over the tiles [first, end). Rows are cut into the fewest blocks, of sizes as equal as can be. For many rows the tiles of
// one block are read again for each block of rows, from the second-level cache.
template <class Kernel>
void walk(const Target& to, int64_t first, int64_t end) {
    constexpr auto every = std::make_integer_sequence<int, MAX_R>{};
    static const struct Table {
        Block whole[MAX_R + 1] = {};
        Table() { fill_blocks<Kernel>(whole, every); }
    } table;
    const int64_t m = to.rows.m, n_blocks = (m + MAX_R - 1) / MAX_R;
    const int widest = tiles_of(int((m + n_blocks - 1) / n_blocks));
    for (int64_t tile = first; tile < end; tile += widest) {
        const int64_t last = tile + widest < end ? tile + widest : end;
        for (int64_t b = 0; b < n_blocks; ++b) {
            const int64_t row = m * b / n_blocks;
            const int r = int(m * (b + 1) / n_blocks - row);
            int64_t t = tile;
            for (; t + tiles_of(r) <= last; t += tiles_of(r)) table.whole[r](to, row, t);
            if (t < last) tail_of_rows<Kernel>(to, r, row, t, last, every);
        }
    }
}

template <class Kernel>
void product_by(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    walk<Kernel>(Target{w, rows, y, ldy, add}, n0 / TILE, layout::tiles(n1));
}

#define TS_UNROLL _Pragma("GCC unroll 16")

}  // namespace
}  // namespace ts
