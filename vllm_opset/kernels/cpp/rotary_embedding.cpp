// rotary_embedding, in place.
#include "_types.h"

namespace opset {
namespace {

// Pair i of a head is elements (i, i + half) in NeoX style, (2i, 2i + 1) otherwise.
template <bool NEOX, class E, class C>
inline void rotate(E* head, const C* cos, const C* sin, int64_t half) {
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
void rotate_all(E* x, const int64_t* positions, const C* table, int64_t tokens, int64_t heads, int64_t x_token,
                int64_t x_head, int64_t half, bool neox) {
#pragma omp parallel for schedule(static) if (tokens * heads * half > WORTH_THREADS)
    for (int64_t token = 0; token < tokens; token++) {
        const C* cos = table + positions[token] * 2 * half;
        for (int64_t head = 0; head < heads; head++) {
            E* at = x + token * x_token + head * x_head;
            if (neox) rotate<true>(at, cos, cos + half, half);
            else rotate<false>(at, cos, cos + half, half);
        }
    }
}

}  // namespace

// x: [tokens, heads, ...] with strides. table: [rows, 2 * half], contiguous. If the position of a token is not a row of
// the table, returns the first such token before it rotates anything; otherwise returns -1.
extern "C" int64_t rotary_embedding(int64_t type, int64_t table_type, void* x, const int64_t* positions,
                                    const void* table, int64_t rows, int64_t tokens, int64_t heads, int64_t x_token,
                                    int64_t x_head, int64_t half, int64_t neox) {
    for (int64_t token = 0; token < tokens; token++)
        if (positions[token] < 0 || positions[token] >= rows) return token;
    with_type(type, [&](auto* element) {
        using E = std::remove_pointer_t<decltype(element)>;
        with_type(table_type, [&](auto* of_table) {
            using C = std::remove_pointer_t<decltype(of_table)>;
            rotate_all(static_cast<E*>(x), positions, static_cast<const C*>(table), tokens, heads, x_token, x_head,
                       half, neox != 0);
        });
    });
    return -1;
}

}  // namespace opset
