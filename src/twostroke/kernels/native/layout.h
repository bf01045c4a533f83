// How packed matrices lie in memory, the same for every instruction set.
//
// Outputs go in panels of 16. A panel is a run of k_rows of 64 bytes, in the order of the inputs; a k_row holds one
// 32-bit word for each of its 16 outputs, so that one broadcast word of activations meets 16 outputs and nothing is
// added across lanes:
//   F32   1 input a word               BF16  2 inputs        W8A8, INT8  4 inputs, code + 128 (unsigned)
//   INT8_GROUPS  the same
//   INT4, INT4_BLOCKS  8 inputs: byte j holds input j in its low and input 4 + j in its high half
// Outputs behind n and inputs behind k stand for 0.
// W8A8, INT8: after all panels one fp32 scale for each output.
// INT4: before a panel's k_rows, for each group of inputs 16 fp16 scales, then for each group 16 zero points (uint8),
// padded to 64 bytes; after all panels one power of two, fp32, for each output: weight = (code − zero) · scale · power.
// INT8_GROUPS: the same without zero points.
// INT4_BLOCKS: before a panel's k_rows, for each group of 32 inputs 16 scales, then 16 minima (uint8); then for each
// block of 256 inputs the unit of scales of 16 outputs, then that of minima (fp16): weight = code · scale · unit −
// minimum · unit of minima.
// The last group and block may be short.
//
// All functions here are static: each file has its own, so that the linker cannot give code compiled for a better
// processor to a file meant for a lesser one.
#pragma once
#include "matrix.h"

namespace ts::layout {

constexpr int64_t kPanelOutputs = 16;
constexpr int64_t kKRowBytes = 64;
constexpr int64_t kBlockGroup = 32;  // inputs of a group of INT4_BLOCKS

static constexpr int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
static constexpr int64_t panels(int64_t n) { return (n + kPanelOutputs - 1) / kPanelOutputs; }
static constexpr int64_t groups(int64_t k, int32_t group) { return (k + group - 1) / group; }

static constexpr int64_t k_rows(Format format, int64_t k) {
    switch (format) {
        case Format::F32: return k;
        case Format::BF16: return padded(k) / 2;
        case Format::W8A8:
        case Format::INT8:
        case Format::INT8_GROUPS: return padded(k) / 4;
        case Format::INT4:
        case Format::INT4_BLOCKS: return padded(k) / 8;
    }
    return 0;
}

// Bytes of a panel before its k_rows.
static constexpr int64_t head_bytes(Format format, int32_t group, int64_t k) {
    switch (format) {
        case Format::INT4: return up(groups(k, group) * 48, kKRowBytes);
        case Format::INT8_GROUPS: return up(groups(k, group) * 32, kKRowBytes);
        case Format::INT4_BLOCKS: return up(groups(k, kBlockGroup) * 32 + groups(k, group) * 64, kKRowBytes);
        default: return 0;
    }
}

// Whether every output has a number behind the panels.
static constexpr bool has_output_scales(Format format) {
    return format != Format::F32 && format != Format::BF16 && format != Format::INT4_BLOCKS;
}

// In a panel of INT4_BLOCKS: the scales of group g, with its minima 16 bytes behind; the unit of scales of its block,
// with that of minima 32 bytes behind.
static inline const char* group_of_block(const char* panel, int64_t g) { return panel + g * 32; }
static inline const char* units_of_block(const char* panel, int64_t n_groups, int64_t g, int32_t block) {
    return panel + n_groups * 32 + g * kBlockGroup / block * 64;
}

static constexpr int64_t panel_bytes(Format format, int32_t group, int64_t k) {
    return head_bytes(format, group, k) + k_rows(format, k) * kKRowBytes;
}

// The scales behind the panels: one for each output, of whole panels, where has_output_scales.
static inline const float* output_scales(const Matrix& w) {
    return reinterpret_cast<const float*>(static_cast<const char*>(w.packed) +
                                          panels(w.n) * panel_bytes(w.format, w.group, w.k));
}

static inline const char* panel(const Matrix& w, int64_t index) {
    return static_cast<const char*>(w.packed) + index * panel_bytes(w.format, w.group, w.k);
}

}  // namespace ts::layout
