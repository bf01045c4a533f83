// What the library's files are compiled for. A target is a row: its name, the features that it needs, every one of
// them, and its table of functions. Processors are sets of features and not points on a line: Zen 4 has AVX-512's VNNI
// and no AVX-VNNI, Alder Lake the reverse.
#pragma once
#include <cstdint>

#include "cpu.h"
#include "kernels.h"

namespace ts {

#if defined(__x86_64__)
constexpr Features kAvx2 =
    set_of(Feature::sse3, Feature::ssse3, Feature::sse4_1, Feature::sse4_2, Feature::popcnt, Feature::xsave,
           Feature::avx, Feature::fma, Feature::f16c, Feature::avx2, Feature::bmi2, Feature::os_ymm);
constexpr Features kAvx512 = kAvx2 | set_of(Feature::avx512f, Feature::avx512dq, Feature::avx512bw, Feature::avx512vl,
                                            Feature::avx512_vnni, Feature::os_zmm);
constexpr Features kAvx512Bf16 = kAvx512 | set_of(Feature::avx512_bf16);
constexpr Features kAmx = set_of(Feature::amx_tile, Feature::amx_int8, Feature::amx_bf16, Feature::os_tiles);

// What is faster behind. build.py has the compiler's flags for each; a test holds them against these sets.
#define TS_TARGETS(ROW)                             \
    ROW(plain, 0)                                   \
    ROW(avx2, kAvx2)                                \
    ROW(avxvnni, kAvx2 | set_of(Feature::avx_vnni)) \
    ROW(avx512, kAvx512)                            \
    ROW(avx512bf16, kAvx512Bf16)                    \
    ROW(amx, kAvx512Bf16 | kAmx)
#elif defined(__aarch64__) && defined(__linux__)
#define TS_TARGETS(ROW)                 \
    ROW(plain, 0)                       \
    ROW(neon, set_of(Feature::asimddp)) \
    ROW(neonbf16, set_of(Feature::asimddp, Feature::i8mm, Feature::bf16))
#else
#define TS_TARGETS(ROW) ROW(plain, 0)
#endif

#define TS_ROW(NAME, NEEDS) const Kernels& kernels_##NAME();
TS_TARGETS(TS_ROW)
#undef TS_ROW

struct TargetRow {
    const char* name;
    Features needs;
    const Kernels& (*kernels)();
};

constexpr TargetRow kTargets[] = {
#define TS_ROW(NAME, NEEDS) {#NAME, NEEDS, kernels_##NAME},
    TS_TARGETS(TS_ROW)
#undef TS_ROW
};
constexpr int kTargetCount = sizeof kTargets / sizeof kTargets[0];

constexpr bool holds(Features features, int target) {
    return (features & kTargets[target].needs) == kTargets[target].needs;
}

// `wanted` where it holds for these features, else the fastest that does. Targets are numbers: rows of kTargets.
constexpr int choose(Features features, int wanted = -1) {
    if (wanted >= 0 && wanted < kTargetCount && holds(features, wanted)) return wanted;
    int best = kTargetCount - 1;
    while (!holds(features, best)) best--;  // plain needs nothing
    return best;
}

// Of this machine; without AMX if its products were tried and found to be others than AVX-512's.
Features features();
int target();                // in use: the fastest that holds, until another was set
int set_target(int wanted);  // for tests and measurements: what choose() makes of it, which is in use now

}  // namespace ts
