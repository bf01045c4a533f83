// The Hadamard transform of one head: what a few of its numbers hold is spread over all of them before they are rounded
// to 4 bits (QuaRot, arXiv 2404.00456).
#pragma once

#include "step_lanes.h"

namespace {

// Sums of the lanes that differ in bit Step of their number, and in the second of each pair differences.
template <int Step>
TS_INLINE Floats butterfly(Floats v) {
    const Ints lane = lane_numbers();
    const Floats other = __builtin_shuffle(v, lane ^ Step);
    return other + ((lane & Step) != 0 ? -v : v);
}

// x ← x·H in place. H is orthonormal and its own inverse: Sylvester's matrix over blocks of the largest power of two
// that divides n. It adds in the same order on every target, as kernels/four_bit_cache.py does.
void hadamard(float* x, int64_t n) {
    const int64_t block = n & -n;
    const Floats scale = all(1.0f / __builtin_sqrtf(static_cast<float>(block)));
    each_vector(n, [&](int64_t i, int lanes) TS_INLINED {  // of fewer lanes, blocks are shorter than a vector
        Floats v = load_some(x + i, lanes) * scale;
        if (block > 1) v = butterfly<1>(v);
        if (block > 2) v = butterfly<2>(v);
        if (block > 4) v = butterfly<4>(v);
        if (block > 8) v = butterfly<8>(v);
        store_some(x + i, v, lanes);
    });
    for (int64_t step = kLanes; step < block; step *= 2)
        for (int64_t i = 0; i < n; i += 2 * step)
            for (int64_t j = i; j < i + step; j += kLanes) {
                const Floats a = load(x + j), b = load(x + j + step);
                store(x + j, a + b);
                store(x + j + step, a - b);
            }
}

}  // namespace
