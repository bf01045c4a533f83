// Few rows of BF16 beside AMX's matrix registers: what tdpbf16ps does, by AVX-512 and to the last bit, because a row's
// outputs must not depend on how many rows there are. For each chunk of 16 pairs of inputs: fused sums of the even and
// of the odd products apart, in order; then the sum of both onto what was there; denormal numbers as zeros, both read
// and made (Intel's SDM, TDPBF16PS).
#pragma once
#include "vectors_avx512.h"

#include "products_body.h"

namespace ts {
namespace {

// Even, odd and whole sums side by side: three registers for each row and panel.
struct FewBf16Blocking {
    static constexpr int kMaxRows = 4;
    static constexpr int panels_of(int r) { return r == 1 ? 8 : r == 2 ? 4 : 2; }
};

struct FewBf16 {
    template <int R, int T>
    static void block(const ProductArgs& to, int64_t row, int64_t panel) {
        constexpr int64_t kChunkKRows = 16;
        constexpr unsigned kDenormalsAreZeros = 0x8040;
        const int64_t k = padded(to.w.k), n_chunks = k / (2 * kChunkKRows), panel_bytes = k / 2 * kKRowBytes;
        const char* weights = layout::panel(to.w, panel);
        const RowPointers<uint16_t, R> x(to.rows.bf16 + row * k, k);
        const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
        const unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | kDenormalsAreZeros);
        __m512 sum[R][T];
        // The compiler does not know that arithmetic depends on the mode: nothing may pass these two lines.
        TS_EACH(r, R)
            TS_EACH(t, T) {
                sum[r][t] = _mm512_setzero_ps();
                __asm__ volatile("" : "+v"(sum[r][t]));
            }
        for_k_rows<T, kChunkKRows * kKRowBytes>(to, n_chunks, panel_bytes,
                                                [&](int64_t chunk, const Ahead& ahead) __attribute__((always_inline)) {
            __m512 even[R][T], odd[R][T];
            TS_EACH(r, R)
                TS_EACH(t, T) even[r][t] = odd[r][t] = _mm512_setzero_ps();
            for (int64_t s = chunk * kChunkKRows; s < (chunk + 1) * kChunkKRows; ++s) {
                __m512 w_even[T], w_odd[T];
                TS_EACH(t, T) {
                    const char* from = weights + t * panel_bytes + s * kKRowBytes;
                    fetch(from, ahead, t);
                    const __m512i w = _mm512_loadu_si512(from);
                    w_even[t] = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
                    w_odd[t] = _mm512_castsi512_ps(_mm512_and_si512(w, upper));
                }
                TS_EACH(r, R) {
                    const __m512i both = broadcast_word(x[r] + s * 2);
                    const __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                    const __m512 b = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
                    TS_EACH(t, T) {
                        even[r][t] = _mm512_fmadd_ps(a, w_even[t], even[r][t]);
                        odd[r][t] = _mm512_fmadd_ps(b, w_odd[t], odd[r][t]);
                    }
                }
            }
            TS_EACH(r, R)
                TS_EACH(t, T) sum[r][t] = _mm512_add_ps(sum[r][t], _mm512_add_ps(even[r][t], odd[r][t]));
        });
        TS_EACH(r, R)
            TS_EACH(t, T) __asm__ volatile("" : "+v"(sum[r][t]));
        _mm_setcsr(mode);
        TS_EACH(r, R)
            TS_EACH(t, T) write(to, row + r, panel + t, sum[r][t]);
    }
};

}  // namespace
}  // namespace ts
