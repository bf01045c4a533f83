// What the products of all vector instruction sets share: the walk over blocks of R rows and T tiles that stay in
// registers. Everything has internal linkage: each file has its own, compiled for its own processors.
#pragma once
#include "layout.h"

#include <cstdlib>
#include <utility>

#define TS_EACH(I, N) _Pragma("GCC unroll 16") for (int I = 0; I < (N); ++I)  // unrolled

namespace ts {
namespace {

using layout::kKRowBytes;
using layout::kPanelOutputs;

struct Walk {
    const Matrix& w;
    const Rows& rows;
    float* y;
    int64_t ldy;
    bool add;
    // Where the walk is: rows are cut into n_blocks, of which `block` runs now; no tiles follow these.
    int64_t block = 0, n_blocks = 1;
    bool last = false;
};

// How far ahead of their use weights are fetched into the first-level cache, in bytes of all streams of a block
// together: what is on its way from memory at any time.
constexpr int64_t kPrefetchDistanceBytes = 8192;

// For T tiles read side by side, where to fetch from: so many bytes behind the address that is read now, in the first
// tile and in the others (0: nowhere). One block of rows: what it will read kPrefetchDistanceBytes / T later, which
// past a tile's end is T tiles on. Several blocks read the same tiles, all but the first from a cache: each fetches one
// of the next T tiles, so that memory never rests.
template <int T>
struct Ahead {
    int64_t distance, first, others, first_past_end, others_past_end;
    Ahead(const Walk& to, int64_t bytes, int64_t tile_bytes) {
        distance = kPrefetchDistanceBytes / T < bytes ? kPrefetchDistanceBytes / T : bytes;
        first = others = distance;
        first_past_end = others_past_end = to.last ? 0 : distance + (T - 1) * tile_bytes;
        if (to.n_blocks > 1) {
            first = first_past_end = to.last || to.block >= T ? 0 : (T + to.block) * tile_bytes;
            others = others_past_end = 0;
        }
    }
};

// Calls body(step, ahead in the first tile, in the others) for every step of T tiles.
template <int T, int64_t Bytes = kKRowBytes, class Body>
__attribute__((always_inline)) inline void for_steps(const Walk& to, int64_t n_steps, int64_t tile_bytes, Body body) {
    const Ahead<T> ahead(to, n_steps * Bytes, tile_bytes);
    const int64_t turn = n_steps - ahead.distance / Bytes;
    for (int64_t s = 0; s < turn; ++s) body(s, ahead.first, ahead.others);
    for (int64_t s = turn; s < n_steps; ++s) body(s, ahead.first_past_end, ahead.others_past_end);
}

// R rows by a few pointers: with one for each the processor's registers do not suffice.
template <class T, int R>
struct RowPointers {
    static constexpr int kPerPointer = 3;
    const T* first[(R + kPerPointer - 1) / kPerPointer];
    int64_t stride;
    RowPointers(const T* rows, int64_t stride) : stride(stride) {
        for (int r = 0; r < R; r += kPerPointer) {
            first[r / kPerPointer] = rows + r * stride;
            __asm__(
                ""
                : "+r"(
                    first[r /
                          kPerPointer]));  // or the compiler finds out how they hang together and has R of them again
        }
    }
    const T* operator[](int r) const { return first[r / kPerPointer] + (r % kPerPointer) * stride; }
};

using Block = void (*)(const Walk&, int64_t row, int64_t tile);

template <class Kernel, class Fit, int... I>
constexpr void fill_blocks(Block (&whole)[Fit::kMaxRows + 1], std::integer_sequence<int, I...>) {
    ((whole[I + 1] = &Kernel::template block<I + 1, Fit::tiles_of(I + 1)>), ...);
}

template <class Kernel, int R, int T>
void tail_of_tiles(const Walk& to, int64_t row, int64_t tile, int64_t end) {
    if constexpr (T >= 1) {
        if (tile + T <= end) {
            Kernel::template block<R, T>(to, row, tile);
            tile += T;
        }
        if (tile < end) tail_of_tiles<Kernel, R, T / 2>(to, row, tile, end);
    }
}

template <class Kernel, class Fit, int... I>
void tail_of_rows(const Walk& to, int r, int64_t row, int64_t tile, int64_t end, std::integer_sequence<int, I...>) {
    using Tail = void (*)(const Walk&, int64_t, int64_t, int64_t);
    static constexpr Tail tails[] = {&tail_of_tiles<Kernel, I + 1, Fit::tiles_of(I + 1) / 2>...};
    tails[r - 1](to, row, tile, end);
}

// `Fit` says what the registers hold: kMaxRows rows, and tiles_of(r) tiles beside r rows.
//
// All rows over the tiles [first, end). Rows are cut into the fewest blocks, of sizes as equal as can be. For many rows
// the tiles of one block are read again for each block of rows, from the second-level cache.
template <class Kernel, class Fit>
void walk(Walk to, int64_t first, int64_t end) {
    constexpr auto every = std::make_integer_sequence<int, Fit::kMaxRows>{};
    static const struct Table {
        Block whole[Fit::kMaxRows + 1] = {};
        Table() { fill_blocks<Kernel, Fit>(whole, every); }
    } table;
    const int64_t m = to.rows.m, n_blocks = (m + Fit::kMaxRows - 1) / Fit::kMaxRows;
    to.n_blocks = n_blocks;
    const int widest = Fit::tiles_of(int((m + n_blocks - 1) / n_blocks));
    for (int64_t tile = first; tile < end; tile += widest) {
        const int64_t last = tile + widest < end ? tile + widest : end;
        to.last = last == end;
        for (int64_t b = 0; b < n_blocks; ++b) {
            to.block = b;
            const int64_t row = m * b / n_blocks;
            const int r = int(m * (b + 1) / n_blocks - row);
            int64_t t = tile;
            for (; t + Fit::tiles_of(r) <= last; t += Fit::tiles_of(r)) table.whole[r](to, row, t);
            if (t < last) tail_of_rows<Kernel, Fit>(to, r, row, t, last, every);
        }
    }
}

template <class Kernel, class Fit>
void product_by(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    walk<Kernel, Fit>(Walk{w, rows, y, ldy, add}, n0 / kPanelOutputs, layout::tiles(n1));
}

// Kept from call to call, at whole pages. Not a std::vector: its code, compiled here, could be linked into files meant
// for lesser processors.
template <class T>
struct Scratch {
    T* values = nullptr;
    int64_t size = 0;
    T* at_least(int64_t wanted) {
        if (wanted > size) {
            constexpr int64_t kPage = 4096;
            std::free(values);
            values = static_cast<T*>(std::aligned_alloc(kPage, size_t(layout::up(wanted * int64_t(sizeof(T)), kPage))));
            size = wanted;
        }
        return values;
    }
    ~Scratch() { std::free(values); }
};

// Sums of the codes of each group of an INT4 matrix, (m, groups), fp32: every one is a whole number far below 2^24.
thread_local Scratch<float> group_sums;

void sum_groups(const Matrix& w, const Rows& rows) {
    const int64_t n_groups = layout::groups(w.k, w.group), n_sums = sums_per_row(w.k) - 1, per_group = w.group / 32;
    float* to_all = group_sums.at_least(rows.m * n_groups);
    for (int64_t m = 0; m < rows.m; ++m) {
        const int32_t* from = rows.sums + m * (n_sums + 1) + 1;
        float* to = to_all + m * n_groups;
        for (int64_t g = 0; g < n_groups; ++g) {
            int32_t sum = 0;
            for (int64_t i = g * per_group; i < (g + 1) * per_group && i < n_sums; ++i) sum += from[i];
            to[g] = float(sum);
        }
    }
}

}  // namespace
}  // namespace ts
