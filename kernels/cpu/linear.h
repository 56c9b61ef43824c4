// y = x @ W.T + bias with W packed into panels; and the gated half of a feed-forward, act(x @ G.T) * (x @ U.T).
#pragma once

#include <vector>

#include "product.h"
#include "team.h"

namespace pagoda {

constexpr int64_t DEPTH_BLOCK = 2048;  // of a panel: 128 KiB of bfloat16, which stay in the L2 cache
constexpr int64_t ROW_BLOCK = 2304;        // of x: each panel is read once for so many tokens

enum Activation : int64_t { NONE = 0, SILU = 1, GELU = 2 };

inline int64_t num_panels(int64_t num_columns) { return (num_columns + PANEL - 1) / PANEL; }

// weight[row][depth] -> panels. `source_of(column)` is the row that becomes a packed column; -1 makes it zeros.
// Called by every thread of a team.
template <class T, class SourceOf>
void pack(Team& team, const T* weight, int64_t panel_count, int64_t depth, T* panels, SourceOf source_of) {
    constexpr int P = PER_LANE<T>;
    team.share(panel_count, [&](int64_t panel) {
        T* to = panels + panel * PANEL * depth;
        for (int column = 0; column < PANEL; ++column) {
            const int64_t source = source_of(panel * PANEL + column);
            for (int64_t d = 0; d < depth; ++d)
                to[(d / P * PANEL + column) * P + d % P] = source < 0 ? T{} : weight[source * depth + d];
        }
    });
}

// Where column `packed` of a gated weight comes from: each panel holds 16 columns of the gate, then the same of up.
inline int64_t gated_source(int64_t packed, int64_t num_gates) {
    constexpr int HALF = PANEL / 2;
    const int64_t column = packed / PANEL * HALF + packed % HALF;
    if (column >= num_gates) return -1;
    return packed % PANEL < HALF ? column : num_gates + column;
}

template <class T>
struct LinearArguments {
    const T* x;  // [rows][depth], rows `x_stride` apart
    int64_t rows, depth, x_stride;
    const T* panels;
    const float* bias;  // one for each packed column, or null
    T* out;             // [rows][columns], contiguous
    int64_t columns;    // of `out`
    Activation activation;
    float* wide_out;    // if not null, results go there, as they were summed, and not to `out`
};

// Write a finished tile of a panel.
template <class T>
inline void finish_tile(const LinearArguments<T>& a, int64_t panel, int64_t row, int count, float* tile) {
    for (int r = 0; r < count; ++r, tile += PANEL) {
        if (a.bias)
            for (int c = 0; c < PANEL; c += W)
                store(tile + c, load<Floats>(tile + c) + load<Floats>(a.bias + panel * PANEL + c));
        const int width = a.activation == NONE ? PANEL : PANEL / 2;
        if (a.activation != NONE)
            for (int c = 0; c < width; c += W) {
                const Floats gate = load<Floats>(tile + c), up = load<Floats>(tile + width + c);
                store(tile + c, (a.activation == SILU ? silu(gate) : gelu(gate)) * up);
            }
        const int64_t valid = std::min<int64_t>(width, a.columns - panel * width);
        if (a.wide_out) {
            std::copy(tile, tile + std::max<int64_t>(valid, 0), a.wide_out + (row + r) * a.columns + panel * width);
            continue;
        }
        T* to = a.out + (row + r) * a.columns + panel * width;
        if (valid == width) {
            for (int c = 0; c < width; c += W) store_floats(to + c, load<Floats>(tile + c));
        } else {
            T whole[PANEL];
            for (int c = 0; c < width; c += W) store_floats(whole + c, load<Floats>(tile + c));
            std::copy(whole, whole + std::max<int64_t>(valid, 0), to);
        }
    }
}

template <class T>
void multiply_panel(
    Tiles& tiles, const LinearArguments<T>& a, int64_t panel, int64_t first_row, int64_t num_rows, float* sums) {
    const T* weight = a.panels + panel * PANEL * a.depth;
    for (int64_t begin = 0; begin < a.depth; begin += DEPTH_BLOCK) {
        const int64_t depth = std::min(DEPTH_BLOCK, a.depth - begin);
        const bool is_first = begin == 0, is_last = begin + depth == a.depth;
        for_row_groups<T>(num_rows, [&](int64_t group, int count) {
            float tile[GROUP<T> * PANEL];
            const int64_t row = first_row + group;
            multiply_group(
                tiles, count, a.x + row * a.x_stride + begin, a.x_stride, weight + begin * PANEL, depth, tile);
            float* sum = sums + group * PANEL;
            if (!is_first)
                for (int i = 0; i < count * PANEL; i += W)
                    store(tile + i, load<Floats>(sum + i) + load<Floats>(tile + i));
            if (is_last)
                finish_tile(a, panel, row, count, tile);
            else
                std::copy(tile, tile + count * PANEL, sum);
        });
    }
}

// Called by every thread of a team; all have finished when it returns.
template <class T>
void linear(Team& team, const LinearArguments<T>& a) {
    const int64_t panels = num_panels(a.activation == NONE ? a.columns : 2 * a.columns);
    const int64_t row_blocks = (a.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    Tiles tiles;
    std::vector<float> sums(a.depth > DEPTH_BLOCK ? std::min(a.rows, ROW_BLOCK) * PANEL : 0);
    // Contiguous shares: two threads that take panels in turn read memory half as fast.
    team.share(row_blocks * panels, [&](int64_t task) {
        const int64_t first = task / panels * ROW_BLOCK;
        multiply_panel(tiles, a, task % panels, first, std::min(ROW_BLOCK, a.rows - first), sums.data());
    });
}

}  // namespace pagoda
