// What the library's files are compiled for. A target is a row: its name and the features that it needs, every one of
// them. Processors are sets of features and not points on a line: Zen 4 has AVX-512's VNNI and no AVX-VNNI, Alder Lake
// the reverse.
#pragma once
#include <cstdint>

#include "cpu.h"

namespace ts {

enum class Target : int32_t { Plain = 0, Avx2, AvxVnni, Avx512 /* with VNNI */, Avx512Bf16, Amx };

struct TargetRow {
    const char* name;
    Features needs;
};

constexpr Features kAvx2 =
    set_of(Feature::sse3, Feature::ssse3, Feature::sse4_1, Feature::sse4_2, Feature::popcnt, Feature::xsave,
           Feature::avx, Feature::fma, Feature::f16c, Feature::avx2, Feature::bmi2, Feature::os_ymm);
constexpr Features kAvx512 = kAvx2 | set_of(Feature::avx512f, Feature::avx512dq, Feature::avx512bw, Feature::avx512vl,
                                            Feature::avx512_vnni, Feature::os_zmm);
constexpr Features kAvx512Bf16 = kAvx512 | set_of(Feature::avx512_bf16);
constexpr Features kTiles = set_of(Feature::amx_tile, Feature::amx_int8, Feature::amx_bf16, Feature::os_tiles);

// In the order of Target, what is faster behind. build.py has the compiler's flags for each; a test holds them against
// these sets.
constexpr TargetRow kTargets[] = {
    {"plain", 0},
    {"avx2", kAvx2},
    {"avxvnni", kAvx2 | set_of(Feature::avx_vnni)},
    {"avx512", kAvx512},
    {"avx512bf16", kAvx512Bf16},
    {"amx", kAvx512Bf16 | kTiles},
};
constexpr int kTargetCount = sizeof kTargets / sizeof kTargets[0];

constexpr bool holds(Features features, Target target) {
    const Features needs = kTargets[static_cast<int>(target)].needs;
    return (features & needs) == needs;
}

// `wanted`, the number of a target, where it holds for these features, else the fastest that does.
constexpr Target choose(Features features, int wanted = -1) {
    if (wanted >= 0 && wanted < kTargetCount && holds(features, static_cast<Target>(wanted)))
        return static_cast<Target>(wanted);
    int best = kTargetCount - 1;
    while (!holds(features, static_cast<Target>(best))) best--;  // plain needs nothing
    return static_cast<Target>(best);
}

Features
features();  // of this machine; without tiles where their products were tried and found to be others than AVX-512's
Target target();                // in use: the fastest that holds, until another was set
Target set_target(int wanted);  // for tests and measurements: what choose() makes of it, which is in use now

}  // namespace ts
