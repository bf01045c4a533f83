// The step's working memory: arrays that grow and are never copied, in large pages (products of long rows are slower by
// half without).
#pragma once

#include <cstdint>
#include <new>

#include "matrix.h"
#include "memory.h"

namespace ts {

template <typename T>
class Array {
public:
    Array() = default;
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() { release(data_); }
    // At least n numbers, zero where they are new; what was there is gone if it must grow. Throws std::bad_alloc.
    void need(int64_t n) {
        if (n <= size_) return;
        if (n < 2 * size_) n = 2 * size_;  // addresses only, until they are touched
        release(data_);
        size_ = 0;
        data_ = static_cast<T*>(allocate(n * static_cast<int64_t>(sizeof(T)) + 64));
        if (data_ == nullptr) throw std::bad_alloc();
        size_ = n;
    }
    T* get() const { return data_; }
    T& operator[](int64_t i) const { return data_[i]; }

private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

// Rows of up to k numbers in each form that a product may read.
class PreparedRows {
public:
    void need(int64_t m, int64_t k) {
        bf16_.need(m * padded(k));
        codes_.need(m * padded(k));
        scales_.need(m);
        sums_.need(m * sums_per_row(k));
    }
    // Views rows of x (m, k); rows [first, last) are made now.
    Rows make(Format format, const float* x, int64_t m, int64_t k, int64_t first, int64_t last) {
        Rows rows{m, x, bf16_.get(), codes_.get(), scales_.get(), sums_.get()};
        prepare_rows(format, x, k, rows, first, last);
        return rows;
    }

private:
    Array<uint16_t> bf16_;
    Array<int8_t> codes_;
    Array<float> scales_;
    Array<int32_t> sums_;
};

}  // namespace ts
