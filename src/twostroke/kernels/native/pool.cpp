#include "pool.h"

#include <pthread.h>
#include <chrono>
#include <csignal>
#include <new>
#include <system_error>
#include <utility>
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <climits>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ts {
namespace {

using Word = std::atomic<uint32_t>;
using Clock = std::chrono::steady_clock;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if defined(__linux__)
void sleep_while(Word& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(Word& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(Word&, uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
void wake_all(Word&) {}
#endif

// Some microseconds, without asking for the time. True once `word` differs from `value`.
bool spin_briefly(const Word& word, uint32_t value) {
    for (int i = 0; i < 200; ++i) {
        if (word.load(std::memory_order_acquire) != value) return true;
        relax();
    }
    return false;
}

bool spin_longer(const Word& word, uint32_t value, double seconds) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    do {
        for (int i = 0; i < 20; ++i) {
            if (word.load(std::memory_order_acquire) != value) return true;
            relax();
        }
    } while (Clock::now() < end);
    return false;
}

thread_local int this_thread = 0;  // its number in the region that it runs
thread_local Clock::time_point last_move{};
thread_local bool runs_alone = false;

// While it lives, the calling thread runs on one processor, unless the system refuses.
class Pinned {
public:
    explicit Pinned(const std::vector<int>& pins) {
#if defined(__linux__)
        if (pins.empty() || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
        held_ = pin_to(pins[0]);
#else
        (void)pins;
#endif
    }
    ~Pinned() {
#if defined(__linux__)
        if (held_) sched_setaffinity(0, sizeof before_, &before_);
#endif
    }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;

    static bool pin_to(int processor) {
#if defined(__linux__)
        if (processor < 0 || processor >= CPU_SETSIZE) return false;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(processor, &one);
        return sched_setaffinity(0, sizeof one, &one) == 0;
#else
        (void)processor;
        return false;
#endif
    }

private:
#if defined(__linux__)
    cpu_set_t before_;
    bool held_ = false;
#endif
};

void child_after_fork() { Pool::shared().after_fork(); }

}  // namespace

Pool& Pool::shared() {
    static Pool* pool = [] {  // never destroyed: threads may run until the process ends
        auto* made = new Pool(std::thread::hardware_concurrency() == 1 ? 1 : 2);
        return made;
    }();
    static const int registered = pthread_atfork(nullptr, nullptr, child_after_fork);
    (void)registered;
    return *pool;
}

void Pool::run_alone(bool alone) { runs_alone = alone; }

Pool::~Pool() { stop(); }

// Until `word` differs from `value`. `sleepers` counts those in the kernel: who changes the word wakes them if there
// are any. Both sides order their write before their read (seq_cst), so either the sleeper sees the new word or the
// waker sees the sleeper.
void Pool::wait_while(Word& word, uint32_t value, Word& sleepers, double spin_s) {
    if (spin_briefly(word, value)) return;
    move_apart();
    if (spin_longer(word, value, spin_s)) return;
    sleepers.fetch_add(1);
    while (word.load() == value) sleep_while(word, value);
    sleepers.fetch_sub(1);
}

void Pool::note_processor() {
#if defined(__linux__)
    processor_[this_thread].value.store(uint32_t(sched_getcpu() + 1), std::memory_order_relaxed);
#endif
}

void Pool::move_apart() {
    if (pinned()) return;
#if defined(__linux__)
    const uint32_t here = uint32_t(sched_getcpu() + 1);
    bool shared = false;
    for (int thread = 0; thread < n_threads_; ++thread)
        shared |= thread != this_thread && processor_[thread].value.load(std::memory_order_relaxed) == here;
    if (!shared) return;
    const auto now = Clock::now();
    if (now < last_move + std::chrono::duration<double>(kBetweenMovesS)) return;
    last_move = now;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    cpu_set_t others = allowed;
    for (int thread = 0; thread < n_threads_; ++thread) {
        const uint32_t processor = processor_[thread].value.load(std::memory_order_relaxed);
        if (thread != this_thread && processor > 0 && processor <= CPU_SETSIZE) CPU_CLR(processor - 1, &others);
    }
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0)
        return;  // the thread has moved on return
    sched_setaffinity(0, sizeof allowed, &allowed);
    note_processor();
#endif
}

// Those that run already lose nothing: they are on another processor, or move there.
void Pool::wake_workers() {
#if defined(__linux__)
    cpu_set_t others;
    const int here = sched_getcpu();
    if (!pinned() && here >= 0 && here < CPU_SETSIZE && sched_getaffinity(0, sizeof others, &others) == 0) {
        CPU_CLR(here, &others);
        for (int thread = 1; CPU_COUNT(&others) > 0 && thread < n_threads_; ++thread)
            if (const uint32_t number = number_[thread].value.load())
                sched_setaffinity(pid_t(number), sizeof others, &others);
    }
#endif
    wake_all(epoch_.value);
}

void Pool::start() {
    sigset_t all, before;  // signals are the caller's business
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const uint32_t seen = epoch_.value.load();
    try {
        for (int thread = 1; thread < n_threads_; ++thread)
            workers_.emplace_back([this, thread, seen] { work(thread, seen); });
    } catch (const std::system_error&) {  // no more processes, or no address space for a stack
    } catch (const std::bad_alloc&) {
    }
    n_threads_ = int(workers_.size()) + 1;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pool::stop() {
    if (workers_.empty()) return;
    stopping_ = true;
    epoch_.value.fetch_add(1);
    wake_all(epoch_.value);
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    for (int thread = 0; thread < kMaxThreads; ++thread) number_[thread].value = 0;  // the system gives them to others
    stopping_ = false;
}

void Pool::resize(int n_threads) {
    std::lock_guard<std::mutex> lock(region_);
    if (n_threads < 1) n_threads = 1;
    if (n_threads > kMaxThreads) n_threads = kMaxThreads;
    if (n_threads == n_wanted_) return;
    stop();
    n_threads_ = n_wanted_ = n_threads;
}

void Pool::pin(std::vector<int> processors) {
    std::lock_guard<std::mutex> lock(region_);
    if (processors == pins_) return;
    stop();
    n_threads_ = n_wanted_;
    pins_ = std::move(processors);
}

void Pool::after_fork() {
    // The parent's threads do not exist here, and a lock or a counter may have been caught half way.
    // Nothing of theirs is destroyed: joining or detaching a thread that is not there is an error.
    new (&workers_) std::vector<std::thread>;
    new (&region_) std::mutex;
    for (Line* line : {&epoch_, &epoch_sleepers_, &remaining_, &caller_sleeps_, &arrived_, &phase_, &phase_sleepers_})
        line->value = 0;
    for (int thread = 0; thread < kMaxThreads; ++thread) number_[thread].value = 0;  // they are the parent's
    stopping_ = false;
}

void Pool::work(int thread, uint32_t seen) {
    this_thread = thread;
#if defined(__linux__)
    number_[thread].value.store(uint32_t(syscall(SYS_gettid)));
#endif
    if (thread < int(pins_.size())) Pinned::pin_to(pins_[thread]);
    note_processor();
    for (;;) {
        wait_while(epoch_.value, seen, epoch_sleepers_.value, kIdleSpinS);
        ++seen;
        if (stopping_) return;
        note_processor();
        function_(argument_, thread, n_threads_);
        if (remaining_.value.fetch_sub(1) == 1 && caller_sleeps_.value.load()) wake_all(remaining_.value);
    }
}

void Pool::run_raw(Function function, void* argument) {
    if (runs_alone) {
        function(argument, 0, 1);
        return;
    }
    std::lock_guard<std::mutex> lock(region_);
    if (n_threads_ > 1 && workers_.empty()) start();
    if (n_threads_ == 1) {
        function(argument, 0, 1);
        return;
    }
    const Pinned here(pins_);
    this_thread = 0;
    note_processor();
    function_ = function;
    argument_ = argument;
    remaining_.value.store(uint32_t(n_threads_ - 1));
    epoch_.value.fetch_add(1);
    if (epoch_sleepers_.value.load()) wake_workers();
    function(argument, 0, n_threads_);
    for (uint32_t left; (left = remaining_.value.load()) != 0;)
        wait_while(remaining_.value, left, caller_sleeps_.value, kSpinS);
}

void Pool::barrier() {
    if (n_threads_ == 1 || runs_alone) return;
    note_processor();
    const uint32_t phase = phase_.value.load(std::memory_order_relaxed);
    if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(n_threads_)) {
        arrived_.value.store(0, std::memory_order_relaxed);
        phase_.value.store(phase + 1);
        if (phase_sleepers_.value.load()) wake_all(phase_.value);
    } else {
        wait_while(phase_.value, phase, phase_sleepers_.value, kSpinS);
    }
}

}  // namespace ts
