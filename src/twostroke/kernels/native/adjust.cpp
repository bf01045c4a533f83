// Biases, penalties, held-off ends and forbidden tokens on rows of logits, in place and back again. The plain reference
// is in engine/adjust.py.
#include "kernels.h"

#include <algorithm>
#include <cstring>

#include "pool.h"
#include "sampling.h"

namespace ts {
namespace {

void forbid(const uint32_t* allowed, float* x, int64_t n_vocab) {
    constexpr float kNever = -__builtin_inff();
    for (int64_t first = 0; first < n_vocab; first += 32, allowed++) {
        const int64_t n = std::min<int64_t>(32, n_vocab - first);
        if (*allowed == ~0u) continue;  // as most words are within a text
        if (*allowed == 0) {
            std::fill_n(x + first, n, kNever);
            continue;
        }
        for (int64_t i = 0; i < n; i++)
            if (!(*allowed >> i & 1)) x[first + i] = kNever;
    }
}

void change(const Adjustment& a, float* x, int64_t n_vocab) {
    if (a.whole != nullptr) std::memcpy(a.whole, x, static_cast<size_t>(n_vocab) * sizeof(float));
    float* undo = a.undo;
    const auto at = [&](int64_t token, auto value) {
        if (token < 0 || token >= n_vocab) {
            *undo++ = 0.0f;
            return;
        }
        *undo++ = x[token];
        x[token] = value(x[token]);
    };
    const auto repeated = [&](float v) { return v > 0.0f ? v / a.repetition : v * a.repetition; };
    for (int64_t i = 0; i < a.n_biased; i++) at(a.biased[i], [&](float v) { return v + a.biases[i]; });
    for (int64_t i = 0; i < a.n_prompt; i++) at(a.prompt[i], repeated);
    for (int64_t i = 0; i < a.n_output; i++) {
        if (a.fresh[i]) at(a.output[i], repeated);
        else *undo++ = 0.0f;
    }
    for (int64_t i = 0; i < a.n_output; i++) {
        const float off = static_cast<float>(a.presence + a.frequency * static_cast<double>(a.counts[i]));
        at(a.output[i], [&](float v) { return v - off; });
    }
    for (int64_t i = 0; i < a.n_ends; i++) at(a.ends[i], [](float) { return -__builtin_inff(); });
    if (a.allowed != nullptr) forbid(a.allowed, x, n_vocab);
}

void restore(const Adjustment& a, float* x, int64_t n_vocab) {
    if (a.whole != nullptr) {
        std::memcpy(x, a.whole, static_cast<size_t>(n_vocab) * sizeof(float));
        return;
    }
    const float* undo = a.undo + a.n_biased + a.n_prompt + 2 * a.n_output + a.n_ends;
    const auto back = [&](const int64_t* tokens, int64_t n, const uint8_t* only) {
        for (int64_t i = n - 1; i >= 0; i--) {
            undo--;
            if (tokens[i] >= 0 && tokens[i] < n_vocab && (only == nullptr || only[i])) x[tokens[i]] = *undo;
        }
    };
    back(a.ends, a.n_ends, nullptr);
    back(a.output, a.n_output, nullptr);
    back(a.output, a.n_output, a.fresh);
    back(a.prompt, a.n_prompt, nullptr);
    back(a.biased, a.n_biased, nullptr);
}

template <class F>
void for_each(Adjustment* each, int64_t n, int64_t n_threads, F f) {
    const auto some = [&](int64_t first, int64_t step) {
        for (int64_t i = first; i < n; i += step) f(each[i]);
    };
    if (n_threads <= 1 || n <= 1) some(0, 1);
    else Pool::shared().run([&](int thread, int n_all) { some(thread, n_all); });
}

}  // namespace
}  // namespace ts

extern "C" {

// Change n rows of (…, n_vocab) logits, each row once, and find the largest of each.
void ts_adjust(float* logits, int64_t n_vocab, void* adjustments, int64_t n, int64_t n_threads) {
    ts::for_each(static_cast<ts::Adjustment*>(adjustments), n, n_threads, [&](ts::Adjustment& a) {
        float* x = logits + a.row * n_vocab;
        ts::change(a, x, n_vocab);
        a.best = ts::kernels().largest(x, n_vocab);
        a.token = 0;
        while (a.token < n_vocab - 1 && x[a.token] != a.best) a.token++;
    });
}

// Every number is again what it was before ``ts_adjust``.
void ts_restore(float* logits, int64_t n_vocab, void* adjustments, int64_t n, int64_t n_threads) {
    ts::for_each(static_cast<ts::Adjustment*>(adjustments), n, n_threads,
                 [&](ts::Adjustment& a) { ts::restore(a, logits + a.row * n_vocab, n_vocab); });
}

}  // extern "C"
