// Products by AVX-512 with VNNI.
#include "blocks_avx512.h"
#include "products.h"

namespace ts::avx512 {
namespace {

struct W8A8 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = padded(to.w.k), n_steps = k / 4, tile_bytes = n_steps * kKRowBytes;
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<int8_t, R> codes(to.rows.codes + row * k, k);
        __m512i sum[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) sum[r][t] = _mm512_setzero_si512();
        for_steps<T>(to, n_steps, tile_bytes,
                     [&](int64_t s, int64_t first, int64_t others) __attribute__((always_inline)) {
            __m512i w[T];
            TS_EACH(t, T) {
                const char* from = weights + t * tile_bytes + s * kKRowBytes;
                _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                w[t] = _mm512_loadu_si512(from);
            }
            TS_EACH(r, R) {
                const __m512i a = word(codes[r] + s * 4);
                TS_EACH(t, T) add_products(sum[r][t], w[t], a);
            }
        });
        const int64_t n_sums = sums_per_row(to.w.k);
        TS_EACH(r, R) {
            // Weights are unsigned, 128 too large: Σ(w + 128)·a − 128·Σa.
            const __m512i excess = _mm512_set1_epi32(128 * to.rows.sums[(row + r) * n_sums]);
            const __m512 row_scale = _mm512_set1_ps(to.rows.scales[row + r]);
            TS_EACH(t, T) {
                const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[r][t], excess));
                write(to, row + r, tile + t, _mm512_mul_ps(_mm512_mul_ps(exact, row_scale), scales_of(to, tile + t)));
            }
        }
    }
};

struct Int8 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = to.w.k, tile_bytes = layout::tile_bytes(Format::INT8, 0, k);
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<float, R> x(to.rows.f32 + row * k, k);
        __m512 sum[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) sum[r][t] = _mm512_setzero_ps();
        const auto step = [&](int64_t s, int n_inputs, int64_t first, int64_t others) __attribute__((always_inline)) {
            __m512i w[T];
            TS_EACH(t, T) {
                const char* from = weights + t * tile_bytes + s * kKRowBytes;
                _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                w[t] = _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(char(0x80)));
            }
            TS_EACH(j, 4) {
                if (j >= n_inputs) break;
                __m512 value[T];
                TS_EACH(t, T)
                    value[t] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w[t], unsigned(24 - 8 * j)), 24));
                TS_EACH(r, R) {
                    const __m512 a = _mm512_set1_ps(x[r][s * 4 + j]);
                    TS_EACH(t, T) sum[r][t] = _mm512_fmadd_ps(a, value[t], sum[r][t]);
                }
            }
        };
        for_steps<T>(to, k / 4, tile_bytes,
                     [&](int64_t s, int64_t first, int64_t others)
                         __attribute__((always_inline)) { step(s, 4, first, others); });
        if (k % 4) step(k / 4, int(k % 4), 0, 0);
        TS_EACH(r, R)
            TS_EACH(t, T) write(to, row + r, tile + t, _mm512_mul_ps(sum[r][t], scales_of(to, tile + t)));
    }
};

struct F32 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = to.w.k, tile_bytes = k * kKRowBytes;
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<float, R> x(to.rows.f32 + row * k, k);
        __m512 sum[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) sum[r][t] = _mm512_setzero_ps();
        for_steps<T>(to, k, tile_bytes, [&](int64_t s, int64_t first, int64_t others) __attribute__((always_inline)) {
            __m512 w[T];
            TS_EACH(t, T) {
                const char* from = weights + t * tile_bytes + s * kKRowBytes;
                _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                w[t] = _mm512_loadu_ps(from);
            }
            TS_EACH(r, R) {
                const __m512 a = _mm512_set1_ps(x[r][s]);
                TS_EACH(t, T) sum[r][t] = _mm512_fmadd_ps(a, w[t], sum[r][t]);
            }
        });
        TS_EACH(r, R)
            TS_EACH(t, T) write(to, row + r, tile + t, sum[r][t]);
    }
};

// Without vdpbf16ps: the two halves of a word are widened to fp32.
struct Bf16 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = padded(to.w.k), n_steps = k / 2, tile_bytes = n_steps * kKRowBytes;
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<uint16_t, R> x(to.rows.bf16 + row * k, k);
        const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
        __m512 sum[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) sum[r][t] = _mm512_setzero_ps();
        for_steps<T>(to, n_steps, tile_bytes,
                     [&](int64_t s, int64_t first, int64_t others) __attribute__((always_inline)) {
            __m512 even[T], odd[T];
            TS_EACH(t, T) {
                const char* from = weights + t * tile_bytes + s * kKRowBytes;
                _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                const __m512i w = _mm512_loadu_si512(from);
                even[t] = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
                odd[t] = _mm512_castsi512_ps(_mm512_and_si512(w, upper));
            }
            TS_EACH(r, R) {
                const __m512i both = word(x[r] + s * 2);
                const __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                const __m512 b = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
                TS_EACH(t, T) {
                    sum[r][t] = _mm512_fmadd_ps(a, even[t], sum[r][t]);
                    sum[r][t] = _mm512_fmadd_ps(b, odd[t], sum[r][t]);
                }
            }
        });
        TS_EACH(r, R)
            TS_EACH(t, T) write(to, row + r, tile + t, sum[r][t]);
    }
};

// Sums of a group and of all groups side by side: twice the registers for each row and tile.
struct FitInt4 {
    static constexpr int kMaxRows = 8;
    static constexpr int tiles_of(int r) { return r == 1 ? 8 : r <= 3 ? 4 : 2; }
};

struct Int4 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = padded(to.w.k), n_steps = k / 8, n_groups = layout::groups(to.w.k, to.w.group),
                      group_steps = to.w.group / 8;
        const int64_t head = layout::head_bytes(Format::INT4, to.w.group, to.w.k),
                      tile_bytes = head + n_steps * kKRowBytes;
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<int8_t, R> codes(to.rows.codes + row * k, k);
        const Ahead<T> ahead(to, n_steps * kKRowBytes, tile_bytes);
        const float* code_sums = group_sums.values + row * n_groups;
        const __m512i low_half = _mm512_set1_epi8(15);
        __m512 total[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) total[r][t] = _mm512_setzero_ps();
        for (int64_t g = 0; g < n_groups; ++g) {
            __m512i sum[R][T];
            TS_EACH(r, R)
                TS_EACH(t, T) sum[r][t] = _mm512_setzero_si512();
            const int64_t end = (g + 1) * group_steps < n_steps ? (g + 1) * group_steps : n_steps;
            const bool past_end = end * kKRowBytes + ahead.distance > n_steps * kKRowBytes;
            const int64_t first = past_end ? ahead.first_past_end : ahead.first;
            const int64_t others = past_end ? ahead.others_past_end : ahead.others;
            for (int64_t s = g * group_steps; s < end; ++s) {
                __m512i low[T], high[T];
                TS_EACH(t, T) {
                    const char* from = weights + t * tile_bytes + head + s * kKRowBytes;
                    _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                    const __m512i w = _mm512_loadu_si512(from);
                    low[t] = _mm512_and_si512(w, low_half);
                    high[t] = _mm512_and_si512(_mm512_srli_epi16(w, 4), low_half);
                }
                TS_EACH(r, R) {
                    const __m512i a = word(codes[r] + s * 8), b = word(codes[r] + s * 8 + 4);
                    TS_EACH(t, T) {
                        add_products(sum[r][t], low[t], a);
                        add_products(sum[r][t], high[t], b);
                    }
                }
            }
            TS_EACH(t, T) {
                const char* from = weights + t * tile_bytes;
                const __m512 scale =
                    _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + g * 32)));
                const __m128i zeros = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + n_groups * 32 + g * 16));
                const __m512 zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zeros));
                TS_EACH(r, R) {
                    const __m512 code_sum = _mm512_set1_ps(code_sums[r * n_groups + g]);
                    const __m512 exact = _mm512_fnmadd_ps(zero, code_sum, _mm512_cvtepi32_ps(sum[r][t]));
                    total[r][t] = _mm512_fmadd_ps(scale, exact, total[r][t]);
                }
            }
        }
        TS_EACH(r, R) {
            const __m512 row_scale = _mm512_set1_ps(to.rows.scales[row + r]);
            TS_EACH(t, T)
                write(to, row + r, tile + t,
                      _mm512_mul_ps(_mm512_mul_ps(total[r][t], row_scale), scales_of(to, tile + t)));
        }
    }
};

void quantize_row(const float* x, int64_t k, int8_t* codes, float& scale, int32_t* sums) {
    const int64_t whole = k / 16 * 16;
    const __mmask16 rest = __mmask16((1u << (k - whole)) - 1);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    // As integers: NaN is above all numbers, and stays.
    __m512i largest[2] = {_mm512_castps_si512(_mm512_set1_ps(kSmallestMaximum)), _mm512_setzero_si512()};
    for (int64_t i = 0; i < whole; i += 16) {
        __m512i& so_far = largest[(i / 16) % 2];
        so_far = _mm512_max_epi32(so_far, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
    }
    largest[1] = _mm512_max_epi32(largest[1], _mm512_and_si512(_mm512_maskz_loadu_epi32(rest, x + whole), magnitude));
    const int bits = _mm512_reduce_max_epi32(_mm512_max_epi32(largest[0], largest[1]));
    float maximum;
    __builtin_memcpy(&maximum, &bits, 4);
    scale = maximum / 127.0f;
    const __m512 inverse = _mm512_set1_ps(127.0f / maximum);
    const __m256i ones = _mm256_set1_epi8(1);
    int32_t all = 0;
    for (int64_t i = 0; i < padded(k); i += 32) {
        __m128i half[2];
        for (int h = 0; h < 2; ++h) {
            const int64_t from = i + 16 * h;
            const __mmask16 mask = from + 16 <= k ? __mmask16(0xffff) : from < k ? rest : __mmask16(0);
            const __m512 values = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + from), inverse);
            const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(values), _mm512_set1_ps(127.5f), _CMP_LT_OQ);
            half[h] = _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(finite, values));
        }
        const __m256i both = _mm256_set_m128i(half[1], half[0]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), both);
        const __m256i words = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, both);
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
        sums[1 + i / 32] = _mm_cvtsi128_si32(sum);
        all += sums[1 + i / 32];
    }
    sums[0] = all;
}

// To nearest even, in integers: the bits of NaN are set apart.
__m256i bf16_of(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(rounded);
}

}  // namespace

void product(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    switch (w.format) {
        case Format::F32: return product_by<F32, Fit512>(w, rows, n0, n1, y, ldy, add);
        case Format::BF16: return product_by<Bf16, Fit512>(w, rows, n0, n1, y, ldy, add);
        case Format::W8A8: return product_by<W8A8, Fit512>(w, rows, n0, n1, y, ldy, add);
        case Format::INT8: return product_by<Int8, Fit512>(w, rows, n0, n1, y, ldy, add);
        case Format::INT4: sum_groups(w, rows); return product_by<Int4, FitInt4>(w, rows, n0, n1, y, ldy, add);
    }
}

void prepare_rows(Format format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last) {
    const int64_t stride = padded(k), n_sums = sums_per_row(k);
    for (int64_t m = first; m < last; ++m) {
        const float* row = x + m * k;
        if (format != Format::BF16) {
            quantize_row(row, k, const_cast<int8_t*>(out.codes) + m * stride, const_cast<float*>(out.scales)[m],
                         const_cast<int32_t*>(out.sums) + m * n_sums);
            continue;
        }
        auto* to = const_cast<uint16_t*>(out.bf16) + m * stride;
        for (int64_t i = 0; i < stride; i += 16) {
            const __mmask16 mask = i + 16 <= k ? __mmask16(0xffff)
                                   : i < k     ? __mmask16((1u << (k - i)) - 1)
                                               : __mmask16(0);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), bf16_of(_mm512_maskz_loadu_ps(mask, row + i)));
        }
    }
}

// In eight streams side by side, as the products of one row read eight tiles: the processor fetches several ahead at
// once.
uint64_t sum_words(const uint64_t* words, int64_t n_words) {
    constexpr int64_t kStream = 4096;  // words of each at a time
    __m512i sums[8];
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 8 * kStream <= n_words; i += 8 * kStream)
        for (int64_t at = i; at < i + kStream; at += 8) {
            TS_EACH(j, 8) {
                const uint64_t* from = words + at + j * kStream;
                _mm_prefetch(reinterpret_cast<const char*>(from) + kPrefetchDistanceBytes / 8, _MM_HINT_T0);
                sums[j] = _mm512_add_epi64(sums[j], _mm512_loadu_si512(from));
            }
        }
    uint64_t all = 0;
    for (auto& sum : sums) all += uint64_t(_mm512_reduce_add_epi64(sum));
    for (; i < n_words; ++i) all += words[i];
    return all;
}

}  // namespace ts::avx512
