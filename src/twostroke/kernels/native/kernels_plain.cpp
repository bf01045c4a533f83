// Everything by C++ alone: the reference of all products, and what runs where no faster target does.
#include "attention_body.h"
#include "elementwise_body.h"
#include "layout.h"
#include "numbers.h"
#include "sample_body.h"
#include "targets.h"

#include <algorithm>

namespace ts {
namespace {

using layout::kPanelOutputs;

struct Place {
    const Matrix& w;
    const char* panel;
    int64_t lane;
    const uint8_t* word(int64_t k_row) const {
        const char* k_rows = panel + layout::head_bytes(w.format, w.group, w.k);
        return reinterpret_cast<const uint8_t*>(k_rows + k_row * layout::kKRowBytes + lane * 4);
    }
};

float dot_f32(const Place& p, const float* x) {
    float sum = 0;
    for (int64_t i = 0; i < p.w.k; ++i) {
        float weight;
        std::memcpy(&weight, p.word(i), 4);
        sum = std::fma(x[i], weight, sum);
    }
    return sum;
}

float dot_bf16(const Place& p, const uint16_t* x) {
    float sum = 0;
    for (int64_t i = 0; i < p.w.k; ++i) {
        uint16_t weight;
        std::memcpy(&weight, p.word(i / 2) + (i % 2) * 2, 2);
        sum = std::fma(float_of_bf16(x[i]), float_of_bf16(weight), sum);
    }
    return sum;
}

float dot_int8(const Place& p, const float* x) {
    float sum = 0;
    for (int64_t i = 0; i < p.w.k; ++i) sum = std::fma(x[i], float(int(p.word(i / 4)[i % 4]) - 128), sum);
    return sum;
}

int32_t dot_w8a8(const Place& p, const int8_t* codes) {
    int64_t sum = 0;
    for (int64_t i = 0; i < p.w.k; ++i) sum += int(codes[i]) * (int(p.word(i / 4)[i % 4]) - 128);
    return int32_t(sum);
}

float dot_int4(const Place& p, const int8_t* codes) {
    const int64_t n_groups = layout::groups(p.w.k, p.w.group);
    float sum = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
        uint16_t scale;
        std::memcpy(&scale, p.panel + (g * kPanelOutputs + p.lane) * 2, 2);
        const int zero = uint8_t(p.panel[n_groups * kPanelOutputs * 2 + g * kPanelOutputs + p.lane]);
        const int64_t end = (g + 1) * p.w.group < p.w.k ? (g + 1) * p.w.group : p.w.k;
        int32_t inner = 0;
        for (int64_t i = g * p.w.group; i < end; ++i) {
            const uint8_t both = p.word(i / 8)[i % 4];
            inner += int(codes[i]) * (int(i % 8 < 4 ? both & 15 : both >> 4) - zero);
        }
        sum = std::fma(float_of_fp16(scale), float(inner), sum);
    }
    return sum;
}

float dot_int8_groups(const Place& p, const int8_t* codes) {
    const int64_t n_groups = layout::groups(p.w.k, p.w.group);
    float sum = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
        uint16_t scale;
        std::memcpy(&scale, p.panel + (g * kPanelOutputs + p.lane) * 2, 2);
        const int64_t end = std::min((g + 1) * p.w.group, p.w.k);
        int32_t inner = 0;
        for (int64_t i = g * p.w.group; i < end; ++i) inner += int(codes[i]) * (int(p.word(i / 4)[i % 4]) - 128);
        sum = std::fma(float_of_fp16(scale), float(inner), sum);
    }
    return sum;
}

float dot_int4_blocks(const Place& p, const int8_t* codes) {
    const int64_t n_groups = layout::groups(p.w.k, layout::kBlockGroup);
    float sum = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
        const char *counts = layout::group_of_block(p.panel, g) + p.lane,
                   *units = layout::units_of_block(p.panel, n_groups, g, p.w.group) + 2 * p.lane;
        float of[2];  // the group's scale and minimum
        for (int i = 0; i < 2; ++i) {
            uint16_t unit;
            std::memcpy(&unit, units + 32 * i, 2);
            of[i] = float_of_fp16(unit) * float(uint8_t(counts[kPanelOutputs * i]));
        }
        const int64_t end = std::min((g + 1) * layout::kBlockGroup, p.w.k);
        int32_t inner = 0, code_sum = 0;
        for (int64_t i = g * layout::kBlockGroup; i < end; ++i) {
            const uint8_t both = p.word(i / 8)[i % 4];
            inner += int(codes[i]) * int(i % 8 < 4 ? both & 15 : both >> 4);
            code_sum += codes[i];
        }
        sum = std::fma(of[0], float(inner), sum);
        sum = std::fma(-of[1], float(code_sum), sum);
    }
    return sum;
}

void multiply_rows(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    const float* scales = layout::output_scales(w);
    const int64_t k = w.k, k_codes = padded(k);
    for (int64_t m = 0; m < rows.m; ++m)
        for (int64_t n = n0; n < n1; ++n) {
            const Place p{w, layout::panel(w, n / kPanelOutputs), n % kPanelOutputs};
            float value = 0;
            switch (w.format) {
                case Format::F32: value = dot_f32(p, rows.f32 + m * k); break;
                case Format::BF16: value = dot_bf16(p, rows.bf16 + m * k_codes); break;
                case Format::INT8: value = dot_int8(p, rows.f32 + m * k) * scales[n]; break;
                case Format::W8A8:
                    value = float(dot_w8a8(p, rows.codes + m * k_codes)) * rows.scales[m] * scales[n];
                    break;
                case Format::INT4: value = dot_int4(p, rows.codes + m * k_codes) * rows.scales[m] * scales[n]; break;
                case Format::INT8_GROUPS:
                    value = dot_int8_groups(p, rows.codes + m * k_codes) * rows.scales[m] * scales[n];
                    break;
                case Format::INT4_BLOCKS: value = dot_int4_blocks(p, rows.codes + m * k_codes) * rows.scales[m]; break;
            }
            if (w.bias) value += w.bias[n];
            float& target = y[m * ldy + n];
            target = add ? target + value : value;
        }
}

// The largest magnitude of a row, compared as integers: NaN is above all numbers, and stays.
float largest_of(const float* x, int64_t k) {
    uint32_t bits = bits_of_float(kSmallestMaximum);
    for (int64_t i = 0; i < k; ++i) bits = std::max(bits, bits_of_float(x[i]) & 0x7fffffff);
    return float_of_bits(bits);
}

int8_t code_of(float value) {  // not finite: the scale says so
    const float code = std::nearbyint(value);
    return std::fabs(code) <= 127.0f ? int8_t(code) : int8_t{0};
}

void prepare_rows(Format format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last) {
    const int64_t stride = padded(k), n_sums = sums_per_row(k);
    for (int64_t m = first; m < last; ++m) {
        const float* row = x + m * k;
        if (format == Format::BF16) {
            auto* to = const_cast<uint16_t*>(out.bf16) + m * stride;
            for (int64_t i = 0; i < stride; ++i) to[i] = i < k ? bf16_of_float(row[i]) : uint16_t{0};
            continue;
        }
        const float largest = largest_of(row, k), inverse = 127.0f / largest;
        auto* codes = const_cast<int8_t*>(out.codes) + m * stride;
        auto* sums = const_cast<int32_t*>(out.sums) + m * n_sums;
        const_cast<float*>(out.scales)[m] = largest / 127.0f;
        for (int64_t s = 0; s < n_sums; ++s) sums[s] = 0;
        for (int64_t i = 0; i < stride; ++i) {
            codes[i] = i < k ? code_of(row[i] * inverse) : int8_t{0};
            sums[1 + i / 32] += codes[i];
            sums[0] += codes[i];
        }
    }
}

void thin_codes(const void* packed, int64_t k, const float* scales, const SplitRows& x, int64_t m, int64_t n0,
                int64_t n1, float* const* y, bool add) {
    const auto* weights = static_cast<const uint8_t*>(packed);
    for (int64_t r = 0; r < m; ++r)
        for (int64_t n = n0; n < n1; ++n) {
            const SplitRows row = x.from(r);
            int32_t high = 0, low = 0;
            for (int64_t i = 0; i < 4 * k; ++i) {
                const int64_t word = (n / kPanelOutputs * k + i / 4) * kPanelOutputs + n % kPanelOutputs;
                const int weight = int(weights[4 * word + i % 4]) - 128;
                high += weight * row.high[i];
                low += weight * row.low[i];
            }
            float value = std::fma(float(high), 128.0f, float(low)) * *row.scale;
            if (scales != nullptr) value *= scales[n];
            y[r][n] = add ? y[r][n] + value : value;
        }
}

void split_row(const float* x, int64_t k, int8_t* high, int8_t* low, float* scale, SplitSums* sums) {
    const float largest = largest_of(x, k), inverse = kSplitUnits / largest;
    *scale = largest / kSplitUnits;
    *sums = {0, 0};
    for (int64_t i = 0; i < padded(k); ++i) {
        const float units = i < k ? x[i] * inverse : 0.0f;
        high[i] = code_of(units * (1.0f / 128.0f));
        low[i] = code_of(std::fma(-float(high[i]), 128.0f, units));
        sums->high += high[i];
        sums->low += low[i];
    }
}

uint64_t sum_words(const uint64_t* words, int64_t n_words) {
    uint64_t a = 0, b = 0, c = 0, d = 0;
    int64_t i = 0;
    for (; i + 4 <= n_words; i += 4) a += words[i], b += words[i + 1], c += words[i + 2], d += words[i + 3];
    for (; i < n_words; ++i) a += words[i];
    return a + b + c + d;
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

const ts::Kernels& ts::kernels_plain() {
    static constexpr Kernels made = with_sampling(with_attention(with_elementwise(with_products({}))));
    return made;
}
