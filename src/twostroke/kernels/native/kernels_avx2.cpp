// Everything by AVX2 with FMA.
#include "attention_body.h"
#include "elementwise_body.h"
#include "products.h"
#include "sample_body.h"

const ts::Kernels& ts::kernels_avx2() {
    static constexpr Kernels made = with_sampling(with_attention(with_elementwise(avx2::with_products({}))));
    return made;
}
