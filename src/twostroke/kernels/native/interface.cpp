// The C interface that Python loads. Numbers in, numbers out; nothing here throws.
#include "layout.h"
#include "matrix.h"
#include "memory.h"
#include "pool.h"
#include "quantize.h"
#include "sampling.h"
#include "step_run.h"
#include "targets.h"

#if defined(__linux__)
#include <sched.h>
#endif
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

#ifndef TS_SOURCES
#define TS_SOURCES ""
#endif

using namespace ts;

extern "C" {

// The size of a structure that Python mirrors; -1 for an unknown name.
int64_t ts_size_of(const char* name) {
#define TS_SIZE(TYPE, ...) \
    if (std::strcmp(name, #TYPE) == 0) return int64_t(sizeof(TYPE));
    TS_OPS(TS_SIZE)
    TS_SIZE(StepOp)
    TS_SIZE(StepModel)
    TS_SIZE(StepBatch)
    TS_SIZE(AdapterPart)
    TS_SIZE(AdapterAt)
    TS_SIZE(Adapter)
    TS_SIZE(Matrix)
    TS_SIZE(Rows)
    TS_SIZE(TrainingAttention)
    TS_SIZE(Draw)
    TS_SIZE(Adjustment)
#undef TS_SIZE
    return -1;
}

// A hash of the sources that this library was built from.
const char* ts_sources() { return TS_SOURCES; }

// Names of the bits of ts_features, from the lowest on, each with a space behind it.
const char* ts_feature_names() {
#define TS_NAME(NAME) #NAME " "
    return TS_FEATURES(TS_NAME);
#undef TS_NAME
}
uint64_t ts_features() { return features(); }

// Targets by number: the name (null behind the last), the features that it needs, whether it holds here; that in use.
const char* ts_target_name(int number) {
    return number >= 0 && number < kTargetCount ? kTargets[number].name : nullptr;
}
uint64_t ts_target_needs(int number) { return kTargets[number].needs; }
int ts_target() { return target(); }
// The target that is in use now: the wanted one, or the fastest that holds where that does not.
int ts_set_target(int wanted) { return set_target(wanted); }
// What a machine of these features would use; -1: nothing wanted.
int ts_choose(uint64_t features, int wanted) { return choose(features, wanted); }

int ts_threads() { return Pool::shared().threads(); }
void ts_set_threads(int n_threads) { Pool::shared().resize(n_threads); }
// Of the calling thread: whether what follows "on all threads" is computed by it alone.
void ts_run_alone(int alone) { Pool::run_alone(alone != 0); }

// Thread i of every region runs on processors[i]; n 0: where the system likes.
void ts_pin_threads(const int32_t* processors, int n) {
    try {
        Pool::shared().pin(std::vector<int>(processors, processors + n));
    } catch (const std::bad_alloc&) {  // they stay where they are
    }
}
// Where each of the first n threads of a region runs; -1 where the system does not tell.
void ts_processors(int32_t* processors, int n) {
    Pool::shared().run([&](int thread, int) {
#if defined(__linux__)
        if (thread < n) processors[thread] = sched_getcpu();
#else
        if (thread < n) processors[thread] = -1;
#endif
    });
}
// Touches the pages of a packed matrix, of zeros still, by the threads that will read them, if these are pinned: the
// system then takes them from the memory next to these threads' processors. What is packed here needs none of it.
void ts_place(int format, int group, int64_t n, int64_t k, void* packed) {
    if (!Pool::shared().pinned()) return;
    const int64_t bytes = packed_bytes(Format(format), group, n, k), page = 4096;
    Pool::shared().run([&](int thread, int n_threads) {
        const Matrix matrix{Format(format), group, n, k, packed, nullptr};
        int64_t n0, n1;
        share_outputs(matrix, thread, n_threads, n0, n1);
        const char* const last =
            thread + 1 == n_threads ? static_cast<char*>(packed) + bytes : layout::panel(matrix, layout::panels(n1));
        for (auto* at = const_cast<char*>(layout::panel(matrix, n0 / layout::kPanelOutputs)); at < last; at += page)
            *static_cast<volatile char*>(at) = 0;
    });
}

// Whether memory that is allocated from now on asks for large pages.
void ts_set_huge_pages(int asks) { set_huge_pages(asks != 0); }
// Puts what is allocated into large pages now, whatever the system's setting is; bytes for which that worked.
int64_t ts_collapse() {
    try {
        return collapse();
    } catch (const std::bad_alloc&) {
        return 0;
    }
}

void* ts_allocate(int64_t bytes) { return allocate(bytes); }
void ts_release(void* block) { release(block); }

int64_t ts_packed_bytes(int format, int group, int64_t n, int64_t k) {
    return packed_bytes(Format(format), group, n, k);
}
int64_t ts_padded(int64_t k) { return padded(k); }
int64_t ts_sums_per_row(int64_t k) { return sums_per_row(k); }

// On all threads.
void ts_pack(int format, int group, int64_t n, int64_t k, const void* weight, const float* scales, const uint8_t* zeros,
             void* packed) {
    Pool::shared().run([&](int thread, int n_threads) {
        int64_t n0, n1;
        share_outputs(Matrix{Format(format), group, n, k, packed, nullptr}, thread, n_threads, n0, n1);
        if (n0 < n1) pack(Format(format), group, n, k, weight, scales, zeros, packed, n0, n1);
    });
}

// On all threads.
void ts_quantize_columns(int bf16, const void* weight, int64_t n, int64_t k, int8_t* codes, float* scales) {
    Pool::shared().run([&](int thread, int n_threads) {
        quantize_columns(bf16 != 0, weight, k, n * thread / n_threads, n * (thread + 1) / n_threads, codes, scales);
    });
}

// On all threads: rows [0, m) of x into the buffers of matrix.h's Rows (those that the format reads; others null).
void ts_prepare_rows(int format, const float* x, int64_t m, int64_t k, uint16_t* bf16, int8_t* codes, float* scales,
                     int32_t* sums) {
    Pool::shared().run([&](int thread, int n_threads) {
        Rows rows{m, x, bf16, codes, scales, sums};
        prepare_rows(Format(format), x, k, rows, m * thread / n_threads, m * (thread + 1) / n_threads);
    });
}

// On all threads: y (+)= rows · matrixᵀ (+ bias) of prepared rows.
void ts_product(int format, int group, int64_t n, int64_t k, const void* packed, const float* bias, int64_t m,
                const float* f32, const uint16_t* bf16, const int8_t* codes, const float* scales, const int32_t* sums,
                float* y, int64_t ldy, int add) {
    const Matrix matrix{Format(format), group, n, k, packed, bias};
    const Rows rows{m, f32, bf16, codes, scales, sums};
    Pool::shared().run([&](int thread, int n_threads) {
        int64_t n0, n1;
        share_outputs(matrix, thread, n_threads, n0, n1);
        product(matrix, rows, n0, n1, y, ldy, add != 0);
    });
}

// The same by the calling thread alone, outputs [n0, n1).
void ts_product_range(int format, int group, int64_t n, int64_t k, const void* packed, const float* bias, int64_t m,
                      const float* f32, const uint16_t* bf16, const int8_t* codes, const float* scales,
                      const int32_t* sums, int64_t n0, int64_t n1, float* y, int64_t ldy, int add) {
    product(Matrix{Format(format), group, n, k, packed, bias}, Rows{m, f32, bf16, codes, scales, sums}, n0, n1, y, ldy,
            add != 0);
}

// Best seconds of `repeats` readings of a buffer by all threads, each its share of it: the rate that nothing can beat.
double ts_read_seconds(const void* buffer, int64_t bytes, int repeats) {
    double best = 1e300;
    volatile uint64_t sink = 0;
    const int64_t lines = bytes / 64;
    for (int i = 0; i < repeats; ++i) {
        const auto start = std::chrono::steady_clock::now();
        Pool::shared().run([&](int thread, int n_threads) {
            const int64_t from = lines * thread / n_threads, to = lines * (thread + 1) / n_threads;
            const uint64_t sum = kernels().sum_words(static_cast<const uint64_t*>(buffer) + from * 8, (to - from) * 8);
            if (thread == 0) sink = sink + sum;
        });
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (seconds < best) best = seconds;
    }
    return best;
}

// How the step divides its work. Measurements of products divide theirs alike.
int64_t ts_chunk_rows(int64_t n_rows, int64_t n_threads) { return chunk_rows(n_rows, n_threads); }
int64_t ts_prefetch_bytes() { return kPrefetchBytes; }

// Best seconds of `repeats` passes through a model's matrices in turn, one region, prepared rows given. chunk_rows 0:
// every matrix is shared out by its outputs, with a barrier after it; outputs go to `y`, row after row, and
// `prefetch_bytes` of the next matrix are fetched before the barrier. Else threads take chunks of so many rows through
// all matrices, each into a place of its own in `y`: of chunk_rows times the most outputs of a matrix.
double ts_pass_seconds(const Matrix* matrices, int count, const Rows* rows, float* y, int64_t prefetch_bytes,
                       int64_t chunk_rows, int repeats) {
    double best = 1e300;
    int64_t most_outputs = 0;
    for (int j = 0; j < count; ++j) most_outputs = matrices[j].n > most_outputs ? matrices[j].n : most_outputs;
    for (int i = 0; i < repeats; ++i) {
        const auto start = std::chrono::steady_clock::now();
        Pool::shared().run([&](int thread, int n_threads) {
            if (chunk_rows > 0) {
                for (int64_t first = thread * chunk_rows; first < rows[0].m; first += n_threads * chunk_rows)
                    for (int j = 0; j < count; ++j)
                        product(matrices[j], slice(rows[j], matrices[j].k, first, chunk_rows), 0, matrices[j].n,
                                y + thread * chunk_rows * most_outputs, matrices[j].n, false);
                return;
            }
            for (int j = 0; j < count; ++j) {
                int64_t n0, n1;
                share_outputs(matrices[j], thread, n_threads, n0, n1);
                product(matrices[j], rows[j], n0, n1, y, matrices[j].n, false);
                if (prefetch_bytes && j + 1 < count) {
                    share_outputs(matrices[j + 1], thread, n_threads, n0, n1);
                    prefetch(matrices[j + 1], n0, n1, prefetch_bytes);
                }
                Pool::shared().barrier();
            }
        });
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (seconds < best) best = seconds;
    }
    return best;
}

// Seconds that a barrier takes, mean of many in one region.
double ts_barrier_seconds(int count) {
    const auto start = std::chrono::steady_clock::now();
    Pool::shared().run([&](int, int) {
        for (int i = 0; i < count; ++i) Pool::shared().barrier();
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / count;
}

}  // extern "C"
