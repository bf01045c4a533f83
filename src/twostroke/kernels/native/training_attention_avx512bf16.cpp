// training_attention.h by AVX-512-BF16: blocks of 64 queries by 64 keys.
#include "kernels.h"
#include "pool.h"
#include "training_attention.h"
#include "training_attention_blocks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace ts {
namespace {

// One row and key head of the batch, and where its parts lie.
struct Part {
    const TrainingAttention& shape;
    int64_t row, kv_head;

    int64_t blocks() const { return (shape.n_tokens + kBlock - 1) / kBlock; }
    int64_t heads_of_all() const { return shape.n_heads + 2 * shape.n_kv_heads; }
    int64_t group() const { return shape.n_heads / shape.n_kv_heads; }
    // What products of queries and keys, or where scores are bounded their tanh, become powers of two by.
    float to_log2() const { return (shape.cap > 0 ? shape.cap : shape.scale) * kLog2e; }
    float sink_log2(int64_t head) const { return shape.sinks[head] * kLog2e; }
    int64_t offset(int64_t head, int64_t token) const {
        return ((row * shape.n_tokens + token) * heads_of_all() + head) * shape.width;
    }
    int64_t key_head() const { return shape.n_heads + kv_head; }
    int64_t value_head() const { return shape.n_heads + shape.n_kv_heads + kv_head; }
    const int32_t* first() const { return shape.first + row * shape.n_tokens; }
    const float* angle(const float* table, int64_t token) const {
        if (!table) return nullptr;
        return table + ((shape.rope_rows == 1 ? 0 : row) * shape.n_tokens + token) * (shape.width / 2);
    }
    int64_t tokens_of(int64_t block) const { return std::min(kBlock, shape.n_tokens - block * kBlock); }
    int64_t first_block(int64_t block) const { return first()[block * kBlock] / kBlock; }

    // 64 rows of a head as bf16, rotated where asked; zeros behind the last token.
    void read(int64_t head, int64_t block, bool rotated, uint16_t* to) const {
        const int64_t n = tokens_of(block), width = shape.width;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t token = block * kBlock + i;
            const uint16_t* from = shape.qkv + offset(head, token);
            if (rotated && shape.cos)
                rope_row(from, angle(shape.cos, token), angle(shape.sin, token), width / 2, to + i * width);
            else std::memcpy(to + i * width, from, size_t(width) * 2);
        }
        std::memset(to + n * width, 0, size_t((kBlock - n) * width) * 2);
    }
    // The same of a tensor [b][t][heads][width].
    void read_output(const uint16_t* tensor, int64_t head, int64_t block, uint16_t* to) const {
        const int64_t n = tokens_of(block), width = shape.width;
        for (int64_t i = 0; i < n; ++i)
            std::memcpy(to + i * width, tensor + output_offset(head, block * kBlock + i), size_t(width) * 2);
        std::memset(to + n * width, 0, size_t((kBlock - n) * width) * 2);
    }
    int64_t output_offset(int64_t head, int64_t token) const {
        return ((row * shape.n_tokens + token) * shape.n_heads + head) * shape.width;
    }
    // Which of the 16 keys from `key` on query `token` sees.
    __mmask16 seen(int64_t token, int64_t key) const {
        const int64_t low = std::clamp<int64_t>(first()[token] - key, 0, kLanes),
                      high = std::clamp<int64_t>(token + 1 - key, 0, kLanes);
        return __mmask16(((1u << high) - 1) & ~((1u << low) - 1));
    }
    // Whether all queries of a block see all keys of another.
    bool all_seen(int64_t queries, int64_t keys) const {
        return keys < queries && tokens_of(queries) == kBlock &&
               first()[queries * kBlock + kBlock - 1] <= keys * kBlock;
    }
};

// Memory of a thread for one part after another, in pieces of whole cache lines.
class Scratch {
public:
    explicit Scratch(size_t bytes) : memory_(static_cast<char*>(std::aligned_alloc(64, up(bytes))), &std::free) {}
    template <class T>
    T* take(int64_t n) {
        T* piece = reinterpret_cast<T*>(memory_.get() + used_);
        used_ += up(size_t(n) * sizeof(T));
        return piece;
    }
    static size_t up(size_t bytes) { return (bytes + 63) / 64 * 64; }

private:
    std::unique_ptr<char, decltype(&std::free)> memory_;
    size_t used_ = 0;
};

struct Forward {
    const TrainingAttention& shape;
    int64_t blocks = (shape.n_tokens + kBlock - 1) / kBlock, width = shape.width;
    Scratch memory{size_t(kBlock * width * 2 * 2 + blocks * kBlock * width * 2 * 2 + blocks * kBlock * kBlock * 6 +
                          kBlock * width * 4 + 1024)};
    uint16_t* rows = memory.take<uint16_t>(kBlock * width);
    uint32_t *keys = memory.take<uint32_t>(blocks * kPairs * width),
             *values = memory.take<uint32_t>(blocks * kPairs * width);
    float *scores = memory.take<float>(blocks * kBlock * kBlock), *sums = memory.take<float>(kBlock * width);
    uint16_t* weights = memory.take<uint16_t>(blocks * kBlock * kBlock);

    explicit Forward(const TrainingAttention& s) : shape(s) {}

    void run(const Part& part, uint16_t* out, float* log_sums) {
        for (int64_t s = 0; s < blocks; ++s) {
            part.read(part.key_head(), s, true, rows);
            transpose((const uint32_t*)rows, kBlock, width / 2, keys + s * kPairs * width);
            part.read(part.value_head(), s, false, rows);
            interleave(rows, width, values + s * kPairs * width);
        }
        for (int64_t g = 0; g < part.group(); ++g)
            for (int64_t q = 0; q < blocks; ++q) queries(part, part.kv_head * part.group() + g, q, out, log_sums);
    }

    void queries(const Part& part, int64_t head, int64_t q, uint16_t* out, float* log_sums) {
        part.read(head, q, true, rows);
        const int64_t begin = part.first_block(q);
        for (int64_t s = begin; s <= q; ++s)
            product((const uint32_t*)rows, width / 2, keys + s * kPairs * width, kBlock, width / 2, kBlock,
                    scores + s * kBlock * kBlock, false);
        if (shape.cap > 0)
            tanh_of(scores + begin * kBlock * kBlock, (q + 1 - begin) * kBlock * kBlock, shape.scale / shape.cap);
        float inverse[kBlock];
        const __m512 to_log2 = _mm512_set1_ps(part.to_log2());
        for (int64_t i = 0; i < kBlock; ++i) {
            const int64_t token = q * kBlock + i;
            if (token >= shape.n_tokens) {
                for (int64_t s = begin; s <= q; ++s) std::memset(weights + (s * kBlock + i) * kBlock, 0, kBlock * 2);
                continue;
            }
            __m512 running_max = _mm512_set1_ps(-INFINITY);
            for (int64_t s = begin; s <= q; ++s) {
                const bool all = part.all_seen(q, s);
                for (int64_t j = 0; j < kBlock; j += kLanes) {
                    const __m512 x = _mm512_load_ps(scores + (s * kBlock + i) * kBlock + j);
                    running_max =
                        all ? _mm512_max_ps(running_max, x)
                            : _mm512_mask_max_ps(running_max, part.seen(token, s * kBlock + j), running_max, x);
                }
            }
            float largest = _mm512_reduce_max_ps(running_max) * part.to_log2();
            if (shape.sinks) largest = std::max(largest, part.sink_log2(head));
            const __m512 offset = _mm512_set1_ps(largest);
            __m512 total = _mm512_setzero_ps();
            for (int64_t s = begin; s <= q; ++s) {
                const bool all = part.all_seen(q, s);
                for (int64_t j = 0; j < kBlock; j += kLanes) {
                    const __m512 x = _mm512_load_ps(scores + (s * kBlock + i) * kBlock + j);
                    __m512 p = exp2_ps(_mm512_fmsub_ps(x, to_log2, offset));
                    if (!all) p = _mm512_maskz_mov_ps(part.seen(token, s * kBlock + j), p);
                    total = _mm512_add_ps(total, p);
                    _mm256_store_si256((__m256i*)(weights + (s * kBlock + i) * kBlock + j), narrow(p));
                }
            }
            float sum = _mm512_reduce_add_ps(total);
            if (shape.sinks) sum += std::exp2(part.sink_log2(head) - largest);
            inverse[i] = 1.0f / sum;
            log_sums[(part.row * shape.n_heads + head) * shape.n_tokens + token] = largest + std::log2(sum);
        }
        for (int64_t s = begin; s <= q; ++s)
            product((const uint32_t*)(weights + s * kBlock * kBlock), kPairs, values + s * kPairs * width, width,
                    kPairs, kBlock, sums, s > begin);
        for (int64_t i = 0; i < part.tokens_of(q); ++i)
            rope_back(sums + i * width, inverse[i], nullptr, nullptr, width,
                      out + part.output_offset(head, q * kBlock + i));
    }
};

struct Backward {
    const TrainingAttention& shape;
    int64_t blocks = (shape.n_tokens + kBlock - 1) / kBlock, width = shape.width, of_block = kPairs * width;
    Scratch memory{size_t(3 * kBlock * width * 2 + 3 * blocks * of_block * 4 + 3 * of_block * 4 +
                          2 * kBlock * kBlock * 4 + kBlock * kBlock * 3 * 2 + kBlock * width * 4 * 2 +
                          2 * blocks * kBlock * width * 4 + 4096)};
    uint16_t *rows = memory.take<uint16_t>(kBlock * width), *gradient = memory.take<uint16_t>(kBlock * width),
             *output = memory.take<uint16_t>(kBlock * width);
    uint32_t *keys = memory.take<uint32_t>(blocks * of_block), *key_pairs = memory.take<uint32_t>(blocks * of_block),
             *values = memory.take<uint32_t>(blocks * of_block);
    uint32_t *pairs = memory.take<uint32_t>(of_block), *queries_left = memory.take<uint32_t>(of_block),
             *gradient_left = memory.take<uint32_t>(of_block);
    float *scores = memory.take<float>(kBlock * kBlock), *changes = memory.take<float>(kBlock * kBlock);
    uint32_t *weight_pairs = memory.take<uint32_t>(kPairs * kBlock),
             *change_pairs = memory.take<uint32_t>(kPairs * kBlock);
    uint16_t* change_rows = memory.take<uint16_t>(kBlock * kBlock);
    float *query_gradient = memory.take<float>(kBlock * width), *rotated = memory.take<float>(kBlock * width);
    float *key_gradient = memory.take<float>(blocks * kBlock * width),
          *value_gradient = memory.take<float>(blocks * kBlock * width);

    explicit Backward(const TrainingAttention& s) : shape(s) {}

    void run(const Part& part, const uint16_t* out, const float* log_sums, const uint16_t* out_gradient,
             uint16_t* qkv_gradient, float* sink_gradient) {
        for (int64_t s = 0; s < blocks; ++s) {
            part.read(part.key_head(), s, true, rows);
            transpose((const uint32_t*)rows, kBlock, width / 2, keys + s * of_block);
            interleave(rows, width, key_pairs + s * of_block);
            part.read(part.value_head(), s, false, rows);
            transpose((const uint32_t*)rows, kBlock, width / 2, values + s * of_block);
        }
        std::memset(key_gradient, 0, size_t(blocks * kBlock * width) * 4);
        std::memset(value_gradient, 0, size_t(blocks * kBlock * width) * 4);
        for (int64_t g = 0; g < part.group(); ++g) {
            const int64_t head = part.kv_head * part.group() + g;
            float of_sink = 0.0f;
            for (int64_t q = 0; q < blocks; ++q)
                of_sink += queries(part, head, q, out, log_sums, out_gradient, qkv_gradient);
            if (shape.sinks) sink_gradient[part.row * shape.n_heads + head] = of_sink;
        }
        for (int64_t s = 0; s < blocks; ++s) {
            write(part, part.key_head(), s, key_gradient + s * kBlock * width, shape.scale, shape.cos, qkv_gradient);
            write(part, part.value_head(), s, value_gradient + s * kBlock * width, 1.0f, nullptr, qkv_gradient);
        }
    }

    // Transposed sums (width × 64) of a block as rows of the gradient.
    void write(const Part& part, int64_t head, int64_t block, const float* transposed, float scale, const float* cos,
               uint16_t* to) {
        transpose((const uint32_t*)transposed, width, kBlock, (uint32_t*)rotated);
        for (int64_t i = 0; i < part.tokens_of(block); ++i) {
            const int64_t token = block * kBlock + i;
            rope_back(rotated + i * width, scale, part.angle(cos, token), part.angle(cos ? shape.sin : nullptr, token),
                      width, to + part.offset(head, token));
        }
    }

    // Gradients of a block of queries, and what it adds to those of keys and values. Returns its share of the sink's
    // gradient: −Σ p·mean, since the sink has no value and ∂P is 0 there.
    float queries(const Part& part, int64_t head, int64_t q, const uint16_t* out, const float* log_sums,
                  const uint16_t* out_gradient, uint16_t* qkv_gradient) {
        part.read(head, q, true, rows);
        part.read_output(out_gradient, head, q, gradient);
        part.read_output(out, head, q, output);
        interleave(rows, width, pairs);
        transpose(pairs, kPairs, width, queries_left);
        interleave(gradient, width, pairs);
        transpose(pairs, kPairs, width, gradient_left);
        float mean[kBlock], log_sum[kBlock];  // mean: Σ ∂O·O, what softmax's gradient subtracts
        for (int64_t i = 0; i < kBlock; ++i) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t d = 0; d < width; d += kLanes)
                sum = _mm512_fmadd_ps(widen(gradient + i * width + d), widen(output + i * width + d), sum);
            mean[i] = _mm512_reduce_add_ps(sum);
            const int64_t token = q * kBlock + i;
            log_sum[i] =
                token < shape.n_tokens ? log_sums[(part.row * shape.n_heads + head) * shape.n_tokens + token] : 0.0f;
        }
        const int64_t begin = part.first_block(q);
        for (int64_t s = begin; s <= q; ++s) {
            product((const uint32_t*)rows, width / 2, keys + s * of_block, kBlock, width / 2, kBlock, scores, false);
            product((const uint32_t*)gradient, width / 2, values + s * of_block, kBlock, width / 2, kBlock, changes,
                    false);
            if (shape.cap > 0) {
                tanh_of(scores, kBlock * kBlock, shape.scale / shape.cap);
                softmax_backward<true>(part, q, s, mean, log_sum);
            } else softmax_backward<false>(part, q, s, mean, log_sum);
            product(gradient_left, kPairs, weight_pairs, kBlock, kPairs, width, value_gradient + s * kBlock * width,
                    true);
            product(queries_left, kPairs, change_pairs, kBlock, kPairs, width, key_gradient + s * kBlock * width, true);
            product((const uint32_t*)change_rows, kPairs, key_pairs + s * of_block, width, kPairs, kBlock,
                    query_gradient, s > begin);
        }
        for (int64_t i = 0; i < part.tokens_of(q); ++i) {
            const int64_t token = q * kBlock + i;
            rope_back(query_gradient + i * width, shape.scale, part.angle(shape.cos, token),
                      part.angle(shape.sin, token), width, qkv_gradient + part.offset(head, token));
        }
        float of_sink = 0.0f;
        if (shape.sinks)
            for (int64_t i = 0; i < part.tokens_of(q); ++i)
                of_sink -= std::exp2(part.sink_log2(head) - log_sum[i]) * mean[i];
        return of_sink;
    }

    // Scores and ∂P of a block as P and ∂S = P · (∂P − mean), two rows at a time. Of bounded scores their tanh is
    // given, and ∂S is multiplied with what it changes by: 1 − tanh².
    template <bool Bounded>
    void softmax_backward(const Part& part, int64_t q, int64_t s, const float* mean, const float* log_sum) {
        const bool all = part.all_seen(q, s);
        const __m512 to_log2 = _mm512_set1_ps(part.to_log2());
        for (int64_t i = 0; i < kBlock; i += 2)
            for (int64_t j = 0; j < kBlock; j += kLanes) {
                __m256i weight[2], change[2];
                for (int64_t k = 0; k < 2; ++k) {
                    const int64_t at = (i + k) * kBlock + j, token = q * kBlock + i + k;
                    const __m512 score = _mm512_load_ps(scores + at);
                    __m512 p = exp2_ps(_mm512_fmsub_ps(score, to_log2, _mm512_set1_ps(log_sum[i + k])));
                    if (!all)
                        p = _mm512_maskz_mov_ps(
                            token < shape.n_tokens ? part.seen(token, s * kBlock + j) : __mmask16(0), p);
                    __m512 d =
                        _mm512_mul_ps(p, _mm512_sub_ps(_mm512_load_ps(changes + at), _mm512_set1_ps(mean[i + k])));
                    if constexpr (Bounded) d = _mm512_fnmadd_ps(_mm512_mul_ps(score, score), d, d);
                    weight[k] = narrow(p);
                    change[k] = narrow(d);
                    _mm256_store_si256((__m256i*)(change_rows + at), change[k]);
                }
                _mm512_store_si512(weight_pairs + i / 2 * kBlock + j, words(weight[0], weight[1]));
                _mm512_store_si512(change_pairs + i / 2 * kBlock + j, words(change[0], change[1]));
            }
    }
};

// Each part by one thread, the next free one taking the next.
template <class Work, class Call>
void over_parts(const TrainingAttention& shape, Call&& call) {
    std::atomic<int64_t> next{0};
    Pool::shared().run([&](int, int) {
        Work work(shape);
        for (int64_t i; (i = next.fetch_add(1)) < shape.n_rows * shape.n_kv_heads;)
            call(work, Part{shape, i / shape.n_kv_heads, i % shape.n_kv_heads});
    });
}

void attend(const TrainingAttention& shape, uint16_t* out, float* log_sums) {
    over_parts<Forward>(shape, [&](Forward& work, const Part& part) { work.run(part, out, log_sums); });
}

void attend_backward(const TrainingAttention& shape, const uint16_t* out, const float* log_sums,
                     const uint16_t* out_gradient, uint16_t* qkv_gradient, float* sink_gradient) {
    over_parts<Backward>(shape, [&](Backward& work, const Part& part) {
        work.run(part, out, log_sums, out_gradient, qkv_gradient, sink_gradient);
    });
}

}  // namespace
}  // namespace ts

ts::Kernels ts::with_avx512bf16_training(Kernels k) {
    k.train_attention = attend;
    k.train_attention_backward = attend_backward;
    return k;
}
