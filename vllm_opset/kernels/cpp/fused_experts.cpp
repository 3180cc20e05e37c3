// Both products of fused_experts. Each reads the weights of the experts that have tokens, once, where they are.
#include "_stored.h"

namespace opset {
namespace {

constexpr int64_t BLOCK = 32;  // rows of a weight; a thread multiplies a multiple of them for all experts

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

// The choices sorted by expert. Those of expert e are order[first[e]] .. order[first[e + 1] - 1]. used: the experts that
// have tokens.
struct ByExpert {
    std::vector<int64_t> order, first, used;

    explicit ByExpert(const Choices& choices) : order(choices.number()), first(choices.experts + 2) {
        for (int64_t choice = 0; choice < choices.number(); choice++)
            if (const int64_t place = choices.place(choice); place >= 0) first[place + 2]++;
        for (int64_t place = 0; place < choices.experts; place++)
            if (first[place + 2]) used.push_back(place);
        for (int64_t place = 2; place <= choices.experts; place++) first[place] += first[place - 1];
        for (int64_t choice = 0; choice < choices.number(); choice++)
            if (const int64_t place = choices.place(choice); place >= 0) order[first[place + 1]++] = choice;
    }
};

// A product by experts: weight [experts, out, in], bias [experts, out] or null.
template <class E>
struct Product {
    const ByExpert& sorted;
    const Weight& weight;
    const E* bias;
    int64_t in, out;

    const E* rows(int64_t expert, int64_t row) const {
        return reinterpret_cast<const E*>(weight.values) + (expert * out + row) * in;
    }

    // Calls f(choice, row, product) for the rows from `begin` to before `end` of sorted.used[at]. row_of(choice): the row
    // of activations to multiply. next: the row of the next of these experts that is multiplied afterwards.
    template <class R, class F>
    void multiply(int64_t at, int64_t begin, int64_t end, int64_t next, R row_of, F f) const {
        const int64_t expert = sorted.used[at], after = sorted.used[std::min<int64_t>(at + 1, sorted.used.size() - 1)];
        const int64_t* choices = sorted.order.data() + sorted.first[expert];
        const int64_t tokens = sorted.first[expert + 1] - sorted.first[expert];
        std::vector<const E*> x(tokens);
        for (int64_t i = 0; i < tokens; i++) x[i] = row_of(choices[i]);
        const E* biases = bias ? bias + expert * out : nullptr;
        const auto result = [&](int64_t row, int64_t token, float product) {
            f(choices[token], row, biases ? product + widen(biases[row]) : product);
        };
        if (weight.format == Format::PLAIN) {
            const PlainRows<E> plain{rows(expert, 0), in, end, rows(after, next)};
            multiply_rows(plain, begin, end, x.data(), tokens, in, result);
        } else {
            std::vector<E> buffer(TILE * in);
            const StoredRows<E> stored{Stored(weight, out, in, expert), buffer.data()};
            multiply_rows(stored, begin, end, x.data(), tokens, in, result);
        }
    }
};

template <class E>
void multiply_up(const Choices& choices, const E* x, const Weight& weight, const E* bias, E* y, int64_t in,
                 int64_t out, int64_t x_token) {
    const ByExpert sorted(choices);
    const Product<E> product{sorted, weight, bias, in, out};
    const bool worth = choices.number() * in * out > WORTH_THREADS;
    // The rows of all experts follow each other, so that a thread reads long parts of a weight.
    parallel_for(sorted.used.size() * out, BLOCK, worth, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row += out - row % out)
            product.multiply(
                row / out, row % out, std::min(out, row % out + end - row), 0,
                [&](int64_t choice) { return x + choice / choices.top_k * x_token; },
                [&](int64_t choice, int64_t row, float value) { y[choice * out + row] = narrow<E>(value); });
    });
}

template <class E>
void multiply_down(const Choices& choices, const E* x, const Weight& weight, const E* bias, const float* weights,
                   const E* shared, E* y, int64_t in, int64_t out) {
    const ByExpert sorted(choices);
    const Product<E> product{sorted, weight, bias, in, out};
    const bool worth = choices.number() * in * out > WORTH_THREADS;
    // A thread has the same rows of all experts, since it adds up their results.
    parallel_for(out, BLOCK, worth, [&](int64_t begin, int64_t end) {
        const int64_t rows = end - begin;
        std::vector<float> totals(choices.tokens * rows);
        for (size_t at = 0; at < sorted.used.size(); at++)
            product.multiply(
                at, begin, end, begin, [&](int64_t choice) { return x + choice * in; },
                [&](int64_t choice, int64_t row, float value) {
                    totals[choice / choices.top_k * rows + row - begin] += weights[choice] * value;
                });
        for (int64_t token = 0; token < choices.tokens; token++)
            for (int64_t row = begin; row < end; row++) {
                const float total = totals[token * rows + row - begin];
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
