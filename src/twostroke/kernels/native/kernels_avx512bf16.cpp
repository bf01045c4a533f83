// Products of bf16 rows and attention by vdpbf16ps; norms and activations compiled beside them. Everything else is
// AVX-512's.
#include "attention_body.h"
#include "blocks_avx512.h"
#include "elementwise_body.h"
#include "kernels.h"

namespace ts {
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

void product_avx512bf16(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    if (w.format != Format::BF16) return kernels_avx512().product(w, rows, n0, n1, y, ldy, add);
    product_by<Bf16, Fit512>(w, rows, n0, n1, y, ldy, add);
}

}  // namespace
}  // namespace ts

const ts::Kernels& ts::kernels_avx512bf16() {
    static const Kernels made = [] {
        Kernels k = with_avx512bf16_training(with_attention(with_elementwise(kernels_avx512())));
        k.product = product_avx512bf16;
        return k;
    }();
    return made;
}
