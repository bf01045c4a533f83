// The products of packed matrices, once for all instruction sets, over vectors of sixteen lanes: a panel's outputs. The
// file that includes this one has included the instruction set's vectors_<name>.h before: the two types F32x16 and
// I32x16, what is done with them, and how many rows and panels its registers hold.
#pragma once
#include "blocks.h"
#include "kernels.h"

namespace ts {
namespace {

// y[row, 16 outputs of the panel] = value (+ bias) (+ what was there).
TS_INLINE void write(const ProductArgs& to, int64_t row, int64_t panel, F32x16 value) {
    const int64_t n = panel * kPanelOutputs, left = to.w.n - n;
    float* y = to.y + row * to.ldy + n;
    if (to.w.bias) value = add(value, load_first(to.w.bias + n, left));
    if (to.add) value = add(load_first(y, left), value);
    store_first(y, value, left);
}

TS_INLINE F32x16 scales_of(const ProductArgs& to, int64_t panel) {
    return load_floats(layout::output_scales(to.w) + panel * kPanelOutputs);
}

TS_INLINE I32x16 broadcast_word(const void* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return broadcast(bits);
}

// The words of a row of panel t of those side by side, when what comes later is on its way.
TS_INLINE I32x16 fetch_words(const char* from, const Ahead& ahead, int t) {
    fetch(from, ahead, t);
    return load_words(from);
}

struct W8A8 {
    template <int R, int T>
    static void block(const ProductArgs& to, int64_t row, int64_t panel) {
        const int64_t k = padded(to.w.k), n_k_rows = k / 4, panel_bytes = n_k_rows * kKRowBytes;
        const char* weights = layout::panel(to.w, panel);
        const RowPointers<int8_t, R> codes(to.rows.codes + row * k, k);
        I32x16 sum[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) sum[r][t] = zero_words();
        for_k_rows<T>(to, n_k_rows, panel_bytes, [&](int64_t s, const Ahead& ahead) __attribute__((always_inline)) {
            I32x16 w[T];
            TS_EACH(t, T) w[t] = fetch_words(weights + t * panel_bytes + s * kKRowBytes, ahead, t);
            TS_EACH(r, R) {
                const I32x16 a = broadcast_word(codes[r] + s * 4);
                TS_EACH(t, T) add_code_products(sum[r][t], w[t], a);
            }
        });
        const int64_t n_sums = sums_per_row(to.w.k);
        TS_EACH(r, R) {
            // Weights may be read as unsigned, 128 too large: Σ(w + 128)·a − 128·Σa.
            const I32x16 excess = broadcast(kCodeExcess * to.rows.sums[(row + r) * n_sums]);
            const F32x16 row_scale = broadcast(to.rows.scales[row + r]);
            TS_EACH(t, T) {
                const F32x16 exact = to_floats(subtract(sum[r][t], excess));
                write(to, row + r, panel + t, multiply(multiply(exact, row_scale), scales_of(to, panel + t)));
            }
        }
    }
};

struct Int8 {
    template <int J, int R, int T>
    TS_INLINE void add_input(const RowPointers<float, R>& x, int64_t s, const I32x16 (&w)[T], F32x16 (&sum)[R][T]) {
        F32x16 value[T];
        TS_EACH(t, T) value[t] = code_of<J>(w[t]);
        TS_EACH(r, R) {
            const F32x16 a = broadcast(x[r][s * 4 + J]);
            TS_EACH(t, T) sum[r][t] = fma(a, value[t], sum[r][t]);
        }
    }
    template <int R, int T>
    static void block(const ProductArgs& to, int64_t row, int64_t panel) {
        const int64_t k = to.w.k, panel_bytes = layout::panel_bytes(Format::INT8, 0, k);
        const char* weights = layout::panel(to.w, panel);
        const RowPointers<float, R> x(to.rows.f32 + row * k, k);
        F32x16 sum[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) sum[r][t] = zero_floats();
        const auto k_row = [&](int64_t s, int n_inputs, const Ahead& ahead) __attribute__((always_inline)) {
            I32x16 w[T];
            TS_EACH(t, T) w[t] = fetch_words(weights + t * panel_bytes + s * kKRowBytes, ahead, t);
            add_input<0>(x, s, w, sum);
            if (n_inputs > 1) add_input<1>(x, s, w, sum);
            if (n_inputs > 2) add_input<2>(x, s, w, sum);
            if (n_inputs > 3) add_input<3>(x, s, w, sum);
        };
        for_k_rows<T>(to, k / 4, panel_bytes,
                      [&](int64_t s, const Ahead& ahead) __attribute__((always_inline)) { k_row(s, 4, ahead); });
        if (k % 4) k_row(k / 4, int(k % 4), Ahead{});
        TS_EACH(r, R)
            TS_EACH(t, T) write(to, row + r, panel + t, multiply(sum[r][t], scales_of(to, panel + t)));
    }
};

struct F32 {
    template <int R, int T>
    static void block(const ProductArgs& to, int64_t row, int64_t panel) {
        const int64_t k = to.w.k, panel_bytes = k * kKRowBytes;
        const char* weights = layout::panel(to.w, panel);
        const RowPointers<float, R> x(to.rows.f32 + row * k, k);
        F32x16 sum[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) sum[r][t] = zero_floats();
        for_k_rows<T>(to, k, panel_bytes, [&](int64_t s, const Ahead& ahead) __attribute__((always_inline)) {
            F32x16 w[T];
            TS_EACH(t, T) {
                const char* from = weights + t * panel_bytes + s * kKRowBytes;
                fetch(from, ahead, t);
                w[t] = load_floats(from);
            }
            TS_EACH(r, R) {
                const F32x16 a = broadcast(x[r][s]);
                TS_EACH(t, T) sum[r][t] = fma(a, w[t], sum[r][t]);
            }
        });
        TS_EACH(r, R)
            TS_EACH(t, T) write(to, row + r, panel + t, sum[r][t]);
    }
};

struct Bf16 {
    template <int R, int T>
    static void block(const ProductArgs& to, int64_t row, int64_t panel) {
        const int64_t k = padded(to.w.k), n_k_rows = k / 2, panel_bytes = n_k_rows * kKRowBytes;
        const char* weights = layout::panel(to.w, panel);
        const RowPointers<uint16_t, R> x(to.rows.bf16 + row * k, k);
        F32x16 sum[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) sum[r][t] = zero_floats();
        for_k_rows<T>(to, n_k_rows, panel_bytes, [&](int64_t s, const Ahead& ahead) __attribute__((always_inline)) {
            if constexpr (RegisterBlocking::half_by_half(R)) {
                I32x16 a[R];
                TS_EACH(r, R) a[r] = broadcast_word(x[r] + s * 2);
                TS_EACH(t, T)
                    add_bf16_panel(sum, t, fetch_words(weights + t * panel_bytes + s * kKRowBytes, ahead, t), a);
                return;
            }
            I32x16 w[T];
            TS_EACH(t, T) w[t] = fetch_words(weights + t * panel_bytes + s * kKRowBytes, ahead, t);
            TS_EACH(r, R) {
                const I32x16 a = broadcast_word(x[r] + s * 2);
                TS_EACH(t, T) add_bf16_products(sum[r][t], w[t], a);
            }
        });
        TS_EACH(r, R)
            TS_EACH(t, T) write(to, row + r, panel + t, sum[r][t]);
    }
};

// Many rows of bf16 where a product of fp32 costs no more: each row is widened once for all outputs, each panel once
// for all rows, and more rows have room beside a panel. Sums are made in the order of Bf16, to the same bits.
thread_local Scratch<float> widened_inputs, widened_panel;

struct WidenedBlocking {
    static constexpr int kMaxRows = 6;  // twelve of AVX2's registers for sums: each ends before the next is added to it
    static constexpr int panels_of(int) { return 1; }
};
struct Widened {
    template <int R, int>
    static void block(const ProductArgs& to, int64_t row, int64_t panel) {
        const int64_t k = padded(to.w.k);
        // The walk takes all blocks of rows over one panel before the next.
        const float* weights = to.block == 0 ? widen(to, panel, k) : widened_panel.values;
        const RowPointers<float, R> x(to.rows.f32 + row * k, k);
        F32x16 sum[R];
        TS_EACH(r, R) sum[r] = zero_floats();
        for (int64_t i = 0; i < k; ++i) {
            const F32x16 w = load_floats(weights + i * kPanelOutputs);
            TS_EACH(r, R) sum[r] = fma(broadcast(x[r][i]), w, sum[r]);
        }
        TS_EACH(r, R) write(to, row + r, panel, sum[r]);
    }

    // The k inputs of a panel, one after another; the next panel is fetched meanwhile.
    static const float* widen(const ProductArgs& to, int64_t panel, int64_t k) {
        const char* from = layout::panel(to.w, panel);
        const int64_t ahead = to.last ? 0 : k / 2 * kKRowBytes;
        float* wide = widened_panel.at_least(k * kPanelOutputs);
        for (int64_t s = 0; s < k / 2; ++s, from += kKRowBytes, wide += 2 * kPanelOutputs) {
            __builtin_prefetch(from + ahead, 0, 2);
            Words pairs;
            __builtin_memcpy(&pairs, from, sizeof(pairs));
            store(wide, (Floats)(pairs << 16));
            store(wide + kPanelOutputs, (Floats)(pairs & 0xffff0000u));
        }
        return widened_panel.values;
    }
};

// What 4-bit codes stand for: a group's scale and zero point.
struct ZeroPoints {
    static constexpr Format kFormat = Format::INT4;
    static int32_t group(const Matrix& w) { return w.group; }
    const F32x16 scale, zero;
    TS_INLINE ZeroPoints of(const Matrix&, const char* panel, int64_t n_groups, int64_t g) {
        return {load_fp16(panel + g * 32), load_uint8(panel + n_groups * 32 + g * 16)};
    }
    TS_INLINE F32x16 with(const ZeroPoints& w, F32x16 total, I32x16 sum, F32x16 code_sum) {
        return fma(w.scale, fnma(w.zero, code_sum, to_floats(sum)), total);
    }
    TS_INLINE F32x16 whole(const ProductArgs& to, int64_t panel, F32x16 total, F32x16 row_scale) {
        return multiply(multiply(total, row_scale), scales_of(to, panel));
    }
};

// A group's scale and minimum, made of codes and of its block's units.
struct Minima {
    static constexpr Format kFormat = Format::INT4_BLOCKS;
    static int32_t group(const Matrix&) { return int32_t(layout::kBlockGroup); }
    const F32x16 scale, minimum;
    TS_INLINE Minima of(const Matrix& w, const char* panel, int64_t n_groups, int64_t g) {
        const char *counts = layout::group_of_block(panel, g),
                   *units = layout::units_of_block(panel, n_groups, g, w.group);
        return {multiply(load_fp16(units), load_uint8(counts)),
                multiply(load_fp16(units + 32), load_uint8(counts + 16))};
    }
    TS_INLINE F32x16 with(const Minima& w, F32x16 total, I32x16 sum, F32x16 code_sum) {
        return fnma(w.minimum, code_sum, fma(w.scale, to_floats(sum), total));
    }
    TS_INLINE F32x16 whole(const ProductArgs&, int64_t, F32x16 total, F32x16 row_scale) {
        return multiply(total, row_scale);
    }
};

template <class Meaning>
struct Int4 {
    template <int R, int T>
    static void block(const ProductArgs& to, int64_t row, int64_t panel) {
        const int32_t group = Meaning::group(to.w);
        const int64_t k = padded(to.w.k), n_k_rows = k / 8, n_groups = layout::groups(to.w.k, group);
        const int64_t group_k_rows = group / 8, head = layout::head_bytes(Meaning::kFormat, to.w.group, to.w.k);
        const int64_t panel_bytes = head + n_k_rows * kKRowBytes;
        const char* weights = layout::panel(to.w, panel);
        const RowPointers<int8_t, R> codes(to.rows.codes + row * k, k);
        const Prefetch<T> later(to, n_k_rows * kKRowBytes, panel_bytes, head);
        const float* code_sums = group_sums.values + row * n_groups;
        constexpr int kAtOnce = Int4Blocking::panels_at_once(T);
        F32x16 total[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) total[r][t] = zero_floats();
        for (int64_t g = 0; g < n_groups; ++g) {
            I32x16 sum[R][T];
            TS_EACH(r, R)
                TS_EACH(t, T) sum[r][t] = zero_words();
            const int64_t end = (g + 1) * group_k_rows < n_k_rows ? (g + 1) * group_k_rows : n_k_rows;
            later.fetch_head(weights, g);
            for (int64_t exact = g * group_k_rows; exact < end; exact += kNibbleKRows) {  // 4 or multiples in a group
                NibbleSum narrow[R][T];
                TS_EACH(r, R)
                    TS_EACH(t, T) narrow[r][t] = nibble_sum(sum[r][t]);
                for (int64_t s = exact; s < exact + kNibbleKRows; ++s) {
                    const Ahead ahead = later.at(s * kKRowBytes);
                    TS_EACH(part, T / kAtOnce) {
                        const int panel0 = part * kAtOnce;
                        I32x16 low[kAtOnce], high[kAtOnce];
                        TS_EACH(t, kAtOnce) {
                            const char* from = weights + (panel0 + t) * panel_bytes + head + s * kKRowBytes;
                            const I32x16 w = fetch_words(from, ahead, panel0 + t);
                            low[t] = low_nibbles(w);
                            high[t] = high_nibbles(w);
                        }
                        TS_EACH(r, R) {
                            const I32x16 a = broadcast_word(codes[r] + s * 8), b = broadcast_word(codes[r] + s * 8 + 4);
                            TS_EACH(t, kAtOnce) add_nibble_products(narrow[r][panel0 + t], low[t], high[t], a, b);
                        }
                    }
                }
                TS_EACH(r, R)
                    TS_EACH(t, T) sum[r][t] = with_nibbles(sum[r][t], narrow[r][t]);
            }
            TS_EACH(t, T) {
                const Meaning meaning = Meaning::of(to.w, weights + t * panel_bytes, n_groups, g);
                TS_EACH(r, R)
                    total[r][t] =
                        Meaning::with(meaning, total[r][t], sum[r][t], broadcast(code_sums[r * n_groups + g]));
            }
        }
        TS_EACH(r, R) {
            const F32x16 row_scale = broadcast(to.rows.scales[row + r]);
            TS_EACH(t, T) write(to, row + r, panel + t, Meaning::whole(to, panel + t, total[r][t], row_scale));
        }
    }
};

struct Int8Groups {
    template <int R, int T>
    static void block(const ProductArgs& to, int64_t row, int64_t panel) {
        const int64_t k = padded(to.w.k), n_k_rows = k / 4, n_groups = layout::groups(to.w.k, to.w.group);
        const int64_t group_k_rows = to.w.group / 4, head = layout::head_bytes(Format::INT8_GROUPS, to.w.group, to.w.k);
        const int64_t panel_bytes = head + n_k_rows * kKRowBytes;
        const char* weights = layout::panel(to.w, panel);
        const RowPointers<int8_t, R> codes(to.rows.codes + row * k, k);
        const Prefetch<T> later(to, n_k_rows * kKRowBytes, panel_bytes, head);
        const float* code_sums = group_sums.values + row * n_groups;
        F32x16 total[R][T];
        TS_EACH(r, R)
            TS_EACH(t, T) total[r][t] = zero_floats();
        for (int64_t g = 0; g < n_groups; ++g) {
            I32x16 sum[R][T];
            TS_EACH(r, R)
                TS_EACH(t, T) sum[r][t] = zero_words();
            const int64_t end = (g + 1) * group_k_rows < n_k_rows ? (g + 1) * group_k_rows : n_k_rows;
            later.fetch_head(weights, g);
            for (int64_t s = g * group_k_rows; s < end; ++s) {
                const Ahead ahead = later.at(s * kKRowBytes);
                I32x16 w[T];
                TS_EACH(t, T) w[t] = fetch_words(weights + t * panel_bytes + head + s * kKRowBytes, ahead, t);
                TS_EACH(r, R) {
                    const I32x16 a = broadcast_word(codes[r] + s * 4);
                    TS_EACH(t, T) add_code_products(sum[r][t], w[t], a);
                }
            }
            TS_EACH(t, T) {
                const F32x16 scale = load_fp16(weights + t * panel_bytes + g * 32);
                TS_EACH(r, R) {
                    // Weights may be read as unsigned, 128 too large; whole numbers far below 2^24.
                    const F32x16 code_sum = broadcast(code_sums[r * n_groups + g]);
                    const F32x16 exact = fnma(broadcast(float(kCodeExcess)), code_sum, to_floats(sum[r][t]));
                    total[r][t] = fma(scale, exact, total[r][t]);
                }
            }
        }
        TS_EACH(r, R) {
            const F32x16 row_scale = broadcast(to.rows.scales[row + r]);
            TS_EACH(t, T)
                write(to, row + r, panel + t, multiply(multiply(total[r][t], row_scale), scales_of(to, panel + t)));
        }
    }
};

template <class Kernel, class Blocking = RegisterBlocking>
void product_by(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    walk<Kernel, Blocking>(ProductArgs{w, rows, y, ldy, add}, n0 / kPanelOutputs, layout::panels(n1));
}

// As many rows at a time as stay in a cache when they are widened.
void multiply_widened(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    constexpr int64_t kInputs = 1 << 18;
    const int64_t k = padded(w.k), n_rows = kInputs / k < 48 ? 48 : kInputs / k;
    for (int64_t first = 0; first < rows.m; first += n_rows) {
        Rows some = slice(rows, w.k, first, n_rows);
        float* wide = widened_inputs.at_least(some.m * k);
        for (int64_t i = 0; i < some.m * k; ++i) wide[i] = float_of_bf16(some.bf16[i]);
        some.f32 = wide;
        product_by<Widened, WidenedBlocking>(w, some, n0, n1, y + first * ldy, ldy, add);
    }
}

void multiply_rows(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    switch (w.format) {
        case Format::F32: return product_by<F32>(w, rows, n0, n1, y, ldy, add);
        case Format::BF16:
            if (rows.m >= RegisterBlocking::kWidensFrom) return multiply_widened(w, rows, n0, n1, y, ldy, add);
            return product_by<Bf16>(w, rows, n0, n1, y, ldy, add);
        case Format::W8A8: return product_by<W8A8>(w, rows, n0, n1, y, ldy, add);
        case Format::INT8: return product_by<Int8>(w, rows, n0, n1, y, ldy, add);
        case Format::INT4:
            sum_groups(w.group, w, rows);
            return product_by<Int4<ZeroPoints>, Int4Blocking>(w, rows, n0, n1, y, ldy, add);
        case Format::INT8_GROUPS:
            sum_groups(w.group, w, rows);
            return product_by<Int8Groups, Int4Blocking>(w, rows, n0, n1, y, ldy, add);
        case Format::INT4_BLOCKS:
            sum_groups(int32_t(layout::kBlockGroup), w, rows);
            return product_by<Int4<Minima>, Int4Blocking>(w, rows, n0, n1, y, ldy, add);
    }
}

// The largest magnitude of a row, kSmallestMaximum at least; NaN is above all.
float largest_of(const float* x, int64_t k) {
    I32x16 largest[2] = {magnitude_bits(broadcast(kSmallestMaximum)), zero_words()};
    for (int64_t i = 0; i < k; i += 32) {
        largest[0] = greater_words(largest[0], magnitude_bits(load_first(x + i, k - i)));
        largest[1] = greater_words(largest[1], magnitude_bits(load_first(x + i + 16, k - i - 16)));
    }
    const int32_t bits = greatest_word(greater_words(largest[0], largest[1]));
    float maximum;
    __builtin_memcpy(&maximum, &bits, 4);
    return maximum;
}

void quantize_row(const float* x, int64_t k, int8_t* codes, float& scale, int32_t* sums) {
    const float maximum = largest_of(x, k);
    scale = maximum / 127.0f;
    const F32x16 inverse = broadcast(127.0f / maximum);
    sums[0] = 0;
    for (int64_t i = 0; i < k; i += 32) {
        const F32x16 first = load_first(x + i, k - i), second = load_first(x + i + 16, k - i - 16);
        sums[1 + i / 32] = store_codes(codes + i, codes_of_floats(multiply(first, inverse)),
                                       codes_of_floats(multiply(second, inverse)));
        sums[0] += sums[1 + i / 32];
    }
}

void prepare_rows(Format format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last) {
    const int64_t stride = padded(k), n_sums = sums_per_row(k);
    for (int64_t m = first; m < last; ++m) {
        const float* row = x + m * k;
        if (format == Format::BF16) {
            auto* to = const_cast<uint16_t*>(out.bf16) + m * stride;
            for (int64_t i = 0; i < stride; i += 16) store_bf16(to + i, load_first(row + i, k - i));
        } else {
            quantize_row(row, k, const_cast<int8_t*>(out.codes) + m * stride, const_cast<float*>(out.scales)[m],
                         const_cast<int32_t*>(out.sums) + m * n_sums);
        }
    }
}

constexpr int64_t kCodesAhead = 64 * kKRowBytes;  // of thin_codes

// R rows of T panels side by side, the first of which has output `begin`.
template <int R, int T>
void thin_block(const char* weights, int64_t k, const float* scales, const SplitRows& x, int64_t begin, int64_t n0,
                int64_t n1, float* const* y, bool add_to) {
    const int64_t panel_bytes = k * kKRowBytes;
    I32x16 high[R][T], low[R][T];
    TS_EACH(r, R) {  // what weights are too large by, taken off before: the sums are exact in any order
        const SplitSums sums = *x.from(r).sums;
        TS_EACH(t, T) {
            high[r][t] = broadcast(-kCodeExcess * sums.high);
            low[r][t] = broadcast(-kCodeExcess * sums.low);
        }
    }
    for (int64_t s = 0; s < k; ++s) {
        I32x16 w[T];
        TS_EACH(t, T) {
            const char* from = weights + t * panel_bytes + s * kKRowBytes;
            __builtin_prefetch(from + kCodesAhead, 0, 3);
            w[t] = load_words(from);
        }
        TS_EACH(r, R) {
            const I32x16 upper = broadcast_word(x.high + r * x.stride + 4 * s),
                         lower = broadcast_word(x.low + r * x.stride + 4 * s);
            TS_EACH(t, T) add_code_products(high[r][t], w[t], upper);
            TS_EACH(t, T) add_code_products(low[r][t], w[t], lower);
        }
    }
    TS_EACH(r, R) {
        const F32x16 row_scale = broadcast(*x.from(r).scale);
        TS_EACH(t, T) {
            const int64_t at = begin + t * kPanelOutputs, first = n0 > at ? n0 - at : 0, last = n1 - at;
            F32x16 value = multiply(fma(to_floats(high[r][t]), broadcast(128.0f), to_floats(low[r][t])), row_scale);
            if (scales != nullptr) value = multiply(value, load_floats(scales + at));
            float* to = y[r] + at;
            if (first == 0) {
                store_first(to, add_to ? add(load_first(to, last), value) : value, last);
                continue;
            }
            float lanes[kPanelOutputs];
            store_first(lanes, value, kPanelOutputs);
            for (int64_t i = first; i < last && i < kPanelOutputs; ++i) to[i] = add_to ? to[i] + lanes[i] : lanes[i];
        }
    }
}

// R rows of the panels [panel, end), T of them side by side as long as there are so many.
template <int R, int T>
void thin_panels(const char* packed, int64_t k, const float* scales, const SplitRows& x, int64_t panel, int64_t end,
                 int64_t n0, int64_t n1, float* const* y, bool add_to) {
    for (; panel + T <= end; panel += T)
        thin_block<R, T>(packed + panel * k * kKRowBytes, k, scales, x, panel * kPanelOutputs, n0, n1, y, add_to);
    if constexpr (T > 1) thin_panels<R, T / 2>(packed, k, scales, x, panel, end, n0, n1, y, add_to);
}

void thin_codes(const void* packed, int64_t k, const float* scales, const SplitRows& x, int64_t m, int64_t n0,
                int64_t n1, float* const* y, bool add) {
    const char* weights = static_cast<const char*>(packed);
    const int64_t first = n0 / kPanelOutputs, end = layout::panels(n1);
    int64_t r = 0;
    const auto rows = [&](auto count) {  // two sums a row and panel
        constexpr int R = decltype(count)::value, T = RegisterBlocking::panels_of(2 * R);
        for (; r + R <= m; r += R) thin_panels<R, T>(weights, k, scales, x.from(r), first, end, n0, n1, y + r, add);
    };
    if constexpr (2 * 4 <= RegisterBlocking::kMaxRows) rows(std::integral_constant<int, 4>{});
    rows(std::integral_constant<int, 2>{});
    rows(std::integral_constant<int, 1>{});
}

void split_row(const float* x, int64_t k, int8_t* high, int8_t* low, float* scale, SplitSums* sums) {
    const float maximum = largest_of(x, k);
    *scale = maximum / kSplitUnits;
    *sums = {0, 0};
    const F32x16 inverse = broadcast(kSplitUnits / maximum), wide = broadcast(128.0f),
                 narrow = broadcast(1.0f / 128.0f);
    for (int64_t i = 0; i < k; i += 32) {
        I32x16 upper[2], lower[2];
        TS_EACH(j, 2) {
            const F32x16 units = multiply(load_first(x + i + 16 * j, k - i - 16 * j), inverse);
            upper[j] = codes_of_floats(multiply(units, narrow));
            lower[j] = codes_of_floats(fnma(to_floats(upper[j]), wide, units));
        }
        sums->high += store_codes(high + i, upper[0], upper[1]);
        sums->low += store_codes(low + i, lower[0], lower[1]);
    }
}

// In streams side by side, as the products of one row read panels: the processor fetches several ahead at once.
uint64_t sum_words(const uint64_t* words, int64_t n_words) {
    constexpr int64_t kStream = 4096;  // words of each at a time
    constexpr int kStreams = RegisterBlocking::panels_of(1);
    const int64_t near = prefetch_distances().near / kStreams;
    const Ahead ahead{near, near, kFetchesFar ? prefetch_distances().far / kStreams : 0};
    I32x16 sums[kStreams];
    TS_EACH(j, kStreams) sums[j] = zero_words();
    int64_t i = 0;
    for (; i + kStreams * kStream <= n_words; i += kStreams * kStream)
        for (int64_t at = i; at < i + kStream; at += 8)
            TS_EACH(j, kStreams) {
                const char* from = reinterpret_cast<const char*>(words + at + j * kStream);
                sums[j] = add_quads(sums[j], fetch_words(from, ahead, j));
            }
    uint64_t all = 0;
    TS_EACH(j, kStreams) all += sum_of_quads(sums[j]);
    for (; i < n_words; ++i) all += words[i];
    return all;
}

constexpr Kernels with_products(Kernels k) {
    k.product = multiply_rows;
    k.prepare_rows = prepare_rows;
    k.sum_words = sum_words;
    k.thin_codes = thin_codes;
    k.split_row = split_row;
    return k;
}

}  // namespace
}  // namespace ts
