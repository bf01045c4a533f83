// What the C interfaces of sample.cpp and adjust.cpp read and answer; engine/native_sampling.py has the same fields as
// numpy types.
#pragma once

#include <cstdint>

namespace ts {

// How a row's token is drawn.
struct Draw {
    int64_t row;
    int64_t token;  // the answer
    double number;  // in [0, 1)
    float temperature, top_p, min_p;
    int32_t top_k;  // 0: all
};

// What one row's request asks for. Tokens outside of the
// vocabulary are left out. In this order: biases are added; tokens of the prompt, and of the output that the prompt
// does not hold, are divided (positive) or multiplied (negative) by ``repetition``; presence + count·frequency is taken
// off tokens of the output; ends become −∞, and so do tokens that are not allowed.
struct Adjustment {
    int64_t row;
    int64_t token;  // answer: that of the largest logit
    int64_t n_biased, n_prompt, n_output, n_ends;
    const int64_t* biased;
    const float* biases;
    const int64_t* prompt;
    const int64_t* output;
    const int32_t* counts;
    const uint8_t* fresh;  // of each token of the output, whether the prompt does not hold it
    const int64_t* ends;
    const uint32_t* allowed;  // a bit a token, from the lowest on, as far as the last token's; null: all
    float* whole;             // room for the row as it was, where tokens are not allowed and it is put back; else null
    float* undo;              // what stood there: room for n_biased + n_prompt + 2·n_output + n_ends
    double presence, frequency;
    float repetition;
    float best;  // answer: the largest logit
};

}  // namespace ts
