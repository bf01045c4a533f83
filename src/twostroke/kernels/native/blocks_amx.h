// Blocks of AMX's matrix registers, for W8A8 and BF16: 32 rows and 32 outputs, or up to 16 rows and 64 outputs. 16
// k_rows of a packed panel (1 KiB) are a panel of weights as the processor wants it, and 64 bytes of 16 rows a panel of
// activations: nothing is rearranged.
#pragma once
#include "vectors_avx512.h"

#include "products_body.h"
#include "tmm.h"

namespace ts {
namespace {

constexpr int64_t kTmmRows = 16, kChunkBytes = 64, kWeightsBytes = kTmmRows * kChunkBytes;
// Tile registers: four of sums, then rows, then weights.
constexpr int kRows0 = 4, kRows1 = 5, kWeights0 = 6, kWeights1 = 7;

// For blocks of m rows if there are no more than 32, else for whole blocks only; of so many bytes of rows at a time.
void shape(int64_t m, int64_t chunk_bytes = kChunkBytes) {
    const auto first = uint8_t(m < kTmmRows ? m : kTmmRows), second = uint8_t(m <= kTmmRows      ? first
                                                                              : m < 2 * kTmmRows ? m - kTmmRows
                                                                                                 : kTmmRows);
    TmmShapes shapes;
    for (int tmm = 0; tmm < 8; ++tmm) {
        shapes.row_bytes[tmm] = kChunkBytes;
        shapes.rows[tmm] = kTmmRows;
    }
    for (int tmm : {kRows0, kRows1}) shapes.row_bytes[tmm] = uint16_t(chunk_bytes);
    for (int tmm : {kWeights0, kWeights1}) shapes.rows[tmm] = uint8_t(chunk_bytes / 4);
    for (int tmm : {0, 1, kRows0}) shapes.rows[tmm] = first;
    for (int tmm : {2, 3, kRows1}) shapes.rows[tmm] = second;
    shape_tmm(shapes);
}

// What comes next from memory, on its way into the second-level cache while products run: lines [i, end) of four
// stretches in turn, since the processor's own prefetcher, which carries most, follows several streams faster than one.
struct Fetch {
    static constexpr int64_t kStreams = 4;
    const char* from;
    int64_t stretch_bytes, i, end;
    void lines(int64_t n) {
        for (; n > 0 && i < end; --n, ++i)
            _mm_prefetch(from + i % kStreams * stretch_bytes + i / kStreams * 64, _MM_HINT_T1);
    }
};

// What block() works on: rows, of which those from `fresh` on are written; panels of outputs; chunks of inputs; where
// the sums lie between the parts of the inputs.
struct Part {
    int64_t row, fresh, end, panel, chunk, end_chunk;
    int32_t* sums;
};

// The sums of a block as the registers left them, (rows, T·16 outputs), turned into outputs row by row between the
// products of the next block: the processor's matrix and vector units then work at the same time. Outputs of more bytes
// than the caches can hold are written past them: a line need not be read before it is written, and whole columns of a
// wide matrix do not push one another out of the same few sets.
constexpr int64_t kStreamedBytes = 8 << 20;
bool is_streamed(const ProductArgs& to) {
    return !to.add && to.rows.m * to.w.n * 4 > kStreamedBytes && to.ldy % kTmmRows == 0 &&
           reinterpret_cast<uintptr_t>(to.y) % 64 == 0;
}

template <Format F>
struct Sums {
    const ProductArgs& to;
    const int32_t* values = nullptr;
    int64_t first = 0, row = 0, end = 0;  // the rows: of the block, not yet written, behind the block
    int64_t panel = 0, n_panels = 0;
    const bool streamed = is_streamed(to);
    const float* const scales = F == Format::BF16 ? nullptr : layout::output_scales(to.w);

    explicit Sums(const ProductArgs& to) : to(to) {}

    void write_rows(int64_t n) {
        const int64_t last = row + n < end ? row + n : end;
        if (row >= last) return;
        switch (n_panels) {
            case 1: write_rows_of<1>(last); break;
            case 2: write_rows_of<2>(last); break;
            default: write_rows_of<4>(last);
        }
        row = last;
    }

    void take(const Part& part, int64_t width) {
        values = part.sums;
        first = part.row;
        row = part.fresh;
        end = part.end;
        panel = part.panel;
        n_panels = width;
    }

private:
    // What write() of products_body.h does, with everything that stays the same for a row outside the loop.
    template <int T>
    void write_rows_of(int64_t last) const {
        const int64_t n = panel * kTmmRows, left = to.w.n - (n + (T - 1) * kTmmRows), ldy = to.ldy,
                      n_sums = sums_per_row(to.w.k);
        const __mmask16 all = 0xffff, mask = left >= kTmmRows ? all : __mmask16((1u << left) - 1);  // of the last panel
        const float *bias = to.w.bias ? to.w.bias + n : nullptr, *row_scales = to.rows.scales,
                    *output_scales = scales + (F == Format::BF16 ? 0 : n);
        const int32_t *from = values + (row - first) * T * kTmmRows, *row_sums = to.rows.sums;
        const bool add = to.add;
        float* y = to.y + row * ldy + n;
        for (int64_t r = row; r < last; ++r, y += ldy, from += T * kTmmRows) {
            __m512 value[T];
            if constexpr (F == Format::BF16) {
                TS_EACH(t, T) value[t] = _mm512_castsi512_ps(_mm512_load_si512(from + t * kTmmRows));
            } else if constexpr (F == Format::INT4) {
                const __m512 row_scale = _mm512_set1_ps(row_scales[r]);
                TS_EACH(t, T)
                    value[t] = _mm512_mul_ps(
                        _mm512_mul_ps(_mm512_castsi512_ps(_mm512_load_si512(from + t * kTmmRows)), row_scale),
                        _mm512_loadu_ps(output_scales + t * kTmmRows));
            } else {
                // As in products_avx512.cpp, to the last bit.
                const __m512i excess = _mm512_set1_epi32(128 * row_sums[r * n_sums]);
                const __m512 row_scale = _mm512_set1_ps(row_scales[r]);
                TS_EACH(t, T) {
                    const __m512 exact =
                        _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(from + t * kTmmRows), excess));
                    value[t] =
                        _mm512_mul_ps(_mm512_mul_ps(exact, row_scale), _mm512_loadu_ps(output_scales + t * kTmmRows));
                }
            }
            if (bias)
                TS_EACH(t, T)
                    value[t] =
                        _mm512_add_ps(value[t], _mm512_maskz_loadu_ps(t == T - 1 ? mask : all, bias + t * kTmmRows));
            if (add)
                TS_EACH(t, T)
                    value[t] =
                        _mm512_add_ps(_mm512_maskz_loadu_ps(t == T - 1 ? mask : all, y + t * kTmmRows), value[t]);
            if (streamed && mask == all)
                TS_EACH(t, T) _mm512_stream_ps(y + t * kTmmRows, value[t]);
            else
                TS_EACH(t, T) _mm512_mask_storeu_ps(y + t * kTmmRows, t == T - 1 ? mask : all, value[t]);
        }
    }
};

template <Format F, int SUM, int A, int B>
void add_tmm_products() {
    if constexpr (F == Format::BF16) add_bf16_products<SUM, A, B>();
    else if constexpr (F == Format::INT4) add_signed_byte_products<SUM, A, B>();
    else add_byte_products<SUM, A, B>();
}

// R times 16 rows with T times 16 outputs, sum of (r, t) in register r·T + t: R·T is at most 4, and R at most 2.
template <Format F, int R, int T>
void add_chunk(const char* rows, int64_t row_bytes, const char* weights, int64_t next_panel) {
    load_tmm<kRows0>(rows, row_bytes);
    load_tmm<kWeights0>(weights, kChunkBytes);
    add_tmm_products<F, 0, kRows0, kWeights0>();
    if constexpr (T > 1) {
        load_tmm<kWeights1>(weights + next_panel, kChunkBytes);
        add_tmm_products<F, 1, kRows0, kWeights1>();
    }
    if constexpr (T > 2) {
        load_tmm<kWeights0>(weights + 2 * next_panel, kChunkBytes);
        add_tmm_products<F, 2, kRows0, kWeights0>();
        load_tmm<kWeights1>(weights + 3 * next_panel, kChunkBytes);
        add_tmm_products<F, 3, kRows0, kWeights1>();
    }
    if constexpr (R > 1) {
        load_tmm<kRows1>(rows + kTmmRows * row_bytes, row_bytes);
        add_tmm_products<F, 2, kRows1, kWeights0>();
        if constexpr (T > 1) add_tmm_products<F, 3, kRows1, kWeights1>();
    }
}

constexpr int64_t kSums = 4 * kTmmRows * kTmmRows;  // of a block

// Calls move<register>(where in `sums`) for the sums of (R·16 rows, T·16 outputs), which lie there row by row.
template <int R, int T, class Int, class Move>
void for_sums(Int* sums, Move move) {
    move(std::integral_constant<int, 0>{}, sums);
    if constexpr (T > 1) move(std::integral_constant<int, 1>{}, sums + kTmmRows);
    if constexpr (T > 2) {
        move(std::integral_constant<int, 2>{}, sums + 2 * kTmmRows);
        move(std::integral_constant<int, 3>{}, sums + 3 * kTmmRows);
    }
    if constexpr (R > 1) {
        move(std::integral_constant<int, 2>{}, sums + T * kTmmRows * kTmmRows);
        if constexpr (T > 1) move(std::integral_constant<int, 3>{}, sums + T * kTmmRows * kTmmRows + kTmmRows);
    }
}

template <Format F>
int64_t bytes_of_row(int64_t k) {
    return padded(k) * (F == Format::BF16 ? 2 : 1);
}

template <Format F>
const char* first_row(const ProductArgs& to) {
    if constexpr (F == Format::BF16) return reinterpret_cast<const char*>(to.rows.bf16);
    return reinterpret_cast<const char*>(to.rows.codes);
}

template <Format F, int R, int T>
void block(const ProductArgs& to, const Part& part, Sums<F>& pending, Fetch fetch) {
    const int64_t row_bytes = bytes_of_row<F>(to.w.k), all_chunks = row_bytes / kChunkBytes;
    const int64_t next_panel = layout::panel_bytes(to.w.format, 0, to.w.k);
    const char* rows = first_row<F>(to) + part.row * row_bytes;
    const char* weights = layout::panel(to.w, part.panel);
    for_sums<R, T>(part.sums, [&](auto tmm, const int32_t* from) {
        if (part.chunk > 0) load_tmm<tmm()>(from, T * kChunkBytes);
        else zero_tmm<tmm()>();
    });
    if (const int64_t n_chunks = part.end_chunk - part.chunk; n_chunks > 0) {
        const int64_t rows_per_chunk = (pending.end - pending.row + n_chunks - 1) / n_chunks;
        const int64_t lines_per_chunk = (fetch.end - fetch.i + n_chunks - 1) / n_chunks;
        for (int64_t chunk = part.chunk; chunk < part.end_chunk; ++chunk) {
            fetch.lines(lines_per_chunk);
            add_chunk<F, R, T>(rows + chunk * kChunkBytes, row_bytes, weights + chunk * kWeightsBytes, next_panel);
            pending.write_rows(rows_per_chunk);
        }
    }
    const bool last = part.end_chunk == all_chunks;
    if (last &&
        row_bytes %
            kChunkBytes) {  // half a chunk: 32 codes. Copied beside zeros, since a register would read behind both
        constexpr int64_t HALF = kChunkBytes / 2;
        alignas(64) char last_rows[2 * kTmmRows * kChunkBytes] = {}, last_weights[T * kWeightsBytes] = {};
        for (int64_t r = 0; r < part.end - part.row; ++r)
            std::memcpy(last_rows + r * kChunkBytes, rows + r * row_bytes + all_chunks * kChunkBytes, HALF);
        for (int t = 0; t < T; ++t)
            std::memcpy(last_weights + t * kWeightsBytes, weights + t * next_panel + all_chunks * kWeightsBytes,
                        kWeightsBytes / 2);
        add_chunk<F, R, T>(last_rows, kChunkBytes, last_weights, kWeightsBytes);
    }
    pending.write_rows(2 * kTmmRows);
    for_sums<R, T>(part.sums, [&](auto tmm, int32_t* sums) { store_tmm<tmm()>(sums, T * kChunkBytes); });
    if (last) pending.take(part, T);
}

// Inputs are walked in parts of so many chunks where several blocks of rows read the same weights: a part of them then
// stays in the first-level cache. For more blocks than this there is no room for the sums between the parts, and all
// inputs are one.
constexpr int64_t kPartChunks = 9, kMostBlocks = 16;

// The rows of block b: 32, or 16 for the last where they suffice; says how many times 16. Of m rows that are no
// multiple, the last block begins before the others' end, so that the registers need no other shape: a row's sums are
// the same whichever block they come from.
int place_rows(Part& part, int64_t b, int64_t m) {
    const int64_t left = m - b * 2 * kTmmRows, rows = left > kTmmRows ? 2 * kTmmRows : kTmmRows;
    part.fresh = b * 2 * kTmmRows;
    part.row = left < rows && b > 0 ? m - rows : part.fresh;
    part.end = part.row + rows < m ? part.row + rows : m;
    return int(rows / kTmmRows);
}

// The share of one of n blocks in fetching the strip behind this one, which is as wide.
template <int T>
Fetch fetch_share(const ProductArgs& to, int64_t panel, int64_t end, int64_t block, int64_t n) {
    const char* next = layout::panel(to.w, panel + T < end ? panel + T : end);
    const int64_t stretch =
        (layout::panel(to.w, panel + 2 * T < end ? panel + 2 * T : end) - next) / (Fetch::kStreams * 64);
    return Fetch{next, stretch * 64, Fetch::kStreams * stretch * block / n,
                 Fetch::kStreams * stretch * (block + 1) / n};
}

// A strip of T panels with all rows.
template <Format F, int T>
void strip(const ProductArgs& to, int64_t panel, int64_t end, Sums<F>& pending, int32_t* sums) {
    const int64_t m = to.rows.m, n_blocks = (m + 2 * kTmmRows - 1) / (2 * kTmmRows),
                  n_chunks = bytes_of_row<F>(to.w.k) / kChunkBytes;
    const bool in_parts = n_chunks > kPartChunks && n_blocks > 1 && n_blocks <= kMostBlocks;
    const int64_t n_parts = in_parts ? (n_chunks + kPartChunks - 1) / kPartChunks : 1, n_fetches = n_parts * n_blocks;
    for (int64_t p = 0; p < n_parts; ++p) {
        Part part{};
        part.panel = panel;
        part.chunk = n_chunks * p / n_parts;
        part.end_chunk = n_chunks * (p + 1) / n_parts;
        for (int64_t b = 0; b < n_blocks; ++b) {
            const Fetch fetch = fetch_share<T>(to, panel, end, p * n_blocks + b, n_fetches);
            part.sums = sums + (in_parts ? b * kSums : 0);
            if (place_rows(part, b, m) == 1) block<F, 1, T>(to, part, pending, fetch);
            else if constexpr (T <= 2) block<F, 2, T>(to, part, pending, fetch);
        }
    }
}

template <Format F>
void walk_amx(const ProductArgs& to, int64_t first, int64_t end) {
    alignas(64) int32_t sums[kMostBlocks * kSums];
    Sums<F> pending(to);
    shape(to.rows.m);
    int64_t panel = first;
    if (to.rows.m <= kTmmRows)
        for (; panel + 4 <= end; panel += 4) strip<F, 4>(to, panel, end, pending, sums);
    for (; panel + 2 <= end; panel += 2) strip<F, 2>(to, panel, end, pending, sums);
    if (panel < end) strip<F, 1>(to, panel, end, pending, sums);
    pending.write_rows(2 * kTmmRows);
    if (pending.streamed) _mm_sfence();  // before another thread is told that they are there
    release_tmm();
}

}  // namespace
}  // namespace ts
