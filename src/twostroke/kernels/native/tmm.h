// The processor's matrix registers (AMX): eight registers of up to 16 rows of 64 bytes. With TS_EMULATE_AMX the same
// operations in plain C++, by which the code above them is tested on processors without them.
#pragma once
#include <cstdint>
#include <cstring>

namespace ts {
namespace {

// Rows and bytes a row of each register, as ldtilecfg reads them.
struct alignas(64) TmmShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TmmShapes) == 64);

#ifdef TS_EMULATE_AMX

struct EmulatedTmm {
    TmmShapes shapes;
    uint8_t data[8][16][64];
};
thread_local EmulatedTmm emulated;

inline void shape_tmm(const TmmShapes& shapes) {
    emulated.shapes = shapes;
    std::memset(emulated.data, 0, sizeof emulated.data);
}
inline void release_tmm() { emulated.shapes = TmmShapes{}; }

template <int Tmm>
inline void zero_tmm() {
    std::memset(emulated.data[Tmm], 0, sizeof emulated.data[Tmm]);
}
template <int Tmm>
inline void load_tmm(const void* from, int64_t stride) {
    zero_tmm<Tmm>();
    for (int r = 0; r < emulated.shapes.rows[Tmm]; ++r)
        std::memcpy(emulated.data[Tmm][r], static_cast<const char*>(from) + r * stride, emulated.shapes.row_bytes[Tmm]);
}
template <int Tmm>
inline void store_tmm(void* to, int64_t stride) {
    for (int r = 0; r < emulated.shapes.rows[Tmm]; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, emulated.data[Tmm][r], emulated.shapes.row_bytes[Tmm]);
}
template <int SUM, int A, int B, class TypeOfB>
inline void emulate_byte_products() {
    for (int m = 0; m < emulated.shapes.rows[SUM]; ++m)
        for (int n = 0; n < 16; ++n) {
            int32_t sum;
            std::memcpy(&sum, &emulated.data[SUM][m][4 * n], 4);
            for (int k = 0; k < 16; ++k)
                for (int j = 0; j < 4; ++j)
                    sum += int(int8_t(emulated.data[A][m][4 * k + j])) * int(TypeOfB(emulated.data[B][k][4 * n + j]));
            std::memcpy(&emulated.data[SUM][m][4 * n], &sum, 4);
        }
}
template <int SUM, int SIGNED, int UNSIGNED>
inline void add_byte_products() {
    emulate_byte_products<SUM, SIGNED, UNSIGNED, uint8_t>();
}
template <int SUM, int A, int B>
inline void add_signed_byte_products() {
    emulate_byte_products<SUM, A, B, int8_t>();
}
inline float emulated_bf16(const uint8_t* from) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 2, from, 2);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
template <int SUM, int A, int B>
inline void add_bf16_products() {
    for (int m = 0; m < emulated.shapes.rows[SUM]; ++m)
        for (int n = 0; n < 16; ++n) {
            float sum, even = 0, odd = 0;
            std::memcpy(&sum, &emulated.data[SUM][m][4 * n], 4);
            for (int k = 0; k < 16; ++k) {
                even += emulated_bf16(&emulated.data[A][m][4 * k]) * emulated_bf16(&emulated.data[B][k][4 * n]);
                odd += emulated_bf16(&emulated.data[A][m][4 * k + 2]) * emulated_bf16(&emulated.data[B][k][4 * n + 2]);
            }
            sum += even + odd;
            std::memcpy(&emulated.data[SUM][m][4 * n], &sum, 4);
        }
}

#else

inline void shape_tmm(const TmmShapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void release_tmm() { __asm__ volatile("tilerelease"); }

template <int Tmm>
inline void zero_tmm() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tmm));
}
template <int Tmm>
inline void load_tmm(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(Tmm), "r"(from), "r"(stride) : "memory");
}
template <int Tmm>
inline void store_tmm(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(Tmm), "r"(to), "r"(stride) : "memory");
}
template <int SUM, int SIGNED, int UNSIGNED>
inline void add_byte_products() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(SIGNED), "i"(UNSIGNED));
}
template <int SUM, int A, int B>
inline void add_signed_byte_products() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}
template <int SUM, int A, int B>
inline void add_bf16_products() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}

#endif

}  // namespace
}  // namespace ts
