// The step at work: its memory, and its operations in four files. step_operations.cpp has the plan's operations,
// step_experts.cpp those of a mixture of experts, step_latent.cpp those of latent attention, step_rows.cpp what they do
// to a row, to a group of heads or to a task of attention; step.cpp what is around them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "pieces.h"
#include "step.h"
#include "step_memory.h"
#include "step_tasks.h"

namespace ts {

constexpr int64_t kFewRows = 48;  // threads share the outputs of up to so many rows; of more, each takes chunks of rows
constexpr int64_t kPrivateRows =
    4;  // so few are normalised and quantised by every thread for itself: cheaper than a barrier
constexpr int64_t kChunkRows = 256;        // most: every chunk reads a layer's weights again
constexpr int64_t kMlpOutputs = 256;       // of a chunk's rows, gate and up by turns
constexpr int64_t kExpertRows = 1024;      // rows, each with one of its experts, between two barriers
constexpr int64_t kPartFloats = 64 << 10;  // of an expert's outputs at a time: they stay in the second-level cache
constexpr int64_t kThinRowBytes = 64;      // of a row for an adapter, beside its numbers: a scale and sums
constexpr int64_t kPiecesEach = 8, kPieceOutputs = 64;  // a thread's part of a matrix, in pieces that others may take
constexpr int64_t kLeastPartBytes = 128 << 10;          // of a part of fewer, taking pieces costs more than it saves
constexpr int64_t kPrefetchBytes = 64 << 10;            // of the next matrix, before a thread waits for the others

// Rows of a chunk that a thread takes through the operations between two attentions; 0: few rows, not cut.
inline int64_t chunk_rows(int64_t n_rows, int64_t n_threads) {
    if (n_rows <= kFewRows) return 0;
    const int64_t each = (n_rows + n_threads - 1) / n_threads;
    return std::min(kChunkRows, (each + 31) / 32 * 32);  // whole registers of rows, as AMX has them
}

// What a layer's rows chose in a mixture of experts. Each row has top_k pairs of an expert and its share, at row ·
// top_k.
struct Routing {
    Array<float> shares, dense_shares;  // dense_shares: of the dense part beside the experts, one a row
    Array<int32_t> chosen, sorted;      // sorted: pairs in the order of their experts
    std::vector<int64_t> first_pair;    // in sorted, of each expert
    PreparedRows rows, gathered, inner;
};

struct ThreadMemory {
    Array<float> normed, mlp_inner, up, scores;
    PreparedRows rows;
    Array<uint8_t> attention;
    Array<float> thin, thin_sums;
    Array<char> thin_rows;
    Routing routing;  // of so few rows that every thread routes them for itself
};

// The rows of a step with adapters. Rows stay where they are, because attention reads the cache in the order in which
// requests got their pages; what belongs to adapters goes over them in an `order` in which rows of one adapter lie
// together, so that its numbers are read once. A chunk of rows is one of places too.
struct AdaptedRows {
    std::vector<const Adapter*> adapters;  // of each row
    std::vector<int32_t> order;

    // For chunks of so many rows; 0: not cut.
    void sort(int64_t chunk) {
        const auto n = static_cast<int64_t>(adapters.size()), each = chunk > 0 ? chunk : n;
        order.resize(adapters.size());
        std::iota(order.begin(), order.end(), 0);
        for (int64_t first = 0; first < n; first += each)
            std::stable_sort(order.begin() + first, order.begin() + std::min(n, first + each),
                             [&](int32_t a, int32_t b) { return std::less<>()(adapters[a], adapters[b]); });
    }
};

class Step {
public:
    explicit Step(const StepModel&);
    void run(const StepBatch&);  // throws std::bad_alloc before anything was computed

private:
    struct Now {  // what a thread knows of where the step is
        float* residual;
        float* attention_out;
        int64_t n_rows;
        int thread, n_threads;
        size_t op = 0;
        // Rows [first, last): all of them, whose outputs and parts the threads share out, or a chunk that is this
        // thread's alone.
        bool shared = true;
        int64_t first = 0, last = 0;
        Rows prepared{};
        const AdaptedRows* adapted = nullptr;  // null: the step has no adapters
        const float* thin = nullptr;           // what the adapters made of rows, in their order, from place `first` on
        int64_t n_claims = 0;
        uint64_t operation = 0;  // that was last shared out in pieces
    };
    struct Range {
        int64_t first, last;
    };

    void make_ready(int n_threads);
    void place_rows();
    void sort_adapted(int n_threads);
    void need_memory(int n_threads);
    TaskList* list_of(int64_t window);
    void barrier();
    void work(int thread, int n_threads);
    void run_chunks(size_t begin, size_t end, Now&);
    static int64_t share(int64_t n, int part, int n_parts) { return n * part / n_parts; }

    // step_operations.cpp
    void run(size_t i, Now&);
    void run(const Embed&, Now&);
    void run(const Norm&, Now&);
    void run(const QkvProjection&, Now&);
    void run(const QkNorm&, Now&);
    void run(const RopeAndCacheWrite&, Now&);
    void run(const PagedAttention&, Now&);
    void run(const GatherSampledRows&, Now&);
    void run(const OutProjectionAdd&, Now&);
    void run(const MlpUp&, Now&);
    void run(const MlpDownAdd&, Now&);
    void run(const LmHead&, Now&);

    // step_experts.cpp
    void run(const RouteTokens&, Now&);
    void run(const ExpertsAdd&, Now&);
    void need_expert_memory(int64_t n_rows);
    void need_routing(Routing&, int64_t n_rows);
    Routing& routing(const Now&);
    void choose(const RouteTokens&, const float* logits, int64_t row, float* scores, Routing&);
    void sort_by_expert(const ExpertsAdd&, int64_t n_rows, Routing&);
    void count_load(const ExpertsAdd&, int64_t layer, const Routing&);
    template <class Segment>
    static void each_segment(const Routing&, int64_t first, int64_t last, Segment);
    void up_part(const ExpertsAdd&, const Now&, const Rows& rows, int64_t expert, int64_t at);
    void down_part(const ExpertsAdd&, const Now&, const Routing&, const Rows& rows, int64_t expert, int64_t first);

    // step_latent.cpp
    void run(const LatentProjection&, Now&);
    void run(const LatentValues&, Now&);
    void need_latent_memory();
    void multiply_head(const Now&, const Matrix&, int64_t head, int64_t n, const float* from, int64_t stride, float* y,
                       int64_t ldy);

    // step_operations.cpp
    Range own(const Now&, int64_t n) const;
    Range own_outputs(const Now&, const Matrix&) const;
    static Range own_outputs(const Now&, int64_t n_outputs);
    template <class Op>
    void add(const Op&, Now&, const Rows&);
    template <class Work>
    void each_piece(Now&, const Matrix&, Work);
    void multiply(Now&, const Matrix&, const Rows&, float* y, bool add);
    template <typename Fill>
    Rows prepare(Now&, size_t reader, Format, float* shared_to, float* own_to, int64_t k, Fill);
    Rows prepare(Now&, Format, float* rows, int64_t k);
    size_t reader_of(size_t norm) const;
    template <class Run>
    void each_adapter(const Now&, size_t op, int64_t first, int64_t last, Run);
    void make_thin(const Now&, size_t op, const float* x, int64_t k, int64_t first, int64_t last, float* to);
    void adapt(const Now&, int second, Range outputs, float* y, int64_t ldy);
    void fetch_next(const Now&);
    void finish(const Now&, bool fetch);

    // step_rows.cpp
    void rope_tables(const Now&);
    void trace(const Now&, int64_t state, Range rows);
    void embed_row(const Embed&, int64_t row, float* to);
    void norm_row(const Norm&, const float* from, float* to);
    void norm_heads(const QkNorm&, int64_t row);
    void norm_group(const QkNorm&, int64_t row, int64_t k);
    void rope_and_cache_write_group(const RopeAndCacheWrite&, int64_t layer, int64_t row, int64_t k);
    KvHead kv_head(int64_t layer, int64_t k) const;
    void attend(const PagedAttention&, int64_t layer, ThreadMemory&, std::atomic<int64_t>& claims);
    void gather(Now&);

    const StepModel m_;
    const std::vector<StepOp> ops_;
    const Kernels* kernels_ = nullptr;
    const StepBatch* batch_ = nullptr;
    KvLayout kv_{};
    int64_t q_width_ = 0, qkv_width_ = 0, widest_ = 0, n_rows_ = 0, n_counters_ = 0;
    bool alone_ = false;
    std::vector<TaskList> lists_;
    std::unique_ptr<std::atomic<int64_t>[]> counters_;  // who took which chunk or task, one for each place in the plan
    Pieces pieces_;
    uint64_t n_runs_ = 0;
    AdaptedRows adapted_, kept_adapted_;
    Array<int64_t> positions_, slots_, first_rows_;
    Array<float> residual_, qkv_, attention_out_, kept_residual_, kept_attention_out_, rope_, normed_, mlp_inner_, up_,
        partials_, thin_;
    Array<Best> best_;
    PreparedRows rows_;
    int64_t most_experts_ = 0, most_chosen_ = 0;
    Array<float> router_logits_, expert_inner_;
    Routing routing_;
    Array<float> latent_down_, latent_queries_, latent_kv_, latent_values_;
    std::vector<std::unique_ptr<ThreadMemory>> memory_;
};

// run(adapter, rows, n, place) for each run of places [first, last) whose rows have the same adapter and something to
// add at `op`: n rows, the first of which has `place`.
template <class Run>
void Step::each_adapter(const Now& now, size_t op, int64_t first, int64_t last, Run run) {
    if (now.adapted == nullptr) return;
    const auto& [adapters, order] = *now.adapted;
    for (int64_t at = first, end; at < last; at = end) {
        const Adapter* adapter = adapters[order[at]];
        for (end = at + 1; end < last && adapters[order[end]] == adapter;) end++;
        if (adapter != nullptr && adapter->at[op].n > 0) run(*adapter, &order[at], end - at, at);
    }
}

// Rows in the form that a matrix reads, and what adapters make of them for operation `reader`. `fill` writes row r, of
// k numbers, to where it is told: in memory of all threads, each its share, or in the thread's own where it makes all
// of them.
template <typename Fill>
Rows Step::prepare(Now& now, size_t reader, Format format, float* shared_to, float* own_to, int64_t k, Fill fill) {
    const int64_t n = now.last - now.first;
    if (now.shared && n > kPrivateRows) {
        const Range rows = own(now, 1);
        for (int64_t i = rows.first; i < rows.last; i++) {
            const int64_t r = now.adapted == nullptr ? i : now.adapted->order[i];
            fill(r, shared_to + r * k);
            rows_.make(format, shared_to, n, k, r, r + 1);
        }
        make_thin(now, reader, shared_to, k, rows.first, rows.last, thin_.get());
        now.thin = thin_.get();
        barrier();
        return rows_.make(format, shared_to, n, k, n, n);
    }
    PreparedRows& made = memory_[now.thread]->rows;
    for (int64_t r = 0; r < n; r++) {  // each while it is in the first-level cache
        fill(now.first + r, own_to + r * k);
        made.make(format, own_to, n, k, r, r + 1);
    }
    float* const own_thin = memory_[now.thread]->thin.get();
    make_thin(now, reader, own_to - now.first * k, k, now.first, now.last,
              own_thin - now.first * batch_->adapter_width);
    now.thin = own_thin;
    return made.make(format, own_to, n, k, n, n);
}

}  // namespace ts
