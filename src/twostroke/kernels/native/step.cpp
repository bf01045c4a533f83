// The plan's operations, one after another, on all threads in one parallel region.
//
// Few rows: every product is shared out by its outputs, with a barrier after each operation. Many rows: threads take chunks of
// rows and carry each from one attention to the next alone, so that a layer needs two barriers and a chunk stays in cache.
// A row's result is the same either way.
#include "step.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "pool.h"
#include "step_kernels.h"
#include "step_memory.h"
#include "step_tasks.h"

namespace ts {
namespace {

constexpr int64_t kFewRows = 48;       // shared out by outputs up to here
constexpr int64_t kPrivateRows = 4;    // so few are normalised and quantised by every thread for itself: cheaper than a barrier
constexpr int64_t kChunkRows = 64;
constexpr int64_t kWidenOutputs = 256; // of a chunk's rows, gate and up by turns
constexpr int64_t kPrefetchBytes = 64 << 10;

const StepKernels& choose_kernels() {
#if defined(__x86_64__)
    switch (level()) {
        case Level::Amx: return step_kernels_amx();
        case Level::Avx512Bf16: return step_kernels_avx512bf16();
        case Level::Avx512: return step_kernels_avx512();
        case Level::AvxVnni:
        case Level::Avx2: return step_kernels_avx2();
        case Level::Plain: break;
    }
#endif
    return step_kernels_plain();
}

struct ThreadMemory {
    Array<float> h, wide, up;
    PreparedRows rows;
    Array<uint8_t> attention;
};

class Step {
public:
    explicit Step(const StepModel& model) : m_(model), ops_(model.ops, model.ops + model.n_ops) {
        kv_.type = static_cast<KvType>(m_.kv_type);
        kv_.head_dim = m_.head_dim;
        kv_.page_tokens = m_.page_tokens;
        const int64_t bytes = kv_.type == KvType::F32 ? 4 : kv_.type == KvType::BF16 ? 2 : 1;
        const int64_t pair = kv_.type == KvType::F32 ? 1 : 2;
        kv_.key_tile_bytes = (m_.head_dim + pair - 1) / pair * pair * kTile * bytes;
        kv_.value_tile_bytes = m_.head_dim * kTile * bytes;
        q_width_ = m_.n_heads * m_.head_dim;
        qkv_width_ = (m_.n_heads + 2 * m_.n_kv_heads) * m_.head_dim;
        widest_ = std::max(m_.d_model, std::max(q_width_, m_.d_ff));
        scale_ = 1.0f / std::sqrt(static_cast<float>(m_.head_dim));
        for (const StepOp& op : ops_)
            if (op.kind == OpKind::Attend && list_of(op.window) == nullptr) {
                lists_.emplace_back();
                lists_.back().window = op.window;
            }
        n_counters_ = 2 * static_cast<int64_t>(ops_.size()) + 2;
        counters_.reset(new std::atomic<int64_t>[n_counters_]);
    }

    void run(const StepBatch& batch) {
        batch_ = &batch;
        kernels_ = &choose_kernels();
        alone_ = batch.n_threads == 1;
        place_rows();
        if (alone_) {
            make_ready(1);
            work(0, 1);
            return;
        }
        Pool& pool = Pool::shared();
        for (bool done = false; !done;) {  // again where another engine has changed the number of threads just now
            const int expected = pool.threads();
            make_ready(expected);
            pool.run([&](int thread, int n_threads) {
                if (n_threads != expected) return;
                work(thread, n_threads);
                if (thread == 0) done = true;
            });
        }
    }

private:
    void make_ready(int n_threads) {
        need_memory(n_threads);
        for (TaskList& list : lists_) {
            list.fill(m_, *batch_, kernels_->task_rows(kv_), n_threads);
            partials_.need(list.partial_floats);
        }
        for (int64_t i = 0; i < n_counters_; i++) counters_[i].store(0, std::memory_order_relaxed);
    }

    TaskList* list_of(int64_t window) {
        for (TaskList& list : lists_)
            if (list.window == window) return &list;
        return nullptr;
    }

    // Position and cache slot of every row.
    void place_rows() {
        const StepBatch& b = *batch_;
        n_rows_ = 0;
        for (int64_t i = 0; i < b.n_requests; i++) n_rows_ += b.counts[i];
        positions_.need(n_rows_);
        slots_.need(n_rows_);
        first_rows_.need(b.n_requests);
        int64_t row = 0;
        for (int64_t i = 0; i < b.n_requests; i++) {
            first_rows_[i] = row;
            const int64_t* pages = b.table + b.table_rows[i] * b.table_stride;
            for (int64_t j = 0; j < b.counts[i]; j++, row++) {
                const int64_t position = b.starts[i] + j;
                positions_[row] = position;
                slots_[row] = pages[position / m_.page_tokens] * m_.page_tokens + position % m_.page_tokens;
            }
        }
    }

    void need_memory(int n_threads) {
        const int64_t n_kept = batch_->kept != nullptr ? batch_->n_kept : n_rows_;
        x_.need(n_rows_ * m_.d_model);
        qkv_.need(n_rows_ * qkv_width_);
        mixed_.need(n_rows_ * q_width_);
        if (batch_->kept != nullptr) {
            kept_x_.need(n_kept * m_.d_model);
            kept_mixed_.need(n_kept * q_width_);
        }
        if (m_.frequencies != nullptr) turns_.need(n_rows_ * 2 * m_.head_dim);
        h_.need(kFewRows * m_.d_model);
        wide_.need(kFewRows * m_.d_ff);
        up_.need(kFewRows * m_.d_ff);
        rows_.need(kFewRows, widest_);
        best_.need(kFewRows * n_threads);
        while (static_cast<int>(memory_.size()) < n_threads) memory_.emplace_back(new ThreadMemory);
        const int64_t scratch = kernels_->attend_scratch_bytes(kv_, m_.n_heads / m_.n_kv_heads);
        for (auto& memory : memory_) {
            memory->h.need(kChunkRows * m_.d_model);
            memory->wide.need(kChunkRows * m_.d_ff);
            memory->up.need(kChunkRows * kWidenOutputs);
            memory->rows.need(kChunkRows, widest_);
            memory->attention.need(scratch);
        }
    }

    void barrier() {
        if (!alone_) Pool::shared().barrier();
    }

    static int64_t share(int64_t n, int part, int n_parts) { return n * part / n_parts; }

    // The whole plan, by one of the threads.
    void work(int thread, int n_threads) {
        Now now{x_.get(), mixed_.get(), n_rows_, Rows{}, thread, n_threads, 0};
        turn_tables(now);
        size_t i = 0;
        while (i < ops_.size()) {
            if (ops_[i].kind == OpKind::Attend) {
                attend(ops_[i], *memory_[thread], counters_[now.n_claims++]);
                barrier();
                i++;
            } else if (ops_[i].kind == OpKind::KeepSampledRows) {
                keep(now);
                i++;
            } else {
                size_t end = i;
                while (end < ops_.size() && ops_[end].kind != OpKind::Attend && ops_[end].kind != OpKind::KeepSampledRows) end++;
                if (now.n_rows <= kFewRows) {
                    for (; i < end; i++) run_shared(i, now);
                } else {
                    run_chunks(i, end, now);
                    i = end;
                }
            }
        }
    }

    struct Now {  // what a thread knows of where the step is
        float* x;
        float* mixed;
        int64_t n_rows;
        Rows prepared;
        int thread, n_threads;
        int64_t n_claims;
    };

    // Cosines (each twice) and sines (−, +) of every row's angles.
    void turn_tables(const Now& now) {
        if (m_.frequencies == nullptr) return;
        const int64_t D = m_.head_dim, end = share(n_rows_, now.thread + 1, now.n_threads);
        for (int64_t r = share(n_rows_, now.thread, now.n_threads); r < end; r++) {
            float* cosines = turns_.get() + r * 2 * D;
            float* sines = cosines + D;
            for (int64_t i = 0; i < D / 2; i++) {
                const float angle = static_cast<float>(positions_[r]) * m_.frequencies[i];
                cosines[2 * i] = cosines[2 * i + 1] = std::cos(angle);
                sines[2 * i + 1] = std::sin(angle);
                sines[2 * i] = -sines[2 * i + 1];
            }
        }  // the barrier after the embedding is the one that others wait at
    }

    void trace(const Now& now, const StepOp& op, int64_t first, int64_t end) {
        if (batch_->trace == nullptr) return;
        const int64_t index = op.kind == OpKind::Embed ? 0 : op.layer + 1, E = m_.d_model;
        std::memcpy(batch_->trace + (index * n_rows_ + first) * E, now.x + first * E, static_cast<size_t>((end - first) * E) * 4);
    }

    void embed_row(const StepOp& op, int64_t row, float* x) {
        kernels_->embed(op.table, op.choice, batch_->tokens[row], m_.d_model, x, false);
        if (op.positions != nullptr) kernels_->embed(op.positions, op.second, positions_[row], m_.d_model, x, true);
    }

    void normalise_row(const StepOp& op, const float* x, float* h) {
        if (op.bias != nullptr) kernels_->layer_norm(x, op.weight, op.bias, op.eps, m_.d_model, h);
        else kernels_->rms_norm(x, op.weight, op.eps, m_.d_model, h);
    }

    // One group of a row: a key head, its value head, its query heads.
    void normalise_group(const StepOp& op, int64_t row, int64_t k) {
        const int64_t D = m_.head_dim, group = m_.n_heads / m_.n_kv_heads;
        float* qkv = qkv_.get() + row * qkv_width_;
        for (int64_t head = k * group; head < (k + 1) * group; head++)
            kernels_->rms_norm(qkv + head * D, op.weight + head * D, op.eps, D, qkv + head * D);
        const int64_t key = m_.n_heads + k;
        kernels_->rms_norm(qkv + key * D, op.weight + key * D, op.eps, D, qkv + key * D);
    }

    void turn_and_store_group(const StepOp& op, int64_t row, int64_t k) {
        const int64_t D = m_.head_dim, group = m_.n_heads / m_.n_kv_heads;
        float* qkv = qkv_.get() + row * qkv_width_;
        float* key = qkv + (m_.n_heads + k) * D;
        if (op.choice) {
            const float* cosines = turns_.get() + row * 2 * D;
            for (int64_t head = k * group; head < (k + 1) * group; head++) kernels_->turn(qkv + head * D, cosines, cosines + D, D);
            kernels_->turn(key, cosines, cosines + D, D);
        }
        if (op.bias != nullptr) {
            const float* offset = op.bias + k * D;
            for (int64_t d = 0; d < D; d++) key[d] -= offset[d];
        }
        kernels_->store_kv(kv_, kv_head(op.layer, k), key, key + m_.n_kv_heads * D, slots_[row]);
    }

    KvHead kv_head(int64_t layer, int64_t k) const {
        const int64_t head = layer * m_.n_kv_heads + k, n_tiles = m_.n_slots / kTile;
        KvHead found{m_.keys + head * n_tiles * kv_.key_tile_bytes, m_.values + head * n_tiles * kv_.value_tile_bytes, nullptr, nullptr};
        if (kv_.type == KvType::INT8) {
            found.key_scales = m_.key_scales + head * m_.n_slots;
            found.value_scales = m_.value_scales + head * m_.n_slots;
        }
        return found;
    }

    void attend(const StepOp& op, ThreadMemory& memory, std::atomic<int64_t>& claims) {
        TaskList& list = *list_of(op.window);
        const StepBatch& b = *batch_;
        const int64_t D = m_.head_dim, group = m_.n_heads / m_.n_kv_heads, n_tasks = static_cast<int64_t>(list.tasks.size());
        for (int64_t i; (i = claims.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
            const Task& task = list.tasks[i];
            const int64_t row = first_rows_[task.request] + task.first_token;
            AttendTask a{};
            a.queries = qkv_.get() + row * qkv_width_ + task.kv_head * group * D;
            a.query_stride = qkv_width_;
            a.mixed = mixed_.get() + row * q_width_ + task.kv_head * group * D;
            a.mixed_stride = q_width_;
            a.pages = b.table + b.table_rows[task.request] * b.table_stride;
            a.first_position = b.starts[task.request] + task.first_token;
            a.n_tokens = static_cast<int32_t>(task.n_tokens);
            a.group = static_cast<int32_t>(group);
            a.window = op.window;
            a.first_key = task.first_key;
            a.end_key = task.end_key;
            if (task.partial >= 0) a.partial = partials_.get() + task.partial + task.span * task.n_tokens * group * (D + 2);
            kernels_->attend(kv_, kv_head(op.layer, task.kv_head), a, scale_, memory.attention.get());
            if (task.partial >= 0 && list.left[task.joined].fetch_sub(1, std::memory_order_acq_rel) == 1) {
                list.left[task.joined].store(task.n_spans, std::memory_order_relaxed);  // for the next layer
                a.partial = partials_.get() + task.partial;
                kernels_->combine(kv_, a, task.n_spans);
            }
        }
    }

    void keep(Now& now) {
        if (batch_->kept == nullptr) return;
        const int64_t n = batch_->n_kept, E = m_.d_model, end = share(n, now.thread + 1, now.n_threads);
        for (int64_t i = share(n, now.thread, now.n_threads); i < end; i++) {
            const int64_t row = batch_->kept[i];
            std::memcpy(kept_x_.get() + i * E, now.x + row * E, static_cast<size_t>(E) * 4);
            std::memcpy(kept_mixed_.get() + i * q_width_, now.mixed + row * q_width_, static_cast<size_t>(q_width_) * 4);
        }
        now.x = kept_x_.get();
        now.mixed = kept_mixed_.get();
        now.n_rows = n;
        barrier();
    }

    // ---- few rows: operation by operation, outputs shared out ----

    // All rows of `from` (n, k) in a matrix's form; `fill`, where given, writes a row of `from` first.
    template <typename Fill>
    Rows prepare_shared(const Now& now, Format format, float* shared_from, float* own_from, int64_t k, Fill fill) {
        if (now.n_rows <= kPrivateRows) {
            for (int64_t r = 0; r < now.n_rows; r++) fill(r, own_from + r * k);
            return memory_[now.thread]->rows.make(format, own_from, now.n_rows, k, 0, now.n_rows);
        }
        const int64_t first = share(now.n_rows, now.thread, now.n_threads), end = share(now.n_rows, now.thread + 1, now.n_threads);
        for (int64_t r = first; r < end; r++) fill(r, shared_from + r * k);
        const Rows rows = rows_.make(format, shared_from, now.n_rows, k, first, end);
        barrier();
        return rows;
    }
    Rows prepare_shared(const Now& now, Format format, float* from, int64_t k) {
        return prepare_shared(now, format, from, from, k, [](int64_t, float*) {});
    }

    void product_shared(const Now& now, const Matrix& w, const Rows& rows, float* y, bool add) {
        int64_t n0, n1;
        share_outputs(w, now.thread, now.n_threads, n0, n1);
        product(w, rows, n0, n1, y, w.n, add);
    }

    // While others are still at work: the next matrix's first bytes.
    void fetch_next(size_t i, const Now& now) {
        for (size_t j = i + 1; j < ops_.size() && j < i + 6; j++)
            if (ops_[j].matrix.packed != nullptr) {
                int64_t n0, n1;
                share_outputs(ops_[j].matrix, now.thread, now.n_threads, n0, n1);
                prefetch(ops_[j].matrix, n0, n1, kPrefetchBytes);
                return;
            }
    }

    void run_shared(size_t i, Now& now) {
        const StepOp& op = ops_[i];
        const int64_t E = m_.d_model, F = m_.d_ff, n = now.n_rows;
        ThreadMemory& own = *memory_[now.thread];
        switch (op.kind) {
            case OpKind::Embed: {
                const int64_t first = share(n, now.thread, now.n_threads), end = share(n, now.thread + 1, now.n_threads);
                for (int64_t r = first; r < end; r++) embed_row(op, r, now.x + r * E);
                trace(now, op, first, end);
                fetch_next(i, now);
                barrier();
                return;
            }
            case OpKind::Normalise:
                now.prepared = prepare_shared(now, ops_[i + 1].matrix.format, h_.get(), own.h.get(), E,
                                              [&](int64_t r, float* h) { normalise_row(op, now.x + r * E, h); });
                return;
            case OpKind::ProjectHeads:
                product_shared(now, op.matrix, now.prepared, qkv_.get(), false);
                barrier();
                return;
            case OpKind::NormaliseHeads:
            case OpKind::TurnAndStore: {
                // The same share of groups in both, so nobody waits between them.
                const int64_t units = n * m_.n_kv_heads, end = share(units, now.thread + 1, now.n_threads);
                for (int64_t u = share(units, now.thread, now.n_threads); u < end; u++) {
                    if (op.kind == OpKind::NormaliseHeads) normalise_group(op, u / m_.n_kv_heads, u % m_.n_kv_heads);
                    else turn_and_store_group(op, u / m_.n_kv_heads, u % m_.n_kv_heads);
                }
                if (op.kind == OpKind::NormaliseHeads) return;
                fetch_next(i, now);
                barrier();
                return;
            }
            case OpKind::AddMixed:
                product_shared(now, op.matrix, prepare_shared(now, op.matrix.format, now.mixed, q_width_), now.x, true);
                fetch_next(i, now);
                barrier();
                return;
            case OpKind::Widen: {
                int64_t n0, n1;
                share_outputs(op.matrix, now.thread, now.n_threads, n0, n1);
                product(op.matrix, now.prepared, n0, n1, wide_.get(), F, false);
                if (op.up.packed != nullptr) product(op.up, now.prepared, n0, n1, up_.get(), F, false);
                if (n1 > n0)
                    for (int64_t r = 0; r < n; r++) {
                        float* wide = wide_.get() + r * F + n0;
                        kernels_->activate(op.choice, wide, op.up.packed != nullptr ? up_.get() + r * F + n0 : nullptr, n1 - n0, wide);
                    }
                fetch_next(i, now);
                barrier();
                return;
            }
            case OpKind::AddNarrowed:
                product_shared(now, op.matrix, prepare_shared(now, op.matrix.format, wide_.get(), F), now.x, true);
                fetch_next(i, now);
                barrier();
                trace(now, op, share(n, now.thread, now.n_threads), share(n, now.thread + 1, now.n_threads));
                return;
            case OpKind::Head: {
                int64_t n0, n1;
                share_outputs(op.matrix, now.thread, now.n_threads, n0, n1);
                product(op.matrix, now.prepared, n0, n1, batch_->logits, op.matrix.n, false);
                if (batch_->best == nullptr) return;
                for (int64_t r = 0; r < n; r++) {
                    Best& mine = best_[now.thread * kFewRows + r];
                    mine = kernels_->best(batch_->logits + r * op.matrix.n + n0, n1 - n0);
                    mine.index += n0;
                }
                barrier();
                for (int64_t r = share(n, now.thread, now.n_threads); r < share(n, now.thread + 1, now.n_threads); r++) {
                    Best found = best_[r];  // the first thread's tokens come first, and ties are the first's
                    for (int t = 1; t < now.n_threads; t++) {
                        const Best& other = best_[t * kFewRows + r];
                        if (!(other.value <= found.value) && found.value == found.value) found = other;
                    }
                    batch_->best[r] = found.value;
                    batch_->best_tokens[r] = found.index;
                }
                return;
            }
            case OpKind::Attend:
            case OpKind::KeepSampledRows: return;
        }
    }

    // ---- many rows: chunk by chunk, each by one thread from attention to attention ----

    void run_chunks(size_t begin, size_t end, Now& now) {
        const int64_t each = (now.n_rows + 2 * now.n_threads - 1) / (2 * now.n_threads);
        const int64_t chunk = std::min(kChunkRows, (each + 7) / 8 * 8);
        std::atomic<int64_t>& claims = counters_[now.n_claims++];
        if (begin == 0 && m_.frequencies != nullptr) barrier();  // the tables of turns
        for (int64_t c; (c = claims.fetch_add(1, std::memory_order_relaxed)) * chunk < now.n_rows;) {
            const int64_t first = c * chunk, last = std::min(first + chunk, now.n_rows);
            for (size_t i = begin; i < end; i++) run_rows(i, now, first, last);
        }
        barrier();
    }

    void run_rows(size_t i, Now& now, int64_t first, int64_t last) {
        const StepOp& op = ops_[i];
        const int64_t E = m_.d_model, F = m_.d_ff, n = last - first;
        ThreadMemory& own = *memory_[now.thread];
        switch (op.kind) {
            case OpKind::Embed:
                for (int64_t r = first; r < last; r++) embed_row(op, r, now.x + r * E);
                trace(now, op, first, last);
                return;
            case OpKind::Normalise:
                for (int64_t r = 0; r < n; r++) {  // each while it is in the first-level cache
                    normalise_row(op, now.x + (first + r) * E, own.h.get() + r * E);
                    now.prepared = own.rows.make(ops_[i + 1].matrix.format, own.h.get(), n, E, r, r + 1);
                }
                return;
            case OpKind::ProjectHeads:
                product(op.matrix, now.prepared, 0, op.matrix.n, qkv_.get() + first * qkv_width_, qkv_width_, false);
                return;
            case OpKind::NormaliseHeads:
                for (int64_t r = first; r < last; r++)
                    for (int64_t k = 0; k < m_.n_kv_heads; k++) normalise_group(op, r, k);
                return;
            case OpKind::TurnAndStore:
                for (int64_t r = first; r < last; r++)
                    for (int64_t k = 0; k < m_.n_kv_heads; k++) turn_and_store_group(op, r, k);
                return;
            case OpKind::AddMixed:
                product(op.matrix, own.rows.make(op.matrix.format, now.mixed + first * q_width_, n, q_width_, 0, n), 0, E,
                        now.x + first * E, E, true);
                return;
            case OpKind::Widen:
                for (int64_t n0 = 0; n0 < F; n0 += kWidenOutputs) {  // activated while they are in the second-level cache
                    const int64_t n1 = std::min(F, n0 + kWidenOutputs), width = op.up.packed != nullptr ? kWidenOutputs : 0;
                    product(op.matrix, now.prepared, n0, n1, own.wide.get(), F, false);
                    if (width > 0) product(op.up, now.prepared, n0, n1, own.up.get() - n0, width, false);
                    for (int64_t r = 0; r < n; r++) {
                        float* wide = own.wide.get() + r * F + n0;
                        kernels_->activate(op.choice, wide, width > 0 ? own.up.get() + r * width : nullptr, n1 - n0, wide);
                    }
                }
                now.prepared = own.rows.make(ops_[i + 1].matrix.format, own.wide.get(), n, F, 0, n);
                return;
            case OpKind::AddNarrowed:
                product(op.matrix, now.prepared, 0, E, now.x + first * E, E, true);
                trace(now, op, first, last);
                return;
            case OpKind::Head:
                product(op.matrix, now.prepared, 0, op.matrix.n, batch_->logits + first * op.matrix.n, op.matrix.n, false);
                if (batch_->best == nullptr) return;
                for (int64_t r = first; r < last; r++) {
                    const Best found = kernels_->best(batch_->logits + r * op.matrix.n, op.matrix.n);
                    batch_->best[r] = found.value;
                    batch_->best_tokens[r] = found.index;
                }
                return;
            case OpKind::Attend:
            case OpKind::KeepSampledRows: return;
        }
    }

    const StepModel m_;
    const std::vector<StepOp> ops_;
    const StepKernels* kernels_ = nullptr;
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

}  // namespace
}  // namespace ts

extern "C" {

void* ts_step_create(const ts::StepModel* model) {
    try {
        return new ts::Step(*model);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void ts_step_destroy(void* step) { delete static_cast<ts::Step*>(step); }

int ts_step_run(void* step, const ts::StepBatch* batch) {
    try {
        static_cast<ts::Step*>(step)->run(*batch);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // extern "C"
