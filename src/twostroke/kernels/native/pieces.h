// How threads share out the outputs of one operation: each its own part, piece by piece, and then what others have left
// of theirs. A thread whose processor is slow, or is taken from it, so holds up the others for one piece.
//
// A part's line holds which operation was last shared out (the higher bits) and how many of its pieces were taken.
// Numbers of operations only grow, so nothing has to be reset: whoever comes first to a part with an older number
// begins it anew. Nobody moves on to the next operation before all pieces of this one are taken, so a newer number
// says that nothing is left.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace ts {

class Pieces {
public:
    // For so many threads. Not while threads take pieces.
    void need(int n_threads) {
        if (n_threads <= n_) return;
        lines_.reset(new Line[n_threads]);
        n_ = n_threads;
    }

    // The next of the n pieces of `owner`'s part of an operation, or -1. Operations begin with 1.
    int64_t take(int owner, uint64_t operation, int64_t n) {
        const uint64_t fresh = operation << kBits;
        std::atomic<uint64_t>& line = lines_[owner].value;
        uint64_t seen = line.load(std::memory_order_relaxed);
        for (;;) {
            if (seen >> kBits > operation) return -1;
            const uint64_t at = seen >> kBits == operation ? seen : fresh;
            if (int64_t(at - fresh) >= n) return -1;
            if (line.compare_exchange_weak(seen, at + 1, std::memory_order_relaxed)) return int64_t(at - fresh);
        }
    }

private:
    static constexpr int kBits = 16;  // of the number of pieces; operations have 48
    struct alignas(64) Line {
        std::atomic<uint64_t> value{0};
    };
    std::unique_ptr<Line[]> lines_;
    int n_ = 0;
};

}  // namespace ts
