// Products of rows of a weight with rows of activations. Both are read along their length, so that nothing is packed.
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "_vector.h"

namespace opset {

// Rows of the weight, and rows of activations, that are multiplied at a time. Their sums must fit the registers.
#ifdef __AVX512F__
constexpr int TILE = 4;
#else
constexpr int TILE = 2;
#endif

// The elements of a row that one instruction multiplies and adds to LANES sums.
template <class E>
struct Step {
    using Vector = Floats;
    static constexpr int ELEMENTS = LANES;
    static void add(Floats& sums, Vector a, Vector b) { sums += a * b; }
    static Vector take(const E* from) { return load(from); }
};

#ifdef __AVX512BF16__
template <>
struct Step<bfloat16> {
    using Vector = __m512bh;
    static constexpr int ELEMENTS = 2 * LANES;
    static void add(Floats& sums, Vector a, Vector b) { sums = Floats(_mm512_dpbf16_ps(__m512(sums), a, b)); }
    static Vector take(const bfloat16* from) {
        Vector elements;
        std::memcpy(&elements, from, sizeof elements);
        return elements;
    }
};
#endif

// The first `number` elements, and zeros after them.
template <class E>
inline auto take_some(const E* from, int64_t number) {
    E elements[Step<E>::ELEMENTS] = {};
    std::memcpy(elements, from, number * sizeof(E));
    return Step<E>::take(elements);
}

// Lane row * TOKENS + token of the result is weight[row] . x[token]. The rows of the weight follow each other.
template <int ROWS, int TOKENS, class E>
inline Floats dot_products(const E* weight, const E* const* x, int64_t size) {
    using S = Step<E>;
    Floats products[LANES] = {};
    const auto step = [&](auto take, int64_t at) {
        typename S::Vector inputs[TOKENS];
        for (int token = 0; token < TOKENS; token++) inputs[token] = take(x[token] + at);
        for (int row = 0; row < ROWS; row++) {
            const auto elements = take(weight + row * size + at);
            for (int token = 0; token < TOKENS; token++)
                S::add(products[row * TOKENS + token], elements, inputs[token]);
        }
    };
    int64_t at = 0;
    for (; at + S::ELEMENTS <= size; at += S::ELEMENTS) {
        for (int row = 0; row < ROWS; row++) __builtin_prefetch(weight + (ROWS + row) * size + at);
        step(S::take, at);
    }
    if (at < size) step([&](const E* from) { return take_some(from, size - at); }, at);
    return sums(products);
}

// Calls f(row, token, product) for `rows` rows of a weight and `tokens` rows of activations.
template <class E, class F>
void multiply_rows(const E* weight, int64_t rows, const E* const* x, int64_t tokens, int64_t size, F f) {
    const auto tile = [&](auto height, auto width, int64_t row, int64_t token) {
        constexpr int ROWS = decltype(height)::value, TOKENS = decltype(width)::value;
        const Floats products = dot_products<ROWS, TOKENS>(weight + row * size, x + token, size);
        for (int r = 0; r < ROWS; r++)
            for (int t = 0; t < TOKENS; t++) f(row + r, token + t, products[r * TOKENS + t]);
    };
    const auto all_tokens = [&](auto height, int64_t row) {
        int64_t token = 0;
        for (; token + TILE <= tokens; token += TILE) tile(height, std::integral_constant<int, TILE>(), row, token);
        switch (tokens - token) {
            case 1: tile(height, std::integral_constant<int, 1>(), row, token); break;
            case 2: tile(height, std::integral_constant<int, 2>(), row, token); break;
            case 3: tile(height, std::integral_constant<int, 3>(), row, token); break;
        }
    };
    int64_t row = 0;
    for (; row + TILE <= rows; row += TILE) all_tokens(std::integral_constant<int, TILE>(), row);
    for (; row < rows; row++) all_tokens(std::integral_constant<int, 1>(), row);
}

}  // namespace opset
