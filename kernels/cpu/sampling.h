// Draws a token of each row of logits.
//
// Of exponential clocks with the probabilities as rates, the first to ring is each with its probability: the token drawn
// is the one of the greatest weight / clock, where weight = e^((logit - most) / temperature) and clock = -log(1 - u), u
// uniform in (0, 1). As clock > u, a token can only win if weight / u does, so hardly any logarithm is taken; as u is at
// least 2^-33, one whose weight is far below the best is passed over before its number is even drawn.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "softmax.h"
#include "team.h"

namespace pagoda {

template <class T>
struct SamplingArguments {
    const T* logits;           // [rows][columns]
    const float* temperature;  // [rows]; 0 takes the greatest logit
    const uint64_t* streams;   // [rows]
    int64_t* tokens;           // [rows], the result
    int64_t rows, columns;
};

typedef uint64_t Longs __attribute__((vector_size(4 * W)));
typedef uint32_t NarrowLongs __attribute__((vector_size(2 * W)));

// The upper halves of SplitMix64's finaliser. Source: Steele, Lea, Flood, OOPSLA 2014.
inline NarrowLongs finalise(Longs x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return __builtin_convertvector((x ^ x >> 31) >> 32, NarrowLongs);
}

template <class T>
class Sampling {
public:
    explicit Sampling(const SamplingArguments<T>& arguments)
        : a(arguments), parts_((a.columns + PART - 1) / PART), most_(a.rows * parts_), winners_(a.rows * parts_) {}

    // Called by every thread of a team; all have finished when it returns.
    void run(Team& team) {
        team.share(a.rows * parts_, [&](int64_t index) { find_most(index / parts_, index % parts_); });
        team.share(a.rows * parts_, [&](int64_t index) {
            const int64_t row = index / parts_, part = index % parts_;
            if (a.temperature[row] > 0) race(row, part);
        });
        team.share(a.rows, [&](int64_t row) { a.tokens[row] = winner(row); });
    }

private:
    static constexpr int64_t PART = 16384;  // columns that a thread takes at a time; a multiple of W

    struct Winner {
        float score = -1;
        int64_t token = 0;
    };

    // Calls body(first column, logits) for the vectors of a part, -inf where a row has ended.
    template <class Body>
    void for_vectors(int64_t row, int64_t part, Body body) const {
        const T* logits = a.logits + row * a.columns;
        const int64_t end = std::min((part + 1) * PART, a.columns), whole = end / W * W;
        for (int64_t i = part * PART; i < whole; i += W) body(i, load_floats(logits + i));
        if (whole == end) return;
        float rest[W];
        std::fill_n(rest, W, EMPTY);
        std::transform(logits + whole, logits + end, rest, [](T logit) { return widen(logit); });
        body(whole, load<Floats>(rest));
    }

    void find_most(int64_t row, int64_t part) {
        Floats most = splat(EMPTY);
        for_vectors(row, part, [&](int64_t, Floats logits) { most = larger(logits, most); });
        most_[row * parts_ + part] = max_of(most);
    }

    float most(int64_t row) const { return *std::max_element(&most_[row * parts_], &most_[row * parts_] + parts_); }

    void race(int64_t row, int64_t part) {
        constexpr float LENIENT = 1.00001f;  // than any rounding
        constexpr uint64_t STEP = 0x9E3779B97F4A7C15;
        const float highest = most(row), inverse = 1 / std::max(a.temperature[row], 1e-5f);
        Longs steps;
        for (int i = 0; i < W / 2; ++i) steps[i] = i * STEP;
        Winner best;
        float floor = EMPTY;  // exponents below it cannot win
        for_vectors(row, part, [&](int64_t first, Floats logits) {
            const Floats exponents = (logits - highest) * inverse;
            if (!any(exponents > floor)) return;
            const Longs x = steps + (a.streams[row] + first * STEP);
            uint32_t drawn[W];
            store(drawn, finalise(x));
            store(drawn + W / 2, finalise(x + W / 2 * STEP));
            const Floats u = (__builtin_convertvector(load<Words>(drawn), Floats) + 0.5f) * 0x1p-32f;
            const Floats weights = exp(exponents);
            if (!any(weights * LENIENT > u * best.score)) return;
            for (int i = 0; i < W; ++i) {
                if (!(weights[i] * LENIENT > u[i] * best.score)) continue;
                const float score = weights[i] / std::min(-std::log1p(-u[i]), 64.0f);
                if (score > best.score) best = {score, first + i};
            }
            floor = std::log(best.score * (0x1p-33f / LENIENT));
        });
        winners_[row * parts_ + part] = best;
    }

    int64_t winner(int64_t row) const {
        if (a.temperature[row] > 0) {
            const Winner* of_row = &winners_[row * parts_];
            const auto is_less = [](const Winner& one, const Winner& two) { return one.score < two.score; };
            return std::max_element(of_row, of_row + parts_, is_less)->token;
        }
        const T* logits = a.logits + row * a.columns;
        const auto is_most = [most = most(row)](T logit) { return widen(logit) == most; };
        const int64_t found = std::find_if(logits, logits + a.columns, is_most) - logits;
        return found < a.columns ? found : 0;
    }

    const SamplingArguments<T>& a;
    const int64_t parts_;
    std::vector<float> most_;
    std::vector<Winner> winners_;
};

}  // namespace pagoda
