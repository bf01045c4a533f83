// Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2) with the matrices that rebuild keys and values
// absorbed: queries are taken into the latent space, where one key and one value a token serve all heads, and each
// head's sum of latents is taken out again.
#include <algorithm>
#include <cstring>

#include "step_run.h"

namespace ts {

void Step::need_latent_memory() {
    for (const StepOp& op : ops_) {
        if (op.kind == OpKind::LatentProjection) {
            const LatentProjection& latent = op.latent_projection;
            if (latent.down.packed != nullptr) latent_down_.need(n_rows_ * latent.down.n);
            latent_queries_.need(n_rows_ * latent.matrix.n);
            latent_kv_.need(n_rows_ * latent.kv.n);
            for (auto& memory : memory_) memory->normed.need(kChunkRows * std::max(latent.matrix.k, latent.latent));
        } else if (op.kind == OpKind::LatentValues) {
            latent_values_.need(n_rows_ * op.latent_values.heads.n);
        }
    }
}

// One head's matrix, of n outputs, times its k numbers of every row, which lie `stride` apart; y is row 0's output 0.
void Step::multiply_head(const Now& now, const Matrix& heads, int64_t head, int64_t n, const float* from,
                         int64_t stride, float* y, int64_t ldy) {
    ThreadMemory& memory = *memory_[now.thread];
    const int64_t n_rows = now.last - now.first, k = heads.k;
    float* const rows = memory.normed.get();
    for (int64_t r = 0; r < n_rows; r++)
        std::memcpy(rows + r * k, from + (now.first + r) * stride, static_cast<size_t>(k) * 4);
    const Rows made = memory.rows.make(heads.format, rows, n_rows, k, 0, n_rows);
    product(heads, made, head * n, (head + 1) * n, y + now.first * ldy - head * n, ldy, false);
}

void Step::run(const LatentProjection& op, Now& now) {
    const int64_t D = m_.head_dim, H = m_.n_heads, k = op.matrix.k;
    float* const queries = latent_queries_.get();
    multiply(now, op.kv, now.prepared, latent_kv_.get(), false);
    if (op.down.packed != nullptr) {
        float* const down = latent_down_.get();
        multiply(now, op.down, now.prepared, down, false);
        if (now.shared) barrier();
        const Rows inside =
            prepare(now, now.op, op.matrix.format, down, memory_[now.thread]->normed.get(), k,
                    [&](int64_t r, float* to) { kernels_->rms_norm(down + r * k, op.down_norm, op.eps, k, to); });
        multiply(now, op.matrix, inside, queries, false);
    } else {
        multiply(now, op.matrix, now.prepared, queries, false);
    }
    if (now.shared) barrier();
    const int64_t first_head = now.shared ? share(H, now.thread, now.n_threads) : 0;
    const int64_t last_head = now.shared ? share(H, now.thread + 1, now.n_threads) : H;
    const int64_t width = op.nope + op.rope;
    for (int64_t h = first_head; h < last_head; h++) {
        multiply_head(now, op.absorb, h, op.latent, queries + h * width, H * width, qkv_.get() + h * D + op.rope,
                      qkv_width_);
        for (int64_t r = now.first; r < now.last; r++)
            std::memcpy(qkv_.get() + r * qkv_width_ + h * D, queries + (r * H + h) * width + op.nope,
                        static_cast<size_t>(op.rope) * 4);
    }
    const Range rows = own(now, 1);
    for (int64_t r = rows.first; r < rows.last; r++) {
        const float* from = latent_kv_.get() + r * op.kv.n;
        float* const key = qkv_.get() + r * qkv_width_ + H * D;
        std::memcpy(key, from + op.latent, static_cast<size_t>(op.rope) * 4);
        kernels_->rms_norm(from, op.kv_norm, op.eps, op.latent, key + op.rope);
        std::memset(key + D, 0, static_cast<size_t>(op.rope) * 4);
        std::memcpy(key + D + op.rope, key + op.rope, static_cast<size_t>(op.latent) * 4);
    }
    finish(now, false);
}

void Step::run(const LatentValues& op, Now& now) {
    const int64_t D = m_.head_dim, H = m_.n_heads, n = op.heads.n / H;
    const int64_t first_head = now.shared ? share(H, now.thread, now.n_threads) : 0;
    const int64_t last_head = now.shared ? share(H, now.thread + 1, now.n_threads) : H;
    for (int64_t h = first_head; h < last_head; h++)
        multiply_head(now, op.heads, h, n, now.attention_out + h * D + op.rope, q_width_, latent_values_.get() + h * n,
                      H * n);
    finish(now, true);
}

}  // namespace ts
