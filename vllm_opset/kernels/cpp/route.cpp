// route: the experts of each token and their weights.
#include <limits>
#include <numeric>

#include "_types.h"

namespace opset {
namespace {

constexpr float LEAST = -std::numeric_limits<float>::infinity();
constexpr float EPSILON = 1e-20f;  // the contract's

// How experts are chosen. bias: [num_experts], added to the scores for the choice, or null. A group's value is the sum
// of its `largest` largest values.
struct Router {
    const float* bias;
    int64_t num_experts, top_k, groups, kept_groups, largest;
    bool softmax, renormalize;
    float factor;
};

// Calls f with the places of the `count` largest values, from the largest on. Of equal values, the first comes first.
// Values are lost: `taken` marks those that f was called with.
template <class F>
void each_largest(const float* values, int64_t number, int64_t count, std::vector<char>& taken, F f) {
    taken.assign(number, false);
    for (; count > 0; count--) {
        int64_t best = -1;
        for (int64_t i = 0; i < number; i++)
            if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
        taken[best] = true;
        f(best);
    }
}

// Writes the softmax or the sigmoid of the logits.
void score(const float* logits, const Router& router, float* scores) {
    const int64_t number = router.num_experts;
    if (!router.softmax) {
#pragma omp simd
        for (int64_t i = 0; i < number; i++) scores[i] = 1 / (1 + exp(-logits[i]));
        return;
    }
    const float largest = *std::max_element(logits, logits + number);
#pragma omp simd
    for (int64_t i = 0; i < number; i++) {
        const float distance = logits[i] - largest;
        scores[i] = distance < LEAST_EXPONENT ? 0 : exp(distance);  // -inf gives 0
    }
    const float factor = 1 / std::accumulate(scores, scores + number, 0.0f);
#pragma omp simd
    for (int64_t i = 0; i < number; i++) scores[i] *= factor;
}

// Sets the values of all groups but the best ones to the least value.
void keep_groups(const Router& router, float* values, std::vector<char>& taken) {
    const int64_t size = router.num_experts / router.groups;
    std::vector<float> sums(router.groups);
    for (int64_t group = 0; group < router.groups; group++) {
        const float* own = values + group * size;
        each_largest(own, size, std::min(router.largest, size), taken, [&](int64_t i) { sums[group] += own[i]; });
    }
    std::vector<char> kept(router.groups);
    each_largest(sums.data(), router.groups, router.kept_groups, taken, [&](int64_t group) { kept[group] = true; });
    for (int64_t group = 0; group < router.groups; group++)
        if (!kept[group]) std::fill_n(values + group * size, size, LEAST);
}

template <class E>
void route_all(const E* logits, const Router& router, float* weights, int32_t* ids, int64_t tokens, int64_t row) {
    const int64_t number = router.num_experts, top_k = router.top_k;
    parallel_for(tokens, 1, tokens * number * top_k > WORTH_THREADS, [&](int64_t begin, int64_t end) {
        std::vector<float> values(number), scores(number);
        std::vector<char> taken;
        for (int64_t token = begin; token < end; token++) {
            for (int64_t i = 0; i < number; i++) values[i] = widen(logits[token * row + i]);
            score(values.data(), router, scores.data());
            if (router.bias)
                for (int64_t i = 0; i < number; i++) values[i] = scores[i] + router.bias[i];
            if (router.groups > 1) keep_groups(router, values.data(), taken);
            float *own = weights + token * top_k, sum = 0;
            int32_t* chosen = ids + token * top_k;
            each_largest(values.data(), number, top_k, taken, [&](int64_t expert) {
                sum += *own++ = scores[expert];
                *chosen++ = int32_t(expert);
            });
            const float factor = router.renormalize ? router.factor / (sum + EPSILON) : router.factor;
            for (int64_t i = 1; i <= top_k; i++) own[-i] *= factor;
        }
    });
}

}  // namespace

// logits: [tokens, num_experts] with row stride `row`. weights, ids: [tokens, top_k], contiguous.
extern "C" void route(int64_t type, const void* logits, const float* bias, float* weights, int32_t* ids, int64_t tokens,
                      int64_t row, int64_t num_experts, int64_t top_k, int64_t groups, int64_t kept_groups,
                      int64_t softmax, int64_t renormalize, float factor) {
    const Router router{bias, num_experts, top_k, groups, kept_groups, bias ? 2 : 1, softmax != 0, renormalize != 0,
                        factor};
    with_type(type, [&](auto* element) {
        using E = std::remove_pointer_t<decltype(element)>;
        route_all(static_cast<const E*>(logits), router, weights, ids, tokens, row);
    });
}

}  // namespace opset
