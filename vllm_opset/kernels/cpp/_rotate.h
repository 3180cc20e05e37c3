// The rotation of one head.
#pragma once

#include "_types.h"

namespace opset {

// Pair i of a head is elements (i, i + half) in NeoX style, (2i, 2i + 1) otherwise.
template <bool NEOX, class E, class C>
inline void rotate_pairs(E* head, const C* cos, const C* sin, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        E& first = head[NEOX ? i : 2 * i];
        E& second = head[NEOX ? i + half : 2 * i + 1];
        const float a = widen(first), b = widen(second), c = widen(cos[i]), s = widen(sin[i]);
        first = narrow<E>(a * c - b * s);
        second = narrow<E>(b * c + a * s);
    }
}

template <class E, class C>
inline void rotate(E* head, const C* cos, const C* sin, int64_t half, bool neox) {
    if (neox) rotate_pairs<true>(head, cos, sin, half);
    else rotate_pairs<false>(head, cos, sin, half);
}

}  // namespace opset
