// The plan's operations, each once: over all rows with the outputs shared out, or over a thread's own chunk of rows.
#include "step_run.h"

#include <algorithm>
#include <limits>

#include "layout.h"

namespace ts {

namespace {

template <class Op>
auto matrix_in(const Op& op, int) -> decltype(&op.matrix) {
    return &op.matrix;
}
template <class Op>
const Matrix* matrix_in(const Op&, long) {
    return nullptr;
}
// The larger of two numbers of different places, of equal ones the first; NaN before all others, the first of them.
Best better(const Best& a, const Best& b) {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan ? a : b;
    if (a_nan || a.value == b.value) return a.index <= b.index ? a : b;
    return a.value > b.value ? a : b;
}

// That of an operation; null: it has none.
const Matrix* matrix_of(const StepOp& op) {
    return visit(op, [](const auto& held) -> const Matrix* { return matrix_in(held, 0); });
}

}  // namespace

void Step::run(size_t i, Now& now) {
    now.op = i;
    visit(ops_[i], [&](const auto& op) { run(op, now); });
}

// Of n parts a row, those of this thread: its share of all rows', or all of its chunk's.
Step::Range Step::own(const Now& now, int64_t n) const {
    if (!now.shared) return {now.first * n, now.last * n};
    const int64_t all = now.last * n;
    return {share(all, now.thread, now.n_threads), share(all, now.thread + 1, now.n_threads)};
}

Step::Range Step::own_outputs(const Now& now, int64_t n_outputs) {
    Range outputs{0, n_outputs};
    if (now.shared)
        share_outputs(Matrix{Format::F32, 0, n_outputs, 0, nullptr, nullptr}, now.thread, now.n_threads, outputs.first,
                      outputs.last);
    return outputs;
}

// The outputs that this thread computes of its rows.
Step::Range Step::own_outputs(const Now& now, const Matrix& w) const { return own_outputs(now, w.n); }

// work(outputs) for all outputs of a matrix: pieces of this thread's part and of what others leave of theirs, or the
// thread's own part as a whole. A product's values do not depend on where it is cut.
template <class Work>
void Step::each_piece(Now& now, const Matrix& w, Work work) {
    const int64_t bytes = layout::panel(w, layout::panels(w.n)) - layout::panel(w, 0);
    if (!now.shared || now.n_threads == 1 || bytes < kLeastPartBytes * now.n_threads) return work(own_outputs(now, w));
    now.operation++;
    for (int i = 0; i < now.n_threads; i++) {
        const int owner = (now.thread + i) % now.n_threads;
        Range part{0, 0};
        share_outputs(w, owner, now.n_threads, part.first, part.last);
        const int64_t n = part.last - part.first, each = (n + kPiecesEach - 1) / kPiecesEach;
        const int64_t width = (each + kPieceOutputs - 1) / kPieceOutputs * kPieceOutputs;
        for (int64_t p; n > 0 && (p = pieces_.take(owner, now.operation, (n + width - 1) / width)) >= 0;) {
            const int64_t first = part.first + p * width;
            work(Range{first, std::min(first + width, part.last)});
        }
    }
}

void Step::multiply(Now& now, const Matrix& w, const Rows& rows, float* y, bool add) {
    each_piece(now, w, [&](Range outputs) {
        product(w, rows, outputs.first, outputs.last, y + now.first * w.n, w.n, add);
        adapt(now, 0, outputs, y + now.first * w.n, w.n);
    });
}

// The operation that reads what a norm made and may have adapters.
size_t Step::reader_of(size_t norm) const { return norm + (ops_[norm + 1].kind == OpKind::RouteTokens ? 2 : 1); }

namespace {

// Rows in the form that an adapter reads, `stride` bytes from one to the next: floats, or two codes a number
// (SplitRows), the lower ones `low` bytes behind the higher and the scale as far behind those, with the sums of all
// codes behind it and then those of each part's.
struct FormRows {
    const char* data;
    int64_t stride, low;

    SplitRows codes(int64_t first, int64_t sums) const {
        const auto* at = reinterpret_cast<const int8_t*>(data) + first;
        const char* const scale = data + 2 * low;
        return {at, at + low, reinterpret_cast<const float*>(scale),
                reinterpret_cast<const SplitSums*>(scale + sizeof(float)) + sums, stride};
    }
};

constexpr int64_t kAllSums = 0, kPartSums = 1;  // places of them

// A row of n numbers and the sums of all its codes.
SplitSums* split(const Kernels& kernels, const float* row, int64_t n, char* to, int64_t low) {
    auto* codes = reinterpret_cast<int8_t*>(to);
    auto* scale = reinterpret_cast<float*>(to + 2 * low);
    auto* sums = reinterpret_cast<SplitSums*>(scale + 1);
    kernels.split_row(row, n, codes, codes + low, scale, sums + kAllSums);
    return sums;
}

// What an adapter makes of a row for its parts.
void split_for_parts(const Kernels& kernels, const AdapterAt& at, const float* row, char* to, int64_t low) {
    SplitSums* const sums = split(kernels, row, at.n, to, low);
    const auto* codes = reinterpret_cast<const int8_t*>(to);
    for (int64_t i = 0; i < at.n_parts; i++) {
        SplitSums of{0, 0};
        for (int32_t j = at.parts[i].first; j < at.parts[i].first + at.parts[i].k; j++) {
            of.high += codes[j];
            of.low += codes[low + j];
        }
        sums[kPartSums + i] = of;
    }
}

}  // namespace

// What the adapters at `op` make of the rows at places [first, last), x (., k) being the rows and `to` the places. A
// row of `to` is in the adapter's form, zeros behind the last number.
void Step::make_thin(const Now& now, size_t op, const float* x, int64_t k, int64_t first, int64_t last, float* to) {
    const int64_t width = batch_->adapter_width, low = padded(k);
    ThreadMemory& own = *memory_[now.thread];
    each_adapter(now, op, first, last, [&](const Adapter& adapter, const int32_t* rows, int64_t n, int64_t place) {
        const AdapterAt& at = adapter.at[op];
        const float* from[kChunkRows];
        float* made[kChunkRows];
        const bool plain = adapter.form == AdapterForm::F32;
        for (int64_t i = 0; i < n; i++) {
            from[i] = x + rows[i] * k;
            made[i] = plain ? to + (place + i) * width : own.thin_sums.get() + i * width;
        }
        if (plain) return kernels_->thin_f32(static_cast<const float*>(at.packed), k, from, n, 0, at.n, made, false);
        const FormRows split_rows{own.thin_rows.get(), kThinRowBytes + 2 * low, low};
        for (int64_t i = 0; i < n; i++) split(*kernels_, from[i], k, own.thin_rows.get() + i * split_rows.stride, low);
        kernels_->thin_codes(at.packed, (k + 3) / 4, at.scales, split_rows.codes(0, kAllSums), n, 0, at.n, made, false);
        for (int64_t i = 0; i < n; i++)
            split_for_parts(*kernels_, at, made[i], reinterpret_cast<char*>(to + (place + i) * width), width);
    });
}

// Adds what adapters have to add to these outputs of all rows; y is row now.first's output 0.
void Step::adapt(const Now& now, int second, Range outputs, float* y, int64_t ldy) {
    const int64_t width = batch_->adapter_width;
    each_adapter(now, now.op, now.first, now.last,
                 [&](const Adapter& adapter, const int32_t* rows, int64_t n, int64_t place) {
        const AdapterAt& at = adapter.at[now.op];
        const float* const thin = now.thin + (place - now.first) * width;
        for (int64_t i = 0; i < at.n_parts; i++) {
            const AdapterPart& part = at.parts[i];
            const int64_t first = std::max<int64_t>(0, outputs.first - part.begin);
            const int64_t last = std::min(part.n, outputs.last - part.begin);
            if (first >= last || part.second != second) continue;
            const float* from[kChunkRows];
            float* to[kChunkRows];
            for (int64_t j = 0; j < n; j++) {
                from[j] = thin + j * width + part.first;
                to[j] = y + (rows[j] - now.first) * ldy + part.begin;
            }
            if (adapter.form == AdapterForm::F32) {
                kernels_->thin_f32(static_cast<const float*>(part.packed), part.k, from, n, first, last, to, true);
                continue;
            }
            const FormRows split_rows{reinterpret_cast<const char*>(thin), 4 * width, width};
            kernels_->thin_codes(part.packed, (part.k + 3) / 4, nullptr, split_rows.codes(part.first, kPartSums + i), n,
                                 first, last, to, true);
        }
    });
}

// residual += rows·Wᵀ, or its norm, for which a row must be whole, or either scaled.
template <class Op>
void Step::add(const Op& op, Now& now, const Rows& rows) {
    if (op.norm.weight == nullptr && op.scale == 1.0f) {
        multiply(now, op.matrix, rows, now.residual, true);
    } else {
        const int64_t E = m_.d_model;
        float* const sums = now.shared ? normed_.get() : memory_[now.thread]->normed.get() - now.first * E;
        multiply(now, op.matrix, rows, sums, false);
        if (now.shared) barrier();
        const Range mine = own(now, 1);
        for (int64_t r = mine.first; r < mine.last; r++) {
            if (op.norm.weight != nullptr) norm_row(op.norm, sums + r * E, sums + r * E);
            for (int64_t e = 0; e < E; e++) now.residual[r * E + e] += op.scale * sums[r * E + e];
        }
    }
    finish(now, true);
    if (op.ends_block) trace(now, ops_[now.op].layer + 1, own(now, 1));
}

Rows Step::prepare(Now& now, Format format, float* from, int64_t k) {
    return prepare(now, now.op, format, from, from + now.first * k, k, [](int64_t, float*) {});
}

// While others are still at work: the next matrix's first bytes.
void Step::fetch_next(const Now& now) {
    for (size_t i = now.op + 1; i < ops_.size() && i < now.op + 6; i++)
        if (const Matrix* next = matrix_of(ops_[i])) {
            const Range outputs = own_outputs(now, *next);
            prefetch(*next, outputs.first, outputs.last, kPrefetchBytes);
            return;
        }
}

// What was written is there for all threads; a chunk's is its thread's alone.
void Step::finish(const Now& now, bool fetch) {
    if (!now.shared) return;
    if (fetch) fetch_next(now);
    barrier();
}

void Step::run(const Embed& op, Now& now) {
    const Range rows = own(now, 1);
    for (int64_t r = rows.first; r < rows.last; r++) embed_row(op, r, now.residual + r * m_.d_model);
    trace(now, 0, rows);
    finish(now, true);
}

void Step::run(const Norm& op, Now& now) {
    const int64_t E = m_.d_model;
    const bool before_head = ops_[now.op + 1].kind == OpKind::LmHead;
    const int64_t n_read = before_head ? now.n_rows - batch_->n_hidden : now.n_rows;
    // Of so few rows that every thread makes them all, the first one writes.
    const bool writes = !now.shared || now.last - now.first > kPrivateRows || now.thread == 0;
    now.prepared = prepare(now, reader_of(now.op), matrix_of(ops_[now.op + 1])->format, normed_.get(),
                           memory_[now.thread]->normed.get(), E, [&](int64_t r, float* to) {
        norm_row(op, now.residual + r * E, to);
        if (r >= n_read && writes) std::copy(to, to + E, batch_->hidden + (r - n_read) * E);
    });
}

void Step::run(const QkvProjection& op, Now& now) {
    multiply(now, op.matrix, now.prepared, qkv_.get(), false);
    finish(now, false);
}

// The same share of heads in this and the next, so nobody waits between them.
void Step::run(const QkNorm& op, Now& now) {
    const int64_t K = m_.n_kv_heads;
    if (op.over_heads) {
        const Range rows = own(now, 1);
        for (int64_t r = rows.first; r < rows.last; r++) norm_heads(op, r);
        return finish(now, false);
    }
    const Range groups = own(now, K);
    for (int64_t g = groups.first; g < groups.last; g++) norm_group(op, g / K, g % K);
}

void Step::run(const RopeAndCacheWrite& op, Now& now) {
    const int64_t K = m_.n_kv_heads;
    const Range groups = own(now, K);
    for (int64_t g = groups.first; g < groups.last; g++)
        rope_and_cache_write_group(op, ops_[now.op].layer, g / K, g % K);
    finish(now, true);
}

void Step::run(const PagedAttention& op, Now& now) {
    attend(op, ops_[now.op].layer, *memory_[now.thread], counters_[now.n_claims++]);
    barrier();
}

void Step::run(const GatherSampledRows&, Now& now) { gather(now); }

void Step::run(const OutProjectionAdd& op, Now& now) {
    add(op, now, prepare(now, op.matrix.format, op.latent ? latent_values_.get() : now.attention_out, op.matrix.k));
}

void Step::run(const MlpUp& op, Now& now) {
    ThreadMemory& own_memory = *memory_[now.thread];
    const int64_t F = op.matrix.n;
    // Of a chunk's rows a part of the outputs at a time: they are activated while they are in the second-level cache.
    const int64_t width = now.shared ? F : kMlpOutputs;
    float* const inner = now.shared ? mlp_inner_.get() : own_memory.mlp_inner.get();
    each_piece(now, op.matrix, [&](Range all) {
        for (int64_t n0 = all.first; n0 < all.last; n0 += width) {
            const int64_t n1 = std::min(all.last, n0 + width);
            float* const up = now.shared ? up_.get() : own_memory.up.get() - n0;
            product(op.matrix, now.prepared, n0, n1, inner, F, false);
            if (op.up.packed != nullptr) product(op.up, now.prepared, n0, n1, up, width, false);
            adapt(now, 0, {n0, n1}, inner, F);
            adapt(now, 1, {n0, n1}, up, width);
            for (int64_t r = 0; r < now.last - now.first; r++) {
                float* to = inner + r * F + n0;
                const float* const by = op.up.packed != nullptr ? up + r * width + n0 : nullptr;
                kernels_->activate(op.activation, to, by, n1 - n0, to);
                if (op.shared)
                    for (int64_t i = 0; i < n1 - n0; i++) to[i] *= routing(now).dense_shares[now.first + r];
            }
        }
    });
    finish(now, true);
}

void Step::run(const MlpDownAdd& op, Now& now) {
    float* const own_inner = memory_[now.thread]->mlp_inner.get();
    float* const inner = now.shared ? mlp_inner_.get() : own_inner;
    add(op, now, prepare(now, now.op, op.matrix.format, inner, inner, op.matrix.k, [](int64_t, float*) {}));
}

void Step::run(const LmHead& op, Now& now) {
    const int64_t V = op.matrix.n;
    now.last = std::min(now.last, now.n_rows - batch_->n_hidden);
    if (now.last <= now.first) return;
    const Rows rows = slice(now.prepared, op.matrix.k, 0, now.last - now.first);
    const bool seeks = batch_->best != nullptr && now.shared;
    Best* const mine = &best_[now.thread * kFewRows];
    for (int64_t r = 0; seeks && r < now.last; r++) mine[r] = {-std::numeric_limits<float>::infinity(), V};
    each_piece(now, op.matrix, [&](Range outputs) {
        const int64_t n = outputs.last - outputs.first;
        if (n <= 0) return;
        product(op.matrix, rows, outputs.first, outputs.last, batch_->logits + now.first * V, V, false);
        for (int64_t r = now.first; r < now.last; r++) {
            float* const logits = batch_->logits + r * V + outputs.first;
            if (op.cap > 0.0f) kernels_->bound(logits, n, op.cap);
            if (!seeks) continue;
            Best found = kernels_->best(logits, n);
            found.index += outputs.first;
            mine[r] = better(mine[r], found);
        }
    });
    if (batch_->best == nullptr) return;
    const auto keep = [&](int64_t r, const Best& found) {
        batch_->best[r] = found.value;
        batch_->best_tokens[r] = found.index;
    };
    if (!now.shared) {
        for (int64_t r = now.first; r < now.last; r++) keep(r, kernels_->best(batch_->logits + r * V, V));
        return;
    }
    barrier();
    const Range all = own(now, 1);
    for (int64_t r = all.first; r < all.last; r++) {
        Best found = best_[r];
        for (int t = 1; t < now.n_threads; t++) found = better(found, best_[t * kFewRows + r]);
        keep(r, found);
    }
}

}  // namespace ts
