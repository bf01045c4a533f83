// W8A8 and BF16 by the matrix tiles of AMX: blocks of 32 rows and 32 outputs. 16 steps of a packed tile (1 KiB) are a tile of weights
// as the processor wants it, and 64 bytes of 16 rows a tile of activations: nothing is rearranged. Everything else is AVX-512's.
#include "blocks_avx512.h"
#include "cpu.h"
#include "products.h"
#include "tiles_amx.h"

#include <chrono>

namespace ts::amx {
namespace {

constexpr int64_t ROWS = 16, CHUNK_BYTES = 64, WEIGHTS_BYTES = ROWS * CHUNK_BYTES;
// Tile registers: sums of the first and second 16 rows with the first and second 16 outputs; rows; weights.
constexpr int SUM00 = 0, SUM01 = 1, SUM10 = 2, SUM11 = 3, ROWS0 = 4, ROWS1 = 5, WEIGHTS0 = 6, WEIGHTS1 = 7;

void shape(int first_rows, int second_rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.row_bytes[tile] = CHUNK_BYTES;
        shapes.rows[tile] = ROWS;
    }
    for (int tile : {SUM00, SUM01, ROWS0}) shapes.rows[tile] = uint8_t(first_rows);
    for (int tile : {SUM10, SUM11, ROWS1}) shapes.rows[tile] = uint8_t(second_rows > 0 ? second_rows : 1);
    shape_tiles(shapes);
}

template <bool BF16, int SUM, int A, int B>
void add_products_of_tiles() {
    if constexpr (BF16)
        add_bf16_products<SUM, A, B>();
    else
        add_byte_products<SUM, A, B>();
}

template <bool BF16, bool SECOND_ROWS, bool SECOND_OUTPUTS>
void add_chunk(const char* rows, int64_t row_bytes, const char* weights, int64_t next_tile) {
    load_tile<ROWS0>(rows, row_bytes);
    load_tile<WEIGHTS0>(weights, CHUNK_BYTES);
    add_products_of_tiles<BF16, SUM00, ROWS0, WEIGHTS0>();
    if constexpr (SECOND_OUTPUTS) {
        load_tile<WEIGHTS1>(weights + next_tile, CHUNK_BYTES);
        add_products_of_tiles<BF16, SUM01, ROWS0, WEIGHTS1>();
    }
    if constexpr (SECOND_ROWS) {
        load_tile<ROWS1>(rows + ROWS * row_bytes, row_bytes);
        add_products_of_tiles<BF16, SUM10, ROWS1, WEIGHTS0>();
        if constexpr (SECOND_OUTPUTS) add_products_of_tiles<BF16, SUM11, ROWS1, WEIGHTS1>();
    }
}

template <bool BF16, int SUM>
void finish(const Target& to, int64_t row, int64_t n_rows, int64_t tile) {
    alignas(64) int32_t sums[ROWS][ROWS];
    store_tile<SUM>(sums, CHUNK_BYTES);
    const int64_t n_sums = sums_per_row(to.w.k);
    for (int64_t r = 0; r < n_rows; ++r) {
        const __m512i sum = _mm512_load_si512(sums[r]);
        if constexpr (BF16) {
            write(to, row + r, tile, _mm512_castsi512_ps(sum));
        } else {
            // As in products_avx512.cpp, to the last bit.
            const __m512i excess = _mm512_set1_epi32(128 * to.rows.sums[(row + r) * n_sums]);
            const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, excess)), _mm512_set1_ps(to.rows.scales[row + r]));
            write(to, row + r, tile, _mm512_mul_ps(scaled, scales_of(to, tile)));
        }
    }
}

template <bool BF16, bool SECOND_ROWS, bool SECOND_OUTPUTS>
void block(const Target& to, int64_t row, int64_t n_rows, int64_t tile) {
    const int64_t row_bytes = padded(to.w.k) * (BF16 ? 2 : 1), n_chunks = row_bytes / CHUNK_BYTES;
    const int64_t next_tile = layout::tile_bytes(to.w.format, 0, to.w.k);
    const char* rows = (BF16 ? reinterpret_cast<const char*>(to.rows.bf16) : reinterpret_cast<const char*>(to.rows.codes)) + row * row_bytes;
    const char* weights = layout::tile(to.w, tile);
    zero_tile<SUM00>();
    if constexpr (SECOND_OUTPUTS) zero_tile<SUM01>();
    if constexpr (SECOND_ROWS) zero_tile<SUM10>();
    if constexpr (SECOND_ROWS && SECOND_OUTPUTS) zero_tile<SUM11>();
    constexpr int T = SECOND_OUTPUTS ? 2 : 1;
    for_steps<T, WEIGHTS_BYTES>(to, n_chunks, next_tile, [&](int64_t chunk, int64_t first, int64_t others) {
        const char* from = weights + chunk * WEIGHTS_BYTES;
        for (int t = 0; t < T; ++t)
            for (int64_t line = 0; line < WEIGHTS_BYTES; line += 64) _mm_prefetch(from + t * next_tile + line + (t == 0 ? first : others), _MM_HINT_T0);
        add_chunk<BF16, SECOND_ROWS, SECOND_OUTPUTS>(rows + chunk * CHUNK_BYTES, row_bytes, from, next_tile);
    });
    if (row_bytes % CHUNK_BYTES) {  // half a chunk: 32 codes. Copied beside zeros, since tiles would read behind both
        constexpr int64_t HALF = CHUNK_BYTES / 2;
        alignas(64) char last_rows[2 * ROWS * CHUNK_BYTES] = {}, last_weights[2 * WEIGHTS_BYTES] = {};
        for (int64_t r = 0; r < n_rows; ++r)
            std::memcpy(last_rows + r * CHUNK_BYTES, rows + r * row_bytes + n_chunks * CHUNK_BYTES, HALF);
        for (int t = 0; t < T; ++t)
            std::memcpy(last_weights + t * WEIGHTS_BYTES, weights + t * next_tile + n_chunks * WEIGHTS_BYTES, WEIGHTS_BYTES / 2);
        add_chunk<BF16, SECOND_ROWS, SECOND_OUTPUTS>(last_rows, CHUNK_BYTES, last_weights, WEIGHTS_BYTES);
    }
    const int64_t first = n_rows < ROWS ? n_rows : ROWS;
    finish<BF16, SUM00>(to, row, first, tile);
    if constexpr (SECOND_OUTPUTS) finish<BF16, SUM01>(to, row, first, tile + 1);
    if constexpr (SECOND_ROWS) finish<BF16, SUM10>(to, row + ROWS, n_rows - ROWS, tile);
    if constexpr (SECOND_ROWS && SECOND_OUTPUTS) finish<BF16, SUM11>(to, row + ROWS, n_rows - ROWS, tile + 1);
}

template <bool BF16>
void walk_tiles(Target to, int64_t first_tile, int64_t end) {
    int64_t shaped = 0;
    to.n_blocks = (to.rows.m + 2 * ROWS - 1) / (2 * ROWS);
    for (int64_t tile = first_tile; tile < end; tile += 2)
        for (int64_t row = 0; row < to.rows.m; row += 2 * ROWS) {
            const int64_t left = to.rows.m - row, n_rows = left < 2 * ROWS ? left : 2 * ROWS;
            if (n_rows != shaped) {
                shape(int(n_rows < ROWS ? n_rows : ROWS), int(n_rows - ROWS));
                shaped = n_rows;
            }
            to.block = row / (2 * ROWS);
            to.last = tile + 2 >= end;
            const bool second_rows = n_rows > ROWS, second_outputs = tile + 1 < end;
            if (second_rows && second_outputs)
                block<BF16, true, true>(to, row, n_rows, tile);
            else if (second_rows)
                block<BF16, true, false>(to, row, n_rows, tile);
            else if (second_outputs)
                block<BF16, false, true>(to, row, n_rows, tile);
            else
                block<BF16, false, false>(to, row, n_rows, tile);
        }
    release_tiles();
}

template <bool BF16>
void product_by_tiles(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    walk_tiles<BF16>(Target{w, rows, y, ldy, add}, n0 / TILE, layout::tiles(n1));
}

// A product to try: values that fill all bits, sizes that leave a rest everywhere.
struct Trial {
    static constexpr int64_t N = 40, K = 160, M = 37;
    Format format;
    char* packed = static_cast<char*>(std::malloc(size_t(packed_bytes(format, 0, N, K))));
    int8_t weights[N * K * 2], codes[M * K];
    uint16_t bf16[M * K];
    float scales[N], row_scales[M], found[M * N], expected[M * N];
    int32_t sums[M * sums_per_row(K)];

    explicit Trial(Format format) : format(format) {
        uint32_t state = 1;
        const auto next = [&state] { return (state = state * 1664525u + 1013904223u) >> 24; };
        const auto bf16_value = [&next] { return uint16_t((next() % 2 << 15) | 0x3f00 | next() % 256); };  // ±0.5 to ±2
        for (int64_t i = 0; i < N * K; ++i) {
            const uint16_t value = format == Format::BF16 ? bf16_value() : uint16_t(next());
            std::memcpy(weights + i * (format == Format::BF16 ? 2 : 1), &value, format == Format::BF16 ? 2 : 1);
        }
        for (float& scale : scales) scale = 0.5f;
        for (float& scale : row_scales) scale = 0.25f;
        for (int32_t& sum : sums) sum = 0;
        for (int64_t i = 0; i < M * K; ++i) {
            codes[i] = int8_t(next());
            bf16[i] = bf16_value();
            sums[i / K * sums_per_row(K)] += codes[i];
        }
        pack(format, 0, N, K, weights, scales, nullptr, packed, 0, N);
    }
    ~Trial() { std::free(packed); }

    bool agrees() {
        const Matrix w{format, 0, N, K, packed, nullptr};
        const Rows rows{M, nullptr, bf16, codes, row_scales, sums};
        if (format == Format::BF16)
            product_by_tiles<true>(w, rows, 0, N, found, N, false);
        else
            product_by_tiles<false>(w, rows, 0, N, found, N, false);
        avx512bf16::product(w, rows, 0, N, expected, N, false);
        for (int64_t i = 0; i < M * N; ++i) {
            const float difference = found[i] - expected[i];
            // bf16: sums of 160 products up to 4, added in another order
            if (!(format == Format::BF16 ? difference < 1e-3f && difference > -1e-3f : difference == 0)) return false;
        }
        return true;
    }
};

// The fewest rows from which tiles are faster than AVX-512 on W8A8 here: measured once, on a matrix that lies in the cache; never,
// if not with 32 rows. Both give the same bits.
int64_t measured_least_rows() {
#ifdef TS_EMULATE_TILES
    return 1;
#else
    constexpr int64_t n = 256, k = 512, most = 32;
    char* packed = static_cast<char*>(std::calloc(size_t(packed_bytes(Format::W8A8, 0, n, k)), 1));
    static int8_t codes[most * k];
    static float scales[most], y[most * n];
    static int32_t sums[most * sums_per_row(k)];
    const Matrix w{Format::W8A8, 0, n, k, packed, nullptr};
    const auto seconds = [](auto work) {
        double best = 1e9;
        for (int i = 0; i < 10; ++i) {
            const auto start = std::chrono::steady_clock::now();
            work();
            const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            best = took < best ? took : best;
        }
        return best;
    };
    int64_t m = 2;
    for (; m <= most; m *= 2) {
        const Rows rows{m, nullptr, nullptr, codes, scales, sums};
        const double tiles = seconds([&] { product_by_tiles<false>(w, rows, 0, n, y, n, false); });
        if (tiles < seconds([&] { avx512::product(w, rows, 0, n, y, n, false); })) break;
    }
    std::free(packed);
    return m <= most ? m : INT64_MAX;
#endif
}

}  // namespace

bool works() {
#ifdef TS_EMULATE_TILES
    const bool there = cpu().avx512_bf16;
#else
    const bool there = cpu().amx;
#endif
    if (!there) return false;
    Trial bytes(Format::W8A8), bf16(Format::BF16);
    return bytes.agrees() && bf16.agrees();
}

void product(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    // bf16 always: sums in another order for few rows than for many would make a row depend on its neighbours.
    if (w.format == Format::BF16) return product_by_tiles<true>(w, rows, n0, n1, y, ldy, add);
    if (w.format == Format::W8A8) {
        static const int64_t least_rows = measured_least_rows();
        if (rows.m >= least_rows) return product_by_tiles<false>(w, rows, n0, n1, y, ldy, add);
    }
    avx512::product(w, rows, n0, n1, y, ldy, add);
}

void prepare_rows(Format format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last) {
    avx512::prepare_rows(format, x, k, out, first, last);
}

uint64_t sum_words(const uint64_t* words, int64_t n_words) { return avx512::sum_words(words, n_words); }

}  // namespace ts::amx
