// What this processor and its operating system can run: a set, one bit for each feature.
#pragma once
#include <cstdint>

namespace ts {

// Named as in Linux's /proc/cpuinfo, where sse3 is "pni". The last three are the operating system's part: it keeps
// these registers for a program that is not running (XGETBV), and of tiles, it has let this process use them.
// clang-format off
#if defined(__aarch64__)
#define TS_FEATURES(NAME) NAME(asimddp) NAME(i8mm) NAME(bf16)
#else
#define TS_FEATURES(NAME)                                                                                     \
    NAME(sse3) NAME(ssse3) NAME(sse4_1) NAME(sse4_2) NAME(popcnt) NAME(xsave) NAME(avx) NAME(fma) NAME(f16c)  \
    NAME(avx2) NAME(bmi2) NAME(avx512f) NAME(avx512dq) NAME(avx512bw) NAME(avx512vl) NAME(avx512_vnni)        \
    NAME(avx_vnni) NAME(avx512_bf16) NAME(amx_tile) NAME(amx_int8) NAME(amx_bf16) NAME(os_ymm) NAME(os_zmm)   \
    NAME(os_tiles)
#endif
// clang-format on

enum class Feature : int32_t {
#define TS_NAME(NAME) NAME,
    TS_FEATURES(TS_NAME)
#undef TS_NAME
};

using Features = uint64_t;

template <class... Each>
constexpr Features set_of(Each... features) {
    return ((Features{1} << static_cast<int>(features)) | ... | Features{0});
}

Features cpu();  // asked at each call

// How far ahead of their use weights are fetched, in bytes of all streams of a product together, into the first-level
// cache and into the second. On AMD's EPYC Zen 4 a pass over 135M and 1.1B parameters takes 0.72 to 0.87 of its time at
// one row and 0.72 to 0.90 at four with these two instead of 8192 alone, which was best on a Xeon with AMX. Code for
// AVX2 alone fetches once, `near` ahead into the second-level cache: 4096 on AMD's EPYC Zen 3, where a pass over 128 MB
// takes 0.90 to 0.93 of its time with both, and one in cache 0.76 (int4) to 0.87 (bf16).
struct PrefetchDistances {
    int64_t near, far;
};
PrefetchDistances prefetch_distances();

}  // namespace ts
