// INT4 by AMX's matrix registers. The codes of a strip of outputs are unpacked once, less their zero points, and read
// again by every block of rows; the sums of a group are exact, and are scaled and added up in fp32 in the order of
// products_avx512.cpp: the bits are the same.
#pragma once
#include "blocks_amx.h"

namespace ts {
namespace {

thread_local Scratch<char> int4_codes, int4_rows;

// How a matrix is cut: groups of chunks, of chunk_bytes inputs each.
struct Int4Shape {
    int64_t n_groups, group_k_rows, n_k_rows, head_bytes, panel_bytes, chunk_bytes,
        codes_bytes;  // codes: unpacked, of a panel
    explicit Int4Shape(const Matrix& w)
        : n_groups(layout::groups(w.k, w.group)),
          group_k_rows(w.group / 8),
          n_k_rows(padded(w.k) / 8),
          head_bytes(layout::head_bytes(Format::INT4, w.group, w.k)),
          panel_bytes(layout::panel_bytes(Format::INT4, w.group, w.k)),
          chunk_bytes(w.group < kChunkBytes ? w.group : kChunkBytes),
          codes_bytes(layout::up(padded(w.k), kChunkBytes) * kPanelOutputs) {}
    int64_t end_k_row(int64_t g) const { return (g + 1) * group_k_rows < n_k_rows ? (g + 1) * group_k_rows : n_k_rows; }
};

// One group of one panel: a k_row of 8 inputs becomes two of 4, a signed byte each.
void unpack_group(const Int4Shape& shape, const char* panel, int64_t g, char* codes) {
    const __m512i low_half = _mm512_set1_epi8(15);
    const __m128i zeros = _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + shape.n_groups * 32 + g * 16));
    const __m512i zero = _mm512_mullo_epi32(_mm512_cvtepu8_epi32(zeros), _mm512_set1_epi32(0x01010101));
    for (int64_t s = g * shape.group_k_rows; s < shape.end_k_row(g); ++s) {
        const __m512i both = _mm512_loadu_si512(panel + shape.head_bytes + s * kKRowBytes);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
        _mm512_store_si512(codes + 2 * s * kKRowBytes, _mm512_sub_epi8(_mm512_and_si512(both, low_half), zero));
        _mm512_store_si512(codes + (2 * s + 1) * kKRowBytes, _mm512_sub_epi8(high, zero));
    }
}

template <int T>
void add_group(const Int4Shape& shape, const char* panels, int64_t g, const int32_t* sums, float* totals,
               int64_t n_rows) {
    __m512 scale[T];
    TS_EACH(t, T)
        scale[t] = _mm512_cvtph_ps(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panels + t * shape.panel_bytes + g * 32)));
    for (int64_t r = 0; r < n_rows; ++r, sums += T * kTmmRows, totals += T * kTmmRows)
        TS_EACH(t, T) {
            const __m512 exact = _mm512_cvtepi32_ps(_mm512_load_si512(sums + t * kTmmRows));
            _mm512_store_ps(totals + t * kTmmRows,
                            _mm512_fmadd_ps(scale[t], exact, _mm512_load_ps(totals + t * kTmmRows)));
        }
}

// `rows`: the codes of all rows, row_bytes each, zeros behind the last to whole chunks. `unpacks`: no block before this
// one did.
template <int R, int T>
void int4_block(const ProductArgs& to, const Int4Shape& shape, const Part& part, const char* rows, int64_t row_bytes,
                char* codes, bool unpacks, Fetch fetch) {
    alignas(64) int32_t sums[2][kSums];
    alignas(64) float totals[kSums];
    const char* panels = layout::panel(to.w, part.panel);
    const int64_t n_rows = part.end - part.row,
                  lines_per_group = (fetch.end - fetch.i + shape.n_groups - 1) / shape.n_groups;
    const auto unpack = [&](int64_t g) {
        if (unpacks && g < shape.n_groups)
            for (int t = 0; t < T; ++t)
                unpack_group(shape, panels + t * shape.panel_bytes, g, codes + t * shape.codes_bytes);
    };
    std::memset(totals, 0, size_t(n_rows * T * kPanelOutputs * 4));
    rows += part.row * row_bytes;
    unpack(0);
    for (int64_t g = 0; g < shape.n_groups; ++g) {
        fetch.lines(lines_per_group);
        for_sums<R, T>(sums[g % 2], [](auto tmm, int32_t*) { zero_tmm<tmm()>(); });
        for (int64_t i = g * shape.group_k_rows * 8; i < shape.end_k_row(g) * 8; i += shape.chunk_bytes)
            add_chunk<Format::INT4, R, T>(rows + i, row_bytes, codes + i * kPanelOutputs, shape.codes_bytes);
        for_sums<R, T>(sums[g % 2], [](auto tmm, int32_t* to) { store_tmm<tmm()>(to, T * kChunkBytes); });
        // While the matrix unit works: the next group's codes, the last group's sums.
        unpack(g + 1);
        if (g > 0) add_group<T>(shape, panels, g - 1, sums[(g - 1) % 2], totals, n_rows);
    }
    add_group<T>(shape, panels, shape.n_groups - 1, sums[(shape.n_groups - 1) % 2], totals, n_rows);
    Sums<Format::INT4> done(to);
    Part whole = part;
    whole.sums = reinterpret_cast<int32_t*>(totals);
    done.take(whole, T);
    done.write_rows(2 * kTmmRows);
}

template <int T>
void int4_strip(const ProductArgs& to, const Int4Shape& shape, const char* rows, int64_t row_bytes, int64_t panel,
                int64_t end) {
    const int64_t m = to.rows.m, n_blocks = (m + 2 * kTmmRows - 1) / (2 * kTmmRows);
    char* codes = int4_codes.at_least(T * shape.codes_bytes);
    Part part{};
    part.panel = panel;
    for (int64_t b = 0; b < n_blocks; ++b) {
        const Fetch fetch = fetch_share<T>(to, panel, end, b, n_blocks);
        if (place_rows(part, b, m) == 1) int4_block<1, T>(to, shape, part, rows, row_bytes, codes, b == 0, fetch);
        else if constexpr (T <= 2) int4_block<2, T>(to, shape, part, rows, row_bytes, codes, b == 0, fetch);
    }
}

void walk_int4(const ProductArgs& to, int64_t first, int64_t end) {
    const Int4Shape shape(to.w);
    const char* rows = reinterpret_cast<const char*>(to.rows.codes);
    int64_t row_bytes = padded(to.w.k);
    if (row_bytes % shape.chunk_bytes) {  // half a chunk: copied beside zeros, since a register would read behind it
        const int64_t whole = layout::up(row_bytes, kChunkBytes);
        char* copy = int4_rows.at_least(to.rows.m * whole);
        for (int64_t r = 0; r < to.rows.m; ++r) {
            std::memcpy(copy + r * whole, rows + r * row_bytes, size_t(row_bytes));
            std::memset(copy + r * whole + row_bytes, 0, size_t(whole - row_bytes));
        }
        rows = copy;
        row_bytes = whole;
    }
    ts::shape(to.rows.m, shape.chunk_bytes);
    int64_t panel = first;
    if (to.rows.m <= kTmmRows)
        for (; panel + 4 <= end; panel += 4) int4_strip<4>(to, shape, rows, row_bytes, panel, end);
    for (; panel + 2 <= end; panel += 2) int4_strip<2>(to, shape, rows, row_bytes, panel, end);
    if (panel < end) int4_strip<1>(to, shape, rows, row_bytes, panel, end);
    if (is_streamed(to)) _mm_sfence();
    release_tmm();
}

}  // namespace
}  // namespace ts
