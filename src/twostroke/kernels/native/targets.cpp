#include "targets.h"

#include <atomic>

namespace ts {
namespace {

Features ask() {
    Features found = cpu();
#if defined(__x86_64__)
    if (amx_is_emulated()) found |= kAmx;
    if ((found & kAmx) == kAmx && (found & kAvx512Bf16) == kAvx512Bf16 && !amx_works()) found &= ~kAmx;
#endif
    return found;
}

struct InUse {
    std::atomic<int> target;
    std::atomic<const Kernels*> kernels;
    explicit InUse(int chosen) : target(chosen), kernels(&kTargets[chosen].kernels()) {}
};

InUse& in_use() {
    static InUse chosen{choose(features())};
    return chosen;
}

}  // namespace

Features features() {
    static const Features found = ask();
    return found;
}

const Kernels& kernels() { return *in_use().kernels.load(std::memory_order_relaxed); }

int target() { return in_use().target.load(std::memory_order_relaxed); }

int set_target(int wanted) {
    const int chosen = choose(features(), wanted);
    in_use().kernels = &kTargets[chosen].kernels();
    return in_use().target = chosen;
}

}  // namespace ts
