// A softmax over positions that come one part after the other.
//
// Source: Milakov and Gimelshein, arXiv:1805.02867.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace pagoda {

constexpr float EMPTY = -std::numeric_limits<float>::infinity();

// The softmax so far of some rows, whose scores are exponents of 2: the largest, and the sums over positions of
// 2^(score - most) and of that times the value. `most` and `total` have whole vectors.
struct Softmax {
    std::vector<float> most, total, values;

    Softmax(int64_t rows, int64_t size) : most(round_up(rows, W)), total(round_up(rows, W)), values(rows * size) {}

    void clear(int64_t rows, int64_t size) {
        std::fill_n(most.begin(), round_up(rows, W), EMPTY);
        std::fill_n(total.begin(), round_up(rows, W), 0.0f);
        std::fill_n(values.begin(), rows * size, 0.0f);
    }
};

// into = the softmax over the positions of both. Source: arXiv:2205.14135, section 3.1.
inline void merge(Softmax& into, const Softmax& part, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; ++row) {
        if (part.most[row] == EMPTY) continue;
        const float now = std::max(into.most[row], part.most[row]);
        const float kept = std::exp2(into.most[row] - now), added = std::exp2(part.most[row] - now);
        into.most[row] = now;
        into.total[row] = into.total[row] * kept + part.total[row] * added;
        float* sums = &into.values[row * size];
        for (int64_t i = 0; i < size; i += W)
            store(sums + i, load<Floats>(sums + i) * kept + load<Floats>(&part.values[row * size + i]) * added);
    }
}

}  // namespace pagoda
