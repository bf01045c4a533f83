// How packed matrices lie in memory, the same for every instruction set.
//
// Outputs go in panels of 16. A panel is a run of k_rows of 64 bytes, in the order of the inputs; a k_row holds one
// 32-bit word for each of its 16 outputs, so that one broadcast word of activations meets 16 outputs and nothing is
// added across lanes:
//   F32   1 input a word               BF16  2 inputs        W8A8, INT8  4 inputs, code + 128 (unsigned)
//   INT4  8 inputs: byte j holds input j in its low and input 4 + j in its high half
// Outputs behind n and inputs behind k stand for 0.
// W8A8, INT8: after all panels one fp32 scale for each output.
// INT4: before a panel's k_rows, for each group of inputs 16 fp16 scales, then for each group 16 zero points (uint8),
// padded to 64 bytes; after all panels one power of two, fp32, for each output: weight = (code − zero) · scale · power.
// The last group may be short.
//
// All functions here are static: each file has its own, so that the linker cannot give code compiled for a better
// processor to a file meant for a lesser one.
#pragma once
#include "matrix.h"

namespace ts::layout {

constexpr int64_t kPanelOutputs = 16;
constexpr int64_t kKRowBytes = 64;

static constexpr int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
static constexpr int64_t panels(int64_t n) { return (n + kPanelOutputs - 1) / kPanelOutputs; }
static constexpr int64_t groups(int64_t k, int32_t group) { return (k + group - 1) / group; }

static constexpr int64_t k_rows(Format format, int64_t k) {
    switch (format) {
        case Format::F32: return k;
        case Format::BF16: return padded(k) / 2;
        case Format::W8A8:
        case Format::INT8: return padded(k) / 4;
        case Format::INT4: return padded(k) / 8;
    }
    return 0;
}

// Bytes of a panel before its k_rows.
static constexpr int64_t head_bytes(Format format, int32_t group, int64_t k) {
    return format == Format::INT4 ? up(groups(k, group) * 48, kKRowBytes) : 0;
}

static constexpr int64_t panel_bytes(Format format, int32_t group, int64_t k) {
    return head_bytes(format, group, k) + k_rows(format, k) * kKRowBytes;
}

// The scales behind the panels: one for each output, of whole panels. Null offset (no scales) in F32 and BF16.
static inline const float* output_scales(const Matrix& w) {
    return reinterpret_cast<const float*>(static_cast<const char*>(w.packed) +
                                          panels(w.n) * panel_bytes(w.format, w.group, w.k));
}

static inline const char* panel(const Matrix& w, int64_t index) {
    return static_cast<const char*>(w.packed) + index * panel_bytes(w.format, w.group, w.k);
}

}  // namespace ts::layout
