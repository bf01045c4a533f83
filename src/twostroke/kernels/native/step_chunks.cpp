// Many rows: chunk by chunk, each by one thread from attention to attention.
#include <algorithm>

#include "step_run.h"

namespace ts {

void Step::run_chunks(size_t begin, size_t end, Now& now) {
    const int64_t each = (now.n_rows + now.n_threads - 1) / now.n_threads;
    const int64_t chunk = std::min(kChunkRows, (each + 31) / 32 * 32);  // whole tiles of rows
    std::atomic<int64_t>& claims = counters_[now.n_claims++];
    if (begin == 0 && m_.frequencies != nullptr) barrier();  // the tables of turns
    for (int64_t c; (c = claims.fetch_add(1, std::memory_order_relaxed)) * chunk < now.n_rows;) {
        const int64_t first = c * chunk, last = std::min(first + chunk, now.n_rows);
        for (size_t i = begin; i < end; i++) run_rows(i, now, first, last);
    }
    barrier();
}

void Step::run_rows(size_t i, Now& now, int64_t first, int64_t last) {
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

}  // namespace ts
