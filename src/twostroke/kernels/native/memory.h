// Memory for packed matrices and caches: large pages, since a step walks through all of it, and nothing wasted between
// matrices.
#pragma once
#include <cstdint>

namespace ts {

// Zeros, aligned to 64 bytes; null where there is no memory. Blocks lie one behind the other in slabs of large pages: a
// page of its own for each (a rounding up to 2 MiB) would cost a model of 90 matrices a tenth of its size. Physical
// memory is taken when it is first touched.
void* allocate(int64_t bytes);

// Whether slabs from now on ask for large pages, as they do unless told otherwise.
void set_huge_pages(bool asks);

// Puts the touched pages of all slabs into large ones, as far as the system can; bytes of the slabs where it could.
int64_t collapse();

// Gives the block's pages back at once, and a slab's addresses with its last block.
void release(void* block);

}  // namespace ts
