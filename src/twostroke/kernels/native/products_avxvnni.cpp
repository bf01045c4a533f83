// Products by AVX2 with the 256-bit VNNI of processors without AVX-512.
#define TS_TARGET avxvnni
#include "products_ymm.h"
