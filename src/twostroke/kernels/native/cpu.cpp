#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ts {
namespace {

uint64_t extended_control_register() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low | (uint64_t{high} << 32);
}

bool is_amd() {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}

bool may_use_tiles() {
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

}  // namespace

// Bits by Intel's Software Developer's Manual, volume 2A, CPUID; those of XCR0 by volume 1, 13.3.
Features cpu() {
    Features found = 0;
    const auto take = [&found](unsigned word, int bit, Feature feature) {
        if (word >> bit & 1) found |= set_of(feature);
    };
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    take(c, 0, Feature::sse3);
    take(c, 9, Feature::ssse3);
    take(c, 12, Feature::fma);
    take(c, 19, Feature::sse4_1);
    take(c, 20, Feature::sse4_2);
    take(c, 23, Feature::popcnt);
    take(c, 26, Feature::xsave);
    take(c, 28, Feature::avx);
    take(c, 29, Feature::f16c);
    const bool os_saves = c >> 27 & 1;
    const uint64_t saved = os_saves ? extended_control_register() : 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        take(b, 5, Feature::avx2);
        take(b, 8, Feature::bmi2);
        take(b, 16, Feature::avx512f);
        take(b, 17, Feature::avx512dq);
        take(b, 30, Feature::avx512bw);
        take(b, 31, Feature::avx512vl);
        take(c, 11, Feature::avx512_vnni);
        take(d, 22, Feature::amx_bf16);
        take(d, 24, Feature::amx_tile);
        take(d, 25, Feature::amx_int8);
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
            take(a, 4, Feature::avx_vnni);
            take(a, 5, Feature::avx512_bf16);
        }
    }
    if ((saved & 0x6) == 0x6) found |= set_of(Feature::os_ymm);
    if ((saved & 0xe6) == 0xe6) found |= set_of(Feature::os_zmm);
    if ((saved & 0x60000) == 0x60000 && (found & set_of(Feature::amx_tile)) && may_use_tiles())
        found |= set_of(Feature::os_tiles);
    return found;
}

PrefetchDistances prefetch_distances() {
    static const PrefetchDistances found = [] {
        if (!is_amd()) return PrefetchDistances{8192, 8192};
        if (cpu() & set_of(Feature::avx512f)) return PrefetchDistances{2048, 18432};
        return PrefetchDistances{4096, 4096};
    }();
    return found;
}

}  // namespace ts

#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

namespace ts {

Features cpu() {
    Features found = 0;
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found |= set_of(Feature::asimddp);
    if (getauxval(AT_HWCAP2) & HWCAP2_I8MM) found |= set_of(Feature::i8mm);
    if (getauxval(AT_HWCAP2) & HWCAP2_BF16) found |= set_of(Feature::bf16);
    return found;
}

PrefetchDistances prefetch_distances() { return {8192, 8192}; }

}  // namespace ts

#else

namespace ts {

Features cpu() { return 0; }

PrefetchDistances prefetch_distances() { return {8192, 8192}; }

}  // namespace ts

#endif
