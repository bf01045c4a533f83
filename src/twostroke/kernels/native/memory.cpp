// Large pages in slabs of addresses. With TS_PLAIN_MEMORY the C library's own blocks, behind which a sanitizer can see.
#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#if defined(__linux__) && !defined(TS_PLAIN_MEMORY)
#include <sys/mman.h>
#endif

namespace ts {

#if defined(__linux__) && !defined(TS_PLAIN_MEMORY)

namespace {

constexpr int64_t kLargePage = int64_t{1} << 21, kPage = 4096, kLine = 64;
constexpr int64_t kSlabBytes = int64_t{1} << 30;  // of addresses

int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
char* up(char* address, int64_t multiple) {
    return reinterpret_cast<char*>(up(reinterpret_cast<int64_t>(address), multiple));
}

struct Slab {
    char* mapped;
    int64_t mapped_bytes;
    char *next, *end;
    int64_t n_blocks = 0;
};

struct Block {
    Slab* slab;
    int64_t bytes;
};

std::mutex lock;
bool asks_for_large = true;
Slab* current = nullptr;

std::map<void*, Block>& blocks() {
    static auto* all = new std::map<void*, Block>;
    return *all;
}

Slab* map_slab(int64_t bytes) {
    const int64_t mapped_bytes = up(bytes, kLargePage) + kLargePage;
    void* mapped =
        mmap(nullptr, size_t(mapped_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* begin = up(static_cast<char*>(mapped), kLargePage);
#if defined(MADV_HUGEPAGE)
    madvise(begin, size_t(up(bytes, kLargePage)), asks_for_large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
    auto* slab =
        new (std::nothrow) Slab{static_cast<char*>(mapped), mapped_bytes, begin, begin + up(bytes, kLargePage)};
    if (!slab) munmap(mapped, size_t(mapped_bytes));
    return slab;
}

void unmap_if_empty(Slab* slab) {
    if (slab->n_blocks > 0 || slab == current) return;
    munmap(slab->mapped, size_t(slab->mapped_bytes));
    delete slab;
}

}  // namespace

void* allocate(int64_t bytes) {
    if (bytes < 0 || bytes > (int64_t{1} << 46)) return nullptr;
    bytes = up(bytes > 0 ? bytes : 1, kLine);
    std::lock_guard<std::mutex> guard(lock);
    if (!current || current->end - current->next < bytes) {
        Slab* slab = map_slab(bytes > kSlabBytes ? bytes : kSlabBytes);
        if (!slab) slab = map_slab(bytes);  // addresses are limited
        if (!slab) return nullptr;
        Slab* before = current;
        current = slab;
        if (before) unmap_if_empty(before);
    }
    char* block = current->next;
    try {
        blocks()[block] = {current, bytes};
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
    current->next += bytes;
    ++current->n_blocks;
    return block;
}

void set_huge_pages(bool asks) {
    std::lock_guard<std::mutex> guard(lock);
    if (asks == asks_for_large) return;
    asks_for_large = asks;
    Slab* before = current;
    current = nullptr;  // the rest of it asks otherwise
    if (before) unmap_if_empty(before);
}

int64_t collapse() {
    constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which older headers do not name
    std::lock_guard<std::mutex> guard(lock);
    std::map<char*, char*> ranges;  // whole large pages of blocks that lie together
    char* end = nullptr;
    std::map<char*, char*>::iterator last = ranges.end();
    for (const auto& [address, block] : blocks()) {
        char* const first = static_cast<char*>(address);
        if (last == ranges.end() || first != end) last = ranges.emplace(first, first).first;
        last->second = end = first + block.bytes;
    }
    int64_t done = 0;
    for (const auto& [first, behind] : ranges)
        for (char* at = up(first, kLargePage); at + kLargePage <= behind; at += kLargePage)
            if (madvise(at, size_t(kLargePage), kCollapse) == 0) done += kLargePage;
    return done;
}

void release(void* address) {
    if (!address) return;
    std::lock_guard<std::mutex> guard(lock);
    const auto found = blocks().find(address);
    if (found == blocks().end()) return;
    const auto [slab, bytes] = found->second;
    blocks().erase(found);
    // Only pages that are wholly its own: the first and the last may hold a neighbour's bytes.
    char *block = static_cast<char*>(address), *first = up(block, kPage), *last = up(block + bytes + 1 - kPage, kPage);
    if (first < last) madvise(first, size_t(last - first), MADV_DONTNEED);
    if (--slab->n_blocks == 0) {
        if (slab == current) current = nullptr;
        unmap_if_empty(slab);
    }
}

#else

void* allocate(int64_t bytes) {
    if (bytes < 0 || bytes > (int64_t{1} << 46)) return nullptr;
    void* block = nullptr;
    if (posix_memalign(&block, 64, size_t(bytes > 0 ? bytes : 1)) != 0) return nullptr;
    return std::memset(block, 0, size_t(bytes));
}

void release(void* block) { std::free(block); }
void set_huge_pages(bool) {}
int64_t collapse() { return 0; }

#endif

}  // namespace ts
