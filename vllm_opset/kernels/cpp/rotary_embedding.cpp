// rotary_embedding, in place.
#include "_rotate.h"

namespace opset {
namespace {

template <class E, class C>
void rotate_all(E* x, const int64_t* positions, const C* table, int64_t tokens, int64_t heads, int64_t x_token,
                int64_t x_head, int64_t half, bool neox) {
    parallel_for(tokens, 1, tokens * heads * half > WORTH_THREADS, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            const C* cos = table + positions[token] * 2 * half;
            for (int64_t head = 0; head < heads; head++)
                rotate(x + token * x_token + head * x_head, cos, cos + half, half, neox);
        }
    });
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
