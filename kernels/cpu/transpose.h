// Keys lie position by position; a panel wants them number by number.
#pragma once

#include "panel.h"

namespace pagoda {

#if defined(__AVX512F__)
// to[i] = words first + i of 16 rows, of which `num_rows` are there (else zero) and have `width` such words (else zero).
__attribute__((always_inline)) inline void transpose16(
    const uint32_t* const* from, int num_rows, int64_t first, int64_t width, __m512i* to) {
    const __mmask16 mask = __mmask16((1u << width) - 1);
    __m512i a[16], b[16];
    if (num_rows >= 16 && width == 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from[i] + first);
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
            a[i] = i < num_rows ? _mm512_maskz_loadu_epi32(mask, from[i] + first) : _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4 * g + c] has rows 4g .. 4g + 3 of columns c, c + 4, c + 8 and c + 12, one in each quarter.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        to[c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88);
        to[8 + c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd);
        to[4 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88);
        to[12 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd);
    }
}
#endif

// to[column][row] = from[row][column] for PANEL rows, of which the first `num_rows` are there and the others zero.
// `before(row, column)` is called before each 16 by 16 are turned.
template <class Before>
inline void transpose(const uint32_t* const* from, int num_rows, int64_t columns, uint32_t* to, Before before) {
    for (int row = 0; row < PANEL; row += 16)
        for (int64_t column = 0; column < columns; column += 16) {
            before(row, column);
            const int64_t width = std::min<int64_t>(16, columns - column);
#if defined(__AVX512F__)
            __m512i turned[16];
            transpose16(from + row, num_rows - row, column, width, turned);
            for (int i = 0; i < width; ++i) _mm512_storeu_si512(to + (column + i) * PANEL + row, turned[i]);
#else
            for (int r = row; r < row + 16; ++r)
                for (int64_t c = column; c < column + width; ++c) to[c * PANEL + r] = r < num_rows ? from[r][c] : 0;
#endif
        }
}

}  // namespace pagoda
