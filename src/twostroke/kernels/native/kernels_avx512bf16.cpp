// Products of bf16 rows and attention by vdpbf16ps; norms and activations compiled beside them. Everything else is
// AVX-512's.
#include "vectors_avx512.h"

#include "attention_body.h"
#include "elementwise_body.h"
#include "products_body.h"
#include "targets.h"

namespace ts {
namespace {

void multiply_bf16_rows(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    if (w.format != Format::BF16) return kernels_avx512().product(w, rows, n0, n1, y, ldy, add);
    product_by<Bf16>(w, rows, n0, n1, y, ldy, add);
}

}  // namespace
}  // namespace ts

const ts::Kernels& ts::kernels_avx512bf16() {
    static const Kernels made = [] {
        Kernels k = with_avx512bf16_training(with_attention(with_elementwise(kernels_avx512())));
        k.product = multiply_bf16_rows;
        return k;
    }();
    return made;
}
