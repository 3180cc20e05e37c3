// linear in bf16 with a packed weight: panels of LANES rows side by side, in pairs of columns.
#include "_vector.h"

namespace opset {
namespace {

// Panels, and tokens, that are multiplied at a time; panels for a single token. Their sums must fit the registers, and
// there must be enough of them to hide the latency of an addition.
#ifdef __AVX512F__
constexpr int PANELS = 4, TOKENS = 6, PANELS_OF_ONE = 8;
#else
constexpr int PANELS = 1, TOKENS = 4, PANELS_OF_ONE = 4;
#endif
constexpr int64_t WORTH_PRODUCTS = 32 * WORTH_THREADS;  // products that take as long as elements of other kernels

using Sums = PartFloats;
using Pairs = PartWords;  // two columns of a row each, the first in the low half

// Adds the products of both columns to the sums of the rows.
inline void add(Sums& sums, Pairs weight, uint32_t x) {
#ifdef __AVX512BF16__
    sums = Sums(_mm512_dpbf16_ps(__m512(sums), bits_of<__m512bh>(weight), bits_of<__m512bh>(Pairs{} + x)));
#else
    sums += bits_of<Sums>(weight << 16) * bits_of<float>(x << 16);
    sums += bits_of<Sums>(weight & 0xffff0000u) * bits_of<float>(x & 0xffff0000u);
#endif
}

// y[token][row] for the rows of P panels and T tokens.
template <int P, int T>
void multiply(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y, int64_t in, int64_t out,
              int64_t x_token) {
    Sums sums[T][P][PARTS] = {};
    for (int64_t column = 0; column < in; column += 2) {
        Pairs pairs[P][PARTS];
        for (int panel = 0; panel < P; panel++)
            std::memcpy(pairs[panel], weight + (panel * in + column) * LANES, sizeof pairs[panel]);
        for (int token = 0; token < T; token++) {
            uint32_t inputs;
            std::memcpy(&inputs, x + token * x_token + column, sizeof inputs);
            for (int panel = 0; panel < P; panel++)
                for (int part = 0; part < PARTS; part++) add(sums[token][panel][part], pairs[panel][part], inputs);
        }
    }
    for (int token = 0; token < T; token++)
        for (int panel = 0; panel < P; panel++) {
            Floats sum;
            std::memcpy(&sum, sums[token][panel], sizeof sum);
            if (bias) sum += load(bias + panel * LANES);
            store(y + token * out + panel * LANES, sum);
        }
}

// Calls f with `number` as a constant, which is at most MOST.
template <int MOST, class F>
void with_constant(int64_t number, F f) {
    if (number == MOST) f(std::integral_constant<int, MOST>());
    else if constexpr (MOST > 1) with_constant<MOST - 1>(number, f);
}

template <int MOST_PANELS, int MOST_TOKENS>
void multiply_all(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y, int64_t tokens,
                  int64_t in, int64_t out, int64_t x_token) {
#pragma omp parallel for schedule(static) if (tokens * in * out > WORTH_PRODUCTS)
    for (int64_t row = 0; row < out; row += MOST_PANELS * LANES)
        with_constant<MOST_PANELS>(std::min<int64_t>(MOST_PANELS, (out - row) / LANES), [&](auto panels) {
            for (int64_t token = 0; token < tokens; token += MOST_TOKENS)
                with_constant<MOST_TOKENS>(std::min<int64_t>(MOST_TOKENS, tokens - token), [&](auto number) {
                    multiply<decltype(panels)::value, decltype(number)::value>(
                        x + token * x_token, weight + row * in, bias ? bias + row : nullptr, y + token * out + row, in,
                        out, x_token);
                });
        });
}

}  // namespace

// x: [tokens, in] with row stride x_token. weight: [out / LANES, in / 2, LANES, 2]. y: [tokens, out]. bias: [out] or
// null. All but x are contiguous.
extern "C" void linear_bf16(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y,
                            int64_t tokens, int64_t in, int64_t out, int64_t x_token) {
    if (tokens == 1) multiply_all<PANELS_OF_ONE, 1>(x, weight, bias, y, tokens, in, out, x_token);
    else multiply_all<PANELS, TOKENS>(x, weight, bias, y, tokens, in, out, x_token);
}

}  // namespace opset
