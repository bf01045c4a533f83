#include "layout.h"
#include "numbers.h"

#include <cmath>
#include <cstring>

namespace ts {
namespace {

using layout::kPanelOutputs;

// The power of two p with largest / p in (0.5, 1].
float power_for(float largest) {
    if (!(largest > 0)) return 1.0f;
    int exponent;
    const float fraction = std::frexp(largest, &exponent);
    return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

// Calls make(bytes of the row, which a word is made of) for the k_rows [0, n_k_rows), and keeps the words in one lane.
template <int64_t Bytes, class Make>
void pack_words(int64_t n_k_rows, const void* row, char* lane, Make make) {
    const auto* from = static_cast<const char*>(row);
    for (int64_t s = 0; s < n_k_rows; ++s, from += Bytes, lane += layout::kKRowBytes) {
        const uint32_t word = make(from);
        std::memcpy(lane, &word, 4);
    }
}

uint32_t word_at(const char* from) {
    uint32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

// The k_rows that have all their inputs, a word at a time: what it is made of lies together in the row. Returns how
// many.
int64_t pack_whole_k_rows(Format format, int64_t k, const void* weight, int64_t row, char* lane) {
    switch (format) {
        case Format::F32: pack_words<4>(k, static_cast<const float*>(weight) + row * k, lane, word_at); return k;
        case Format::BF16:
            pack_words<4>(k / 2, static_cast<const uint16_t*>(weight) + row * k, lane, word_at);
            return k / 2;
        case Format::W8A8:
        case Format::INT8_GROUPS:
        case Format::INT8:  // code + 128 is the code with its sign turned
            pack_words<4>(k / 4, static_cast<const int8_t*>(weight) + row * k, lane,
                          [](const char* from) { return word_at(from) ^ 0x80808080u; });
            return k / 4;
        case Format::INT4_BLOCKS:
        case Format::INT4:
            pack_words<8>(k / 8, static_cast<const uint8_t*>(weight) + row * k, lane, [](const char* from) {
                return (word_at(from) & 0x0f0f0f0fu) | ((word_at(from + 4) & 0x0f0f0f0fu) << 4);
            });
            return k / 8;
    }
    return 0;
}

// One output's inputs into its lane of the panel's k_rows; `weight` null: an output behind n.
void pack_lane(Format format, int64_t k, const void* weight, int64_t row, char* k_rows, int64_t lane) {
    const int64_t n_k_rows = layout::k_rows(format, k);
    for (int64_t s = weight ? pack_whole_k_rows(format, k, weight, row, k_rows + lane * 4) : 0; s < n_k_rows; ++s) {
        auto* word = reinterpret_cast<uint8_t*>(k_rows + s * layout::kKRowBytes + lane * 4);
        switch (format) {
            case Format::F32: {
                const float value = weight ? static_cast<const float*>(weight)[row * k + s] : 0.0f;
                std::memcpy(word, &value, 4);
                break;
            }
            case Format::BF16:
                for (int64_t j = 0; j < 2; ++j) {
                    const int64_t i = s * 2 + j;
                    const uint16_t value =
                        weight && i < k ? static_cast<const uint16_t*>(weight)[row * k + i] : uint16_t{0};
                    std::memcpy(word + 2 * j, &value, 2);
                }
                break;
            case Format::W8A8:
            case Format::INT8_GROUPS:
            case Format::INT8:
                for (int64_t j = 0; j < 4; ++j) {
                    const int64_t i = s * 4 + j;
                    word[j] = uint8_t(weight && i < k ? static_cast<const int8_t*>(weight)[row * k + i] + 128 : 128);
                }
                break;
            case Format::INT4_BLOCKS:
            case Format::INT4:
                for (int64_t j = 0; j < 4; ++j) {
                    const auto* codes = static_cast<const uint8_t*>(weight) + (weight ? row * k : 0);
                    const int64_t i = s * 8 + j;
                    const int low = weight && i < k ? codes[i] & 15 : 0,
                              high = weight && i + 4 < k ? codes[i + 4] & 15 : 0;
                    word[j] = uint8_t(low | (high << 4));
                }
                break;
        }
    }
}

// What lies before the k_rows of one lane of INT4 and INT8_GROUPS: scales of fp16 and, of INT4, zero points. Returns
// the power of two that the scales are shares of.
float pack_scales(Format format, int64_t n_groups, const float* scales, const uint8_t* zeros, char* panel,
                  int64_t lane) {
    float largest = 0;
    for (int64_t g = 0; g < n_groups; ++g) largest = std::fmax(largest, std::fabs(scales[g]));
    const float power = power_for(largest);
    for (int64_t g = 0; g < n_groups; ++g) {
        const uint16_t scale = fp16_of_fraction(scales[g] / power);
        std::memcpy(panel + (g * kPanelOutputs + lane) * 2, &scale, 2);
        if (format == Format::INT4)
            panel[n_groups * kPanelOutputs * 2 + g * kPanelOutputs + lane] = char(zeros ? zeros[g] : 8);
    }
    return power;
}

// The same of INT4_BLOCKS.
void pack_blocks(int32_t block, int64_t k, const float* units, const uint8_t* counts, char* panel, int64_t lane) {
    const int64_t n_groups = layout::groups(k, layout::kBlockGroup);
    for (int64_t g = 0; g < n_groups; ++g)
        for (int64_t i = 0; i < 2; ++i) panel[g * 32 + i * kPanelOutputs + lane] = char(counts[2 * g + i]);
    for (int64_t b = 0; b < layout::groups(k, block); ++b)
        for (int64_t i = 0; i < 2; ++i) {
            const uint16_t unit = fp16_of_float(units[2 * b + i]);
            std::memcpy(panel + n_groups * 32 + b * 64 + i * 32 + lane * 2, &unit, 2);
        }
}

}  // namespace

int64_t packed_bytes(Format format, int32_t group, int64_t n, int64_t k) {
    const int64_t behind = layout::has_output_scales(format) ? kPanelOutputs * 4 : 0;
    return layout::panels(n) * (layout::panel_bytes(format, group, k) + behind);
}

void pack(Format format, int32_t group, int64_t n, int64_t k, const void* weight, const float* scales,
          const uint8_t* zeros, void* packed, int64_t n0, int64_t n1) {
    const int64_t panel_bytes = layout::panel_bytes(format, group, k), head = layout::head_bytes(format, group, k);
    const int64_t n_groups = group ? layout::groups(k, group) : 1;
    auto* to = static_cast<char*>(packed);
    auto* output_scales = reinterpret_cast<float*>(to + layout::panels(n) * panel_bytes);
    for (int64_t t = n0 / kPanelOutputs; t < layout::panels(n1); ++t) {
        char* panel = to + t * panel_bytes;
        std::memset(panel, 0, size_t(head));
        for (int64_t lane = 0; lane < kPanelOutputs; ++lane) {
            const int64_t row = t * kPanelOutputs + lane;
            const bool inside = row < n;
            pack_lane(format, k, inside ? weight : nullptr, row, panel + head, lane);
            float scale = 0;
            if (format == Format::W8A8 || format == Format::INT8) scale = inside ? scales[row] : 0.0f;
            if (inside && (format == Format::INT4 || format == Format::INT8_GROUPS)) {
                const uint8_t* row_zeros = zeros ? zeros + row * n_groups : nullptr;
                scale = pack_scales(format, n_groups, scales + row * n_groups, row_zeros, panel, lane);
            }
            if (inside && format == Format::INT4_BLOCKS)
                pack_blocks(group, k, scales + row * n_groups * 2,
                            zeros + row * layout::groups(k, layout::kBlockGroup) * 2, panel, lane);
            if (layout::has_output_scales(format)) output_scales[row] = scale;
        }
    }
}

}  // namespace ts
