// What the products of all vector instruction sets share: the walk over blocks of R rows and T panels that stay in
// registers. Everything has internal linkage: each file has its own, compiled for its own processors.
#pragma once
#include "cpu.h"
#include "layout.h"

#include <cstdlib>
#include <utility>

#define TS_EACH(I, N) _Pragma("GCC unroll 16") for (int I = 0; I < (N); ++I)  // unrolled

namespace ts {
namespace {

using layout::kKRowBytes;
using layout::kPanelOutputs;

struct ProductArgs {
    const Matrix& w;
    const Rows& rows;
    float* y;
    int64_t ldy;
    bool add;
    // Where the walk is: rows are cut into n_blocks, of which `block` runs now; no panels follow these.
    int64_t block = 0, n_blocks = 1;
    bool last = false;
};

// What to add to the address of a k_row that is read now, to fetch what comes later: into the first-level cache, in the
// first of the panels side by side and in the others, and into the second-level cache, in all. 0: nothing.
struct Ahead {
    int64_t first, others, far;
};

// Whether a line is fetched into both caches. Code for AVX2 alone fetches it once, into the second-level cache: with
// two an int4 row took 1.3 times as long in cache (48 instead of 62 GB/s).
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kFetchesFar = false;
#else
constexpr bool kFetchesFar = true;
#endif

// `from`: of panel t.
__attribute__((always_inline)) inline void fetch(const char* from, const Ahead& ahead, int t) {
    __builtin_prefetch(from + (t == 0 ? ahead.first : ahead.others), 0, kFetchesFar ? 3 : 2);
    if constexpr (kFetchesFar) __builtin_prefetch(from + ahead.far, 0, 2);
}

// For T panels read side by side, `bytes` of k_rows behind a head each. One block of rows: what it will read
// prefetch_distances() / T later, which past a panel's end is T panels on, behind its head, which fetch_head fetches.
// Several blocks read the same panels, all but the first from a cache: each fetches one of the next T panels, so that
// memory never rests.
template <int T>
class Prefetch {
public:
    Prefetch(const ProductArgs& to, int64_t bytes, int64_t panel_bytes, int64_t head = 0) {
        const PrefetchDistances wanted = prefetch_distances();
        const int64_t near = least(wanted.near / T, bytes), far = kFetchesFar ? least(wanted.far / T, bytes) : 0;
        const int64_t next = head + (T - 1) * panel_bytes;
        panel_bytes_ = panel_bytes;
        head_bytes_ = !to.last && to.n_blocks == 1 ? head : 0;
        near_end_ = bytes - near;
        far_end_ = bytes - far;
        if (to.n_blocks == 1) {
            now_ = {near, near, far};
            if (!to.last) past_end_ = {near + next, near + next, far + next};
        } else if (!to.last && to.block < T) {
            now_.first = past_end_.first = (T + to.block) * panel_bytes;
        }
    }
    Ahead at(int64_t byte) const {
        const Ahead& near = byte < near_end_ ? now_ : past_end_;
        return {near.first, near.others, byte < far_end_ ? now_.far : past_end_.far};
    }

    // While group g is computed, a line of the heads of the T panels behind those at `panels`.
    void fetch_head(const char* panels, int64_t g) const {
        if (g * kKRowBytes >= head_bytes_) return;
        TS_EACH(t, T) __builtin_prefetch(panels + (T + t) * panel_bytes_ + g * kKRowBytes, 0, 3);
    }

private:
    static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
    int64_t panel_bytes_, head_bytes_, near_end_, far_end_;
    Ahead now_{}, past_end_{};
};

// Calls body(k_row, what to fetch) for every k_row of T panels.
template <int T, int64_t Bytes = kKRowBytes, class Body>
__attribute__((always_inline)) inline void for_k_rows(const ProductArgs& to, int64_t n_k_rows, int64_t panel_bytes,
                                                      Body body) {
    const Prefetch<T> later(to, n_k_rows * Bytes, panel_bytes);
    for (int64_t s = 0; s < n_k_rows; ++s) body(s, later.at(s * Bytes));
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

using Block = void (*)(const ProductArgs&, int64_t row, int64_t panel);

template <class Kernel, class Blocking, int... I>
constexpr void fill_blocks(Block (&whole)[Blocking::kMaxRows + 1], std::integer_sequence<int, I...>) {
    ((whole[I + 1] = &Kernel::template block<I + 1, Blocking::panels_of(I + 1)>), ...);
}

template <class Kernel, int R, int T>
void tail_of_panels(const ProductArgs& to, int64_t row, int64_t panel, int64_t end) {
    if constexpr (T >= 1) {
        if (panel + T <= end) {
            Kernel::template block<R, T>(to, row, panel);
            panel += T;
        }
        if (panel < end) tail_of_panels<Kernel, R, T / 2>(to, row, panel, end);
    }
}

template <class Kernel, class Blocking, int... I>
void tail_of_rows(const ProductArgs& to, int r, int64_t row, int64_t panel, int64_t end,
                  std::integer_sequence<int, I...>) {
    using Tail = void (*)(const ProductArgs&, int64_t, int64_t, int64_t);
    static constexpr Tail tails[] = {&tail_of_panels<Kernel, I + 1, Blocking::panels_of(I + 1) / 2>...};
    tails[r - 1](to, row, panel, end);
}

// `Blocking` says what the registers hold: kMaxRows rows, and panels_of(r) panels beside r rows.
//
// All rows over the panels [first, end). Rows are cut into the fewest blocks, of sizes as equal as can be. For many
// rows the panels of one block are read again for each block of rows, from the second-level cache.
template <class Kernel, class Blocking>
void walk(ProductArgs to, int64_t first, int64_t end) {
    constexpr auto every = std::make_integer_sequence<int, Blocking::kMaxRows>{};
    static const struct Table {
        Block whole[Blocking::kMaxRows + 1] = {};
        Table() { fill_blocks<Kernel, Blocking>(whole, every); }
    } table;
    const int64_t m = to.rows.m, n_blocks = (m + Blocking::kMaxRows - 1) / Blocking::kMaxRows;
    to.n_blocks = n_blocks;
    const int widest = Blocking::panels_of(int((m + n_blocks - 1) / n_blocks));
    for (int64_t panel = first; panel < end; panel += widest) {
        const int64_t last = panel + widest < end ? panel + widest : end;
        to.last = last == layout::panels(to.w.n);  // what follows a part of the outputs is mostly the next part
        for (int64_t b = 0; b < n_blocks; ++b) {
            to.block = b;
            const int64_t row = m * b / n_blocks;
            const int r = int(m * (b + 1) / n_blocks - row);
            int64_t t = panel;
            for (; t + Blocking::panels_of(r) <= last; t += Blocking::panels_of(r)) table.whole[r](to, row, t);
            if (t < last) tail_of_rows<Kernel, Blocking>(to, r, row, t, last, every);
        }
    }
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

// Sums of the codes of each group of inputs, (m, groups), fp32: every one is a whole number far below 2^24.
thread_local Scratch<float> group_sums;

void sum_sixteens(const Rows& rows, int64_t n_groups, int64_t n_codes, float* to) {
    for (int64_t m = 0; m < rows.m; ++m)
        for (int64_t g = 0; g < n_groups; ++g) {
            const int8_t* from = rows.codes + m * n_codes + g * 16;
            int32_t sum = 0;
            for (int i = 0; i < 16; ++i) sum += from[i];
            *to++ = float(sum);
        }
}

void sum_groups(int32_t group, const Matrix& w, const Rows& rows) {
    const int64_t n_groups = layout::groups(w.k, group), n_sums = sums_per_row(w.k) - 1, per_group = group / 32;
    float* to_all = group_sums.at_least(rows.m * n_groups);
    if (group == 16) return sum_sixteens(rows, n_groups, padded(w.k), to_all);
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
