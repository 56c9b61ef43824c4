// The tile instructions in plain C++, so that the kernels that use them can be tested on a CPU without AMX.
#pragma once

#include <cstring>

namespace pagoda {

struct EmulatedTile {
    int rows = 0, bytes = 0;
    uint8_t data[16][64] = {};
};

inline EmulatedTile* emulated_tiles() {
    thread_local EmulatedTile tiles[8];
    return tiles;
}

inline void emulated_loadconfig(const void* config) {
    const auto* bytes = static_cast<const uint8_t*>(config);
    for (int tile = 0; tile < 8; ++tile) {
        EmulatedTile& own = emulated_tiles()[tile] = EmulatedTile();
        own.bytes = bytes[16 + 2 * tile] + 256 * bytes[17 + 2 * tile];
        own.rows = bytes[48 + tile];
    }
}

inline void emulated_loadd(int tile, const void* from, int64_t stride) {
    EmulatedTile& own = emulated_tiles()[tile];
    for (int row = 0; row < own.rows; ++row)
        std::memcpy(own.data[row], static_cast<const uint8_t*>(from) + row * stride, own.bytes);
}

inline void emulated_stored(int tile, void* to, int64_t stride) {
    const EmulatedTile& own = emulated_tiles()[tile];
    for (int row = 0; row < own.rows; ++row)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, own.data[row], own.bytes);
}

inline void emulated_dpbf16ps(int sums, int x, int w) {
    EmulatedTile* tiles = emulated_tiles();
    for (int row = 0; row < tiles[sums].rows; ++row)
        for (int column = 0; column < tiles[sums].bytes / 4; ++column) {
            float sum;
            std::memcpy(&sum, &tiles[sums].data[row][column * 4], 4);
            for (int lane = 0; lane < tiles[x].bytes / 4; ++lane)
                for (int part = 0; part < 2; ++part) {
                    bf16 a, b;
                    std::memcpy(&a, &tiles[x].data[row][lane * 4 + part * 2], 2);
                    std::memcpy(&b, &tiles[w].data[lane][column * 4 + part * 2], 2);
                    sum += widen(a) * widen(b);
                }
            std::memcpy(&tiles[sums].data[row][column * 4], &sum, 4);
        }
}

}  // namespace pagoda

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_zero
#define _tile_loadconfig(config) emulated_loadconfig(config)
#define _tile_release() std::fill_n(emulated_tiles(), 8, EmulatedTile())
#define _tile_loadd(tile, from, stride) emulated_loadd(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_stored(tile, to, stride)
#define _tile_dpbf16ps(sums, x, w) emulated_dpbf16ps(sums, x, w)
#define _tile_zero(tile) std::memset(emulated_tiles()[tile].data, 0, sizeof(EmulatedTile::data))
