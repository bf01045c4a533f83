// Where attention finds the keys and values of a request: tiles of the cache, or copies of them.
#pragma once

#include "attention.h"
#include "step_lanes.h"

namespace {

inline int64_t slot_of(const ts::KvLayout& kv, const int64_t* pages, int64_t position) {
    return pages[position / kv.page_tokens] * kv.page_tokens + position % kv.page_tokens;
}

// Words of two bf16 from bytes of two codes: sixteen at a time.
TS_INLINE void widen(const int8_t* codes, int64_t n_words, uint32_t* out) {
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(codes);
    int64_t i = 0;
#if defined(__AVX512BF16__)
    const auto sixteen = [codes](int64_t first) {
        const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + first));
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some));
    };
    for (; i + kLanes <= n_words; i += kLanes)
        *reinterpret_cast<LooseWords*>(out + i) = (Words)_mm512_cvtne2ps_pbh(sixteen(2 * i + kLanes), sixteen(2 * i));
#endif
    for (; i + kLanes <= n_words; i += kLanes) {
        const Ints both = (Ints) __builtin_convertvector(*reinterpret_cast<const LooseHalves*>(pairs + i), Words);
        const Words low =
            (Words) __builtin_convertvector((both << 24) >> 24, Floats) >> 16;  // a code needs 7 of bf16's 8 bits
        const Words high = (Words) __builtin_convertvector((both << 16) >> 24, Floats) & 0xffff0000u;
        *reinterpret_cast<LooseWords*>(out + i) = low | high;
    }
    for (; i < n_words; i++)
        out[i] = static_cast<uint32_t>(bf16_of(codes[2 * i])) | static_cast<uint32_t>(bf16_of(codes[2 * i + 1])) << 16;
}

// −7.5 to 7.5 in bf16, which holds them exactly: what codes of 4 bits stand for, by the lowest four of five bits.
alignas(64) constexpr uint16_t kFourBitValues[32] = {
    0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020,
    0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0, 0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020,
    0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0,
};

inline uint32_t two_values(uint32_t codes) {
    return kFourBitValues[codes & 15u] | static_cast<uint32_t>(kFourBitValues[codes >> 16 & 15u]) << 16;
}

// Words of two bf16 from words with a code in the lowest bits of either half; what stands above them is ignored.
TS_INLINE Words two_values(Words codes) {
#if defined(__AVX512BW__)
    return (Words)_mm512_permutexvar_epi16((__m512i)codes, _mm512_load_si512(kFourBitValues));
#else
    const Floats low = __builtin_convertvector((Ints)(codes & 15u), Floats) - all(7.5f);
    const Floats high = __builtin_convertvector((Ints)(codes >> 16 & 15u), Floats) - all(7.5f);
    return (Words)low >> 16 | ((Words)high & 0xffff0000u);
#endif
}

TS_INLINE Words words_of_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    typedef uint8_t Octets __attribute__((vector_size(16), aligned(1), may_alias));
    // By way of halves: in one step GCC takes the vector apart.
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const Octets*>(p), Halves), Words);
#endif
}

// A tile of keys in 4 bits: each byte two dimensions of a slot.
void widen_key_tile(const uint8_t* codes, int64_t q_words, uint32_t* out) {
    for (int64_t i = 0; i < q_words * ts::kTile; i += kLanes) {
        const Words both = words_of_bytes(codes + i);
        *reinterpret_cast<LooseWords*>(out + i) = two_values(both | both << 12);
    }
}

// A tile of values in 4 bits: of two slots together the lower codes, then the upper.
void widen_value_tile(const uint8_t* codes, int64_t D, uint32_t* out) {
    const int64_t half = (D + 1) / 2, upper = D - half;
    for (int64_t j = 0; j < ts::kTile / 2; j++) {
        const uint8_t *even = codes + 2 * j * half, *odd = even + half;
        uint32_t* row = out + j * D;
        const auto sixteen = [=](int64_t d) {
            const Words both = words_of_bytes(even + d) | words_of_bytes(odd + d) << 16;
            *reinterpret_cast<LooseWords*>(row + d) = two_values(both);
            *reinterpret_cast<LooseWords*>(row + half + d) = two_values(both >> 4);
        };
        int64_t d = 0;
        for (; d + kLanes <= upper; d += kLanes) sixteen(d);
        if (d < upper && upper > kLanes) {  // the last sixteen again
            sixteen(upper - kLanes);
            d = upper;
        }
        for (; d < half; d++) {
            const uint32_t both = even[d] | static_cast<uint32_t>(odd[d]) << 16;
            row[d] = two_values(both);
            if (d < upper) row[half + d] = two_values(both >> 4);
        }
    }
}

// N tiles side by side: pointers into the cache where a tile's slots are together there, else copies; of a cache in
// codes bf16 words, or as it is for loops that read codes (kOfCodes). Scales and middles are of a cache in codes.
template <int N>
struct Tiles {
    const uint32_t* keys[N];
    const uint32_t* values[N];
    const uint32_t* next_keys[N];  // of the block behind
    float key_scales[N * ts::kTile], key_middles[N * ts::kTile], value_scales[N * ts::kTile];
};

// Of one slot in int4: the scale and the middle of a key's range.
inline void read_range(const float* held, float& scale, float& middle) {
    uint32_t range;
    std::memcpy(&range, held, 4);
    scale = float_of_bf16(static_cast<uint16_t>(range & 0xffffu));
    middle = float_of_bf16(static_cast<uint16_t>(range >> 16));
}

template <bool kOfCodes, int N>
void find_tiles(const ts::KvLayout& kv, const ts::KvHead& head, const int64_t* pages, int64_t first, int64_t least,
                int64_t end, int n_tiles, uint32_t* key_copies, uint32_t* value_copies, Tiles<N>& tiles) {
    const int64_t D = kv.head_dim;
    const bool together = kv.page_tokens % ts::kTile == 0, codes = kv.type == ts::KvType::INT8,
               four_bits = kv.type == ts::KvType::INT4;
    const int64_t bytes = kv.type == ts::KvType::F32 ? 4 : codes ? 1 : 2, pair = kv.type == ts::KvType::F32 ? 1 : 2;
    const int64_t q_words = (D + pair - 1) / pair, key_words = q_words * ts::kTile, value_words = ts::kTile / pair * D;
    for (int t = 0; t < n_tiles; t++) {
        const int64_t position = first + t * ts::kTile;
        uint32_t* keys = key_copies + t * key_words;
        uint32_t* values = value_copies + t * value_words;
        // Before the window of every row a page may have been given back, and be whoever's: such keys are zeros here.
        if (together && position + ts::kTile > least) {
            const int64_t slot = slot_of(kv, pages, position), tile = slot / ts::kTile;
            const uint8_t* k = head.keys + tile * kv.key_tile_bytes;
            const uint8_t* v = head.values + tile * kv.value_tile_bytes;
            tiles.keys[t] = reinterpret_cast<const uint32_t*>(k);
            tiles.values[t] = reinterpret_cast<const uint32_t*>(v);
            if (four_bits) {
                const Words ranges = load_words(reinterpret_cast<const uint32_t*>(head.key_scales + slot));
                store(tiles.key_scales + t * ts::kTile, (Floats)(ranges << 16));
                store(tiles.key_middles + t * ts::kTile, (Floats)(ranges & 0xffff0000u));
                std::memcpy(tiles.value_scales + t * ts::kTile, head.value_scales + slot, ts::kTile * 4);
            } else if (codes) {
                std::memcpy(tiles.key_scales + t * ts::kTile, head.key_scales + slot, ts::kTile * 4);
                std::memcpy(tiles.value_scales + t * ts::kTile, head.value_scales + slot, ts::kTile * 4);
            }
            if (kOfCodes || !ts::in_codes(kv.type)) continue;
            if (four_bits) {
                widen_key_tile(k, q_words, keys);
                widen_value_tile(v, D, values);
            } else {
                widen(reinterpret_cast<const int8_t*>(k), key_words, keys);
                widen(reinterpret_cast<const int8_t*>(v), value_words, values);
            }
            tiles.keys[t] = keys;
            tiles.values[t] = values;
            continue;
        }
        std::memset(keys, 0, static_cast<size_t>(key_words) * 4);
        std::memset(values, 0, static_cast<size_t>(value_words) * 4);
        uint8_t* own_keys = reinterpret_cast<uint8_t*>(keys);
        uint8_t* own_values = reinterpret_cast<uint8_t*>(values);
        // Codes are put together in the second half of the memory that they are widened into, from its start.
        if (codes && !kOfCodes) own_keys += key_words * 2, own_values += value_words * 2;
        for (int lane = 0; lane < ts::kTile; lane++) {
            tiles.key_scales[t * ts::kTile + lane] = tiles.value_scales[t * ts::kTile + lane] = 1.0f;
            tiles.key_middles[t * ts::kTile + lane] = 0.0f;
            if (position + lane >= end || position + lane < least) continue;
            const int64_t slot = slot_of(kv, pages, position + lane), from = slot % ts::kTile;
            const uint8_t* k = head.keys + slot / ts::kTile * kv.key_tile_bytes;
            const uint8_t* v = head.values + slot / ts::kTile * kv.value_tile_bytes;
            if (four_bits) {
                read_range(head.key_scales + slot, tiles.key_scales[t * ts::kTile + lane],
                           tiles.key_middles[t * ts::kTile + lane]);
                tiles.value_scales[t * ts::kTile + lane] = head.value_scales[slot];
                const int64_t half = (D + 1) / 2;
                if (kOfCodes) {
                    for (int64_t d = 0; d < q_words; d++) own_keys[d * ts::kTile + lane] = k[d * ts::kTile + from];
                    std::memcpy(own_values + lane * half, v + from * half, static_cast<size_t>(half));
                    continue;
                }
                for (int64_t d = 0; d < q_words; d++) {
                    const uint32_t both = k[d * ts::kTile + from];
                    keys[d * ts::kTile + lane] = two_values(both | both << 12);
                }
                uint16_t* column = reinterpret_cast<uint16_t*>(values + lane / 2 * D) + lane % 2;
                for (int64_t d = 0; d < D; d++)
                    column[2 * d] = kFourBitValues[d < half ? v[from * half + d] & 15 : v[from * half + d - half] >> 4];
                continue;
            }
            for (int64_t d = 0; d < q_words; d++)
                std::memcpy(own_keys + (d * ts::kTile + lane) * pair * bytes, k + (d * ts::kTile + from) * pair * bytes,
                            static_cast<size_t>(pair * bytes));
            for (int64_t d = 0; d < D; d++)
                std::memcpy(own_values + (lane / pair * D * pair + d * pair + lane % pair) * bytes,
                            v + (from / pair * D * pair + d * pair + from % pair) * bytes, static_cast<size_t>(bytes));
            if (codes) {
                tiles.key_scales[t * ts::kTile + lane] = head.key_scales[slot];
                tiles.value_scales[t * ts::kTile + lane] = head.value_scales[slot];
            }
        }
        if (codes && !kOfCodes) {
            widen(reinterpret_cast<const int8_t*>(own_keys), key_words, keys);
            widen(reinterpret_cast<const int8_t*>(own_values), value_words, values);
        }
        tiles.keys[t] = keys;
        tiles.values[t] = values;
    }
}

// Where the keys of the block at position `next` lie. Of keys that are not there, or not together, those before them
// stand in: nothing is read from there, only fetched.
template <int N>
TS_INLINE void find_next_keys(const ts::KvLayout& kv, const ts::KvHead& head, const int64_t* pages, int64_t next,
                              int64_t end, int n_tiles, Tiles<N>& tiles) {
    const bool together = kv.page_tokens % ts::kTile == 0;
    for (int t = 0; t < n_tiles; t++) {
        const int64_t position = next + t * ts::kTile;
        tiles.next_keys[t] = tiles.keys[t];
        if (together && position < end)
            tiles.next_keys[t] = reinterpret_cast<const uint32_t*>(head.keys + slot_of(kv, pages, position) /
                                                                                   ts::kTile * kv.key_tile_bytes);
    }
}

}  // namespace
