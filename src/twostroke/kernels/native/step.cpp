// The plan's operations, one after another, on all threads in one parallel region.
//
// Few rows: every product is shared out by its outputs, with a barrier after each operation. Many rows: threads take
// chunks of rows and carry each from one attention to the next alone, so that a layer needs two barriers and a chunk
// stays in cache. A row's result is the same either way.
#include "step.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "pool.h"
#include "step_run.h"

namespace ts {
Step::Step(const StepModel& model) : m_(model), ops_(model.ops, model.ops + model.n_ops) {
    kv_.type = static_cast<KvType>(m_.kv_type);
    kv_.head_dim = m_.head_dim;
    kv_.page_tokens = m_.page_tokens;
    const int64_t bytes = kv_.type == KvType::F32 ? 4 : kv_.type == KvType::BF16 ? 2 : 1;
    const int64_t pair = kv_.type == KvType::F32 ? 1 : 2;
    kv_.key_tile_bytes = (m_.head_dim + pair - 1) / pair * pair * kTile * bytes;
    kv_.value_tile_bytes = m_.head_dim * kTile * bytes;
    if (kv_.type == KvType::INT4) kv_.key_tile_bytes = kv_.value_tile_bytes = (m_.head_dim + 1) / 2 * kTile;
    q_width_ = m_.n_heads * m_.head_dim;
    qkv_width_ = (m_.n_heads + 2 * m_.n_kv_heads) * m_.head_dim;
    widest_ = std::max(m_.d_model, std::max(q_width_, m_.d_ff));
    for (const StepOp& op : ops_)
        if (op.kind == OpKind::PagedAttention && list_of(op.paged_attention.window) == nullptr) {
            lists_.emplace_back();
            lists_.back().window = op.paged_attention.window;
        }
    for (const StepOp& op : ops_)
        if (op.kind == OpKind::RouteTokens) {
            most_experts_ = std::max(most_experts_, op.route_tokens.matrix.n);
            most_chosen_ = std::max<int64_t>(most_chosen_, op.route_tokens.top_k);
        }
    n_counters_ = 2 * static_cast<int64_t>(ops_.size()) + 2;
    counters_.reset(new std::atomic<int64_t>[n_counters_]);
}

void Step::run(const StepBatch& batch) {
    batch_ = &batch;
    kernels_ = &kernels();
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

void Step::make_ready(int n_threads) {
    need_memory(n_threads);
    sort_adapted(n_threads);
    pieces_.need(n_threads);
    n_runs_++;
    for (TaskList& list : lists_) {
        list.fill(m_, *batch_, kernels_->task_rows(kv_), n_threads);
        partials_.need(list.partial_floats);
    }
    for (int64_t i = 0; i < n_counters_; i++) counters_[i].store(0, std::memory_order_relaxed);
}

TaskList* Step::list_of(int64_t window) {
    for (TaskList& list : lists_)
        if (list.window == window) return &list;
    return nullptr;
}

// Position and cache slot of every row.
void Step::place_rows() {
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

// Which rows have which adapters, before and behind the gathering of those that are sampled from.
void Step::sort_adapted(int n_threads) {
    const StepBatch& b = *batch_;
    if (b.adapters == nullptr) return;
    auto &all = adapted_.adapters, &kept = kept_adapted_.adapters;
    all.clear();
    for (int64_t i = 0; i < b.n_requests; i++) all.insert(all.end(), b.counts[i], b.adapters[i]);
    adapted_.sort(chunk_rows(n_rows_, n_threads));
    if (b.kept == nullptr) return;
    kept.clear();
    for (int64_t i = 0; i < b.n_kept; i++) kept.push_back(all[b.kept[i]]);
    kept_adapted_.sort(chunk_rows(b.n_kept, n_threads));
}

void Step::need_memory(int n_threads) {
    const int64_t n_kept = batch_->kept != nullptr ? batch_->n_kept : n_rows_;
    residual_.need(n_rows_ * m_.d_model);
    qkv_.need(n_rows_ * qkv_width_);
    attention_out_.need(n_rows_ * q_width_);
    if (batch_->kept != nullptr) {
        kept_residual_.need(n_kept * m_.d_model);
        kept_attention_out_.need(n_kept * q_width_);
    }
    rope_.need(n_rows_ * m_.n_ropes * 2 * m_.head_dim);
    normed_.need(kFewRows * m_.d_model);
    mlp_inner_.need(kFewRows * m_.d_ff);
    up_.need(kFewRows * m_.d_ff);
    rows_.need(kFewRows, widest_);
    best_.need(kFewRows * n_threads);
    thin_.need(kFewRows * batch_->adapter_width);
    while (static_cast<int>(memory_.size()) < n_threads) memory_.emplace_back(new ThreadMemory);
    need_expert_memory(n_rows_);
    need_latent_memory();
    const int64_t scratch = kernels_->attend_scratch_bytes(kv_, m_.n_heads / m_.n_kv_heads);
    for (auto& memory : memory_) {
        memory->normed.need(kChunkRows * m_.d_model);
        memory->mlp_inner.need(kChunkRows * m_.d_ff);
        memory->up.need((most_chosen_ > 0 ? kExpertRows : kChunkRows) * kMlpOutputs);
        memory->scores.need(most_experts_ * (kChunkRows + 2));
        memory->rows.need(kChunkRows, widest_);
        memory->attention.need(scratch);
        memory->thin.need(kChunkRows * batch_->adapter_width);
        if (batch_->adapters == nullptr) continue;
        memory->thin_sums.need(kChunkRows * batch_->adapter_width);
        memory->thin_rows.need(kChunkRows * (2 * padded(widest_) + kThinRowBytes));
    }
}

void Step::barrier() {
    if (!alone_) Pool::shared().barrier();
}

// The whole plan, by one of the threads.
void Step::work(int thread, int n_threads) {
    Now now{residual_.get(), attention_out_.get(), n_rows_, thread, n_threads};
    if (batch_->adapters != nullptr) now.adapted = &adapted_;
    now.operation = n_runs_ << 16;  // more than a plan has operations
    const auto needs_all = [](const StepOp& op) {
        return op.kind == OpKind::PagedAttention || op.kind == OpKind::GatherSampledRows ||
               op.kind == OpKind::ExpertsAdd;
    };
    rope_tables(now);
    for (size_t i = 0, end; i < ops_.size(); i = end) {
        for (end = i; end < ops_.size() && !needs_all(ops_[end]);) end++;
        if (end > i && chunk_rows(now.n_rows, n_threads) > 0) {
            run_chunks(i, end, now);
            continue;
        }
        if (end == i) end++;
        now.shared = true;
        now.first = 0;
        for (; i < end; i++) {
            now.last = now.n_rows;
            run(i, now);
        }
    }
}

// Many rows: chunk by chunk, each by one thread.
void Step::run_chunks(size_t begin, size_t end, Now& now) {
    const int64_t chunk = chunk_rows(now.n_rows, now.n_threads);
    std::atomic<int64_t>& claims = counters_[now.n_claims++];
    if (begin == 0 && m_.n_ropes > 0) barrier();  // the tables of angles
    now.shared = false;
    for (int64_t c; (c = claims.fetch_add(1, std::memory_order_relaxed)) * chunk < now.n_rows;) {
        now.first = c * chunk;
        now.last = std::min(now.first + chunk, now.n_rows);
        for (size_t i = begin; i < end; i++) run(i, now);
    }
    barrier();
}

}  // namespace ts

extern "C" {

void* ts_step_create(const ts::StepModel* model) {
    try {
        return new ts::Step(*model);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void ts_step_destroy(void* step) { delete static_cast<ts::Step*>(step); }

int ts_step_run(void* step, const ts::StepBatch* batch) {
    try {
        static_cast<ts::Step*>(step)->run(*batch);
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}

}  // extern "C"
