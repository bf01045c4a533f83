// Everything by C++ alone: the reference of all products, and what runs where no faster target does.
#include "attention_body.h"
#include "elementwise_body.h"
#include "products.h"
#include "sample_body.h"

const ts::Kernels& ts::kernels_plain() {
    static constexpr Kernels made = with_sampling(with_attention(with_elementwise(plain::with_products({}))));
    return made;
}
