// Both products of fused_experts. Each reads the weights of the experts that have tokens, once, where they are.
#include "_stored.h"

namespace opset {
namespace {

constexpr int64_t BLOCK = 32;  // rows of a weight that one thread multiplies for all experts

// The experts that the tokens of a step chose. Choice c belongs to token c / top_k. map: the place of each expert among
// those that are here, or null.
struct Choices {
    const int32_t *ids, *map;
    int64_t map_size, tokens, top_k, experts;

    int64_t number() const { return tokens * top_k; }

    // The place of a choice's expert; -1 for an absent one.
    int64_t place(int64_t choice) const {
        const int32_t id = ids[choice];
        return id < 0 || !map ? id : map[id];
    }

    // The first choice of an expert that does not exist, or -1.
    int64_t lost() const {
        const int64_t known = map ? map_size : experts;
        for (int64_t choice = 0; choice < number(); choice++)
            if (ids[choice] < -1 || ids[choice] >= known || place(choice) >= experts) return choice;
        return -1;
    }
};

// The choices sorted by expert. Those of expert e are order[first[e]] .. order[first[e + 1] - 1].
struct ByExpert {
    std::vector<int64_t> order, first;

    explicit ByExpert(const Choices& choices) : order(choices.number()), first(choices.experts + 2) {
        for (int64_t choice = 0; choice < choices.number(); choice++)
            if (const int64_t place = choices.place(choice); place >= 0) first[place + 2]++;
        for (int64_t place = 2; place <= choices.experts; place++) first[place] += first[place - 1];
        for (int64_t choice = 0; choice < choices.number(); choice++)
            if (const int64_t place = choices.place(choice); place >= 0) order[first[place + 1]++] = choice;
    }
};

// Calls f(choice, row, product) for the rows from `begin` to before `end` of the weights [experts, out, in] of all
// experts that have tokens. row_of(choice): the row of activations to multiply.
template <class E, class R, class F>
void multiply_experts(const ByExpert& sorted, int64_t experts, const Weight& weight, const E* bias, int64_t in,
                      int64_t out, int64_t begin, int64_t end, R row_of, F f) {
    std::vector<const E*> x;
    std::vector<E> buffer(weight.format == Format::PLAIN ? 0 : TILE * in);
    for (int64_t expert = 0; expert < experts; expert++) {
        const int64_t *choices = sorted.order.data() + sorted.first[expert];
        const int64_t tokens = sorted.first[expert + 1] - sorted.first[expert];
        if (!tokens) continue;
        x.resize(tokens);
        for (int64_t i = 0; i < tokens; i++) x[i] = row_of(choices[i]);
        const E* biases = bias ? bias + expert * out : nullptr;
        const auto result = [&](int64_t row, int64_t token, float product) {
            f(choices[token], row, biases ? product + widen(biases[row]) : product);
        };
        const auto multiply = [&](auto rows) { multiply_rows(rows, begin, end, x.data(), tokens, in, result); };
        if (weight.format != Format::PLAIN) multiply(StoredRows<E>{Stored(weight, out, in, expert), buffer.data()});
        else multiply(PlainRows<E>{reinterpret_cast<const E*>(weight.values) + expert * out * in, in});
    }
}

// Calls f(begin, end) for blocks of `out` rows, on several threads if there is enough to multiply.
template <class F>
void each_block(int64_t out, int64_t products, F f) {
#pragma omp parallel for schedule(dynamic) if (products > WORTH_THREADS)
    for (int64_t begin = 0; begin < out; begin += BLOCK) f(begin, std::min(begin + BLOCK, out));
}

template <class E>
void multiply_up(const Choices& choices, const E* x, const Weight& weight, const E* bias, E* y, int64_t in,
                 int64_t out, int64_t x_token) {
    const ByExpert sorted(choices);
    each_block(out, choices.number() * in * out, [&](int64_t begin, int64_t end) {
        multiply_experts(
            sorted, choices.experts, weight, bias, in, out, begin, end,
            [&](int64_t choice) { return x + choice / choices.top_k * x_token; },
            [&](int64_t choice, int64_t row, float value) { y[choice * out + row] = narrow<E>(value); });
    });
}

template <class E>
void multiply_down(const Choices& choices, const E* x, const Weight& weight, const E* bias, const float* weights,
                   const E* shared, E* y, int64_t in, int64_t out) {
    const ByExpert sorted(choices);
    each_block(out, choices.number() * in * out, [&](int64_t begin, int64_t end) {
        std::vector<float> totals(choices.tokens * BLOCK);
        multiply_experts(
            sorted, choices.experts, weight, bias, in, out, begin, end,
            [&](int64_t choice) { return x + choice * in; },
            [&](int64_t choice, int64_t row, float value) {
                totals[choice / choices.top_k * BLOCK + row - begin] += weights[choice] * value;
            });
        for (int64_t token = 0; token < choices.tokens; token++)
            for (int64_t row = begin; row < end; row++) {
                const float total = totals[token * BLOCK + row - begin];
                y[token * out + row] = narrow<E>(shared ? total + widen(shared[token * out + row]) : total);
            }
    });
}

}  // namespace

// x: [tokens, in] with row stride x_token. weight: [experts, out, in], as it is stored. bias: [experts, out] or null.
// y: [tokens, top_k, out]; rows of absent experts are left as they are. ids: [tokens, top_k], map: [map_size] or null.
// All others are contiguous. Returns the first choice of an expert that does not exist before anything is written,
// otherwise -1.
extern "C" int64_t experts_up(int64_t type, const void* x, const Weight* weight, const void* bias, void* y,
                              const int32_t* ids, const int32_t* map, int64_t map_size, int64_t tokens, int64_t top_k,
                              int64_t experts, int64_t in, int64_t out, int64_t x_token) {
    const Choices choices{ids, map, map_size, tokens, top_k, experts};
    if (const int64_t lost = choices.lost(); lost >= 0) return lost;
    with_type(type, [&](auto* element) {
        using E = std::remove_pointer_t<decltype(element)>;
        multiply_up(choices, static_cast<const E*>(x), *weight, static_cast<const E*>(bias),
                    static_cast<E*>(y), in, out, x_token);
    });
    return -1;
}

// As experts_up, for x: [tokens, top_k, in] and y: [tokens, out]. weights: [tokens, top_k], by which the results of a
// token are multiplied before they are added up. shared: [tokens, out], added to the sum, or null.
extern "C" void experts_down(int64_t type, const void* x, const Weight* weight, const void* bias, const float* weights,
                             const void* shared, void* y, const int32_t* ids, const int32_t* map, int64_t map_size,
                             int64_t tokens, int64_t top_k, int64_t experts, int64_t in, int64_t out) {
    const Choices choices{ids, map, map_size, tokens, top_k, experts};
    with_type(type, [&](auto* element) {
        using E = std::remove_pointer_t<decltype(element)>;
        multiply_down(choices, static_cast<const E*>(x), *weight, static_cast<const E*>(bias),
                      weights, static_cast<const E*>(shared), static_cast<E*>(y), in, out);
    });
}

}  // namespace opset
