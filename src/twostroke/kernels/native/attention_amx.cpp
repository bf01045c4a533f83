// Attention over a bf16, int8 or int4 cache by AMX's matrix registers: sixteen query rows at a time, and the softmax of
// a span of 256 keys at once.
//
// A tile of the cache is a register of weights as tdpbf16ps wants it: thirty-two dimensions of sixteen keys, or
// thirty-two keys' values of sixteen dimensions. The processor adds each pair's products in one order whatever the
// other rows of a register are, borders are absolute positions, and a key that a row may not see has a weight of
// exactly 0: a row's result depends on nothing beside it, as in attention_body.h.
#include "attention_spans.h"
#include "attention_tiles.h"
#include "targets.h"
#include "tmm.h"

namespace {

constexpr int kTilesPerSpan = ts::kSpan / ts::kTile;
constexpr int kRowsPerTmm = 16;
constexpr int kTaskRows = 96;                      // of a task: an int8 cache is widened once for all of them
constexpr int64_t kPairBytes = 2 * ts::kTile * 2;  // of weights of two tiles of keys: a register's row
constexpr int64_t kWeightStride = ts::kSpan * 2, kScoreStride = ts::kSpan * 4;
constexpr int kRows0 = 4, kKeys0 = 6, kKeys1 = 7;  // matrix registers; 0 to 3 are sums
constexpr int64_t kFetchAhead = 4;  // tiles of keys and values that the first rows ask for ahead of their use

// One thread's memory for one task.
struct Workspace {
    int64_t n_rows, head_dim, q_words;
    uint32_t* q;                           // (rows, q_words)
    float* scores;                         // (16, kSpan)
    uint16_t* weights;                     // (16, kSpan)
    float* sums;                           // (16, head_dim): of the span
    float* total;                          // (rows, head_dim): of the spans before it
    float *total_max, *total_denominator;  // (rows)
    float *turned, *query_sums;            // (head_dim), (rows): of prepare_queries
    uint32_t* key_tiles;                   // (kTilesPerSpan, q_words, 16): tiles that had to be put together or widened
    uint32_t* value_tiles;                 // (kTilesPerSpan, 8, head_dim), one tile of zeros behind them

    int64_t lay_out(const ts::KvLayout& kv, int64_t group, uint8_t* base) {
        const int64_t rows = group > kTaskRows ? group : kTaskRows;
        n_rows = (rows + kRowsPerTmm - 1) / kRowsPerTmm * kRowsPerTmm;
        head_dim = kv.head_dim;
        q_words = head_dim / 2;
        int64_t at = 0;
        auto take = [&](int64_t words) {
            uint8_t* place = base + at;
            at += (words * 4 + 63) / 64 * 64;
            return place;
        };
        q = reinterpret_cast<uint32_t*>(take(n_rows * q_words));
        scores = reinterpret_cast<float*>(take(kRowsPerTmm * ts::kSpan));
        weights = reinterpret_cast<uint16_t*>(take(kRowsPerTmm * ts::kSpan / 2));
        sums = reinterpret_cast<float*>(take(kRowsPerTmm * head_dim));
        total = reinterpret_cast<float*>(take(n_rows * head_dim));
        total_max = reinterpret_cast<float*>(take(n_rows));
        total_denominator = reinterpret_cast<float*>(take(n_rows));
        turned = reinterpret_cast<float*>(take(head_dim));
        query_sums = reinterpret_cast<float*>(take(n_rows));
        key_tiles = reinterpret_cast<uint32_t*>(take(kTilesPerSpan * q_words * ts::kTile));
        value_tiles = reinterpret_cast<uint32_t*>(take((kTilesPerSpan + 1) * ts::kTile / 2 * head_dim));
        return at;
    }
};

bool serves(const ts::KvLayout& kv) { return kv.type != ts::KvType::F32 && kv.head_dim % 32 == 0; }

int64_t task_rows(const ts::KvLayout& kv) { return serves(kv) ? kTaskRows : ts::kernels_avx512bf16().task_rows(kv); }

int64_t scratch_bytes(const ts::KvLayout& kv, int64_t group) {
    if (!serves(kv)) return ts::kernels_avx512bf16().attend_scratch_bytes(kv, group);
    Workspace work;
    return work.lay_out(kv, group, nullptr);
}

// 2ˣ for x ≤ 0 to 17 bits, of which a weight in bf16 keeps 8: exactly 1 at 0, exactly 0 below −126, NaN for NaN.
TS_INLINE __m512 weight_of(__m512 x) {
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(9.6181291e-3f);  // Taylor's ln(2)ᵏ/k!
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(counts, p, whole);
}

// Scores in powers of two, bounded to ±cap by cap·tanh(x/cap), to 17 bits of the cap.
TS_INLINE __m512 bounded_score(__m512 x, float cap) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 t = weight_of(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.0f * kLog2e / cap)));
    const __m512 size = _mm512_mul_ps(_mm512_set1_ps(cap), _mm512_div_ps(_mm512_sub_ps(one, t), _mm512_add_ps(one, t)));
    return _mm512_mask_sub_ps(size, _mm512_movepi32_mask(_mm512_castps_si512(x)), _mm512_setzero_ps(), size);
}

// Scores of one register of rows against the tiles [first, end) of a span, both even.
TS_INLINE void score(const Workspace& work, int64_t row, const Tiles<kTilesPerSpan>& tiles, int first, int end,
                     bool fetch) {
    using namespace ts;
    const uint32_t* q = work.q + row * work.q_words;
    for (int t = first; t < end; t += 2) {
        if (fetch) {
            for (int ahead = t + kFetchAhead; ahead < t + kFetchAhead + 2; ahead++) {
                const int beyond = first + ahead - end;  // the keys are at an end: values from the first on
                if (ahead >= end && beyond >= end) continue;
                const char* from =
                    reinterpret_cast<const char*>(ahead < end ? tiles.keys[ahead] : tiles.values[beyond]);
                for (int64_t i = 0; i < work.q_words * 64; i += 64) __builtin_prefetch(from + i, 0, 3);
            }
        }
        zero_tmm<0>();
        zero_tmm<1>();
        for (int64_t d = 0; d < work.q_words; d += 16) {
            load_tmm<kRows0>(q + d, work.q_words * 4);
            load_tmm<kKeys0>(tiles.keys[t] + d * kTile, 64);
            add_bf16_products<0, kRows0, kKeys0>();
            load_tmm<kKeys1>(tiles.keys[t + 1] + d * kTile, 64);
            add_bf16_products<1, kRows0, kKeys1>();
        }
        store_tmm<0>(work.scores + t * kTile, kScoreStride);
        store_tmm<1>(work.scores + (t + 1) * kTile, kScoreStride);
    }
}

// Scores of one row become weights; keys of the span outside [least, last] have none. Their maximum and sum come back.
TS_INLINE void softmax(ts::KvType type, const Tiles<kTilesPerSpan>& tiles, int first, int end, int64_t least,
                       int64_t last, float cap, float query_sum, float* scores, uint16_t* weights, float& running_max,
                       float& denominator) {
    const bool codes = in_codes(type);
    const __m512 none = _mm512_set1_ps(-__builtin_inff());
    __m512 largest = none;
    for (int t = first; t < end; t++) {
        __m512 x = _mm512_load_ps(scores + t * ts::kTile);
        if (codes) x = _mm512_mul_ps(x, _mm512_loadu_ps(tiles.key_scales + t * ts::kTile));
        if (type == ts::KvType::INT4)
            x = _mm512_fmadd_ps(_mm512_loadu_ps(tiles.key_middles + t * ts::kTile), _mm512_set1_ps(query_sum), x);
        if (cap > 0.0f) x = bounded_score(x, cap * kLog2e);
        const int64_t low = least - t * ts::kTile, high = last - t * ts::kTile;  // lanes that count
        if (low > 0 || high < ts::kTile - 1) {
            const uint32_t from = low > 0 ? (low < 16 ? 0xffffu << low : 0u) : 0xffffu;
            const uint32_t to = high < 15 ? (high >= 0 ? 0xffffu >> (15 - high) : 0u) : 0xffffu;
            x = _mm512_mask_mov_ps(none, __mmask16(from & to), x);
            _mm512_store_ps(scores + t * ts::kTile, x);
        } else if (codes || cap > 0.0f) {
            _mm512_store_ps(scores + t * ts::kTile, x);
        }
        largest = _mm512_max_ps(largest, x);
    }
    running_max = _mm512_reduce_max_ps(largest);
    const __m512 base = _mm512_set1_ps(running_max > -__builtin_inff() ? running_max : 0.0f);
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    __m512 total = _mm512_setzero_ps();
    for (int t = first; t < end; t += 2) {
        __m512 low = weight_of(_mm512_sub_ps(_mm512_load_ps(scores + t * ts::kTile), base));
        __m512 high = weight_of(_mm512_sub_ps(_mm512_load_ps(scores + (t + 1) * ts::kTile), base));
        if (codes) {
            total = _mm512_add_ps(total, _mm512_add_ps(low, high));
            low = _mm512_mul_ps(low, _mm512_loadu_ps(tiles.value_scales + t * ts::kTile));
            high = _mm512_mul_ps(high, _mm512_loadu_ps(tiles.value_scales + (t + 1) * ts::kTile));
        }
        const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        // The sum of what is multiplied, so that weights sum to 1.
        if (!codes) total = _mm512_dpbf16_ps(total, both, (__m512bh)ones);
        _mm512_store_si512(weights + t * ts::kTile, (__m512i)both);
    }
    denominator = _mm512_reduce_add_ps(total);
}

// sums (16, head_dim) = weights · values of the tiles [first, end), for Parts times 16 dimensions from `dimension` on.
template <int Parts>
TS_INLINE void weighted_values(const Workspace& work, const uint32_t* const* values, int first, int end,
                               int64_t dimension, bool fetch) {
    using namespace ts;
    zero_tmm<0>();
    if constexpr (Parts > 1) zero_tmm<1>();
    if constexpr (Parts > 2) zero_tmm<2>();
    if constexpr (Parts > 3) zero_tmm<3>();
    for (int t = first; t < end; t += 2) {
        if (fetch && dimension == 0)
            for (int ahead = t + kFetchAhead; ahead < t + kFetchAhead + 2 && ahead < end; ahead++)
                for (int64_t i = 0; i < work.q_words * 64; i += 64)
                    __builtin_prefetch(reinterpret_cast<const char*>(values[ahead]) + i, 0, 3);
        const uint32_t* v = values[t] + dimension;
        load_tmm<kRows0>(work.weights + t * kTile, kWeightStride);
        load_tmm<kKeys0>(v, work.head_dim * 4);
        add_bf16_products<0, kRows0, kKeys0>();
        if constexpr (Parts > 1) {
            load_tmm<kKeys1>(v + 16, work.head_dim * 4);
            add_bf16_products<1, kRows0, kKeys1>();
        }
        if constexpr (Parts > 2) {
            load_tmm<kKeys0>(v + 32, work.head_dim * 4);
            add_bf16_products<2, kRows0, kKeys0>();
        }
        if constexpr (Parts > 3) {
            load_tmm<kKeys1>(v + 48, work.head_dim * 4);
            add_bf16_products<3, kRows0, kKeys1>();
        }
    }
    float* sums = work.sums + dimension;
    store_tmm<0>(sums, work.head_dim * 4);
    if constexpr (Parts > 1) store_tmm<1>(sums + 16, work.head_dim * 4);
    if constexpr (Parts > 2) store_tmm<2>(sums + 32, work.head_dim * 4);
    if constexpr (Parts > 3) store_tmm<3>(sums + 48, work.head_dim * 4);
}

// Values are read two tiles at a time: those that do not lie side by side are copied, and behind the last of an odd
// number come zeros.
void pair_values(const Workspace& work, Tiles<kTilesPerSpan>& tiles, int n_tiles) {
    const int64_t words = ts::kTile / 2 * work.head_dim;
    for (int t = 0; t < n_tiles; t += 2) {
        const bool odd = t + 1 == n_tiles;
        if (!odd && tiles.values[t + 1] == tiles.values[t] + words) continue;
        uint32_t* copy = work.value_tiles + t * words;
        if (tiles.values[t] != copy) std::memcpy(copy, tiles.values[t], static_cast<size_t>(words) * 4);
        tiles.values[t] = copy;
        if (odd) {
            std::memset(copy + words, 0, static_cast<size_t>(words) * 4);
            tiles.keys[t + 1] = tiles.keys[t];  // any numbers: no row sees them
            std::memset(tiles.key_scales + (t + 1) * ts::kTile, 0, ts::kTile * 4);
            std::memset(tiles.key_middles + (t + 1) * ts::kTile, 0, ts::kTile * 4);
            std::memset(tiles.value_scales + (t + 1) * ts::kTile, 0, ts::kTile * 4);
        } else if (tiles.values[t + 1] != copy + words) {
            std::memcpy(copy + words, tiles.values[t + 1], static_cast<size_t>(words) * 4);
        }
        tiles.values[t + 1] = copy + words;
    }
}

void shape(int n_rows) {
    ts::TmmShapes shapes;
    for (int tmm = 0; tmm < 8; tmm++) {
        shapes.row_bytes[tmm] = 64;
        shapes.rows[tmm] = static_cast<uint8_t>(tmm <= kRows0 ? n_rows : 16);
    }
    ts::shape_tmm(shapes);
}

void attend_tiles(const ts::KvLayout& kv, const ts::KvHead& head, const ts::AttendTask& task, float scale,
                  Workspace& work) {
    const int64_t D = kv.head_dim, n_rows = static_cast<int64_t>(task.n_tokens) * task.group;
    const bool fetch = !in_codes(kv.type);
    prepare_queries(kv, task, scale, work.q, work.q_words, work.turned, work.query_sums);
    for (int64_t r = 0; r < n_rows; r++) work.total_max[r] = -__builtin_inff(), work.total_denominator[r] = 0.0f;
    std::memset(work.total, 0, static_cast<size_t>(n_rows * D) * 4);
    shape(n_rows < kRowsPerTmm ? static_cast<int>(n_rows) : kRowsPerTmm);
    Tiles<kTilesPerSpan> tiles;
    const int64_t first_span = ts::span_of(task.first_key);
    for (int64_t i = first_span; ts::first_key_of(i) < task.end_key; i++) {
        const int64_t span = ts::first_key_of(i), behind = ts::first_key_of(i + 1);
        const int64_t end = behind < task.end_key ? behind : task.end_key;
        const int n_tiles = static_cast<int>((end - span + ts::kTile - 1) / ts::kTile);
        find_tiles<false>(kv, head, task.pages, span, task.first_key, end, n_tiles, work.key_tiles, work.value_tiles,
                          tiles);
        pair_values(work, tiles, n_tiles);
        for (int64_t row = 0; row < n_rows; row += kRowsPerTmm) {
            const int64_t rows = n_rows - row < kRowsPerTmm ? n_rows - row : kRowsPerTmm;
            // Keys that any of these rows sees, by their place in the span, to whole pairs of tiles.
            const int64_t last_token = task.first_position + (row + rows - 1) / task.group;
            const int64_t first_token = task.first_position + row / task.group;
            const int64_t seen = (last_token + 1 < end ? last_token + 1 : end) - span;
            int64_t least = task.window > 0 ? first_token - task.window + 1 - span : 0;
            if (least < task.first_key - span) least = task.first_key - span;
            const int from = least > 0 ? static_cast<int>(least / (2 * ts::kTile)) * 2 : 0;
            const int to = seen > 0 ? static_cast<int>((seen + 2 * ts::kTile - 1) / (2 * ts::kTile)) * 2 : 0;
            float running_max[kRowsPerTmm], denominator[kRowsPerTmm];
            if (from < to) {
                score(work, row, tiles, from, to, fetch && row == 0);
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t position = task.first_position + (row + r) / task.group;
                    const int64_t last = position < end ? position : end - 1;
                    softmax(kv.type, tiles, from, to, task.window > 0 ? position - task.window + 1 - span : 0,
                            last - span, task.cap, work.query_sums[row + r], work.scores + r * ts::kSpan,
                            work.weights + r * ts::kSpan, running_max[r], denominator[r]);
                }
                int64_t d = 0;
                for (; d + 64 <= D; d += 64) weighted_values<4>(work, tiles.values, from, to, d, fetch && row == 0);
                if (d < D) weighted_values<2>(work, tiles.values, from, to, d, fetch && row == 0);
            }
            if (task.partial != nullptr) {
                float* out = task.partial + (i - first_span) * n_rows * (D + 2);
                for (int64_t r = 0; r < rows; r++) {
                    out[2 * (row + r)] = from < to ? running_max[r] : -__builtin_inff();
                    out[2 * (row + r) + 1] = from < to ? denominator[r] : 0.0f;
                    float* sums = out + 2 * n_rows + (row + r) * D;
                    if (from < to) std::memcpy(sums, work.sums + r * D, static_cast<size_t>(D) * 4);
                    else
                        std::memset(sums, 0, static_cast<size_t>(D) * 4);  // it may be the sum that others are added to
                }
                continue;
            }
            if (from < to)
                for (int64_t r = 0; r < rows; r++)
                    merge_span(work.total + (row + r) * D, work.total_max[row + r], work.total_denominator[row + r],
                               work.sums + r * D, running_max[r], denominator[r], D);
        }
    }
    ts::release_tmm();
    if (task.partial != nullptr) return;
    for (int64_t r = 0; r < n_rows; r++)
        divide_by_denominator(kv, task, r, work.total + r * D, work.total_max[r], work.total_denominator[r]);
}

void attend(const ts::KvLayout& kv, const ts::KvHead& head, const ts::AttendTask& task, float scale, void* memory) {
    if (!serves(kv)) return ts::kernels_avx512bf16().attend(kv, head, task, scale, memory);
    Workspace work;
    work.lay_out(kv, task.group, static_cast<uint8_t*>(memory));
    attend_tiles(kv, head, task, scale, work);
}

}  // namespace

ts::Kernels ts::with_amx_attention(Kernels k) {
    k.task_rows = task_rows;
    k.attend_scratch_bytes = scratch_bytes;
    k.attend = attend;
    return k;
}
