// Products by 256-bit vectors, included by one file for each namespace: AVX2 alone, and with AVX-VNNI. TS_TARGET names
// the namespace.
#include "blocks.h"
#include "products.h"

#include <immintrin.h>

namespace ts::TS_TARGET {
namespace {

struct Fit256 {
    static constexpr int kMaxRows = 4;
    static constexpr int tiles_of(int r) { return r == 1 ? 4 : r == 2 ? 2 : 1; }  // two vectors a tile, 16 registers
};

inline __m256i load(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

inline __m256i word(const void* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return _mm256_set1_epi32(bits);
}

inline __m256 scales_of(const Walk& to, int64_t tile, int half) {
    return _mm256_loadu_ps(layout::output_scales(to.w) + tile * kPanelOutputs + half * 8);
}

// All ones in the first `count` words.
inline __m256i first_words(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// y[row, 8 outputs of the tile's half] = value (+ bias) (+ what was there).
inline void write(const Walk& to, int64_t row, int64_t tile, int half, __m256 value) {
    const int64_t n = tile * kPanelOutputs + half * 8, left = to.w.n - n;
    if (left <= 0) return;
    float* y = to.y + row * to.ldy + n;
    if (left >= 8) {
        if (to.w.bias) value = _mm256_add_ps(value, _mm256_loadu_ps(to.w.bias + n));
        if (to.add) value = _mm256_add_ps(_mm256_loadu_ps(y), value);
        _mm256_storeu_ps(y, value);
        return;
    }
    const __m256i mask = first_words(left);
    if (to.w.bias) value = _mm256_add_ps(value, _mm256_maskload_ps(to.w.bias + n, mask));
    if (to.add) value = _mm256_add_ps(_mm256_maskload_ps(y, mask), value);
    _mm256_maskstore_ps(y, mask, value);
}

#ifdef __AVXVNNI__

inline void add_products(__m256i& sum, __m256i unsigned_bytes, __m256i signed_bytes) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(unsigned_bytes), "x"(signed_bytes));
}

#else

// vpmaddubsw would cut sums of two products at 16 bits; 16-bit factors are exact.
inline void add_products(__m256i& sum, __m256i unsigned_bytes, __m256i signed_bytes) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(unsigned_bytes, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(unsigned_bytes, 8), _mm256_srai_epi16(signed_bytes, 8));
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}

#endif

#define TS_EACH_SUM   \
    TS_EACH(r, R)     \
        TS_EACH(t, T) \
            TS_EACH(h, 2)
#define TS_EACH_VECTOR \
    TS_EACH(t, T)      \
        TS_EACH(h, 2)

struct W8A8 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = padded(to.w.k), n_steps = k / 4, tile_bytes = n_steps * kKRowBytes;
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<int8_t, R> codes(to.rows.codes + row * k, k);
        __m256i sum[R][T][2];
        TS_EACH_SUM
            sum[r][t][h] = _mm256_setzero_si256();
        for_steps<T>(to, n_steps, tile_bytes,
                     [&](int64_t s, int64_t first, int64_t others) __attribute__((always_inline)) {
            __m256i w[T][2];
            TS_EACH_VECTOR {
                const char* from = weights + t * tile_bytes + s * kKRowBytes;
                if (h == 0) _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                w[t][h] = load(from + h * 32);
            }
            TS_EACH(r, R) {
                const __m256i a = word(codes[r] + s * 4);
                TS_EACH_VECTOR
                    add_products(sum[r][t][h], w[t][h], a);
            }
        });
        const int64_t n_sums = sums_per_row(to.w.k);
        TS_EACH_SUM {
            // Weights are unsigned, 128 too large: Σ(w + 128)·a − 128·Σa.
            const __m256i excess = _mm256_set1_epi32(128 * to.rows.sums[(row + r) * n_sums]);
            const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum[r][t][h], excess));
            const __m256 scaled = _mm256_mul_ps(exact, _mm256_set1_ps(to.rows.scales[row + r]));
            write(to, row + r, tile + t, h, _mm256_mul_ps(scaled, scales_of(to, tile + t, h)));
        }
    }
};

struct Int8 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = to.w.k, tile_bytes = layout::tile_bytes(Format::INT8, 0, k);
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<float, R> x(to.rows.f32 + row * k, k);
        __m256 sum[R][T][2];
        TS_EACH_SUM
            sum[r][t][h] = _mm256_setzero_ps();
        const auto step = [&](int64_t s, int n_inputs, int64_t first, int64_t others) __attribute__((always_inline)) {
            TS_EACH(j, 4) {
                if (j >= n_inputs) break;
                __m256 value[T][2];
                TS_EACH_VECTOR {
                    const char* from = weights + t * tile_bytes + s * kKRowBytes;
                    if (h == 0 && j == 0) _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                    const __m256i w = _mm256_xor_si256(load(from + h * 32), _mm256_set1_epi8(char(0x80)));
                    value[t][h] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * j), 24));
                }
                TS_EACH(r, R) {
                    const __m256 a = _mm256_set1_ps(x[r][s * 4 + j]);
                    TS_EACH_VECTOR
                        sum[r][t][h] = _mm256_fmadd_ps(a, value[t][h], sum[r][t][h]);
                }
            }
        };
        for_steps<T>(to, k / 4, tile_bytes,
                     [&](int64_t s, int64_t first, int64_t others)
                         __attribute__((always_inline)) { step(s, 4, first, others); });
        if (k % 4) step(k / 4, int(k % 4), 0, 0);
        TS_EACH_SUM
            write(to, row + r, tile + t, h, _mm256_mul_ps(sum[r][t][h], scales_of(to, tile + t, h)));
    }
};

struct F32 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = to.w.k, tile_bytes = k * kKRowBytes;
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<float, R> x(to.rows.f32 + row * k, k);
        __m256 sum[R][T][2];
        TS_EACH_SUM
            sum[r][t][h] = _mm256_setzero_ps();
        for_steps<T>(to, k, tile_bytes, [&](int64_t s, int64_t first, int64_t others) __attribute__((always_inline)) {
            __m256 w[T][2];
            TS_EACH_VECTOR {
                const char* from = weights + t * tile_bytes + s * kKRowBytes;
                if (h == 0) _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                w[t][h] = _mm256_castsi256_ps(load(from + h * 32));
            }
            TS_EACH(r, R) {
                const __m256 a = _mm256_set1_ps(x[r][s]);
                TS_EACH_VECTOR
                    sum[r][t][h] = _mm256_fmadd_ps(a, w[t][h], sum[r][t][h]);
            }
        });
        TS_EACH_SUM
            write(to, row + r, tile + t, h, sum[r][t][h]);
    }
};

struct Bf16 {
    template <int R, int T>
    static void block(const Walk& to, int64_t row, int64_t tile) {
        const int64_t k = padded(to.w.k), n_steps = k / 2, tile_bytes = n_steps * kKRowBytes;
        const char* weights = layout::tile(to.w, tile);
        const RowPointers<uint16_t, R> x(to.rows.bf16 + row * k, k);
        const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
        __m256 sum[R][T][2];
        TS_EACH_SUM
            sum[r][t][h] = _mm256_setzero_ps();
        for_steps<T>(to, n_steps, tile_bytes,
                     [&](int64_t s, int64_t first, int64_t others) __attribute__((always_inline)) {
            __m256i w[T][2];
            TS_EACH_VECTOR {
                const char* from = weights + t * tile_bytes + s * kKRowBytes;
                if (h == 0) _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                w[t][h] = load(from + h * 32);
            }
            TS_EACH(r, R) {
                const __m256i both = word(x[r] + s * 2);
                const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
                const __m256 b = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
                TS_EACH_VECTOR {
                    sum[r][t][h] =
                        _mm256_fmadd_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(w[t][h], 16)), sum[r][t][h]);
                    sum[r][t][h] =
                        _mm256_fmadd_ps(b, _mm256_castsi256_ps(_mm256_and_si256(w[t][h], upper)), sum[r][t][h]);
                }
            }
        });
        TS_EACH_SUM
            write(to, row + r, tile + t, h, sum[r][t][h]);
    }
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
        const __m256i low_half = _mm256_set1_epi8(15);
        __m256 total[R][T][2];
        TS_EACH_SUM
            total[r][t][h] = _mm256_setzero_ps();
        for (int64_t g = 0; g < n_groups; ++g) {
            __m256i sum[R][T][2];
            TS_EACH_SUM
                sum[r][t][h] = _mm256_setzero_si256();
            const int64_t end = (g + 1) * group_steps < n_steps ? (g + 1) * group_steps : n_steps;
            const bool past_end = end * kKRowBytes + ahead.distance > n_steps * kKRowBytes;
            const int64_t first = past_end ? ahead.first_past_end : ahead.first;
            const int64_t others = past_end ? ahead.others_past_end : ahead.others;
            for (int64_t s4 = g * group_steps; s4 < end; s4 += 4) {  // groups are of 32 inputs or multiples: 4 steps
#ifndef __AVXVNNI__
                __m256i narrow[R][T]
                              [2];  // 16-bit sums of 4 steps: 16 products of at most 15·128 each, in pairs, below 2^15
                TS_EACH_SUM
                    narrow[r][t][h] = _mm256_setzero_si256();
#endif
                for (int64_t s = s4; s < s4 + 4; ++s) {
                    TS_EACH_VECTOR {
                        const char* from = weights + t * tile_bytes + head + s * kKRowBytes;
                        if (h == 0) _mm_prefetch(from + (t == 0 ? first : others), _MM_HINT_T0);
                        const __m256i w = load(from + h * 32);
                        const __m256i low = _mm256_and_si256(w, low_half),
                                      high = _mm256_and_si256(_mm256_srli_epi16(w, 4), low_half);
                        TS_EACH(r, R) {
                            const __m256i a = word(codes[r] + s * 8), b = word(codes[r] + s * 8 + 4);
#ifdef __AVXVNNI__
                            add_products(sum[r][t][h], low, a);
                            add_products(sum[r][t][h], high, b);
#else
                            const __m256i pairs =
                                _mm256_add_epi16(_mm256_maddubs_epi16(low, a), _mm256_maddubs_epi16(high, b));
                            narrow[r][t][h] = _mm256_add_epi16(narrow[r][t][h], pairs);
#endif
                        }
                    }
                }
#ifndef __AVXVNNI__
                TS_EACH_SUM
                    sum[r][t][h] =
                        _mm256_add_epi32(sum[r][t][h], _mm256_madd_epi16(narrow[r][t][h], _mm256_set1_epi16(1)));
#endif
            }
            TS_EACH_VECTOR {
                const char* from = weights + t * tile_bytes;
                const __m256 scale =
                    _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + g * 32 + h * 16)));
                const __m128i zeros =
                    _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + n_groups * 32 + g * 16 + h * 8));
                const __m256 zero = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(zeros));
                TS_EACH(r, R) {
                    const __m256 code_sum = _mm256_set1_ps(code_sums[r * n_groups + g]);
                    const __m256 exact = _mm256_fnmadd_ps(zero, code_sum, _mm256_cvtepi32_ps(sum[r][t][h]));
                    total[r][t][h] = _mm256_fmadd_ps(scale, exact, total[r][t][h]);
                }
            }
        }
        TS_EACH_SUM {
            const __m256 scaled = _mm256_mul_ps(total[r][t][h], _mm256_set1_ps(to.rows.scales[row + r]));
            write(to, row + r, tile + t, h, _mm256_mul_ps(scaled, scales_of(to, tile + t, h)));
        }
    }
};

// 32 values of a row from i on, zeros behind k.
inline void load_padded(const float* x, int64_t i, int64_t k, __m256 (&values)[4]) {
    for (int part = 0; part < 4; ++part) {
        const int64_t from = i + part * 8, left = k - from;
        values[part] = left >= 8  ? _mm256_loadu_ps(x + from)
                       : left > 0 ? _mm256_maskload_ps(x + from, first_words(left))
                                  : _mm256_setzero_ps();
    }
}

inline int32_t add_lanes(__m256i words) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

void quantize_row(const float* x, int64_t k, int8_t* codes, float& scale, int32_t* sums) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    // As integers: NaN is above all numbers, and stays.
    __m256i largest = _mm256_castps_si256(_mm256_set1_ps(kSmallestMaximum));
    __m256 values[4];
    for (int64_t i = 0; i < k; i += 32) {
        load_padded(x, i, k, values);
        for (const __m256 part : values)
            largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(part), magnitude));
    }
    __m128i top = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
    const int bits = _mm_cvtsi128_si32(_mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1)));
    float maximum;
    __builtin_memcpy(&maximum, &bits, 4);
    scale = maximum / 127.0f;
    const __m256 inverse = _mm256_set1_ps(127.0f / maximum), limit = _mm256_set1_ps(127.5f);
    int32_t all = 0;
    for (int64_t i = 0; i < padded(k); i += 32) {
        load_padded(x, i, k, values);
        __m256i whole[4];
        for (int part = 0; part < 4; ++part) {
            const __m256 value = _mm256_mul_ps(values[part], inverse);
            const __m256 finite =
                _mm256_cmp_ps(_mm256_and_ps(value, _mm256_castsi256_ps(magnitude)), limit, _CMP_LT_OQ);
            whole[part] = _mm256_cvtps_epi32(_mm256_and_ps(value, finite));
        }
        const __m256i mixed =
            _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
        const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), bytes);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
        sums[1 + i / 32] = add_lanes(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        all += sums[1 + i / 32];
    }
    sums[0] = all;
}

// To nearest even, in integers: the bits of NaN are set apart.
__m256i bf16_of(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values), upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), nan);
}

void round_row(const float* x, int64_t k, uint16_t* to) {
    __m256 values[4];
    for (int64_t i = 0; i < padded(k); i += 32) {
        load_padded(x, i, k, values);
        for (int pair = 0; pair < 2; ++pair) {
            const __m256i mixed = _mm256_packus_epi32(bf16_of(values[2 * pair]), bf16_of(values[2 * pair + 1]));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 16 * pair), _mm256_permute4x64_epi64(mixed, 0xd8));
        }
    }
}

}  // namespace

void product(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    switch (w.format) {
        case Format::F32: return product_by<F32, Fit256>(w, rows, n0, n1, y, ldy, add);
        case Format::BF16: return product_by<Bf16, Fit256>(w, rows, n0, n1, y, ldy, add);
        case Format::W8A8: return product_by<W8A8, Fit256>(w, rows, n0, n1, y, ldy, add);
        case Format::INT8: return product_by<Int8, Fit256>(w, rows, n0, n1, y, ldy, add);
        case Format::INT4: sum_groups(w, rows); return product_by<Int4, Fit256>(w, rows, n0, n1, y, ldy, add);
    }
}

void prepare_rows(Format format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last) {
    const int64_t stride = padded(k), n_sums = sums_per_row(k);
    for (int64_t m = first; m < last; ++m) {
        if (format == Format::BF16) round_row(x + m * k, k, const_cast<uint16_t*>(out.bf16) + m * stride);
        else
            quantize_row(x + m * k, k, const_cast<int8_t*>(out.codes) + m * stride, const_cast<float*>(out.scales)[m],
                         const_cast<int32_t*>(out.sums) + m * n_sums);
    }
}

uint64_t sum_words(const uint64_t* words, int64_t n_words) {
    __m256i sums[8];
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + 32 <= n_words; i += 32) {
        TS_EACH(j, 8) {
            const char* from = reinterpret_cast<const char*>(words + i + 4 * j);
            if (j % 2 == 0) _mm_prefetch(from + kPrefetchDistanceBytes / 2, _MM_HINT_T0);
            sums[j] = _mm256_add_epi64(sums[j], load(from));
        }
    }
    uint64_t all = 0;
    for (const __m256i sum : sums) {
        uint64_t parts[4];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), sum);
        all += parts[0] + parts[1] + parts[2] + parts[3];
    }
    for (; i < n_words; ++i) all += words[i];
    return all;
}

}  // namespace ts::TS_TARGET
