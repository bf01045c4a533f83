// Products by the 256-bit VNNI of processors without AVX-512. Everything else is AVX2's.
#include "vectors_avx2.h"

#include "products_body.h"
#include "targets.h"

const ts::Kernels& ts::kernels_avxvnni() {
    static const Kernels made = with_products(kernels_avx2());
    return made;
}
