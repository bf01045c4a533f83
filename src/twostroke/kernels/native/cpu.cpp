#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <cstdint>
#include <sys/syscall.h>
#include <unistd.h>

namespace ts {
namespace {

uint64_t extended_control_register() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low | (uint64_t{high} << 32);
}

Cpu ask() {
    Cpu found{};
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const bool os_saves = c & bit_OSXSAVE;
    const bool fma = c & bit_FMA, f16c = c & bit_F16C;
    if (!os_saves || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    const uint64_t saved = extended_control_register();
    const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xe6) == 0xe6, tiles = (saved & 0x60000) == 0x60000;
    const bool vnni = c & (1u << 11), avx512 = (b & bit_AVX512F) && (b & bit_AVX512BW) && (b & bit_AVX512DQ) && (b & bit_AVX512VL);
    const bool tile_int8 = d & (1u << 25), tile_bf16 = d & (1u << 22);
    found.avx2 = ymm && (b & bit_AVX2) && fma && f16c;
    found.avx512 = found.avx2 && zmm && avx512 && vnni;
    unsigned a1 = 0, b1 = 0, c1 = 0, d1 = 0;
    if (a >= 1) __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1);
    found.avx_vnni = found.avx2 && (a1 & (1u << 4));
    found.avx512_bf16 = found.avx512 && (a1 & (1u << 5));
    if (found.avx512_bf16 && tiles && tile_int8 && tile_bf16) {
        constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        found.amx = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    }
    return found;
}

}  // namespace

const Cpu& cpu() {
    static const Cpu found = ask();
    return found;
}

}  // namespace ts

#else

namespace ts {

const Cpu& cpu() {
    static const Cpu nothing{};
    return nothing;
}

}  // namespace ts

#endif
