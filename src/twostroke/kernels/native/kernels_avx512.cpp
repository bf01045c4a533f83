// Everything by AVX-512 with VNNI.
#include "attention_body.h"
#include "elementwise_body.h"
#include "products.h"
#include "sample_body.h"

const ts::Kernels& ts::kernels_avx512() {
    static constexpr Kernels made = with_sampling(with_attention(with_elementwise(avx512::with_products({}))));
    return made;
}
