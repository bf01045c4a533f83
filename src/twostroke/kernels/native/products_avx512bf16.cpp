// AVX-512 with vdpbf16ps: products of bf16 rows. Everything else is AVX-512's.
#include "blocks_avx512.h"
#include "products.h"

namespace ts::avx512bf16 {
namespace {

struct Bf16 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = padded(to.w.k), n_steps = k / 2, tile_bytes = n_steps * kKRowBytes;
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<uint16_t, R> x(to.rows.bf16 + row * k, k);
        __m512 sum[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) sum[r][t] = _mm512_setzero_ps();
        for_steps<T>(to, n_steps, tile_bytes,
                     [&](int64_t s, int64_t first, int64_t others) __attribute__((always_inline)) {
            __m512bh w[T];
            TS_EACH(t, T) {
                const char* from = weights + t * tile_bytes + s * kKRowBytes;
                _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                w[t] = (__m512bh)_mm512_loadu_si512(from);
            }
            TS_EACH(r, R) {
                const auto a = (__m512bh)word(x[r] + s * 2);
                TS_EACH(t, T) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], w[t], a);
            }
        });
        TS_EACH(r, R)
            TS_EACH(t, T) write(to, row + r, tile + t, sum[r][t]);
    }
};

}  // namespace

void product(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    if (w.format != Format::BF16) return avx512::product(w, rows, n0, n1, y, ldy, add);
    product_by<Bf16, Fit512>(w, rows, n0, n1, y, ldy, add);
}

void prepare_rows(Format format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last) {
    avx512::prepare_rows(format, x, k, out, first, last);
}

uint64_t sum_words(const uint64_t* words, int64_t n_words) { return avx512::sum_words(words, n_words); }

}  // namespace ts::avx512bf16
