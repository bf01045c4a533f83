// W8A8, BF16 and INT4 by AMX's matrix registers. Everything else is AVX-512's.
#include "bf16_amx.h"
#include "blocks_amx.h"
#include "int4_amx.h"
#include "targets.h"

#include <chrono>

namespace ts {
namespace {

template <Format F>
void product_by_amx(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    const ProductArgs to{w, rows, y, ldy, add};
    if constexpr (F == Format::INT4) walk_int4(to, n0 / kPanelOutputs, layout::panels(n1));
    else walk_amx<F>(to, n0 / kPanelOutputs, layout::panels(n1));
}

// A product to try: values that fill all bits, sizes that leave a rest everywhere.
template <Format F>
struct Trial {
    static constexpr int64_t N = 40, K = 160, M = 37, kGroup = 64;
    const int32_t group = F == Format::INT4 ? kGroup : 0;
    char* packed = static_cast<char*>(std::malloc(size_t(packed_bytes(F, group, N, K))));
    int8_t weights[N * K * 2], codes[M * K];
    uint16_t bf16[M * K];
    float scales[N * layout::groups(K, kGroup)], row_scales[M], found[M * N], expected[M * N];
    int32_t sums[M * sums_per_row(K)];

    Trial() {
        uint32_t state = 1;
        const auto next = [&state] { return (state = state * 1664525u + 1013904223u) >> 24; };
        const auto bf16_value = [&next] { return uint16_t((next() % 2 << 15) | 0x3f00 | next() % 256); };  // ±0.5 to ±2
        for (int64_t i = 0; i < N * K; ++i) {
            const uint16_t value = F == Format::BF16 ? bf16_value() : uint16_t(next());
            std::memcpy(weights + i * (F == Format::BF16 ? 2 : 1), &value, F == Format::BF16 ? 2 : 1);
        }
        for (float& scale : scales) scale = 0.5f;
        for (float& scale : row_scales) scale = 0.25f;
        for (int32_t& sum : sums) sum = 0;
        for (int64_t i = 0; i < M * K; ++i) {
            codes[i] = int8_t(next());
            bf16[i] = bf16_value();
            int32_t* const row_sums = sums + i / K * sums_per_row(K);
            row_sums[0] += codes[i];
            row_sums[1 + i % K / 32] += codes[i];
        }
        pack(F, group, N, K, weights, scales, nullptr, packed, 0, N);
    }
    ~Trial() { std::free(packed); }

    // With AVX-512's own products, or, where those sum in another order, with what copies AMX's order.
    bool agrees(bool without_amx = false) {
        const Matrix w{F, group, N, K, packed, nullptr};
        const Rows rows{M, nullptr, bf16, codes, row_scales, sums};
        product_by_amx<F>(w, rows, 0, N, found, N, false);
        if (F == Format::BF16 && without_amx) {
            product_by<FewBf16, FewBf16Blocking>(w, rows, 0, N, expected, N, false);
            return std::memcmp(found, expected, sizeof found) == 0;
        }
        kernels_avx512bf16().product(w, rows, 0, N, expected, N, false);
        for (int64_t i = 0; i < M * N; ++i) {
            const float difference = found[i] - expected[i];
            // bf16: sums of 160 products up to 4, added in another order
            if (!(F == Format::BF16 ? difference < 1e-3f && difference > -1e-3f : difference == 0)) return false;
        }
        return true;
    }
};

// The fewest rows from which AMX is faster than AVX-512 here, where both give the same bits (W8A8, INT4): measured
// once, on a matrix that lies in the cache; never, if not with 32 rows.
template <Format F>
int64_t measured_least_rows() {
#ifdef TS_EMULATE_AMX
    return 1;
#else
    constexpr int64_t n = 256, k = 512, most = 32;
    constexpr int32_t group = F == Format::INT4 ? 64 : 0;
    struct Buffers {
        alignas(64) char packed[n * k + 64 * n];
        int8_t codes[most * k];
        float scales[most], y[most * n];
        int32_t sums[most * sums_per_row(k)];
    };
    auto* buffers = static_cast<Buffers*>(std::aligned_alloc(alignof(Buffers), sizeof(Buffers)));
    std::memset(static_cast<void*>(buffers), 0, sizeof(Buffers));
    const Matrix w{F, group, n, k, buffers->packed, nullptr};
    const auto seconds = [](auto work) {
        double best = 1e9;
        for (int i = 0; i < 10; ++i) {
            const auto start = std::chrono::steady_clock::now();
            work();
            const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            best = took < best ? took : best;
        }
        return best;
    };
    int64_t least = INT64_MAX;
    for (int64_t m : {2, 3, 4, 6, 8, 12, 16, 24, 32}) {
        const Rows rows{m, nullptr, nullptr, buffers->codes, buffers->scales, buffers->sums};
        const double amx = seconds([&] { product_by_amx<F>(w, rows, 0, n, buffers->y, n, false); });
        if (amx < seconds([&] { kernels_avx512().product(w, rows, 0, n, buffers->y, n, false); })) {
            least = m;
            break;
        }
    }
    std::free(buffers);
    return least;
#endif
}

// BF16 of few rows is bound by memory, which AVX-512's loads wait for less than AMX's.
bool few_enough(const Rows& rows) {
    static const bool same_bits = Trial<Format::BF16>().agrees(true);
    return rows.m <= FewBf16Blocking::kMaxRows && same_bits;
}

template <Format F>
bool enough_rows(const Rows& rows) {
    static const int64_t least_rows = measured_least_rows<F>();
    return rows.m >= least_rows;
}

void product_by_shape(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    if (w.format == Format::BF16) {
        // Never in avx512bf16's order: for few rows another than for many would make a row depend on its neighbours.
        if (few_enough(rows)) return product_by<FewBf16, FewBf16Blocking>(w, rows, n0, n1, y, ldy, add);
        return product_by_amx<Format::BF16>(w, rows, n0, n1, y, ldy, add);
    }
    if (w.format == Format::W8A8 && enough_rows<Format::W8A8>(rows))
        return product_by_amx<Format::W8A8>(w, rows, n0, n1, y, ldy, add);
    if (w.format == Format::INT4 && enough_rows<Format::INT4>(rows))
        return product_by_amx<Format::INT4>(w, rows, n0, n1, y, ldy, add);
    kernels_avx512().product(w, rows, n0, n1, y, ldy, add);
}

}  // namespace

bool amx_is_emulated() {
#ifdef TS_EMULATE_AMX
    return true;
#else
    return false;
#endif
}

bool amx_works() {
    return Trial<Format::W8A8>().agrees() && Trial<Format::INT4>().agrees() && Trial<Format::BF16>().agrees();
}

}  // namespace ts

const ts::Kernels& ts::kernels_amx() {
    static const Kernels made = [] {
        Kernels k = with_amx_attention(kernels_avx512bf16());
        k.product = product_by_shape;
        return k;
    }();
    return made;
}
