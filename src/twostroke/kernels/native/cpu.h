// What this processor and its operating system can run.
#pragma once

namespace ts {

struct Cpu {
    bool avx2;         // with FMA and F16C
    bool avx_vnni;     // 256-bit vpdpbusd without AVX-512
    bool avx512;       // F, BW, DQ, VL and VNNI
    bool avx512_bf16;
    bool amx;          // tiles of int8 and bf16, granted by the operating system
};

const Cpu& cpu();  // asked once

}  // namespace ts
