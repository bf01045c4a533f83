#include "matrix.h"

#include "kernels.h"
#include "layout.h"

namespace ts {

void product(const Matrix& w, const Rows& rows, int64_t n0, int64_t n1, float* y, int64_t ldy, bool add) {
    if (n0 < n1 && rows.m > 0) kernels().product(w, rows, n0, n1, y, ldy, add);
}

void prepare_rows(Format format, const float* x, int64_t k, Rows& out, int64_t first, int64_t last) {
    if (format == Format::F32 || format == Format::INT8 || first >= last) return;
    kernels().prepare_rows(format, x, k, out, first, last);
}

void share_outputs(const Matrix& w, int thread, int n_threads, int64_t& n0, int64_t& n1) {
    const int64_t panels = layout::panels(w.n);
    n0 = panels * thread / n_threads * layout::kPanelOutputs;
    n1 = panels * (thread + 1) / n_threads * layout::kPanelOutputs;
    if (n0 > w.n) n0 = w.n;
    if (n1 > w.n) n1 = w.n;
}

void prefetch(const Matrix& w, int64_t n0, int64_t n1, int64_t bytes) {
    if (n0 >= n1) return;
    const char* from = layout::panel(w, n0 / layout::kPanelOutputs);
    const char* end = layout::panel(w, layout::panels(n1));
    if (end > from + bytes) end = from + bytes;
    for (; from < end; from += layout::kKRowBytes) __builtin_prefetch(from, 0, 2);
}

}  // namespace ts
