// The step's working memory: arrays that grow and are never copied, in large pages (products of long rows are slower by
// half without).
#pragma once

#include <cstdint>
#include <cstring>
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
    // The same for rows of `format` alone, which are held here even where the format reads plain ones.
    void need(Format format, int64_t m, int64_t k) {
        if (reads_plain(format)) return f32_.need(m * k);
        if (format == Format::BF16) return bf16_.need(m * padded(k));
        codes_.need(m * padded(k));
        scales_.need(m);
        sums_.need(m * sums_per_row(k));
    }
    static bool reads_plain(Format format) { return format == Format::F32 || format == Format::INT8; }
    Rows held(int64_t m) const { return {m, f32_.get(), bf16_.get(), codes_.get(), scales_.get(), sums_.get()}; }
    // Makes rows [first, last) of x, or keeps them where the format reads plain ones.
    void keep(Format format, const float* x, int64_t k, int64_t first, int64_t last) {
        if (reads_plain(format))
            std::memcpy(&f32_[first * k], x + first * k, static_cast<size_t>((last - first) * k) * 4);
        else make(format, x, last, k, first, last);
    }
    // Row `to` becomes row `from` of `others`, which holds rows of the same format.
    void copy(Format format, int64_t k, const PreparedRows& others, int64_t from, int64_t to) {
        const int64_t stride = padded(k), n_sums = sums_per_row(k);
        if (reads_plain(format)) {
            std::memcpy(&f32_[to * k], &others.f32_[from * k], static_cast<size_t>(k) * 4);
        } else if (format == Format::BF16) {
            std::memcpy(&bf16_[to * stride], &others.bf16_[from * stride], static_cast<size_t>(stride) * 2);
        } else {
            std::memcpy(&codes_[to * stride], &others.codes_[from * stride], static_cast<size_t>(stride));
            std::memcpy(&sums_[to * n_sums], &others.sums_[from * n_sums], static_cast<size_t>(n_sums) * 4);
            scales_[to] = others.scales_[from];
        }
    }
    // Views rows of x (m, k); rows [first, last) are made now.
    Rows make(Format format, const float* x, int64_t m, int64_t k, int64_t first, int64_t last) {
        Rows rows{m, x, bf16_.get(), codes_.get(), scales_.get(), sums_.get()};
        prepare_rows(format, x, k, rows, first, last);
        return rows;
    }

private:
    Array<float> f32_;
    Array<uint16_t> bf16_;
    Array<int8_t> codes_;
    Array<float> scales_;
    Array<int32_t> sums_;
};

}  // namespace ts
