// A mixture of experts: each row's choice, then the experts' products over the rows that chose them.
//
// Pairs of a row and one of its experts are sorted by expert once a layer. Groups of pairs are gathered; each expert
// multiplies its own, threads sharing out its outputs, so that the work is even however unevenly experts are chosen.
// What a row gets is added in the order of its experts' numbers: its result does not depend on its neighbours.
#include <algorithm>
#include <cmath>

#include "layout.h"
#include "step_run.h"

namespace ts {

void Step::need_expert_memory(int64_t n_rows) {
    if (most_chosen_ == 0) return;
    router_logits_.need(kFewRows * most_experts_);
    for (const StepOp& op : ops_)
        if (op.kind == OpKind::ExpertsAdd)
            expert_inner_.need(std::min(n_rows * most_chosen_, kExpertRows) * op.experts_add.down.k);
    if (n_rows > kPrivateRows) need_routing(routing_, n_rows);
    // Of many rows a few may be left where only those that are sampled go on.
    for (auto& memory : memory_) need_routing(memory->routing, std::min(n_rows, kPrivateRows));
}

void Step::need_routing(Routing& route, int64_t n_rows) {
    const int64_t n_pairs = n_rows * most_chosen_, n_gathered = std::min(n_pairs, kExpertRows);
    route.shares.need(n_pairs);
    route.chosen.need(n_pairs);
    route.sorted.need(n_pairs);
    route.dense_shares.need(n_rows);
    route.first_pair.resize(static_cast<size_t>(most_experts_) + 1);
    for (const StepOp& op : ops_) {
        if (op.kind != OpKind::ExpertsAdd) continue;
        const ExpertsAdd& experts = op.experts_add;
        route.rows.need(experts.gate_up.format, n_rows, experts.gate_up.k);
        route.gathered.need(experts.gate_up.format, n_gathered, experts.gate_up.k);
        route.inner.need(experts.down.format, n_gathered, experts.down.k);
    }
}

// A few rows are routed, gathered and quantised by every thread for itself, which costs less than waiting for the
// other.
Routing& Step::routing(const Now& now) { return now.n_rows <= kPrivateRows ? memory_[now.thread]->routing : routing_; }

// The row's experts and their shares. `scores` is memory of twice the experts.
void Step::choose(const RouteTokens& op, const float* logits, int64_t row, float* scores, Routing& route) {
    const int64_t X = op.matrix.n;
    float* const ranked = scores + X;
    if (op.sigmoid) {
        for (int64_t e = 0; e < X; e++) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    } else {
        const float largest = *std::max_element(logits, logits + X);
        float sum = 0.0f;
        for (int64_t e = 0; e < X; e++) sum += scores[e] = std::exp(logits[e] - largest);
        for (int64_t e = 0; e < X; e++) scores[e] /= sum;
    }
    for (int64_t e = 0; e < X; e++) ranked[e] = scores[e] + (op.correction != nullptr ? op.correction[e] : 0.0f);
    constexpr float kOut = -__builtin_inff();
    if (op.n_groups > 1) {  // of all but the best groups nothing is chosen
        const int64_t size = X / op.n_groups;
        const auto score_of = [&](int64_t g) {
            float best = kOut, second = kOut;
            for (int64_t e = g * size; e < (g + 1) * size; e++) {
                second = std::max(second, std::min(best, ranked[e]));
                best = std::max(best, ranked[e]);
            }
            return op.correction != nullptr ? best + second : best;
        };
        for (int64_t left_out = op.n_groups - op.top_groups; left_out > 0; left_out--) {
            int64_t worst = -1;
            float least = 0.0f;
            for (int64_t g = 0; g < op.n_groups; g++) {
                if (ranked[g * size] == kOut) continue;
                const float score = score_of(g);
                if (worst < 0 || score <= least) worst = g, least = score;
            }
            std::fill(ranked + worst * size, ranked + (worst + 1) * size, kOut);
        }
    }
    int32_t* const chosen = route.chosen.get() + row * op.top_k;
    float* const shares = route.shares.get() + row * op.top_k;
    float sum = 0.0f;
    for (int64_t j = 0; j < op.top_k; j++) {
        const int64_t e = std::max_element(ranked, ranked + X) - ranked;
        chosen[j] = static_cast<int32_t>(e);
        sum += shares[j] = scores[e];
        ranked[e] = kOut;
    }
    const float factor = op.normalised ? op.scale / (sum + 1e-20f) : op.scale;
    for (int64_t j = 0; j < op.top_k; j++) shares[j] *= factor;
}

void Step::run(const RouteTokens& op, Now& now) {
    ThreadMemory& memory = *memory_[now.thread];
    const int64_t X = op.matrix.n, E = op.matrix.k;
    float* const scores = memory.scores.get();
    Routing& route = routing(now);
    const bool alone = &route != &routing_;
    // Of one panel a single thread would compute all, and the others would wait for it.
    const bool shared = now.shared && !(alone && X <= layout::kPanelOutputs);
    float* const logits = shared ? router_logits_.get() : scores + 2 * X;
    const Range outputs = shared ? own_outputs(now, op.matrix) : Range{0, X};
    product(op.matrix, now.prepared, outputs.first, outputs.last, logits, X, false);
    if (shared) barrier();
    const Range rows = alone ? Range{0, now.n_rows} : own(now, 1);
    for (int64_t r = rows.first; r < rows.last; r++) choose(op, logits + (r - now.first) * X, r, scores, route);
    if (op.shared_gate.packed != nullptr) {
        float* const gates = route.dense_shares.get();
        const Rows mine = slice(now.prepared, E, rows.first - now.first, rows.last - rows.first);
        product(op.shared_gate, mine, 0, 1, gates + rows.first, 1, false);
        for (int64_t r = rows.first; r < rows.last; r++) gates[r] = 1.0f / (1.0f + std::exp(-gates[r]));
    }
    route.rows.keep(op.format, now.prepared.f32 - now.first * E, E, rows.first, rows.last);
    if (!alone) finish(now, false);
}

void Step::sort_by_expert(const ExpertsAdd& op, int64_t n_rows, Routing& route) {
    const int64_t n_pairs = n_rows * op.top_k;
    std::vector<int64_t>& first = route.first_pair;
    std::fill(first.begin(), first.end(), 0);
    for (int64_t i = 0; i < n_pairs; i++) first[route.chosen[i] + 1]++;
    for (int64_t e = 0; e < op.n_experts; e++) first[e + 1] += first[e];
    for (int64_t i = 0; i < n_pairs; i++) route.sorted[first[route.chosen[i]]++] = static_cast<int32_t>(i);
    for (int64_t e = op.n_experts; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

void Step::count_load(const ExpertsAdd& op, int64_t layer, const Routing& route) {
    if (batch_->expert_load == nullptr) return;
    int64_t* const load = batch_->expert_load + layer * op.n_experts;
    for (int64_t e = 0; e < op.n_experts; e++) {
        const int64_t rows = route.first_pair[e + 1] - route.first_pair[e];
        load[e] += rows;
        *batch_->experts_touched += rows > 0;
    }
}

// segment(expert, begin, end) for each expert with pairs in [first, last) of those sorted.
template <class Segment>
void Step::each_segment(const Routing& route, int64_t first, int64_t last, Segment segment) {
    for (int64_t begin = first; begin < last;) {
        const int64_t expert = route.chosen[route.sorted[begin]];
        const int64_t end = std::min(last, route.first_pair[expert + 1]);
        segment(expert, begin, end);
        begin = end;
    }
}

// Outputs of m rows that are computed at a time.
static int64_t part_outputs(int64_t m) { return std::max(kMlpOutputs, kPartFloats / m / kMlpOutputs * kMlpOutputs); }

// This thread's outputs of gate and up, activated, of rows that lie at `at` in the group.
void Step::up_part(const ExpertsAdd& op, const Now& now, const Rows& rows, int64_t expert, int64_t at) {
    const int64_t F = op.down.k, gate = expert * 2 * F, up = gate + F, width = part_outputs(rows.m);
    const Range mine = own_outputs(now, F);
    float* const inner = expert_inner_.get() + at * F;
    float* const ups = memory_[now.thread]->up.get();
    for (int64_t n0 = mine.first; n0 < mine.last; n0 += width) {
        const int64_t n1 = std::min(mine.last, n0 + width);
        product(op.gate_up, rows, gate + n0, gate + n1, inner - gate, F, false);
        product(op.gate_up, rows, up + n0, up + n1, ups - up - n0, width, false);
        for (int64_t r = 0; r < rows.m; r++)
            kernels_->activate(op.activation, inner + r * F + n0, ups + r * width, n1 - n0, inner + r * F + n0);
    }
}

// This thread's outputs of down, times each pair's share, added to its row. `first` is the place of the first in
// route.sorted.
void Step::down_part(const ExpertsAdd& op, const Now& now, const Routing& route, const Rows& rows, int64_t expert,
                     int64_t first) {
    const int64_t E = m_.d_model, base = expert * E, width = part_outputs(rows.m);
    const Range mine = own_outputs(now, E);
    float* const sums = memory_[now.thread]->up.get();
    for (int64_t n0 = mine.first; n0 < mine.last; n0 += width) {
        const int64_t n = std::min(mine.last - n0, width);
        product(op.down, rows, base + n0, base + n0 + n, sums - base - n0, width, false);
        for (int64_t r = 0; r < rows.m; r++) {
            const int64_t pair = route.sorted[first + r];
            const float share = route.shares[pair] * op.scale;
            float* const to = now.residual + pair / op.top_k * E + n0;
            const float* const from = sums + r * width;
            for (int64_t i = 0; i < n; i++) to[i] += share * from[i];
        }
    }
}

void Step::run(const ExpertsAdd& op, Now& now) {
    const int64_t E = op.gate_up.k, F = op.down.k, n_pairs = now.n_rows * op.top_k;
    Routing& route = routing(now);
    const bool alone = &route != &routing_, one = now.n_rows == 1;  // all experts read the one row where it is
    const auto meet = [&] {
        if (!alone) barrier();
    };
    if (alone || now.thread == 0) sort_by_expert(op, now.n_rows, route);
    if (now.thread == 0) count_load(op, ops_[now.op].layer, route);
    meet();
    for (int64_t first = 0; first < n_pairs; first += kExpertRows) {
        const int64_t n = std::min(kExpertRows, n_pairs - first), last = first + n;
        const int64_t own_first = alone ? 0 : share(n, now.thread, now.n_threads),
                      own_last = alone ? n : share(n, now.thread + 1, now.n_threads);
        if (!one) {
            for (int64_t i = own_first; i < own_last; i++)
                route.gathered.copy(op.gate_up.format, E, route.rows, route.sorted[first + i] / op.top_k, i);
            meet();
        }
        const Rows gathered = one ? route.rows.held(1) : route.gathered.held(n);
        each_segment(route, first, last, [&](int64_t expert, int64_t begin, int64_t end) {
            up_part(op, now, one ? gathered : slice(gathered, E, begin - first, end - begin), expert, begin - first);
        });
        const int64_t next = route.chosen[route.sorted[first]] * m_.d_model;
        const Range outputs = own_outputs(now, m_.d_model);
        prefetch(op.down, next + outputs.first, next + outputs.last, kPrefetchBytes);
        barrier();
        route.inner.keep(op.down.format, expert_inner_.get(), F, own_first, own_last);
        meet();
        const Rows inner = route.inner.held(n);
        each_segment(route, first, last, [&](int64_t expert, int64_t begin, int64_t end) {
            down_part(op, now, route, slice(inner, F, begin - first, end - begin), expert, begin);
        });
        if (last < n_pairs) barrier();  // the next group's rows take the place of these
    }
    finish(now, true);
    trace(now, ops_[now.op].layer + 1, own(now, 1));
}

}  // namespace ts
