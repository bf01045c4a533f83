// The step at work: its memory, and its operations in three files. step_rows.cpp has what is done to a row or to a task
// of attention, step_shared.cpp the way through the plan of few rows, step_chunks.cpp that of many; step.cpp what is
// around them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "step.h"
#include "step_memory.h"
#include "step_tasks.h"

namespace ts {

constexpr int64_t kFewRows = 48;  // shared out by outputs up to here
constexpr int64_t kPrivateRows =
    4;  // so few are normalised and quantised by every thread for itself: cheaper than a barrier
constexpr int64_t kChunkRows = 256;     // most: every chunk reads a layer's weights again
constexpr int64_t kWidenOutputs = 256;  // of a chunk's rows, gate and up by turns
constexpr int64_t kPrefetchBytes = 64 << 10;

struct ThreadMemory {
    Array<float> h, wide, up;
    PreparedRows rows;
    Array<uint8_t> attention;
};

class Step {
public:
    explicit Step(const StepModel&);
    void run(const StepBatch&);  // throws std::bad_alloc before anything was computed

private:
    struct Now {  // what a thread knows of where the step is
        float* x;
        float* mixed;
        int64_t n_rows;
        Rows prepared;
        int thread, n_threads;
        int64_t n_claims;
    };

    void make_ready(int n_threads);
    void place_rows();
    void need_memory(int n_threads);
    TaskList* list_of(int64_t window);
    void barrier();
    void work(int thread, int n_threads);
    static int64_t share(int64_t n, int part, int n_parts) { return n * part / n_parts; }

    // step_rows.cpp
    void turn_tables(const Now&);
    void trace(const Now&, const StepOp&, int64_t first, int64_t end);
    void embed_row(const StepOp&, int64_t row, float* x);
    void normalise_row(const StepOp&, const float* x, float* h);
    void normalise_group(const StepOp&, int64_t row, int64_t k);
    void turn_and_store_group(const StepOp&, int64_t row, int64_t k);
    KvHead kv_head(int64_t layer, int64_t k) const;
    void attend(const StepOp&, ThreadMemory&, std::atomic<int64_t>& claims);
    void keep(Now&);

    // step_shared.cpp
    void run_shared(size_t i, Now&);
    template <typename Fill>
    Rows prepare_shared(const Now&, Format, float* shared_from, float* own_from, int64_t k, Fill);
    Rows prepare_shared(const Now&, Format, float* from, int64_t k);
    void product_shared(const Now&, const Matrix&, const Rows&, float* y, bool add);
    void fetch_next(size_t i, const Now&);

    // step_chunks.cpp
    void run_chunks(size_t begin, size_t end, Now&);
    void run_rows(size_t i, Now&, int64_t first, int64_t last);

    const StepModel m_;
    const std::vector<StepOp> ops_;
    const Kernels* kernels_ = nullptr;
    const StepBatch* batch_ = nullptr;
    KvLayout kv_{};
    int64_t q_width_ = 0, qkv_width_ = 0, widest_ = 0, n_rows_ = 0, n_counters_ = 0;
    float scale_ = 0.0f;
    bool alone_ = false;
    std::vector<TaskList> lists_;
    std::unique_ptr<std::atomic<int64_t>[]> counters_;  // who took which chunk or task, one for each place in the plan
    Array<int64_t> positions_, slots_, first_rows_;
    Array<float> x_, qkv_, mixed_, kept_x_, kept_mixed_, turns_, h_, wide_, up_, partials_;
    Array<Best> best_;
    PreparedRows rows_;
    std::vector<std::unique_ptr<ThreadMemory>> memory_;
};

}  // namespace ts
