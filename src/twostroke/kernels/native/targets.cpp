#include "targets.h"

#include <atomic>

#include "products.h"

namespace ts {
namespace {

Features ask() {
    Features found = cpu();
#if defined(__x86_64__)
    if (amx::emulates_tiles()) found |= kTiles;
    if (holds(found, Target::Amx) && !amx::works()) found &= ~kTiles;
#endif
    return found;
}

std::atomic<Target>& in_use() {
    static std::atomic<Target> target{choose(features())};
    return target;
}

}  // namespace

Features features() {
    static const Features found = ask();
    return found;
}

Target target() { return in_use().load(std::memory_order_relaxed); }

Target set_target(int wanted) { return in_use() = choose(features(), wanted); }

}  // namespace ts
