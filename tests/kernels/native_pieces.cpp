// Sharing out pieces: each is taken once, whoever is late, and a thread that stalls keeps one piece at most.
#include <atomic>
#include <cstdio>
#include <vector>

#include "pieces.h"
#include "pool.h"

using namespace ts;

namespace {

constexpr int kThreads = 4, kPieces = 8;

int64_t size_of_part(int owner) { return owner == 2 ? 0 : kPieces - owner; }  // uneven, one of them empty

template <class Work>
void take_all(Pieces& pieces, int thread, uint64_t operation, Work work) {
    for (int i = 0; i < kThreads; i++) {
        const int owner = (thread + i) % kThreads;
        for (int64_t p; (p = pieces.take(owner, operation, size_of_part(owner))) >= 0;) work(owner, p);
    }
}

int fail(const char* what) {
    std::printf("%s\n", what);
    return 1;
}

}  // namespace

int main() {
    Pool pool(kThreads);
    Pieces pieces;
    pieces.need(kThreads);
    int64_t total = 0;
    for (int owner = 0; owner < kThreads; owner++) total += size_of_part(owner);

    // Many operations in a row, with no barrier between them as where two products read one input: every piece once.
    constexpr int kOperations = 2000;
    std::vector<std::atomic<int>> taken(size_t(kOperations) * kThreads * kPieces);
    pool.run([&](int thread, int) {
        for (int operation = 0; operation < kOperations; operation++)
            take_all(pieces, thread, uint64_t(operation) + 1,
                     [&](int owner, int64_t p) { taken[(size_t(operation) * kThreads + owner) * kPieces + p]++; });
    });
    for (int operation = 0; operation < kOperations; operation++)
        for (int owner = 0; owner < kThreads; owner++)
            for (int64_t p = 0; p < kPieces; p++)
                if (taken[(size_t(operation) * kThreads + owner) * kPieces + p] != (p < size_of_part(owner)))
                    return fail("a piece was taken twice or never");

    // Thread 3 stalls in its first piece until all others are done: only work that is taken from it makes that end.
    std::atomic<int64_t> done{0}, by_stalled{0};
    pool.run([&](int thread, int) {
        take_all(pieces, thread, kOperations + 1, [&](int, int64_t) {
            if (thread == 3) {
                while (done.load() < total - 1) std::this_thread::yield();
                by_stalled++;
            }
            done++;
        });
    });
    if (done != total || by_stalled > 1) return fail("a stalled thread held up more than one piece");

    // A thread that comes late to an operation finds nothing, and takes nothing from the one that is under way.
    if (pieces.take(0, kOperations + 2, 2) != 0) return fail("a new operation did not begin");
    for (int owner = 0; owner < 1; owner++)
        if (pieces.take(owner, kOperations + 1, kPieces) != -1) return fail("an old operation had pieces");
    if (pieces.take(0, kOperations + 2, 2) != 1 || pieces.take(0, kOperations + 2, 2) != -1)
        return fail("an old operation changed a new one");
    std::printf("done\n");
    return 0;
}
