// How a step's attention is cut into tasks that threads take one by one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "step.h"

namespace ts {

// Some tokens of one request against one KV head, over all their keys or one span of them.
struct Task {
    int32_t request, kv_head;
    int64_t first_token, n_tokens, first_key, end_key;
    int64_t partial;                // offset of the first span's partial results, -1: none
    int32_t joined, span, n_spans;  // joined: which counter says that all spans are there
};

// The tasks of a step, the same in all layers of one window.
struct TaskList {
    int64_t window = 0;
    std::vector<Task> tasks;
    std::unique_ptr<std::atomic<int32_t>[]> left;  // spans to come, of each group of tokens that was shared out
    int64_t n_left = 0, left_capacity = 0;
    int64_t partial_floats = 0;

    // Spans are shared out only where there would be too few tasks without: putting them together costs a little.
    void fill(const StepModel& m, const StepBatch& b, int64_t task_rows, int n_threads) {
        const int64_t group = m.n_heads / m.n_kv_heads, block = std::max<int64_t>(1, task_rows / group);
        tasks.clear();
        n_left = partial_floats = 0;
        int64_t n_whole = 0;
        for (int64_t i = 0; i < b.n_requests; i++) n_whole += (b.counts[i] + block - 1) / block * m.n_kv_heads;
        const bool share_spans = n_threads > 1 && n_whole < 8 * n_threads;
        for (int64_t i = 0; i < b.n_requests; i++)
            for (int64_t first = (b.counts[i] - 1) / block * block; first >= 0; first -= block) {  // the longest first
                const int64_t n = std::min<int64_t>(block, b.counts[i] - first);
                const int64_t position = b.starts[i] + first, end = position + n;
                const int64_t least = window > 0 && position >= window ? position - window + 1 : 0;
                const int64_t first_span = span_of(least), n_spans = span_of(end - 1) + 1 - first_span;
                for (int32_t k = 0; k < m.n_kv_heads; k++) {
                    Task task{static_cast<int32_t>(i), k, first, n, least, end, -1, -1, 0, 1};
                    if (!share_spans || n_spans == 1) {
                        tasks.push_back(task);
                        continue;
                    }
                    task.joined = static_cast<int32_t>(n_left++);
                    task.n_spans = static_cast<int32_t>(n_spans);
                    task.partial = partial_floats;
                    partial_floats += n_spans * n * group * (m.head_dim + 2);
                    for (int32_t s = 0; s < n_spans; s++) {
                        task.span = s;
                        task.first_key = std::max<int64_t>(least, first_key_of(first_span + s));
                        task.end_key = std::min<int64_t>(end, first_key_of(first_span + s + 1));
                        tasks.push_back(task);
                    }
                }
            }
        if (n_left > left_capacity) {
            left.reset(new std::atomic<int32_t>[n_left]);
            left_capacity = n_left;
        }
        for (const Task& task : tasks)
            if (task.joined >= 0) left[task.joined].store(task.n_spans, std::memory_order_relaxed);
    }
};

}  // namespace ts
