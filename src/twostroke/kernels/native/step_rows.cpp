// What the plan's operations do to a row, to one group of its heads, or to a task of attention.
#include <cmath>
#include <cstring>

#include "step_run.h"

namespace ts {

// Cosines (each twice) and sines (−, +) of every row's angles.
void Step::rope_tables(const Now& now) {
    const int64_t D = m_.head_dim, end = share(n_rows_, now.thread + 1, now.n_threads);
    for (int64_t rope = 0; rope < m_.n_ropes; rope++)
        for (int64_t r = share(n_rows_, now.thread, now.n_threads); r < end; r++) {
            const float* frequencies = m_.angles + rope * D;
            const float* magnitudes = frequencies + D / 2;
            float* cosines = rope_.get() + (rope * n_rows_ + r) * 2 * D;
            float* sines = cosines + D;
            for (int64_t i = 0; i < D / 2; i++) {
                const float angle = static_cast<float>(positions_[r]) * frequencies[i];
                cosines[2 * i] = cosines[2 * i + 1] = std::cos(angle) * magnitudes[i];
                sines[2 * i + 1] = std::sin(angle) * magnitudes[i];
                sines[2 * i] = -sines[2 * i + 1];
            }
        }  // the barrier after the embedding is the one that others wait at
}

void Step::trace(const Now& now, int64_t state, Range rows) {
    if (batch_->trace == nullptr) return;
    const int64_t E = m_.d_model;
    std::memcpy(batch_->trace + (state * n_rows_ + rows.first) * E, now.residual + rows.first * E,
                static_cast<size_t>((rows.last - rows.first) * E) * 4);
}

void Step::embed_row(const Embed& op, int64_t row, float* to) {
    const auto type = [](TableType t) { return static_cast<int32_t>(t); };
    kernels_->embed(op.table, type(op.table_type), batch_->tokens[row], m_.d_model, to, false);
    if (op.scale != 1.0f)
        for (int64_t e = 0; e < m_.d_model; e++) to[e] *= op.scale;
    if (op.positions != nullptr)
        kernels_->embed(op.positions, type(op.positions_type), positions_[row], m_.d_model, to, true);
}

void Step::norm_row(const Norm& op, const float* from, float* to) {
    if (op.weight == nullptr) std::memcpy(to, from, static_cast<size_t>(m_.d_model) * 4);
    else if (op.bias != nullptr) kernels_->layer_norm(from, op.weight, op.bias, op.eps, m_.d_model, to);
    else kernels_->rms_norm(from, op.weight, op.eps, m_.d_model, to);
}

// All query heads of a row together, and all its key heads.
void Step::norm_heads(const QkNorm& op, int64_t row) {
    float* qkv = qkv_.get() + row * qkv_width_;
    kernels_->rms_norm(qkv, op.weight, op.eps, q_width_, qkv);
    kernels_->rms_norm(qkv + q_width_, op.weight + q_width_, op.eps, m_.n_kv_heads * m_.head_dim, qkv + q_width_);
}

// One group of a row: a key head, its value head, its query heads.
void Step::norm_group(const QkNorm& op, int64_t row, int64_t k) {
    const int64_t D = m_.head_dim, group = m_.n_heads / m_.n_kv_heads;
    float* qkv = qkv_.get() + row * qkv_width_;
    for (int64_t head = k * group; head < (k + 1) * group; head++)
        kernels_->rms_norm(qkv + head * D, op.weight + head * D, op.eps, D, qkv + head * D);
    const int64_t key = m_.n_heads + k;
    kernels_->rms_norm(qkv + key * D, op.weight + key * D, op.eps, D, qkv + key * D);
}

void Step::rope_and_cache_write_group(const RopeAndCacheWrite& op, int64_t layer, int64_t row, int64_t k) {
    const int64_t D = m_.head_dim, group = m_.n_heads / m_.n_kv_heads;
    float* qkv = qkv_.get() + row * qkv_width_;
    float* key = qkv + (m_.n_heads + k) * D;
    if (op.rope >= 0) {
        const float* cosines = rope_.get() + (op.rope * n_rows_ + row) * 2 * D;
        for (int64_t head = k * group; head < (k + 1) * group; head++)
            kernels_->rope(qkv + head * D, cosines, cosines + D, D);
        kernels_->rope(key, cosines, cosines + D, D);
    }
    if (op.key_offset != nullptr) {
        const float* offset = op.key_offset + k * D;
        for (int64_t d = 0; d < D; d++) key[d] -= offset[d];
    }
    kernels_->cache_write(kv_, kv_head(layer, k), key, key + m_.n_kv_heads * D, slots_[row]);
}

KvHead Step::kv_head(int64_t layer, int64_t k) const {
    const int64_t head = layer * m_.n_kv_heads + k, n_tiles = m_.n_slots / kTile;
    KvHead found{m_.keys + head * n_tiles * kv_.key_tile_bytes, m_.values + head * n_tiles * kv_.value_tile_bytes,
                 nullptr, nullptr};
    if (in_codes(kv_.type)) {
        found.key_scales = m_.key_scales + head * m_.n_slots;
        found.value_scales = m_.value_scales + head * m_.n_slots;
    }
    return found;
}

void Step::attend(const PagedAttention& op, int64_t layer, ThreadMemory& memory, std::atomic<int64_t>& claims) {
    TaskList& list = *list_of(op.window);
    const StepBatch& b = *batch_;
    const int64_t D = m_.head_dim, group = m_.n_heads / m_.n_kv_heads,
                  n_tasks = static_cast<int64_t>(list.tasks.size());
    for (int64_t i; (i = claims.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
        const Task& task = list.tasks[i];
        const int64_t row = first_rows_[task.request] + task.first_token;
        AttendTask a{};
        a.queries = qkv_.get() + row * qkv_width_ + task.kv_head * group * D;
        a.query_stride = qkv_width_;
        a.out = attention_out_.get() + row * q_width_ + task.kv_head * group * D;
        a.out_stride = q_width_;
        a.pages = b.table + b.table_rows[task.request] * b.table_stride;
        a.first_position = b.starts[task.request] + task.first_token;
        a.n_tokens = static_cast<int32_t>(task.n_tokens);
        a.group = static_cast<int32_t>(group);
        a.window = op.window;
        a.cap = op.cap;
        a.sinks = op.sinks == nullptr ? nullptr : op.sinks + task.kv_head * group;
        a.first_key = task.first_key;
        a.end_key = task.end_key;
        if (task.partial >= 0) a.partial = partials_.get() + task.partial + task.span * task.n_tokens * group * (D + 2);
        kernels_->attend(kv_, kv_head(layer, task.kv_head), a, m_.attention_scale, memory.attention.get());
        if (task.partial >= 0 && list.left[task.joined].fetch_sub(1, std::memory_order_acq_rel) == 1) {
            list.left[task.joined].store(task.n_spans, std::memory_order_relaxed);  // for the next layer
            a.partial = partials_.get() + task.partial;
            kernels_->combine(kv_, a, task.n_spans);
        }
    }
}

void Step::gather(Now& now) {
    if (batch_->kept == nullptr) return;
    const int64_t n = batch_->n_kept, E = m_.d_model, end = share(n, now.thread + 1, now.n_threads);
    for (int64_t i = share(n, now.thread, now.n_threads); i < end; i++) {
        const int64_t row = batch_->kept[i];
        std::memcpy(kept_residual_.get() + i * E, now.residual + row * E, static_cast<size_t>(E) * 4);
        std::memcpy(kept_attention_out_.get() + i * q_width_, now.attention_out + row * q_width_,
                    static_cast<size_t>(q_width_) * 4);
    }
    now.residual = kept_residual_.get();
    now.attention_out = kept_attention_out_.get();
    now.n_rows = n;
    if (now.adapted != nullptr) now.adapted = &kept_adapted_;
    barrier();
}

}  // namespace ts
