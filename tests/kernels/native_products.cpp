// Products by a library that Python cannot load here, built for another processor. test_aarch64.py writes the cases to
// the standard input and reads what comes out: the names of the targets that hold, a line each with an empty one behind
// them, then of each case for each of those targets the prepared rows and the products.
//
// A case: format, group, n, k, m, number of scales and of zero points as int64; weights, scales, zero points and rows
// as the library reads them.
#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" {
const char* ts_target_name(int number);
int ts_set_target(int wanted);
int64_t ts_packed_bytes(int format, int group, int64_t n, int64_t k);
int64_t ts_padded(int64_t k);
int64_t ts_sums_per_row(int64_t k);
void ts_pack(int format, int group, int64_t n, int64_t k, const void* weight, const float* scales, const uint8_t* zeros,
             void* packed);
void ts_prepare_rows(int format, const float* x, int64_t m, int64_t k, uint16_t* bf16, int8_t* codes, float* scales,
                     int32_t* sums);
void ts_product(int format, int group, int64_t n, int64_t k, const void* packed, const float* bias, int64_t m,
                const float* f32, const uint16_t* bf16, const int8_t* codes, const float* scales, const int32_t* sums,
                float* y, int64_t ldy, int add);
}

namespace {

template <class T>
std::vector<T> read(int64_t n) {
    std::vector<T> values(static_cast<size_t>(n));
    if (std::fread(values.data(), sizeof(T), values.size(), stdin) != values.size()) values.clear();
    return values;
}

template <class T>
void write(const std::vector<T>& values) {
    std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

}  // namespace

int main() {
    std::vector<int> held;
    for (int i = 0; ts_target_name(i) != nullptr; ++i)
        if (ts_set_target(i) == i) {
            held.push_back(i);
            std::printf("%s\n", ts_target_name(i));
        }
    std::printf("\n");
    for (std::vector<int64_t> head; !(head = read<int64_t>(7)).empty();) {
        const int format = int(head[0]), group = int(head[1]);
        const int64_t n = head[2], k = head[3], m = head[4];
        const auto weights = read<char>(n * k * (format == 0 ? 4 : format == 1 ? 2 : 1));
        const auto scales = read<float>(head[5]);
        const auto zeros = read<uint8_t>(head[6]);
        const auto x = read<float>(m * k);
        std::vector<char> packed(static_cast<size_t>(ts_packed_bytes(format, group, n, k)));
        ts_pack(format, group, n, k, weights.data(), scales.data(), zeros.data(), packed.data());
        for (const int target : held) {
            ts_set_target(target);
            std::vector<uint16_t> bf16(static_cast<size_t>(m * ts_padded(k)));
            std::vector<int8_t> codes(bf16.size());
            std::vector<float> row_scales(static_cast<size_t>(m)), y(static_cast<size_t>(m * n));
            std::vector<int32_t> sums(static_cast<size_t>(m * ts_sums_per_row(k)));
            ts_prepare_rows(format, x.data(), m, k, bf16.data(), codes.data(), row_scales.data(), sums.data());
            ts_product(format, group, n, k, packed.data(), nullptr, m, x.data(), bf16.data(), codes.data(),
                       row_scales.data(), sums.data(), y.data(), n, 0);
            write(bf16);
            write(codes);
            write(row_scales);
            write(sums);
            write(y);
        }
    }
}
