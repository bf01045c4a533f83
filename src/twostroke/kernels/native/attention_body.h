// Attention of a few query rows of one request over the cached keys of one KV head.
//
// Online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) over blocks of kBlock keys; spans of these are
// computed apart and combined in order (as flash-decoding does, so that threads can share them out). Borders of blocks
// and spans are absolute positions and every sum runs over single keys or pairs of dimensions in order, so a row's
// result does not depend on the rows beside it, on how a prompt was cut into chunks, or on the number of threads. A
// block that a row may not see changes nothing of it: its weights are exactly 0 and the correction exactly 1.
#pragma once

#include "attention_spans.h"
#include "attention_tiles.h"
#include "kernels.h"

namespace {

constexpr int kTilesPerBlock = ts::kBlock / ts::kTile;
constexpr int64_t kTaskRows = 48;
#if defined(__AVX2__) && !defined(__AVX512F__)
// Up to so many rows, the keys or values that are read next are fetched while those before them are multiplied. On
// Zen 3 nothing else overlaps the two: a step behind 4,000 tokens takes 0.8 of its time. Not tried where registers are
// wider.
constexpr int kFetchRows = 8;
#else
constexpr int kFetchRows = 0;
#endif

// Keys and values as the loops read them: sixteen lanes of a pair of numbers, or of one float. What a row multiplies
// them with lies in kFactorWords words a pair. `Sums` are sixteen sums, vectors_of(rows) of them side by side.
#if defined(__AVX2__) && !defined(__AVX512F__)
// Two registers each, by hand: GCC keeps its own vectors of 64 bytes in memory where there are no registers of 64.
// Factors are floats, which a load spreads over the lanes. Codes are read as they lie in the cache: their numbers are
// those of their bf16 words, which would have to be written and taken apart again.
using Sums = ts::F32x16;
struct Pairs {
    Sums even, odd;
};
TS_INLINE Sums no_sums() { return ts::zero_floats(); }
TS_INLINE Sums load_sums(const float* p) { return ts::load_floats(p); }
TS_INLINE void store_sums(float* p, Sums v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
}
TS_INLINE __m128i sixteen_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
TS_INLINE __m256 eight_floats(__m256i words) { return _mm256_cvtepi32_ps(words); }

struct OfPairs {
    static constexpr int kPair = 2, kFactorWords = 2, kVectorBytes = 64;  // bytes: of sixteen pairs
    static constexpr bool kOfCodes = false;
    TS_INLINE Sums dot(Sums sum, const uint32_t* factors, Pairs many) {
        const float* f = reinterpret_cast<const float*>(factors);
        return ts::fma(ts::broadcast(f[1]), many.odd, ts::fma(ts::broadcast(f[0]), many.even, sum));
    }
};
struct Bf16Pairs : OfPairs {
    TS_INLINE Pairs load(const void* p) {
        const ts::I32x16 words = ts::load_words(p);
        const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(words.low, 16)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(words.high, 16))},
                {_mm256_castsi256_ps(_mm256_and_si256(words.low, upper)),
                 _mm256_castsi256_ps(_mm256_and_si256(words.high, upper))}};
    }
    TS_INLINE Pairs keys(const uint32_t* tile, int64_t d) { return load(tile + d * kLanes); }
    TS_INLINE Pairs values(const uint32_t* tile, int64_t j, int64_t D, int64_t d) { return load(tile + j * D + d); }
};
struct CodePairs : OfPairs {
    static constexpr bool kOfCodes = true;
    static constexpr int kVectorBytes = 32;
    TS_INLINE Pairs load(const uint8_t* p) {
        const __m256i low = _mm256_cvtepi8_epi16(sixteen_bytes(p)), high = _mm256_cvtepi8_epi16(sixteen_bytes(p + 16));
        return {{eight_floats(_mm256_srai_epi32(_mm256_slli_epi32(low, 16), 16)),
                 eight_floats(_mm256_srai_epi32(_mm256_slli_epi32(high, 16), 16))},
                {eight_floats(_mm256_srai_epi32(low, 16)), eight_floats(_mm256_srai_epi32(high, 16))}};
    }
    TS_INLINE Pairs keys(const uint32_t* tile, int64_t d) {
        return load(reinterpret_cast<const uint8_t*>(tile) + d * 2 * kLanes);
    }
    TS_INLINE Pairs values(const uint32_t* tile, int64_t j, int64_t D, int64_t d) {
        return load(reinterpret_cast<const uint8_t*>(tile) + (j * D + d) * 2);
    }
};
struct FourBitCodes : OfPairs {
    static constexpr bool kOfCodes = true;
    static constexpr int kVectorBytes = 16;
    // What the lower four bits of sixteen bytes stand for.
    TS_INLINE Sums values_of(__m128i codes) {
        codes = _mm_and_si128(codes, _mm_set1_epi8(15));
        const __m256 middle = _mm256_set1_ps(7.5f);
        return {_mm256_sub_ps(eight_floats(_mm256_cvtepu8_epi32(codes)), middle),
                _mm256_sub_ps(eight_floats(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8))), middle)};
    }
    TS_INLINE Pairs keys(const uint32_t* tile, int64_t d) {
        const __m128i both = sixteen_bytes(reinterpret_cast<const uint8_t*>(tile) + d * kLanes);
        return {values_of(both), values_of(_mm_srli_epi16(both, 4))};
    }
    // Where half of a head is whole vectors of dimensions, and for so few rows that taking codes apart again for every
    // kRowsAtOnce of them costs less than writing their words: 4 rows gain a sixth, a prompt's 48 would lose a twelfth.
    static constexpr bool reads(int64_t D, int64_t n_rows) { return D % (2 * kLanes) == 0 && n_rows <= 8; }
    TS_INLINE Pairs values(const uint32_t* tile, int64_t j, int64_t D, int64_t d) {
        const int64_t half = D / 2;
        const bool upper = d >= half;
        const uint8_t* even = reinterpret_cast<const uint8_t*>(tile) + 2 * j * half + (upper ? d - half : d);
        const __m128i shift = _mm_cvtsi32_si128(upper ? 4 : 0);
        return {values_of(_mm_srl_epi16(sixteen_bytes(even), shift)),
                values_of(_mm_srl_epi16(sixteen_bytes(even + half), shift))};
    }
};
struct SingleFloats {
    static constexpr int kPair = 1, kFactorWords = 1, kVectorBytes = 64;
    static constexpr bool kOfCodes = false;
    TS_INLINE Sums dot(Sums sum, const uint32_t* factor, Sums many) {
        return ts::fma(ts::broadcast(*reinterpret_cast<const float*>(factor)), many, sum);
    }
    TS_INLINE Sums keys(const uint32_t* tile, int64_t d) { return ts::load_floats(tile + d * kLanes); }
    TS_INLINE Sums values(const uint32_t* tile, int64_t j, int64_t D, int64_t d) {
        return ts::load_floats(tile + j * D + d);
    }
};
constexpr int kRowsAtOnce = 4;
// So many sums of two registers leave four for a vector's floats, or three at three rows, where it still takes 0.98 of
// a step.
constexpr int vectors_of(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// sums[row][vector] += factor(row) · vector(vector). One vector at a time: its floats take four registers.
template <typename Format, int Rows, int N, typename Factor, typename Vector>
TS_INLINE void add_products(Sums (&sums)[Rows][N], Factor factor, Vector vector) {
    for (int n = 0; n < N; n++) {
        const auto many = vector(n);
        for (int r = 0; r < Rows; r++) sums[r][n] = Format::dot(sums[r][n], factor(r), many);
    }
}

TS_INLINE Sums every(float x) { return ts::broadcast(x); }
TS_INLINE Sums plus(Sums a, Sums b) { return ts::add(a, b); }
TS_INLINE Sums minus(Sums a, Sums b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
TS_INLINE Sums times(Sums a, Sums b) { return ts::multiply(a, b); }
TS_INLINE Sums times_plus(Sums a, Sums b, Sums c) { return ts::fma(a, b, c); }
TS_INLINE Sums larger(Sums a, Sums b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
TS_INLINE Sums power_of_two(Sums x) { return {exp2_of_half(x.low), exp2_of_half(x.high)}; }
TS_INLINE float power_of_two(float x) { return _mm256_cvtss_f32(exp2_of_half(_mm256_set1_ps(x))); }
TS_INLINE Split split(Sums x) {
    Split both;
    both.half[0] = x.low, both.half[1] = x.high;
    return both;
}
TS_INLINE float largest_of(Sums x) { return max_of(split(x).whole); }
TS_INLINE float total_of(Sums x) { return sum_of(split(x).whole); }
TS_INLINE Sums bounded_by(Sums x, float cap) {
    const Split y{bounded(split(x).whole, cap)};
    return {y.half[0], y.half[1]};
}
TS_INLINE __m256 only_lanes(__m256 x, int first, int low, int high) {
    const __m256i lane = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), lane),
                                        _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(high)));
    return _mm256_blendv_ps(x, _mm256_set1_ps(-__builtin_inff()), _mm256_castsi256_ps(out));
}
TS_INLINE Sums only_lanes(Sums x, int low, int high) {
    return {only_lanes(x.low, 0, low, high), only_lanes(x.high, 8, low, high)};
}
TS_INLINE __m256 rounded_to_bf16(__m256 x) { return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_words_of_half(x), 16)); }
TS_INLINE Sums rounded_to_bf16(Sums x) { return {rounded_to_bf16(x.low), rounded_to_bf16(x.high)}; }
// Sixteen weights, rounded to bf16.
TS_INLINE void store_weights(uint32_t* weights, int t, Sums rounded) {
    store_sums(reinterpret_cast<float*>(weights) + t * ts::kTile, rounded);
}
#else
using Sums = Floats;
TS_INLINE Sums every(float x) { return all(x); }
TS_INLINE Sums plus(Sums a, Sums b) { return a + b; }
TS_INLINE Sums minus(Sums a, Sums b) { return a - b; }
TS_INLINE Sums times(Sums a, Sums b) { return a * b; }
TS_INLINE Sums times_plus(Sums a, Sums b, Sums c) { return fma(a, b, c); }
TS_INLINE Sums larger(Sums a, Sums b) { return greater(a, b); }
TS_INLINE Sums power_of_two(Sums x) { return exp2_of(x); }
TS_INLINE float power_of_two(float x) { return exp2_of(all(x))[0]; }
TS_INLINE float largest_of(Sums x) { return max_of(x); }
TS_INLINE float total_of(Sums x) { return sum_of(x); }
TS_INLINE Sums bounded_by(Sums x, float cap) { return bounded(x, cap); }
TS_INLINE Sums only_lanes(Sums x, int low, int high) {
    const Ints lane = lane_numbers();
    const Floats none = all(-__builtin_inff());
    x = lane < low ? none : x;
    return lane > high ? none : x;
}
TS_INLINE Sums rounded_to_bf16(Sums x) { return (Floats)(bf16_words(x) << 16); }
TS_INLINE Sums no_sums() { return all(0.0f); }
TS_INLINE Sums load_sums(const float* p) { return load(p); }
TS_INLINE void store_sums(float* p, Sums v) { store(p, v); }
struct OfWords {
    static constexpr int kFactorWords = 1, kVectorBytes = 64;
    static constexpr bool kOfCodes = false;
    TS_INLINE Words keys(const uint32_t* tile, int64_t d) { return load_words(tile + d * kLanes); }
    TS_INLINE Words values(const uint32_t* tile, int64_t j, int64_t D, int64_t d) {
        return load_words(tile + j * D + d);
    }
};
struct Bf16Pairs : OfWords {
    static constexpr int kPair = 2;
    TS_INLINE Sums dot(Sums sum, const uint32_t* one, Words many) { return dot_pairs(sum, all_words(*one), many); }
};
struct SingleFloats : OfWords {
    static constexpr int kPair = 1;
    TS_INLINE Sums dot(Sums sum, const uint32_t* one, Words many) {
        return fma((Floats)all_words(*one), (Floats)many, sum);
    }
};
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 6;
#else
constexpr int kRowsAtOnce = 1;
#endif
constexpr int vectors_of(int) { return 4; }

// sums[row][vector] += factor(row) · vector(vector).
template <typename Format, int Rows, int N, typename Factor, typename Vector>
TS_INLINE void add_products(Sums (&sums)[Rows][N], Factor factor, Vector vector) {
    Words many[N];
    for (int n = 0; n < N; n++) many[n] = vector(n);
    for (int r = 0; r < Rows; r++)
        for (int n = 0; n < N; n++) sums[r][n] = Format::dot(sums[r][n], factor(r), many[n]);
}
TS_INLINE void store_weights(uint32_t* weights, int t, Sums rounded) {
    store_halves(reinterpret_cast<uint16_t*>(weights) + t * ts::kTile, low_halves((Words)rounded >> 16), kLanes);
}
#endif

// Fetches the line that vector i of a tile begins; where it begins none, one before it has fetched its line. `ahead` of
// the loops below are the tiles that are read next, or null.
template <typename Format>
TS_INLINE void fetch(const uint32_t* tile, int64_t i) {
    constexpr int64_t kEach = 64 / Format::kVectorBytes;
    if (i % kEach == 0) __builtin_prefetch(reinterpret_cast<const char*>(tile) + i * Format::kVectorBytes, 0, 2);
}

// scores[row][key] of Rows rows and Tiles tiles of 16 keys.
template <typename Format, int Rows, int Tiles>
TS_INLINE void score_rows(const uint32_t* q, int64_t q_words, const uint32_t* const* keys, float* scores,
                          const uint32_t* const* ahead) {
    Sums sums[Rows][Tiles];
    for (int r = 0; r < Rows; r++)
        for (int t = 0; t < Tiles; t++) sums[r][t] = no_sums();
    for (int64_t d = 0; d < q_words; d++) {
        if (ahead != nullptr)
            for (int t = 0; t < Tiles; t++) fetch<Format>(ahead[t], d);
        add_products<Format, Rows, Tiles>(sums, [&](int r) TS_INLINED {
            return q + (r * q_words + d) * Format::kFactorWords;
        }, [&](int t) TS_INLINED { return Format::keys(keys[t], d); });
    }
    for (int r = 0; r < Rows; r++)
        for (int t = 0; t < Tiles; t++) store_sums(scores + r * ts::kBlock + t * ts::kTile, sums[r][t]);
}

template <typename Format, int Rows>
void score_tiles(const uint32_t* q, int64_t q_words, const uint32_t* const* keys, int n_tiles, float* scores,
                 const uint32_t* const* ahead) {
    constexpr int kVectors = vectors_of(Rows);
    const auto from = [&](int t) TS_INLINED { return ahead == nullptr ? nullptr : ahead + t; };
    int t = 0;
    for (; t + kVectors <= n_tiles; t += kVectors)
        score_rows<Format, Rows, kVectors>(q, q_words, keys + t, scores + t * ts::kTile, from(t));
    for (; t < n_tiles; t++) score_rows<Format, Rows, 1>(q, q_words, keys + t, scores + t * ts::kTile, from(t));
}

template <int N>
struct Count {
    constexpr int operator()() const { return N; }
};

// sums[row][dimension] += weights · values, for Rows rows and Parts·16 dimensions from `first` on.
template <typename Format, int Rows, int Parts>
TS_INLINE void weighted_value_rows(const uint32_t* weights, const uint32_t* const* values, int n_tiles,
                                   int64_t head_dim, int64_t padded, int64_t first, float* sums,
                                   const uint32_t* const* ahead) {
    Sums s[Rows][Parts];
    for (int r = 0; r < Rows; r++)
        for (int p = 0; p < Parts; p++) s[r][p] = load_sums(sums + r * padded + first + p * kLanes);
    constexpr int kWords = ts::kTile / Format::kPair;
    for (int t = 0; t < n_tiles; t++)
        for (int j = 0; j < kWords; j++) {
            if (ahead != nullptr)
                for (int p = 0; p < Parts; p++) fetch<Format>(ahead[t], j * (padded / kLanes) + first / kLanes + p);
            add_products<Format, Rows, Parts>(s, [&](int r) TS_INLINED {
                return weights + r * ts::kBlock + (t * kWords + j) * Format::kFactorWords;
            }, [&](int p) TS_INLINED { return Format::values(values[t], j, head_dim, first + p * kLanes); });
        }
    for (int r = 0; r < Rows; r++)
        for (int p = 0; p < Parts; p++) store_sums(sums + r * padded + first + p * kLanes, s[r][p]);
}

template <typename Format, int Rows>
void weighted_value_tiles(const uint32_t* weights, const uint32_t* const* values, int n_tiles, int64_t head_dim,
                          int64_t padded, float* sums, const uint32_t* const* ahead) {
    constexpr int kVectors = vectors_of(Rows), kThree = kVectors > 2 ? 3 : 1, kTwo = kVectors > 1 ? 2 : 1;
    for (int64_t first = 0; first < padded; first += kVectors * kLanes) {
        const int64_t left = (padded - first) / kLanes;
        const auto parts = [&](auto n) TS_INLINED {
            weighted_value_rows<Format, Rows, n()>(weights, values, n_tiles, head_dim, padded, first, sums, ahead);
        };
        if (left >= kVectors) parts(Count<kVectors>{});
        else if (left == 3) parts(Count<kThree>{});
        else if (left == 2) parts(Count<kTwo>{});
        else parts(Count<1>{});
    }
}

// Calls body<Rows>(first row) over all rows, kRowsAtOnce at a time and what is left in smaller pieces.
template <template <typename, int> class Body, typename Format, typename... Args>
TS_INLINE void by_rows(int n_rows, Args... args) {
    int r = 0;
    for (; r + kRowsAtOnce <= n_rows; r += kRowsAtOnce) Body<Format, kRowsAtOnce>::run(r, args...);
    if constexpr (kRowsAtOnce >= 4) {
        if (n_rows - r >= 4) Body<Format, 4>::run(r, args...), r += 4;
        if (n_rows - r >= 3) Body<Format, 3>::run(r, args...), r += 3;
        if (n_rows - r >= 2) Body<Format, 2>::run(r, args...), r += 2;
    }
    for (; r < n_rows; r++) Body<Format, 1>::run(r, args...);
}
template <typename Format, int Rows>
struct Score {
    TS_INLINE void run(int r, const uint32_t* q, int64_t words, const uint32_t* const* keys, int n_tiles, float* scores,
                       const uint32_t* const* ahead) {
        score_tiles<Format, Rows>(q + r * words * Format::kFactorWords, words, keys, n_tiles, scores + r * ts::kBlock,
                                  r == 0 ? ahead : nullptr);
    }
};
template <typename Format, int Rows>
struct WeightedValues {
    TS_INLINE void run(int r, const uint32_t* weights, const uint32_t* const* values, int n_tiles, int64_t D,
                       int64_t padded, float* sums, const uint32_t* const* ahead) {
        weighted_value_tiles<Format, Rows>(weights + r * ts::kBlock, values, n_tiles, D, padded, sums + r * padded,
                                           r == 0 ? ahead : nullptr);
    }
};

// One thread's memory for one task.
struct Scratch {
    int64_t n_rows, q_words, padded;
    uint32_t* q;        // (rows, q_words, words that a pair's factors take)
    float* scores;      // (rows, kBlock)
    uint32_t* weights;  // (rows, kBlock)
    float* sums;        // (rows, padded): of the span
    float* total;       // (rows, padded): of the spans before it
    float *running_max, *denominator, *total_max, *total_denominator;  // (rows)
    float *turned, *query_sums;                                        // (head_dim), (rows): of prepare_queries
    uint32_t* key_tiles;    // (kTilesPerBlock, q_words, 16): tiles that had to be put together or widened
    uint32_t* value_tiles;  // (kTilesPerBlock, 16, head_dim), a lane's width of slack behind them

    static int64_t round(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
    static int64_t rows_of(int64_t group) { return group > kTaskRows ? group : kTaskRows; }

    int64_t lay_out(const ts::KvLayout& kv, int64_t group, uint8_t* base) {
        n_rows = rows_of(group);
        const int64_t pair = kv.type == ts::KvType::F32 ? 1 : 2;
        q_words = (kv.head_dim + pair - 1) / pair;
        padded = round(kv.head_dim, kLanes);
        int64_t at = 0;
        auto take = [&](int64_t words) {
            uint8_t* place = base + at;
            at += round(words * 4, 64);
            return place;
        };
        q = reinterpret_cast<uint32_t*>(take(n_rows * q_words * Bf16Pairs::kFactorWords));
        scores = reinterpret_cast<float*>(take(n_rows * ts::kBlock));
        weights = reinterpret_cast<uint32_t*>(take(n_rows * ts::kBlock));
        sums = reinterpret_cast<float*>(take(n_rows * padded));
        total = reinterpret_cast<float*>(take(n_rows * padded));
        running_max = reinterpret_cast<float*>(take(n_rows));
        denominator = reinterpret_cast<float*>(take(n_rows));
        total_max = reinterpret_cast<float*>(take(n_rows));
        total_denominator = reinterpret_cast<float*>(take(n_rows));
        turned = reinterpret_cast<float*>(take(kv.head_dim));
        query_sums = reinterpret_cast<float*>(take(n_rows));
        key_tiles = reinterpret_cast<uint32_t*>(take(kTilesPerBlock * q_words * ts::kTile));
        value_tiles = reinterpret_cast<uint32_t*>(take(kTilesPerBlock * ts::kTile * kv.head_dim + 4 * kLanes));
        return at;
    }
};

int64_t task_rows(const ts::KvLayout&) { return kTaskRows; }

int64_t attend_scratch_bytes(const ts::KvLayout& kv, int64_t group) {
    Scratch scratch;
    return scratch.lay_out(kv, group, nullptr);
}

// One block's scores of row r become weights; its maximum, sum and what was summed so far are brought up to date.
TS_INLINE void softmax(const ts::KvLayout& kv, const Tiles<kTilesPerBlock>& tiles, int64_t r, int64_t first,
                       int64_t least, int64_t last, int n_tiles, float cap, Scratch& s) {
    float* scores = s.scores + r * ts::kBlock;
    const Sums none = every(-__builtin_inff());
    Sums x[kTilesPerBlock];
    Sums running_max = none;
    for (int t = 0; t < kTilesPerBlock; t++) {
        x[t] = none;
        if (t >= n_tiles) continue;
        x[t] = load_sums(scores + t * ts::kTile);
        if (in_codes(kv.type)) x[t] = times(x[t], load_sums(tiles.key_scales + t * ts::kTile));
        if (kv.type == ts::KvType::INT4)
            x[t] = times_plus(load_sums(tiles.key_middles + t * ts::kTile), every(s.query_sums[r]), x[t]);
        if (cap > 0.0f) x[t] = bounded_by(x[t], cap * kLog2e);
        const int64_t position = first + t * ts::kTile;
        if (position < least || position + ts::kTile - 1 > last) {
            const int low = least - position > 0 ? static_cast<int>(least - position < 16 ? least - position : 16) : 0;
            const int high = last - position < 15 ? static_cast<int>(last - position > -1 ? last - position : -1) : 15;
            x[t] = only_lanes(x[t], low, high);
        }
        running_max = larger(running_max, x[t]);
    }
    const float before = s.running_max[r], here = largest_of(running_max);
    const float now = here > before ? here : before;
    const float base = now > -__builtin_inff() ? now : 0.0f;
    const float correction = power_of_two(before - base);
    Sums total = no_sums();
    for (int t = 0; t < n_tiles; t++) {
        Sums w = power_of_two(minus(x[t], every(base)));
        if (kv.type == ts::KvType::F32) {
            total = plus(total, w);
            store_sums(reinterpret_cast<float*>(s.weights) + r * ts::kBlock + t * ts::kTile, w);
            continue;
        }
        if (kv.type == ts::KvType::BF16) {
            w = rounded_to_bf16(w);
            total = plus(total, w);  // the sum of what is multiplied, so that weights sum to 1
            store_weights(s.weights + r * ts::kBlock, t, w);
            continue;
        }
        total = plus(total, w);
        w = times(w, load_sums(tiles.value_scales + t * ts::kTile));
        store_weights(s.weights + r * ts::kBlock, t, rounded_to_bf16(w));
    }
    s.denominator[r] = s.denominator[r] * correction + total_of(total);
    s.running_max[r] = now;
    if (correction != 1.0f)
        for (int64_t d = 0; d < s.padded; d += kLanes) {
            float* sums = s.sums + r * s.padded + d;
            store_sums(sums, times(load_sums(sums), every(correction)));
        }
}

template <typename Format>
void attend_as(const ts::KvLayout& kv, const ts::KvHead& head, const ts::AttendTask& task, float scale, Scratch& s) {
    const int64_t D = kv.head_dim, n_rows = static_cast<int64_t>(task.n_tokens) * task.group;
    prepare_queries(kv, task, scale, s.q, s.q_words * Format::kFactorWords, s.turned, s.query_sums);
    for (int64_t r = 0; r < n_rows; r++) s.total_max[r] = -__builtin_inff(), s.total_denominator[r] = 0.0f;
    std::memset(s.total, 0, static_cast<size_t>(n_rows * s.padded) * 4);
    Tiles<kTilesPerBlock> tiles;
    const int64_t first_span = ts::span_of(task.first_key);
    for (int64_t i = first_span; ts::first_key_of(i) < task.end_key; i++) {
        const int64_t span = ts::first_key_of(i), behind = ts::first_key_of(i + 1);
        for (int64_t r = 0; r < n_rows; r++) s.running_max[r] = -__builtin_inff(), s.denominator[r] = 0.0f;
        std::memset(s.sums, 0, static_cast<size_t>(n_rows * s.padded) * 4);
        const int64_t end = behind < task.end_key ? behind : task.end_key;
        for (int64_t block = span; block < end; block += ts::kBlock) {
            if (block + ts::kBlock <= task.first_key) continue;
            const int64_t here = block + ts::kBlock < end ? block + ts::kBlock : end;
            const int n_tiles = static_cast<int>((here - block + ts::kTile - 1) / ts::kTile);
            // The first tokens may see nothing of this block yet, and the last nothing of it any more.
            int64_t first_token = block > task.first_position ? block - task.first_position : 0;
            int64_t last_token = task.n_tokens;
            if (task.window > 0) {
                const int64_t out = here - 1 + task.window - task.first_position;  // this token sees none of its keys
                if (out < last_token) last_token = out;
            }
            if (first_token >= last_token) continue;
            find_tiles<Format::kOfCodes>(kv, head, task.pages, block, task.first_key, here, n_tiles, s.key_tiles,
                                         s.value_tiles, tiles);
            const int64_t first_row = first_token * task.group;
            const int rows = static_cast<int>(last_token * task.group - first_row);
            const bool fetches = rows <= kFetchRows;
            if (fetches) find_next_keys(kv, head, task.pages, block + ts::kBlock, task.end_key, n_tiles, tiles);
            by_rows<Score, Format>(rows, (const uint32_t*)s.q + first_row * s.q_words * Format::kFactorWords, s.q_words,
                                   tiles.keys, n_tiles, s.scores + first_row * ts::kBlock,
                                   fetches ? tiles.values : nullptr);
            for (int64_t r = first_row; r < first_row + rows; r++) {
                const int64_t last = task.first_position + r / task.group;
                const int64_t least = task.window > 0 ? last - task.window + 1 : 0;
                softmax(kv, tiles, r, block, least, last, n_tiles, task.cap, s);
            }
            by_rows<WeightedValues, Format>(rows, (const uint32_t*)s.weights + first_row * ts::kBlock, tiles.values,
                                            n_tiles, D, s.padded, s.sums + first_row * s.padded,
                                            fetches ? tiles.next_keys : nullptr);
        }
        if (task.partial != nullptr) {
            float* out = task.partial + (i - first_span) * n_rows * (D + 2);
            for (int64_t r = 0; r < n_rows; r++) {
                out[2 * r] = s.running_max[r];
                out[2 * r + 1] = s.denominator[r];
                std::memcpy(out + 2 * n_rows + r * D, s.sums + r * s.padded, static_cast<size_t>(D) * 4);
            }
            continue;
        }
        for (int64_t r = 0; r < n_rows; r++)
            merge_span(s.total + r * s.padded, s.total_max[r], s.total_denominator[r], s.sums + r * s.padded,
                       s.running_max[r], s.denominator[r], s.padded);
    }
    if (task.partial != nullptr) return;
    for (int64_t r = 0; r < n_rows; r++)
        divide_by_denominator(kv, task, r, s.total + r * s.padded, s.total_max[r], s.total_denominator[r]);
}

void attend(const ts::KvLayout& kv, const ts::KvHead& head, const ts::AttendTask& task, float scale, void* memory) {
    Scratch scratch;
    scratch.lay_out(kv, task.group, static_cast<uint8_t*>(memory));
    if (kv.type == ts::KvType::F32) return attend_as<SingleFloats>(kv, head, task, scale, scratch);
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (kv.type == ts::KvType::INT8) return attend_as<CodePairs>(kv, head, task, scale, scratch);
    if (kv.type == ts::KvType::INT4 && FourBitCodes::reads(kv.head_dim, task.n_tokens * task.group))
        return attend_as<FourBitCodes>(kv, head, task, scale, scratch);
#endif
    attend_as<Bf16Pairs>(kv, head, task, scale, scratch);
}

constexpr ts::Kernels with_attention(ts::Kernels k) {
    k.task_rows = task_rows;
    k.attend_scratch_bytes = attend_scratch_bytes;
    k.attend = attend;
    k.combine = combine;
    return k;
}

}  // namespace
