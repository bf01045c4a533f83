// Everything by NEON with its dot products of bytes.
#include "vectors_neon.h"

#include "attention_body.h"
#include "elementwise_body.h"
#include "products_body.h"
#include "sample_body.h"
#include "targets.h"

const ts::Kernels& ts::kernels_neon() {
    static constexpr Kernels made = with_sampling(with_attention(with_elementwise(with_products({}))));
    return made;
}
