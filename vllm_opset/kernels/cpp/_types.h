// Code that the kernels share: the element types, exp, and loops on several threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "_team.h"

namespace opset {

template <class To, class From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// This is a scalar type, so that compilers can vectorise it.
enum class bfloat16 : uint16_t {};

inline float widen(float value) { return value; }
inline float widen(bfloat16 value) { return bits_of<float>(uint32_t(value) << 16); }

template <class E>
E narrow(float value);

template <>
inline float narrow(float value) {
    return value;
}

// Rounds to nearest even. NaN stays NaN.
template <>
inline bfloat16 narrow(float value) {
    const uint32_t wide = bits_of<uint32_t>(value);
    const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return bfloat16((wide & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// Calls f with a null pointer of the element type that Python calls `type`.
template <class F>
inline void with_type(int64_t type, F f) {
    if (type == 0) f(static_cast<float*>(nullptr));
    else f(static_cast<bfloat16*>(nullptr));
}

// Calls f with `number` as a constant, which is at most MOST.
template <int MOST, class F>
inline void with_constant(int64_t number, F f) {
    if (number == MOST) f(std::integral_constant<int, MOST>());
    else if constexpr (MOST > 1) with_constant<MOST - 1>(number, f);
}

// e^x with a relative error of 1e-7, in code that compilers vectorise. Below LEAST_EXPONENT it is 1e-38 instead of
// smaller values. Above 88.4 it is infinite, slightly too early.
constexpr float LEAST_EXPONENT = -87.0f;
inline float exp(float x) {
    x = std::min(std::max(x, LEAST_EXPONENT), 89.0f);
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.9875691e-4f;
    p = p * r + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000001e-1f;
    return (p * r * r + r + 1.0f) * bits_of<float>((int32_t(n) + 127) << 23);
}

}  // namespace opset
