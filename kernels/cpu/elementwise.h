// What happens to each token by itself: norms, rotary embedding with the write into the cache.
//
// Functions with a loop over rows or tokens are called by every thread of a team; all have finished when they return.
#pragma once

#include <cmath>

#include "panel.h"
#include "team.h"

namespace pagoda {

// out = x / rms(x) * weight for one row; `size` need not be a multiple of anything.
template <class X, class T>
inline void norm_row(const X* x, const float* weight, T* out, int64_t size, float eps) {
    const int64_t whole = size / W * W;
    Floats squares{};
    for (int64_t i = 0; i < whole; i += W) {
        const Floats value = load_floats(x + i);
        squares += value * value;
    }
    float total = sum_of(squares);
    for (int64_t i = whole; i < size; ++i) total += widen(x[i]) * widen(x[i]);
    const float factor = 1.0f / std::sqrt(total / float(size) + eps);
    for (int64_t i = 0; i < whole; i += W)
        store_floats(out + i, load_floats(x + i) * factor * load_floats(weight + i));
    for (int64_t i = whole; i < size; ++i) {
        const float value = widen(x[i]) * factor * weight[i];
        if constexpr (sizeof(T) == 2)
            out[i] = to_bf16(value);
        else
            out[i] = value;
    }
}

template <class T>
void rms_norm(Team& team, const T* x, const float* weight, T* out, int64_t rows, int64_t size, float eps) {
    team.share(rows, [&](int64_t row) { norm_row(x + row * size, weight, out + row * size, size, eps); });
}

// The norm of each of `heads` heads of each token, in place; tokens are `stride` apart.
template <class T>
void rms_norm_heads(
    Team& team, T* x, int64_t stride, const float* weight, int64_t tokens, int64_t heads, int64_t size, float eps) {
    team.share(tokens, [&](int64_t token) {
        for (int64_t head = 0; head < heads; ++head) {
            T* numbers = x + token * stride + head * size;
            norm_row(numbers, weight, numbers, size, eps);
        } });
}

// residual += x; out = norm of residual.
template <class T>
void add_rms_norm(
    Team& team, const T* x, float* residual, const float* weight, T* out, int64_t rows, int64_t size, float eps) {
    team.share(rows, [&](int64_t row) {
        const T* added = x + row * size;
        float* sum = residual + row * size;
        const int64_t whole = size / W * W;
        for (int64_t i = 0; i < whole; i += W) store(sum + i, load<Floats>(sum + i) + load_floats(added + i));
        for (int64_t i = whole; i < size; ++i) sum[i] += widen(added[i]);
        norm_row(sum, weight, out + row * size, size, eps);
    });
}

template <class T>
inline T narrow(float value) {
    if constexpr (sizeof(T) == 2)
        return to_bf16(value);
    else
        return value;
}

// Rotates dimension i with i + size / 2; `to` may be `from`.
template <class T>
inline void rotate(const T* from, T* to, const float* cos, const float* sin, int64_t size) {
    const int64_t half = size / 2, whole = half / W * W;
    for (int64_t i = 0; i < whole; i += W) {
        const Floats a = load_floats(from + i), b = load_floats(from + half + i);
        store_floats(to + i, a * load<Floats>(cos + i) - b * load<Floats>(sin + i));
        store_floats(to + half + i, b * load<Floats>(cos + half + i) + a * load<Floats>(sin + half + i));
    }
    for (int64_t i = whole; i < half; ++i) {
        const float a = widen(from[i]), b = widen(from[half + i]);
        to[i] = narrow<T>(a * cos[i] - b * sin[i]);
        to[half + i] = narrow<T>(b * cos[half + i] + a * sin[half + i]);
    }
}

template <class T>
struct RopeArguments {
    T *q;                  // [tokens][heads][size], tokens `q_stride` apart; rotated in place
    const T *k, *v;        // [tokens][kv_heads][size], tokens `kv_stride` apart
    int64_t tokens, heads, kv_heads, size, q_stride, k_stride, v_stride;
    const float *cos, *sin;  // [tokens][size]
    const int64_t* slots;  // [tokens]; negative: written already
    T* cache;              // [blocks][2][block_size][kv_heads][size], blocks `block_stride` apart
    int64_t block_size, block_stride;
};

template <class T>
void rope_kv_write(Team& team, const RopeArguments<T>& a) {
    const int64_t width = a.kv_heads * a.size;
    team.share(a.tokens, [&](int64_t token) {
        const float *cos = a.cos + token * a.size, *sin = a.sin + token * a.size;
        for (int64_t head = 0; head < a.heads; ++head) {
            T* q = a.q + token * a.q_stride + head * a.size;
            rotate(q, q, cos, sin, a.size);
        }
        const int64_t slot = a.slots[token];
        if (slot < 0) return;
        T* keys = a.cache + slot / a.block_size * a.block_stride + slot % a.block_size * width;
        for (int64_t head = 0; head < a.kv_heads; ++head)
            rotate(a.k + token * a.k_stride + head * a.size, keys + head * a.size, cos, sin, a.size);
        T* values = keys + a.block_size * width;
        std::memcpy(values, a.v + token * a.v_stride, width * sizeof(T));
    });
}

}  // namespace pagoda
