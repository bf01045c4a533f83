// Norms, rotary positions, cache write, activations: rows of fp32, each computed in one order whatever else is in the
// step.
#pragma once

#include "hadamard.h"
#include "kernels.h"
#include "step_lanes.h"

namespace {

void embed(const void* table, int32_t type, int64_t token, int64_t n, float* x, bool add) {
    const int64_t first = token * n;
    for (int64_t i = 0; i < n; i++) {
        float v;
        if (type == 0) {
            v = static_cast<const float*>(table)[first + i];
        } else {
            const uint16_t half = static_cast<const uint16_t*>(table)[first + i];
            v = type == 1 ? float_of_bf16(half) : float_of_fp16(half);
        }
        x[i] = add ? x[i] + v : v;
    }
}

TS_INLINE float sum_of_squares(const float* x, float mean, int64_t n) {
    Floats sums[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
    const Floats offset = all(mean);
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes)
        for (int j = 0; j < 4; j++) {
            const Floats v = load(x + i + j * kLanes) - offset;
            sums[j] = fma(v, v, sums[j]);
        }
    for (; i < n; i += kLanes) {
        const int left = n - i < kLanes ? static_cast<int>(n - i) : kLanes;
        Floats v = load_some(x + i, left) - offset;
        if (left < kLanes) v = lane_numbers() < left ? v : all(0.0f);
        sums[0] = fma(v, v, sums[0]);
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
    const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, 0.0f, n) / static_cast<float>(n) + eps);
    const Floats factors = all(factor);
    each_vector(n, [&](int64_t i, int lanes) TS_INLINED {
        store_some(y + i, load_some(x + i, lanes) * factors * load_some(weight + i, lanes), lanes);
    });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y) {
    Floats total = all(0.0f);
    each_vector(n, [&](int64_t i, int lanes) TS_INLINED { total += load_some(x + i, lanes); });
    const float mean = sum_of(total) / static_cast<float>(n);
    const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, mean, n) / static_cast<float>(n) + eps);
    const Floats factors = all(factor), offset = all(mean);
    each_vector(n, [&](int64_t i, int lanes) TS_INLINED {
        const Floats normal = (load_some(x + i, lanes) - offset) * factors;
        store_some(y + i, fma(normal, load_some(weight + i, lanes), load_some(bias + i, lanes)), lanes);
    });
}

TS_INLINE Floats swapped_pairs(Floats v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    Split x{v};
    TS_HALVES(h) x.half[h] = _mm256_permute_ps(x.half[h], 0xb1);
    return x.whole;
#else
    return __builtin_shuffle(v, Ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
#endif
}

// (a, b) → (a·cos − b·sin, b·cos + a·sin) for neighbours a, b; cosines come twice each, sines as −sin, +sin.
void rope(float* head, const float* cosines, const float* sines, int64_t head_dim) {
    int64_t i = 0;
    for (; i + kLanes <= head_dim; i += kLanes) {
        const Floats v = load(head + i);
        store(head + i, fma(swapped_pairs(v), load(sines + i), v * load(cosines + i)));
    }
    for (; i < head_dim; i += 2) {
        const float a = head[i], b = head[i + 1];
        head[i] = a * cosines[i] + b * sines[i];
        head[i + 1] = b * cosines[i + 1] + a * sines[i + 1];
    }
}

TS_INLINE float largest_magnitude(const float* x, int64_t n) {
    Floats highest = all(0.0f);
    each_vector(
        n, [&](int64_t i, int lanes) TS_INLINED { highest = greater(highest, magnitude(load_some(x + i, lanes))); });
    return max_of(highest);
}

// Codes −127 to 127, to nearest even, as adding 1.5·2²³ rounds.
TS_INLINE Ints codes_of(Floats x) {
    const Ints codes = (Ints)(x + all(12582912.0f)) - 0x4b400000;
    const Ints highest = lane_numbers() * 0 + 127;
    const Ints bounded = codes > highest ? highest : codes;
    return bounded < -highest ? -highest : bounded;
}

TS_INLINE float kv_scale(const float* x, int64_t n) {
    const float highest = largest_magnitude(x, n);
    return (highest > 1e-30f ? highest : 1e-30f) / 127.0f;
}

// Sixteen numbers at a time as `convert` makes them: pairs of a key's 16 slots apart, a value's two slots apart.
template <typename Number, typename Convert>
TS_INLINE void scatter(const ts::KvHead& place, const float* key, const float* value, int64_t lane, int64_t D,
                       Convert convert) {
    struct Pair {
        Number first, second;
    };
    Pair* k = reinterpret_cast<Pair*>(place.keys) + lane;
    Number* v = reinterpret_cast<Number*>(place.values) + (lane / 2) * 2 * D + lane % 2;
    each_vector(D, [&](int64_t d, int n) TS_INLINED {
        alignas(64) Number keys[kLanes], values[kLanes];
        convert(load_some(key + d, n), load_some(value + d, n), keys, values);
        for (int i = 0; i < n; i += 2) k[(d + i) / 2 * ts::kTile] = Pair{keys[i], keys[i + 1]};
        for (int i = 0; i < n; i++) v[2 * (d + i)] = values[i];
    });
}

// Whether a head's numbers are finite as the cache holds them: bf16 rounds what is larger than its largest to infinity.
TS_INLINE bool stays_finite(const ts::KvLayout& kv, const float* x) {
    Floats odd = all(0.0f);  // 0, or NaN once a number is not finite
    each_vector(kv.head_dim, [&](int64_t i, int lanes) TS_INLINED {
        const Floats v = load_some(x + i, lanes);
        odd += (kv.type == ts::KvType::BF16 ? (Floats)(bf16_words(v) << 16) : v) * 0.0f;
    });
    return sum_of(odd) == 0.0f;
}

// A key or value that is not finite becomes a key of NaN and a value of zeros. Rows that see the token are NaN by their
// score, and rows that do not, multiplying its value by a weight of 0, are spared: of this request, and of the one that
// has the page next, so that no page needs to be cleared when it is given back.
void store_poison(const ts::KvLayout& kv, const ts::KvHead& head, const ts::KvHead& place, int64_t lane, int64_t slot) {
    const int64_t D = kv.head_dim, pair = kv.type == ts::KvType::F32 ? 1 : 2;
    for (int64_t d = 0; d < D; d++) {
        const int64_t k = (d / pair * ts::kTile + lane) * pair + d % pair,
                      v = (lane / pair * D + d) * pair + lane % pair;
        if (kv.type == ts::KvType::F32) {
            reinterpret_cast<float*>(place.keys)[k] = __builtin_nanf("");
            reinterpret_cast<float*>(place.values)[v] = 0.0f;
        } else if (kv.type == ts::KvType::BF16) {
            reinterpret_cast<uint16_t*>(place.keys)[k] = 0x7fc0;
            reinterpret_cast<uint16_t*>(place.values)[v] = 0;
        }
    }
    // Codes are finite whatever they are. In int4 the NaN is the middle of the key's range.
    if (in_codes(kv.type)) head.key_scales[slot] = __builtin_nanf(""), head.value_scales[slot] = 0.0f;
}

// Codes 0 to 15 of numbers of scales between −7.5 and 7.5, to nearest even.
TS_INLINE Ints four_bit_codes(Floats x) {
    const Ints codes = (Ints)(x + all(7.5f) + all(12582912.0f)) - 0x4b400000;
    const Ints highest = lane_numbers() * 0 + 15;
    const Ints bounded = codes > highest ? highest : codes;
    return bounded < 0 ? highest * 0 : bounded;
}

// A key between its smallest and its largest number, a value to both sides of zero: in a score the middle of a key's
// range costs one sum over the query, in a sum of values it would cost a second sum of weights.
void write_four_bits(const ts::KvHead& head, const ts::KvHead& place, const float* key, const float* value,
                     int64_t lane, int64_t slot, int64_t D) {
    const int64_t half = (D + 1) / 2;
    Floats lowest = all(key[0]), highest = lowest;
    each_vector(D, [&](int64_t d, int n) TS_INLINED {
        const Floats v = lane_numbers() < n ? load_some(key + d, n) : all(key[0]);
        highest = greater(highest, v);
        lowest = -greater(-lowest, -v);
    });
    const float low = -max_of(-lowest), high = max_of(highest);
    const uint16_t scale = bf16_of(high / 15.0f - low / 15.0f), middle = bf16_of(0.5f * high + 0.5f * low);
    const float key_scale = float_of_bf16(scale), largest = largest_magnitude(value, D);
    const float value_scale = (largest > ts::kSmallestMaximum ? largest : ts::kSmallestMaximum) / 7.5f;
    const Floats per_key = all(key_scale > ts::kSmallestMaximum ? 1.0f / key_scale : 0.0f),
                 per_value = all(1.0f / value_scale), middles = all(float_of_bf16(middle));
    each_vector(D, [&](int64_t d, int n) TS_INLINED {
        const Ints codes = four_bit_codes((load_some(key + d, n) - middles) * per_key);
        for (int i = 0; i < n; i += 2)  // behind an odd D any code: queries have a zero there
            place.keys[(d + i) / 2 * ts::kTile + lane] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
    });
    each_vector(half, [&](int64_t d, int n) TS_INLINED {
        const int upper = D - half - d < n ? static_cast<int>(D - half - d) : n;
        const Ints low_codes = four_bit_codes(load_some(value + d, n) * per_value),
                   high_codes = four_bit_codes(load_some(value + half + d, upper) * per_value);
        const LooseBytes both = __builtin_convertvector(low_codes | high_codes << 4, LooseBytes);
        std::memcpy(place.values + lane * half + d, &both, static_cast<size_t>(n));
    });
    const uint32_t range = static_cast<uint32_t>(middle) << 16 | scale;
    std::memcpy(head.key_scales + slot, &range, 4);
    head.value_scales[slot] = value_scale;
}

void cache_write(const ts::KvLayout& kv, const ts::KvHead& head, float* key, float* value, int64_t slot) {
    const int64_t tile = slot / ts::kTile, lane = slot % ts::kTile, D = kv.head_dim;
    const ts::KvHead place{head.keys + tile * kv.key_tile_bytes, head.values + tile * kv.value_tile_bytes, nullptr,
                           nullptr};
    if (kv.type == ts::KvType::INT4) {
        hadamard(key, D);
        hadamard(value, D);
    }
    if (!stays_finite(kv, key) || !stays_finite(kv, value)) return store_poison(kv, head, place, lane, slot);
    if (kv.type == ts::KvType::INT4) return write_four_bits(head, place, key, value, lane, slot, D);
    if (kv.type == ts::KvType::F32) {
        float* k = reinterpret_cast<float*>(place.keys) + lane;
        for (int64_t d = 0; d < D; d++) k[d * ts::kTile] = key[d];
        std::memcpy(reinterpret_cast<float*>(place.values) + lane * D, value, static_cast<size_t>(D) * 4);
        return;
    }
    if (kv.type == ts::KvType::BF16) {
        scatter<uint16_t>(place, key, value, lane, D, [](Floats k, Floats v, uint16_t* keys, uint16_t* values) {
            store_halves(keys, low_halves(bf16_words(k)), kLanes);
            store_halves(values, low_halves(bf16_words(v)), kLanes);
        });
        return;
    }
    const float key_scale = kv_scale(key, D), value_scale = kv_scale(value, D);
    const Floats per_key = all(1.0f / key_scale), per_value = all(1.0f / value_scale);
    scatter<int8_t>(place, key, value, lane, D, [&](Floats k, Floats v, int8_t* keys, int8_t* values) {
        *reinterpret_cast<LooseBytes*>(keys) = __builtin_convertvector(codes_of(k * per_key), LooseBytes);
        *reinterpret_cast<LooseBytes*>(values) = __builtin_convertvector(codes_of(v * per_value), LooseBytes);
    });
    head.key_scales[slot] = key_scale;
    head.value_scales[slot] = value_scale;
}

TS_INLINE Floats silu(Floats x) { return quotient(x, all(1.0f) + exp_of(-x)); }

TS_INLINE Floats gelu_tanh(Floats x) {
    // tanh(u) = 1 − 2/(1 + e²ᵘ), so x/2·(1 + tanh(u)) = x·(1 − 1/(1 + e²ᵘ))
    const Floats u = all(0.7978845608f) * fma(all(0.044715f) * x * x, x, x);
    return x - quotient(x, all(1.0f) + exp_of(u + u));
}

TS_INLINE Floats gelu(Floats x) {
    // erf by Abramowitz & Stegun 7.1.26, absolute error below 1.5e-7.
    const Floats z = magnitude(x) * all(0.70710678f);
    const Floats t = quotient(all(1.0f), fma(all(0.3275911f), z, all(1.0f)));
    Floats p = all(1.061405429f);
    p = fma(p, t, all(-1.453152027f));
    p = fma(p, t, all(1.421413741f));
    p = fma(p, t, all(-0.284496736f));
    p = fma(p, t, all(0.254829592f));
    const Floats tail = p * t * exp_of(-z * z);  // 1 − erf(|z|)
    const Floats half = all(0.5f) * x;
    return x < all(0.0f) ? half * tail : half * (all(2.0f) - tail);
}

template <typename Function>
TS_INLINE void activate_by(const float* gate, const float* up, int64_t n, float* y, Function function) {
    if (up == nullptr)
        return each_vector(n, [&](int64_t i, int lanes)
                                  TS_INLINED { store_some(y + i, function(load_some(gate + i, lanes)), lanes); });
    each_vector(n, [&](int64_t i, int lanes) TS_INLINED {
        store_some(y + i, function(load_some(gate + i, lanes)) * load_some(up + i, lanes), lanes);
    });
}

// min(g, 7)·σ(1.702·g)·(1 + u) of a gate g and an up u within ±7 (gpt-oss).
void clamped_swish(const float* gate, const float* up, int64_t n, float* y) {
    const Floats limit = all(7.0f);
    each_vector(n, [&](int64_t i, int lanes) TS_INLINED {
        const Floats g = -greater(-load_some(gate + i, lanes), -limit);
        const Floats u = -greater(-greater(load_some(up + i, lanes), -limit), -limit);
        store_some(y + i, quotient(g, all(1.0f) + exp_of(g * all(-1.702f))) * (u + all(1.0f)), lanes);
    });
}

void activate(ts::Activation activation, const float* gate, const float* up, int64_t n, float* y) {
    switch (activation) {
        case ts::Activation::Silu: return activate_by(gate, up, n, y, [](Floats v) TS_INLINED { return silu(v); });
        case ts::Activation::Gelu: return activate_by(gate, up, n, y, [](Floats v) TS_INLINED { return gelu(v); });
        case ts::Activation::GeluTanh:
            return activate_by(gate, up, n, y, [](Floats v) TS_INLINED { return gelu_tanh(v); });
        case ts::Activation::ClampedSwish: return clamped_swish(gate, up, n, y);
    }
}

void bound(float* x, int64_t n, float cap) {
    each_vector(
        n, [&](int64_t i, int lanes) TS_INLINED { store_some(x + i, bounded(load_some(x + i, lanes), cap), lanes); });
}

// For each of sixteen lanes the largest of its numbers, the first place that has it, and 0, or NaN once one is not
// finite. Returns how many of x were looked at.
TS_INLINE int64_t best_of_lanes(const float* x, int64_t n, float* values, int32_t* places, float* odds) {
    int64_t i = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256 highest[2], odd[2];
    __m256i where[2], here[2];
    TS_HALVES(h) {
        highest[h] = _mm256_set1_ps(-__builtin_inff());
        odd[h] = _mm256_setzero_ps();
        where[h] = here[h] = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * h));
    }
    for (; i + kLanes <= n; i += kLanes) {
        TS_HALVES(h) {
            const __m256 v = _mm256_loadu_ps(x + i + 8 * h);
            odd[h] = _mm256_fmadd_ps(v, _mm256_setzero_ps(), odd[h]);
            const __m256i more = _mm256_castps_si256(_mm256_cmp_ps(v, highest[h], _CMP_GT_OQ));
            where[h] = _mm256_blendv_epi8(where[h], here[h], more);
            highest[h] = _mm256_max_ps(v, highest[h]);
            here[h] = _mm256_add_epi32(here[h], _mm256_set1_epi32(kLanes));
        }
    }
    TS_HALVES(h) {
        _mm256_storeu_ps(values + 8 * h, highest[h]);
        _mm256_storeu_ps(odds + 8 * h, odd[h]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(places + 8 * h), where[h]);
    }
#else
    Floats highest = all(-__builtin_inff()), odd = all(0.0f);
    Ints where = lane_numbers(), here = lane_numbers();
    for (; i + kLanes <= n; i += kLanes, here += kLanes) {
        const Floats v = load(x + i);
        odd += v * 0.0f;
        where = v > highest ? here : where;
        highest = greater(v, highest);
    }
    store(values, highest);
    store(odds, odd);
    std::memcpy(places, &where, sizeof where);
#endif
    return i;
}

ts::Best best(const float* x, int64_t n) {
    float values[kLanes], odds[kLanes];
    int32_t places[kLanes];
    int64_t i = best_of_lanes(x, n, values, places, odds);
    ts::Best found{-__builtin_inff(), n};
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; lane++) {
        total += odds[lane];
        if (values[lane] > found.value || (values[lane] == found.value && places[lane] < found.index))
            found = {values[lane], places[lane]};
    }
    for (; i < n; i++) {
        total += x[i] * 0.0f;
        if (x[i] > found.value) found = {x[i], i};
    }
    if (total != 0.0f) found.value = total;  // NaN
    return found;
}

constexpr int kThinAhead = 32;  // inputs

// R rows of one panel. Four chains of sums hide the latency of an addition, the same four for any R.
template <int R>
TS_INLINE void thin_block(const float* panel, int64_t k, const float* const* x, Floats (&sum)[R]) {
    const float* from[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) from[r] = x[r];
    Floats chains[R][4];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) chains[r][j] = all(0.0f);
    int64_t i = 0;
    for (; i + 4 <= k; i += 4) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __builtin_prefetch(panel + (i + j + kThinAhead) * kLanes, 0, 3);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
                chains[r][j] = fma(all(from[r][i + j]), load(panel + (i + j) * kLanes), chains[r][j]);
        }
    }
    for (; i < k; i++) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) chains[r][0] = fma(all(from[r][i]), load(panel + i * kLanes), chains[r][0]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r] = (chains[r][0] + chains[r][1]) + (chains[r][2] + chains[r][3]);
}

// Lanes [first, last) of a panel's outputs, whose first is y.
TS_INLINE void put(float* y, Floats value, int first, int last, bool add) {
    if (first == 0) {
        store_some(y, add ? load_some(y, last) + value : value, last);
        return;
    }
    float lanes[kLanes];
    store(lanes, value);
    for (int i = first; i < last; i++) y[i] = add ? y[i] + lanes[i] : lanes[i];
}

template <int R>
TS_INLINE void thin_rows(const float* panel, int64_t k, const float* const* x, float* const* y, int64_t begin,
                         int first, int last, bool add) {
    Floats sum[R];
    thin_block<R>(panel, k, x, sum);
    for (int r = 0; r < R; r++) put(y[r] + begin, sum[r], first, last, add);
}

void thin_f32(const float* packed, int64_t k, const float* const* x, int64_t m, int64_t n0, int64_t n1, float* const* y,
              bool add) {
    for (int64_t panel = n0 / kLanes; panel * kLanes < n1; panel++) {
        const int64_t begin = panel * kLanes;
        const int first = static_cast<int>(begin < n0 ? n0 - begin : 0);
        const int last = static_cast<int>(n1 - begin < kLanes ? n1 - begin : kLanes);
        const float* from = packed + begin * k;
        int64_t r = 0;
        for (; r + 4 <= m; r += 4) thin_rows<4>(from, k, x + r, y + r, begin, first, last, add);
        for (; r + 2 <= m; r += 2) thin_rows<2>(from, k, x + r, y + r, begin, first, last, add);
        for (; r < m; r++) thin_rows<1>(from, k, x + r, y + r, begin, first, last, add);
    }
}

constexpr ts::Kernels with_elementwise(ts::Kernels k) {
    k.embed = embed;
    k.rms_norm = rms_norm;
    k.layer_norm = layer_norm;
    k.rope = rope;
    k.cache_write = cache_write;
    k.activate = activate;
    k.bound = bound;
    k.best = best;
    k.thin_f32 = thin_f32;
    return k;
}

}  // namespace
