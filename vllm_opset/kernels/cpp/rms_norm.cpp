// rms_norm and fused_add_rms_norm, which differ only in the input of the norm.
#include "_norm.h"

namespace opset {
namespace {

template <class E, class W>
void norm(const E* x, E* residual, const W* weight, E* y, int64_t outer, int64_t inner, int64_t size, int64_t x_outer,
          int64_t x_inner, float epsilon, float offset) {
    parallel_for(outer * inner, 1, outer * inner * size > WORTH_THREADS, [&](int64_t begin, int64_t end) {
        std::vector<float> wide(size);
        for (int64_t row = begin; row < end; row++) {
            const E* from = x + row / inner * x_outer + row % inner * x_inner;
            const float squares = widen_row(from, residual ? residual + row * size : nullptr, size, wide.data());
            const float factor = 1 / std::sqrt(squares / size + epsilon);
            scale_row(wide.data(), factor, weight, offset, size, y + row * size);
        }
    });
}

}  // namespace

// x: [outer, inner, size] with strides. y, and residual if it is not null: contiguous; y may be x. weight may be null.
extern "C" void rms_norm(int64_t type, int64_t weight_type, const void* weight, const void* x, void* residual, void* y,
                         int64_t outer, int64_t inner, int64_t size, int64_t x_outer, int64_t x_inner, float epsilon,
                         float offset) {
    with_type(type, [&](auto* element) {
        using E = std::remove_pointer_t<decltype(element)>;
        with_type(weight_type, [&](auto* of_weight) {
            using W = std::remove_pointer_t<decltype(of_weight)>;
            norm(static_cast<const E*>(x), static_cast<E*>(residual), static_cast<const W*>(weight),
                 static_cast<E*>(y), outer, inner, size, x_outer, x_inner, epsilon, offset);
        });
    });
}

}  // namespace opset
