// Vectors of the machine's width, and the few operations on them that the kernels need.
//
// One source serves every instruction set: GCC's vector types do the arithmetic, intrinsics only what they cannot say.
// A bfloat16 is the upper half of a float32. Pairs of them fill one 32-bit lane, the first in the lower half.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#define PAGODA_WIDTH 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define PAGODA_WIDTH 8
#else
#define PAGODA_WIDTH 4
#endif

namespace pagoda {

constexpr int W = PAGODA_WIDTH;  // float32 numbers in a vector

using bf16 = uint16_t;
typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));

template <class V>
inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

template <class To, class From>
inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

constexpr int64_t round_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

inline Floats splat(float value) { return Floats{} + value; }

inline float widen(bf16 value) { return bits<float>(uint32_t(value) << 16); }
inline float widen(float value) { return value; }

// Round to the nearest bfloat16, ties to even.
inline bf16 to_bf16(float value) {
    const uint32_t word = bits<uint32_t>(value);
    if (value != value) return uint16_t(word >> 16 | 0x40);
    return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

inline Floats load_floats(const float* from) { return load<Floats>(from); }
inline Floats load_floats(const bf16* from) {
#if defined(__AVX512F__)
    return bits<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16));
#else
    return bits<Floats>(__builtin_convertvector(load<Halves>(from), Words) << 16);
#endif
}

// Numbers of two rows side by side: those of `one` in the lower halves.
inline Words pair(const bf16* one, const bf16* two) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_cvtepu16_epi32(load<__m256i>(one)), high = _mm512_cvtepu16_epi32(load<__m256i>(two));
    return bits<Words>(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#else
    return __builtin_convertvector(load<Halves>(one), Words) | __builtin_convertvector(load<Halves>(two), Words) << 16;
#endif
}

inline void store_floats(float* to, Floats value) { store(to, value); }
inline void store_floats(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtneps_pbh(bits<__m512>(value)));
#else
    const Words word = bits<Words>(value);
    const Words rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    const Words quiet = word >> 16 | 0x40;
    store(to, __builtin_convertvector(Words(value == value ? rounded : quiet), Halves));
#endif
}

// sum + x[0] * w[0] + x[1] * w[1] in each lane, for pairs of bfloat16; or sum + x * w for float32.
inline Floats multiply_add(Floats sum, uint32_t x, Words w, bf16) {
#if defined(__AVX512BF16__)
    return bits<Floats>(
        _mm512_dpbf16_ps(bits<__m512>(sum), bits<__m512bh>(_mm512_set1_epi32(int(x))), bits<__m512bh>(w)));
#else
    sum += bits<float>(x << 16) * bits<Floats>(w << 16);
    return sum + bits<float>(x & 0xffff0000u) * bits<Floats>(w & 0xffff0000u);
#endif
}
inline Floats multiply_add(Floats sum, uint32_t x, Words w, float) {
    return sum + bits<float>(x) * bits<Floats>(w);
}

// One number of a vector's, taken together two by two, halves first.
template <class V, class Both>
inline float folded(V value, Both both) {
    if constexpr (sizeof(V) == 4 * sizeof(float)) {
        return both(both(value[0], value[2]), both(value[1], value[3]));
    } else {
        typedef float Half __attribute__((vector_size(sizeof(V) / 2)));
        Half halves[2];
        std::memcpy(halves, &value, sizeof value);
        return folded(both(halves[0], halves[1]), both);
    }
}

inline float sum_of(Floats value) {
    return folded(value, [](auto one, auto two) __attribute__((always_inline)) { return one + two; });
}

inline float max_of(Floats value) {
    return folded(value, [](auto one, auto two) __attribute__((always_inline)) { return one > two ? one : two; });
}

// Whether a comparison holds in any lane.
inline bool any(Ints is) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(bits<__m512i>(is), bits<__m512i>(is)) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256(bits<__m256i>(is), bits<__m256i>(is));
#else
    int32_t found = 0;
    for (int i = 0; i < W; ++i) found |= is[i];
    return found != 0;
#endif
}

// Of each pair the larger; b where one is not a number.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return bits<Floats>(_mm512_max_ps(bits<__m512>(a), bits<__m512>(b)));
#elif defined(__AVX2__)
    return bits<Floats>(_mm256_max_ps(bits<__m256>(a), bits<__m256>(b)));
#else
    return a > b ? a : b;
#endif
}

constexpr float LOG2_E = 1.44269504f;

#if defined(__AVX512F__)
constexpr float LEAST_EXPONENT = -150.0f;
#else
constexpr float LEAST_EXPONENT = -127.0f;
#endif

// The nearest integer to x, and 2 to its power: 0 for LEAST_EXPONENT. Not for x below that or above 127.
struct Power {
    Floats exponent;
#if defined(__AVX512F__)
    explicit Power(Floats x) : exponent(bits<Floats>(_mm512_roundscale_ps(bits<__m512>(x), 8))) {}

    Floats times(Floats factor) const {
        return bits<Floats>(_mm512_scalef_ps(bits<__m512>(factor), bits<__m512>(exponent)));
    }
#else
    Ints biased;

    explicit Power(Floats x) {
        const Floats magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
        const Floats shifted = x + magic;
        exponent = shifted - magic;
        biased = bits<Ints>(shifted) - bits<Ints>(magic) + 127;
    }

    Floats times(Floats factor) const { return factor * bits<Floats>(biased << 23); }
#endif
};

// 2 to the power of x, to 3 units in the last place; 0 from LEAST_EXPONENT down. Not for x above 127.
// The polynomial is that of its degree with the least relative error for |r| <= 1/2 among those that are 1 at 0.
inline Floats exp2(Floats x) {
    const Floats clamped = larger(splat(LEAST_EXPONENT), x);
    const Power power(clamped);
    const Floats r = clamped - power.exponent;
    Floats y = splat(0.0013264727f);
    y = y * r + 0.009671513f;
    y = y * r + 0.055507336f;
    y = y * r + 0.24022242f;
    y = y * r + 0.693147f;
    y = y * r + 1.0f;
    return power.times(y);
}

// e to the power of x, to 2 units in the last place; 0 from LEAST_EXPONENT * ln(2) down. Not for x above 88.
// Source: Cody and Waite's range reduction; the polynomial is the Taylor series of e^r on |r| <= ln(2)/2.
inline Floats exp(Floats x) {
    constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    const Floats clamped = larger(splat(LEAST_EXPONENT * 0.69314718f), x);
    const Power power(clamped * LOG2_E);
    const Floats r = clamped - power.exponent * LN2_HIGH - power.exponent * LN2_LOW;
    Floats y = splat(1.0f / 720);
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return power.times(y);
}

inline Floats silu(Floats x) { return x < -80.0f ? Floats{} : x / (1.0f + exp(-larger(splat(-80.0f), x))); }

inline Floats tanh(Floats x) {
    // (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x
    const Floats size = x < 0.0f ? -x : x;
    const Floats e = exp(-2.0f * size);
    const Floats value = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -value : value;
}

// Source: Hendrycks and Gimpel, arXiv:1606.08415, the tanh approximation.
inline Floats gelu(Floats x) { return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x))); }

}  // namespace pagoda
