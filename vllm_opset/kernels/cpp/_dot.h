// Products of rows of a weight with rows of activations. Both are read along their length, so that nothing is packed.
#pragma once

#include "_vector.h"

namespace opset {

// Rows of the weight, and rows of activations, that are multiplied at a time. Their sums must fit the registers.
#ifdef __AVX512F__
constexpr int TILE = 4;
#else
constexpr int TILE = 2;
#endif

// Rows that are fetched from memory are multiplied so many tiles later: a short row takes less time than a fetch.
constexpr int PREFETCHED = 2;

// The elements of a row that one instruction multiplies and adds to LANES sums.
template <class E>
struct Step {
    struct Vector {
        PartFloats parts[PARTS];
    };
    static constexpr int ELEMENTS = LANES;
    static void add(PartFloats (&sums)[PARTS], Vector a, Vector b) {
        for (int part = 0; part < PARTS; part++) sums[part] += a.parts[part] * b.parts[part];
    }
    static Vector take(const E* from) {
        Vector elements;
        for (int part = 0; part < PARTS; part++) elements.parts[part] = load_part(from + part * PART);
        return elements;
    }
};

#ifdef __AVX512BF16__
template <>
struct Step<bfloat16> {
    using Vector = __m512bh;
    static constexpr int ELEMENTS = 2 * LANES;
    static void add(PartFloats (&sums)[PARTS], Vector a, Vector b) {
        sums[0] = PartFloats(_mm512_dpbf16_ps(__m512(sums[0]), a, b));
    }
    static Vector take(const bfloat16* from) {
        Vector elements;
        std::memcpy(&elements, from, sizeof elements);
        return elements;
    }
};
#elif !defined(__AVX512F__)
// The elements of even places and those of odd ones: two instructions widen both. Products are added in any order.
template <>
inline Step<bfloat16>::Vector Step<bfloat16>::take(const bfloat16* from) {
    const PartWords pairs = load_words(from);
    return {{bits_of<PartFloats>(pairs << 16), bits_of<PartFloats>(pairs & 0xffff0000u)}};
}
#endif

// The first `number` elements, and zeros after them.
template <class E>
inline auto take_some(const E* from, int64_t number) {
    E elements[Step<E>::ELEMENTS] = {};
    std::memcpy(elements, from, number * sizeof(E));
    return Step<E>::take(elements);
}

// Lane row * TOKENS + token of the result is weight[row] . x[token]. The rows of the weight follow each other. beside(at)
// is called at each step, which begins at this column.
template <int ROWS, int TOKENS, class E, class F>
inline PartFloats dot_products(const E* weight, const E* const* x, int64_t size, F beside) {
    using S = Step<E>;
    PartFloats partial[ROWS * TOKENS][PARTS] = {};
    const auto step = [&](auto take, int64_t at) {
        typename S::Vector inputs[TOKENS];
        for (int token = 0; token < TOKENS; token++) inputs[token] = take(x[token] + at);
        for (int row = 0; row < ROWS; row++) {
            const auto elements = take(weight + row * size + at);
            for (int token = 0; token < TOKENS; token++)
                S::add(partial[row * TOKENS + token], elements, inputs[token]);
        }
    };
    int64_t at = 0;
    for (; at + S::ELEMENTS <= size; at += S::ELEMENTS) {
        beside(at);
        step(S::take, at);
    }
    if (at < size) step([&](const E* from) { return take_some(from, size - at); }, at);
    PartFloats products[PART] = {};
    for (int i = 0; i < ROWS * TOKENS; i++) {
        products[i] = partial[i][0];
        for (int part = 1; part < PARTS; part++) products[i] += partial[i][part];
    }
    return sums(products);
}

// Rows of a weight that is multiplied where it is. From row `end` on, rows from `next` on are multiplied afterwards.
template <class E>
struct PlainRows {
    const E* weight;
    int64_t size, end;
    const E* next;

    const E* operator()(int64_t row, int64_t) const { return weight + row * size; }

    // Fetches a step of the rows that are multiplied some tiles later.
    template <int ROWS>
    ALWAYS_INLINE void fetch(int64_t row, int64_t at) const {
        row += PREFETCHED * ROWS;
        const E* from = row < end ? weight + row * size : next + (row - end) * size;
        for (int i = 0; i < ROWS; i++) prefetch(from + i * size + at);
    }
};

// Calls f(row, token, product) for the rows of a weight from `begin` to before `end` and `tokens` rows of activations.
// rows(row, number): that many rows of the weight, which follow each other.
template <class E, class R, class F>
void multiply_rows(R rows, int64_t begin, int64_t end, const E* const* x, int64_t tokens, int64_t size, F f) {
    const auto tile = [&](auto height, auto width, const E* weight, int64_t row, int64_t token) {
        constexpr int ROWS = decltype(height)::value, TOKENS = decltype(width)::value;
        const auto fetch = [&](int64_t at) ALWAYS_INLINE { rows.template fetch<ROWS>(row, at); };
        const PartFloats products = dot_products<ROWS, TOKENS>(weight, x + token, size, fetch);
        for (int r = 0; r < ROWS; r++)
            for (int t = 0; t < TOKENS; t++) f(row + r, token + t, products[r * TOKENS + t]);
    };
    const auto all_tokens = [&](auto height, int64_t row) {
        const E* weight = rows(row, decltype(height)::value);
        int64_t token = 0;
        for (; token + TILE <= tokens; token += TILE)
            tile(height, std::integral_constant<int, TILE>(), weight, row, token);
        switch (tokens - token) {
            case 1: tile(height, std::integral_constant<int, 1>(), weight, row, token); break;
            case 2: tile(height, std::integral_constant<int, 2>(), weight, row, token); break;
            case 3: tile(height, std::integral_constant<int, 3>(), weight, row, token); break;
        }
    };
    int64_t row = begin;
    for (; row + TILE <= end; row += TILE) all_tokens(std::integral_constant<int, TILE>(), row);
    for (; row < end; row++) all_tokens(std::integral_constant<int, 1>(), row);
}

}  // namespace opset
