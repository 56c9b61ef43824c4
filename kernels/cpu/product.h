// Groups of rows against a panel: by tiles where the machine has them and numbers are bfloat16, else by vectors.
//
// All row counts go the same way, so that a row's sums do not depend on how many others there are.
#pragma once

#include "amx.h"
#include "panel.h"

namespace pagoda {

#if defined(PAGODA_AMX)
template <class T>
constexpr bool USES_TILES = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool USES_TILES = false;
#endif

// Rows that are multiplied with a panel at once, and what the depth is best a multiple of.
template <class T>
constexpr int GROUP = USES_TILES<T> ? AMX_ROWS : MAX_ROWS;
template <class T>
constexpr int DEPTH_STEP = USES_TILES<T> ? AMX_DEPTH : PER_LANE<T>;

// out[row][32] = x[row] @ panel for up to GROUP<T> rows.
template <class T>
inline void multiply_group(
    [[maybe_unused]] Tiles& tiles, int num_rows, const T* x, int64_t x_stride, const T* panel, int64_t depth,
    float* out, int64_t out_stride = PANEL) {
#if defined(PAGODA_AMX)
    if constexpr (USES_TILES<T>)
        multiply_amx(tiles, num_rows, x, x_stride, panel, depth, out, out_stride);
    else
#endif
        multiply(num_rows, x, x_stride, panel, depth, out, out_stride);
}

// Calls body(first, count) for groups of rows. Tiles like full ones best, vectors nearly equal ones.
template <class T, class Body>
inline void for_row_groups(int64_t num_rows, Body body) {
    if constexpr (USES_TILES<T>)
        for (int64_t first = 0; first < num_rows; first += GROUP<T>)
            body(first, int(std::min<int64_t>(GROUP<T>, num_rows - first)));
    else
        for (int64_t groups = (num_rows + GROUP<T> - 1) / GROUP<T>, group = 0; group < groups; ++group) {
            const int64_t first = num_rows * group / groups;
            body(first, int(num_rows * (group + 1) / groups - first));
        }
}

}  // namespace pagoda
