// The one matrix product that everything is made of: rows of x against a panel of 32 columns.
//
// A panel holds 32 columns of a matrix, all of its depth, in the order in which they are read:
//
//     float32:   panel[depth][32]          bfloat16:   panel[depth / 2][32][2]
//
// so a panel is one run of memory, and one vector of it meets one broadcast number (or pair) of x. Each result is a sum
// along the depth in one fixed order: what a row gets does not depend on how many rows there are.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace pagoda {

constexpr int PANEL = 32;

template <class T>
constexpr int PER_LANE = 4 / sizeof(T);  // numbers along the depth in one 32-bit lane

// Rows and vectors of columns whose sums stay in registers.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12, VECTORS = 2;
#else
constexpr int MAX_ROWS = 4, VECTORS = 2;
#endif
static_assert(PANEL % (VECTORS * W) == 0);

// out[row][v * W ...] = sum over lanes of x[row][lane] * words_at(lane, v), for ROWS rows and V vectors of columns.
template <class T, int ROWS, int V, class WordsAt>
inline void multiply_rows(
    const T* x, int64_t x_stride, int64_t lanes, WordsAt words_at, float* out, int64_t out_stride) {
    Floats sums[ROWS][V] = {};
    for (int64_t lane = 0; lane < lanes; ++lane) {
        Words w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) w[v] = words_at(lane, v);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const uint32_t broadcast = load<uint32_t>(x + row * x_stride + lane * PER_LANE<T>);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[row][v] = multiply_add(sums[row][v], broadcast, w[v], T{});
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(out + row * out_stride + v * W, sums[row][v]);
}

// Calls body with num_rows, at most MAX_ROWS, as a compile-time constant.
template <int ROWS = MAX_ROWS, class Body>
inline void with_rows(int num_rows, Body body) {
    if constexpr (ROWS > 0) {
        if (num_rows == ROWS)
            body(std::integral_constant<int, ROWS>{});
        else
            with_rows<ROWS - 1>(num_rows, body);
    }
}

// out[row][32] = x[row] @ panel for up to MAX_ROWS rows. `depth` is a multiple of PER_LANE<T>.
template <class T>
inline void multiply(
    int num_rows, const T* x, int64_t x_stride, const T* panel, int64_t depth, float* out, int64_t out_stride = PANEL) {
    with_rows(num_rows, [&](auto rows) {
        for (int column = 0; column < PANEL; column += VECTORS * W) {
            const uint32_t* words = reinterpret_cast<const uint32_t*>(panel) + column;
            multiply_rows<T, rows.value, VECTORS>(
                x, x_stride, depth / PER_LANE<T>,
                [=](int64_t lane, int v) { return load<Words>(words + lane * PANEL + v * W); }, out + column,
                out_stride);
        }
    });
}

}  // namespace pagoda
