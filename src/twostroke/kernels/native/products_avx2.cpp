// Products by AVX2 with FMA.
#define TS_LEVEL avx2
#include "products_ymm.h"
