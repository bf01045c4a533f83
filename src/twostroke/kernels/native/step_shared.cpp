// Few rows: operation by operation, outputs shared out.
#include "step_run.h"

namespace ts {

// All rows of `from` (n, k) in a matrix's form; `fill`, where given, writes a row of `from` first.
template <typename Fill>
Rows Step::prepare_shared(const Now& now, Format format, float* shared_from, float* own_from, int64_t k, Fill fill) {
    if (now.n_rows <= kPrivateRows) {
        for (int64_t r = 0; r < now.n_rows; r++) fill(r, own_from + r * k);
        return memory_[now.thread]->rows.make(format, own_from, now.n_rows, k, 0, now.n_rows);
    }
    const int64_t first = share(now.n_rows, now.thread, now.n_threads),
                  end = share(now.n_rows, now.thread + 1, now.n_threads);
    for (int64_t r = first; r < end; r++) fill(r, shared_from + r * k);
    const Rows rows = rows_.make(format, shared_from, now.n_rows, k, first, end);
    barrier();
    return rows;
}
Rows Step::prepare_shared(const Now& now, Format format, float* from, int64_t k) {
    return prepare_shared(now, format, from, from, k, [](int64_t, float*) {});
}

void Step::product_shared(const Now& now, const Matrix& w, const Rows& rows, float* y, bool add) {
    int64_t n0, n1;
    share_outputs(w, now.thread, now.n_threads, n0, n1);
    product(w, rows, n0, n1, y, w.n, add);
}

// While others are still at work: the next matrix's first bytes.
void Step::fetch_next(size_t i, const Now& now) {
    for (size_t j = i + 1; j < ops_.size() && j < i + 6; j++)
        if (ops_[j].matrix.packed != nullptr) {
            int64_t n0, n1;
            share_outputs(ops_[j].matrix, now.thread, now.n_threads, n0, n1);
            prefetch(ops_[j].matrix, n0, n1, kPrefetchBytes);
            return;
        }
}

void Step::run_shared(size_t i, Now& now) {
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
                    kernels_->activate(op.choice, wide, op.up.packed != nullptr ? up_.get() + r * F + n0 : nullptr,
                                       n1 - n0, wide);
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

}  // namespace ts
