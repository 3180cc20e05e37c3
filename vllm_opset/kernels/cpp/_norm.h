// The two passes of an RMS norm over one row.
#pragma once

#include "_types.h"

namespace opset {

template <class E, class W>
inline void scale_row(const float* x, float factor, const W* weight, float offset, int64_t size, E* y) {
    if (weight) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) y[i] = narrow<E>(x[i] * factor * (widen(weight[i]) + offset));
    } else {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) y[i] = narrow<E>(x[i] * factor);
    }
}

// Writes the row to `wide` as fp32. If there is a residual, adds it and stores the sum in it. Returns the sum of
// squares.
template <class E>
inline float widen_row(const E* x, E* residual, int64_t size, float* wide) {
    float squares = 0;
    if (residual) {
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) {
            const float sum = widen(x[i]) + widen(residual[i]);
            residual[i] = narrow<E>(sum);
            wide[i] = sum;
            squares += sum * sum;
        }
    } else {
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) {
            wide[i] = widen(x[i]);
            squares += wide[i] * wide[i];
        }
    }
    return squares;
}

}  // namespace opset
