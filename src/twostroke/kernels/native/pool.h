// Threads of our own, for steps of a few milliseconds made of a hundred small parallel parts.
//
// A region runs one function on all threads, the caller being thread 0; barrier() inside it costs well under a
// microsecond while every thread has a core. Waiting spins for a while, then sleeps in the kernel, because other
// programs share the cores: an idle pool uses no processor time. After a fork the child's pool makes new threads at its
// first region.
//
// Threads are not pinned unless that is asked for (pin), but the scheduler at times puts two of a pool on one processor
// and leaves another to a program that matters less; each then waits for the other's time slice at every barrier
// (measured: 60 µs instead of 0.3). A thread that waits and finds that it shares a processor with another of the pool
// moves to one that none of them is on.
//
// A virtual machine's processor that has been idle for some milliseconds counts as taken by the host, so Linux wakes a
// worker on the caller's own processor, where it waits for the caller's time slice (a step of 69 µs took 1,700 until
// both threads happened to part). A worker that sleeps is therefore woken on any processor but the caller's.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace ts {

class Pool {
public:
    // Inside a region longer than waking a thread takes (some 80 µs in a virtual machine): a thread that sleeps sooner
    // is late at the next barrier, where the others then sleep. Between regions the caller has other work.
    static constexpr double kSpinS = 300e-6;
    static constexpr double kIdleSpinS = 50e-6;
    static constexpr double kBetweenMovesS = 2e-3;
    static constexpr int kMaxThreads = 256;

    explicit Pool(int n_threads) : n_threads_(n_threads), n_wanted_(n_threads) {}
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    static Pool& shared();  // the process's pool; two threads, or one on a single processor, until resized

    // Whether the calling thread runs its regions by itself, without the pool's threads and without waiting for other
    // callers: work behind an engine's steps must not hold them up.
    static void run_alone(bool alone);

    // As many as were asked for, or as could be started where the system refused some (a container's limit of
    // processes): that many until another number is asked for.
    int threads() const { return n_threads_; }
    void resize(int n_threads);  // waits for a running region

    // From now on thread i of every region runs on processors[i]; the caller is there during regions alone, so that
    // what it starts elsewhere is not held there. Empty: where the system likes, as the threads behind the last one.
    void pin(std::vector<int> processors);
    bool pinned() const { return !pins_.empty(); }

    // f(thread, n_threads) on every thread; returns when all have returned. A second caller waits. Not from inside a
    // region.
    template <class F>
    void run(F&& f) {
        run_raw([](void* p, int thread, int n) { (*static_cast<std::remove_reference_t<F>*>(p))(thread, n); }, &f);
    }

    // Inside a region, by all threads: what each wrote before is seen by all after.
    void barrier();

    // In a child process after fork: forget the parent's threads. Called by the library's fork handler.
    void after_fork();

private:
    using Function = void (*)(void*, int, int);
    using Word = std::atomic<uint32_t>;
    struct alignas(64) Line {
        Word value{0};
    };

    void run_raw(Function, void*);
    void start();  // of as many threads as the system gives; n_threads_ is their number then
    void stop();
    void work(int thread, uint32_t seen);
    void wait_while(Word& word, uint32_t value, Word& sleepers, double spin_s);
    void note_processor();
    void move_apart();
    void wake_workers();

    std::atomic<int> n_threads_;  // read by other callers while a region's first one starts threads
    int n_wanted_;
    std::mutex region_;
    std::vector<std::thread> workers_;
    std::vector<int> pins_;
    Function function_ = nullptr;
    void* argument_ = nullptr;
    bool stopping_ = false;
    Line epoch_, epoch_sleepers_;                               // a region starts
    Line remaining_, caller_sleeps_;                            // a region ends
    Line arrived_, phase_, phase_sleepers_;                     // barriers
    std::unique_ptr<Line[]> processor_{new Line[kMaxThreads]};  // that each thread was last seen on, plus 1
    std::unique_ptr<Line[]> number_{new Line[kMaxThreads]};     // the system's, of each worker; 0 before it runs
};

}  // namespace ts
