// Products by AVX2 with FMA.
#define TS_TARGET avx2
#include "products_ymm.h"
