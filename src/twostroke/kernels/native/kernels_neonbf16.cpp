// Products by NEON's USDOT and BFDOT. Everything else is kernels_neon.cpp's.
#include "vectors_neon.h"

#include "products_body.h"
#include "targets.h"

const ts::Kernels& ts::kernels_neonbf16() {
    static const Kernels made = with_products(kernels_neon());
    return made;
}
