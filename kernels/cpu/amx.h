// The product of panel.h by AMX tiles, for bfloat16: 32 rows at a time against a whole panel.
//
// One tile holds 16 rows of 32 numbers of x, another 16 pairs along the depth of 16 columns of a panel, just as they lie.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 1, ch. 18.
#pragma once

#include "panel.h"

namespace pagoda {
constexpr int AMX_ROWS = 32;  // two tiles
constexpr int AMX_DEPTH = 32;
}  // namespace pagoda

#if defined(PAGODA_AMX)

#if defined(PAGODA_AMX_EMULATED)
#include "amx_emulated.h"
#else
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagoda {

// Linux wants to be asked before a process uses tiles; threads started later may too. Whether they can be used.
inline bool enable_amx() {
#if defined(PAGODA_AMX_EMULATED)
    return true;
#else
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// The tiles of the thread that makes and destroys it. Shaping them costs as much as a dozen products: to be kept.
class Tiles {
public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (num_rows_) _tile_release();
    }

    // For products of so many rows, at most AMX_ROWS. What the tiles held is lost if there were others before.
    // Tiles 0 to 3 are sums (row half, column half), 4 and 5 rows of x, 6 and 7 columns of the panel.
    void shape(int num_rows) {
        if (num_rows == num_rows_) return;
        num_rows_ = num_rows;
        TileConfig config;
        const int rows[2] = {std::min(num_rows, 16), std::max(num_rows - 16, 0)};
        for (int tile = 0; tile < 8; ++tile) {
            const int height = tile < 4 ? rows[tile / 2] : tile < 6 ? rows[tile - 4] : 16;
            config.rows[tile] = uint8_t(height);
            config.bytes_per_row[tile] = height ? 64 : 0;
        }
        asm volatile("" ::"m"(config));  // for GCC it reads no more than the first bytes
        _tile_loadconfig(&config);
    }

private:
    int num_rows_ = 0;
};

template <bool HAS_SECOND>
inline void multiply_tiles(const bf16* x, int64_t x_bytes, const bf16* panel) {
    constexpr int PANEL_BYTES = PANEL * 4;
    asm volatile("" ::: "memory");  // GCC does not know that a tile is loaded from memory, and would leave out the writing
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, panel, PANEL_BYTES);
    _tile_loadd(7, panel + 32, PANEL_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (HAS_SECOND) {
        _tile_loadd(5, x + 16 * (x_bytes / 2), x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

template <bool HAS_SECOND>
inline void multiply_amx(
    int num_rows, const bf16* x, int64_t x_stride, const bf16* panel, int64_t depth, float* out, int64_t out_stride) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (HAS_SECOND) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const int64_t whole = depth / AMX_DEPTH * AMX_DEPTH;
    for (int64_t k = 0; k < whole; k += AMX_DEPTH)
        multiply_tiles<HAS_SECOND>(x + k, x_stride * 2, panel + k * PANEL);
    if (whole < depth) {  // what is left, with zeros behind it
        bf16 rest_x[AMX_ROWS * AMX_DEPTH] = {}, rest_panel[AMX_DEPTH * PANEL] = {};
        for (int row = 0; row < num_rows; ++row)
            std::copy_n(x + row * x_stride + whole, depth - whole, rest_x + row * AMX_DEPTH);
        std::copy_n(panel + whole * PANEL, (depth - whole) * PANEL, rest_panel);
        multiply_tiles<HAS_SECOND>(rest_x, AMX_DEPTH * 2, rest_panel);
    }
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + 16, out_stride * 4);
    if constexpr (HAS_SECOND) {
        _tile_stored(2, out + 16 * out_stride, out_stride * 4);
        _tile_stored(3, out + 16 * out_stride + 16, out_stride * 4);
    }
}

// out[row][32] = x[row] @ panel for up to AMX_ROWS rows.
inline void multiply_amx(
    Tiles& tiles, int num_rows, const bf16* x, int64_t x_stride, const bf16* panel, int64_t depth, float* out,
    int64_t out_stride = PANEL) {
    tiles.shape(num_rows);
    if (num_rows > 16)
        multiply_amx<true>(num_rows, x, x_stride, panel, depth, out, out_stride);
    else
        multiply_amx<false>(num_rows, x, x_stride, panel, depth, out, out_stride);
}

}  // namespace pagoda

#else

namespace pagoda {
inline bool enable_amx() { return true; }  // there is nothing to enable
class Tiles {};
}  // namespace pagoda

#endif
