// silu_and_mul: silu(gate) * up, where gate and up are the halves of each row.
#include "_types.h"

namespace opset {

// x: [rows, 2 * size] with row stride x_row. y: [rows, size], contiguous.
extern "C" void silu_and_mul(int64_t type, const void* x, void* y, int64_t rows, int64_t size, int64_t x_row) {
    with_type(type, [&](auto* element) {
        using E = std::remove_pointer_t<decltype(element)>;
        parallel_for(rows, 1, rows * size > WORTH_THREADS, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                const E* gate = static_cast<const E*>(x) + row * x_row;
                const E* up = gate + size;
                E* out = static_cast<E*>(y) + row * size;
#pragma omp simd
                for (int64_t i = 0; i < size; i++) {
                    const float g = widen(gate[i]);
                    out[i] = narrow<E>(g / (1 + exp(-g)) * widen(up[i]));
                }
            }
        });
    });
}

}  // namespace opset
