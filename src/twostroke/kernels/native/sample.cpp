// Drawing tokens, and finding the most probable ones. The plain references are in engine/sampler.py.
#include "kernels.h"
#include "pool.h"
#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace ts {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kFew = 2048;  // candidates; beyond, a look at all of them by bins is less work

struct Candidate {
    float logit, weight;
    int32_t token;
};

class Row {
public:
    // Weights of all tokens; returns their sum.
    double weigh(const float* x, int64_t n, float temperature) {
        x_ = x;
        n_ = n;
        const int64_t n_blocks = (n + kSampleBlock - 1) / kSampleBlock;
        weights_.resize(static_cast<size_t>(n));
        sums_.resize(static_cast<size_t>(n_blocks));
        most_.resize(static_cast<size_t>(n_blocks));
        largest_ = kernels().largest(x, n);
        inverse_ = 1.0f / std::max(temperature, 1e-30f);
        kernels().weigh(x, n, largest_, inverse_, weights_.data(), sums_.data(), most_.data());
        double total = 0;
        for (double sum : sums_) total += sum;
        return total;
    }

    float largest() const { return largest_; }

    int64_t draw(const Draw& d) {
        double total = weigh(x_, n_, d.temperature);
        if (total != total) return -1;
        const bool by_k = d.top_k > 0 && d.top_k < n_, by_p = d.top_p < 1.0f;
        const float least = d.min_p > 0.0f ? std::log(d.min_p) : -kInfinity;
        const double share = static_cast<double>(d.top_p);
        float floor = -kInfinity;
        const auto enough = [&](double sum) {
            if (by_k) return found_.size() >= static_cast<size_t>(d.top_k);
            return !by_p || sum >= share * total;
        };
        if (!by_k && !by_p && d.min_p <= 0.0f) return among_all(d.number, total);
        if (!gather(by_k   ? cut_for(d.top_k)
                    : by_p ? 0x1p-4f
                           : d.min_p * 0.999f,
                    enough, kFew)) {  // flat: most of the vocabulary is of weight
            if (by_k) total = keep(floor = kth_of_all(d.top_k), -kInfinity);
            if (by_p) floor = nucleus_of_all(share * total);
            return among_all(d.number, keep(floor, least));
        }
        if (by_k) floor = kth(d.top_k);
        if (by_p) {
            sorted_.clear();
            double kept = 0;
            for (const Candidate& c : found_)
                if (c.logit >= floor) {
                    sorted_.push_back(c);
                    kept += static_cast<double>(c.weight);
                }
            floor = std::max(floor, nucleus(share * (by_k ? kept : total), 0));
        }
        return among_found(d.number, floor, least);
    }

    // The k largest logits, best first, ties in order of their tokens; false where there are fewer that weigh a number.
    bool top(int64_t k, float* values, int64_t* tokens) {
        gather(cut_for(k), [&](double) { return found_.size() >= static_cast<size_t>(k); }, static_cast<size_t>(n_));
        if (found_.size() < static_cast<size_t>(k)) return false;
        std::partial_sort(found_.begin(), found_.begin() + k, found_.end(), [](const Candidate& a, const Candidate& b) {
            return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
        });
        for (int64_t i = 0; i < k; i++) {
            values[i] = found_[static_cast<size_t>(i)].logit;
            tokens[i] = found_[static_cast<size_t>(i)].token;
        }
        return true;
    }

    void set(const float* x, int64_t n) {
        x_ = x;
        n_ = n;
    }

private:
    // A weight that at least k tokens have, and seldom many more: the k-th largest of the blocks' largest.
    float cut_for(int64_t k) {
        if (k > static_cast<int64_t>(most_.size())) return 0x1p-9f;
        values_ = most_;
        std::nth_element(values_.begin(), values_.begin() + (k - 1), values_.end(), std::greater<float>());
        return values_[static_cast<size_t>(k - 1)];
    }

    // Candidates in the order of their tokens, from the weight ``cut`` down to one at which enough(their sum) holds, at
    // the last all tokens; false where they became more than ``most``.
    template <class F>
    bool gather(float cut, F enough, size_t most) {
        for (;; cut = cut > 0x1p-40f ? cut * 0x1p-6f : 0.0f) {
            found_.clear();
            double sum = 0;
            for (size_t block = 0; block < most_.size(); block++) {
                if (most_[block] < cut) continue;
                if (found_.size() > most) return false;
                const int64_t begin = static_cast<int64_t>(block) * kSampleBlock,
                              end = std::min(begin + kSampleBlock, n_);
                for (int64_t i = begin; i < end; i++) {
                    const float w = weights_[static_cast<size_t>(i)];
                    if (w >= cut) {
                        found_.push_back({x_[i], w, static_cast<int32_t>(i)});
                        sum += static_cast<double>(w);
                    }
                }
            }
            if (enough(sum) || cut <= 0.0f) return true;
        }
    }

    double keep(float floor, float least) {
        kernels().keep(x_, n_, largest_, inverse_, floor, least, weights_.data(), sums_.data());
        double total = 0;
        for (double sum : sums_) total += sum;
        return total;
    }

    // Sixteen bins to each power of two of the weights, 0 left out. Four counts of each, because neighbours fall into
    // one bin and each addition waits for the one before.
    static int bin_of(float weight) {
        uint32_t bits;
        std::memcpy(&bits, &weight, 4);
        return static_cast<int>(bits >> 19);
    }
    struct Bin {
        double sum[4];
        int64_t count[4];
        double total() const { return (sum[0] + sum[1]) + (sum[2] + sum[3]); }
        int64_t number() const { return count[0] + count[1] + count[2] + count[3]; }
    };
    void fill_bins() {
        bins_.assign(static_cast<size_t>(bin_of(1.0f)) + 2, Bin{});  // a weight may be a little above 1
        const size_t last = bins_.size() - 1;
        for (int64_t i = 0; i < n_; i++) {
            const float w = weights_[static_cast<size_t>(i)];
            Bin& bin = bins_[std::min(static_cast<size_t>(bin_of(w)), last)];
            bin.sum[i & 3] += static_cast<double>(w);
            bin.count[i & 3]++;
        }
    }
    // Those of one bin into sorted_.
    void take_bin(size_t bin) {
        const size_t last = bins_.size() - 1;
        sorted_.clear();
        for (int64_t i = 0; i < n_; i++) {
            const float w = weights_[static_cast<size_t>(i)];
            if (std::min(static_cast<size_t>(bin_of(w)), last) == bin)
                sorted_.push_back({x_[i], w, static_cast<int32_t>(i)});
        }
    }

    float kth_of_all(int64_t k) {
        fill_bins();
        int64_t above = 0;
        for (size_t bin = bins_.size() - 1; bin > 0; bin--) {
            const int64_t here = bins_[bin].number();
            if (above + here >= k) {
                take_bin(bin);
                found_ = sorted_;
                return kth(k - above);
            }
            above += here;
        }
        return -kInfinity;  // the rest weighs nothing
    }

    float nucleus_of_all(double needed) {
        fill_bins();
        double above = 0;
        for (size_t bin = bins_.size() - 1; bin > 0; bin--) {
            const double here = bins_[bin].total();
            if (here > 0 && above + here >= needed) {
                take_bin(bin);
                return nucleus(needed, above);
            }
            above += here;
        }
        return -kInfinity;
    }

    // The k-th largest logit of the candidates.
    float kth(int64_t k) {
        values_.clear();
        for (const Candidate& c : found_) values_.push_back(c.logit);
        std::nth_element(values_.begin(), values_.begin() + (k - 1), values_.end(), std::greater<float>());
        return values_[static_cast<size_t>(k - 1)];
    }

    // The smallest logit of the smallest set of ``sorted_`` (which it sorts in part) whose weights, and ``before`` of
    // what is more probable than all of it, sum to at least ``needed``.
    float nucleus(double needed, double before) {
        const auto higher = [](const Candidate& a, const Candidate& b) { return a.logit > b.logit; };
        auto begin = sorted_.begin(), end = sorted_.end();
        while (end - begin > 32) {
            const auto middle = begin + (end - begin) / 2;
            std::nth_element(begin, middle, end, higher);
            double sum = 0;
            for (auto c = begin; c != middle; ++c) sum += static_cast<double>(c->weight);
            if (before + sum >= needed) {
                end = middle;
            } else {
                before += sum;
                begin = middle;
            }
        }
        std::sort(begin, end, higher);
        float floor = begin->logit;
        for (auto c = begin; c != end && before < needed; ++c) {
            floor = c->logit;
            before += static_cast<double>(c->weight);
        }
        return floor;
    }

    // Inverse of the distribution function over the tokens in their own order.
    int64_t among_all(double number, double total) const {
        const double target = std::min(number * total, std::nextafter(total, 0.0));
        double before = 0;
        int64_t last = 0;
        for (size_t block = 0; block < sums_.size(); block++) {
            const int64_t begin = static_cast<int64_t>(block) * kSampleBlock;
            if (before + sums_[block] > target) {
                double sum = before;
                const int64_t end = std::min(begin + kSampleBlock, n_);
                for (int64_t i = begin; i < end; i++) {
                    const float w = weights_[static_cast<size_t>(i)];
                    sum += static_cast<double>(w);
                    if (w > 0.0f) last = i;
                    if (sum > target) return i;
                }
                return last;  // a block's sum and the sum one by one may differ in the last bit
            }
            before += sums_[block];
        }
        for (int64_t i = n_ - 1; i >= 0; i--)
            if (weights_[static_cast<size_t>(i)] > 0.0f) return i;
        return 0;
    }

    int64_t among_found(double number, float floor, float least) {
        double total = 0;
        sorted_.clear();
        for (const Candidate& c : found_)
            if (c.logit >= floor && (c.logit - largest_) * inverse_ >= least) {
                sorted_.push_back(c);
                total += static_cast<double>(c.weight);
            }
        const double target = std::min(number * total, std::nextafter(total, 0.0));
        double sum = 0;
        for (const Candidate& c : sorted_) {
            sum += static_cast<double>(c.weight);
            if (sum > target) return c.token;
        }
        return sorted_.back().token;
    }

    const float* x_ = nullptr;
    int64_t n_ = 0;
    float largest_ = 0, inverse_ = 1;
    std::vector<float> weights_, most_, values_;
    std::vector<double> sums_;
    std::vector<Candidate> found_, sorted_;
    std::vector<Bin> bins_;
};

// What the C interface answers.
enum Outcome : int { kDone = 0, kNoMemory = 1, kNoNumber = 2 /* a row of logits holds NaN */ };

// f(row's place, scratch), false where the row holds NaN, for n rows, shared out to at most n_threads.
template <class F>
int for_rows(int64_t n, int64_t n_threads, F f) {
    std::atomic<int> outcome{kDone};
    const auto some = [&](int64_t first, int64_t step) {
        static thread_local Row scratch;
        try {
            for (int64_t i = first; i < n; i += step)
                if (!f(i, scratch)) outcome = kNoNumber;
        } catch (const std::bad_alloc&) {
            outcome = kNoMemory;
        }
    };
    if (n_threads <= 1 || n <= 1) {
        some(0, 1);
    } else {
        Pool::shared().run([&](int thread, int n_all) { some(thread, n_all); });
    }
    return outcome;
}

}  // namespace

}  // namespace ts

extern "C" {

// A token for each draw from its row of (…, n_vocab) logits. 1: no memory. 2: a row holds NaN, or nothing that is
// finite; its draws have no token.
int ts_draw(const float* logits, int64_t n_vocab, void* draws, int64_t n, int64_t n_threads) {
    ts::Draw* each = static_cast<ts::Draw*>(draws);
    return ts::for_rows(n, n_threads, [&](int64_t i, ts::Row& row) {
        row.set(logits + each[i].row * n_vocab, n_vocab);
        each[i].token = row.draw(each[i]);
        return each[i].token >= 0;
    });
}

// Of each of n rows the logarithm of the sum of exp(logits), and the k ≤ n_vocab largest logits with their tokens. 1:
// no memory. 2: a row holds NaN; what is written of it means nothing.
int ts_top(const float* logits, int64_t n_vocab, const int64_t* rows, int64_t n, int64_t k, double* normalisers,
           float* values, int64_t* tokens, int64_t n_threads) {
    return ts::for_rows(n, n_threads, [&](int64_t i, ts::Row& row) {
        const double total = row.weigh(logits + rows[i] * n_vocab, n_vocab, 1.0f);
        normalisers[i] = static_cast<double>(row.largest()) + std::log(total);
        return total == total && (k <= 0 || row.top(k, values + i * k, tokens + i * k));
    });
}

}  // extern "C"
