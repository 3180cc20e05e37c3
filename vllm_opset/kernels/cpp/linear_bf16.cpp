// linear in bf16 with a packed weight: panels of LANES rows side by side, in pairs of columns. A quantised one is packed
// as it is stored.
#include "_stored_panels.h"

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
inline void add(Sums& sums, Pairs weight, Pairs x) {
#ifdef __AVX512BF16__
    sums = Sums(_mm512_dpbf16_ps(__m512(sums), bits_of<__m512bh>(weight), bits_of<__m512bh>(x)));
#else
    sums += bits_of<Sums>(weight << 16) * bits_of<Sums>(x << 16);
    sums += bits_of<Sums>(weight & 0xffff0000u) * bits_of<Sums>(x & 0xffff0000u);
#endif
}

// Panels of a weight in bf16.
struct PlainPanels {
    static constexpr int STEPS = 1;
    const bfloat16* weight;
    int64_t columns;

    struct Group {};

    int64_t group_columns() const { return columns; }
    void read(int64_t, int64_t, Group&) const {}

    template <int STEP>
    void pairs(int64_t panel, int64_t column, const Group&, Pairs (&to)[PARTS]) const {
        const bfloat16* from = weight + (panel * columns + column) * LANES;
        for (int part = 0; part < PARTS; part++) to[part] = load_words(from + 2 * PART * part);
    }
};

// Calls f with the constants from 0 to before NUMBER.
template <int NUMBER, class F>
inline void each_constant(F f) {
    if constexpr (NUMBER > 1) each_constant<NUMBER - 1>(f);
    f(std::integral_constant<int, NUMBER - 1>());
}

// Calls f(column, pairs) for all pairs of columns of P panels.
template <int P, class W, class F>
inline void each_pair(const W& weight, int64_t in, F f) {
    for (int64_t begin = 0, group = 0; begin < in; begin += weight.group_columns(), group++) {
        typename W::Group groups[P];
        for (int panel = 0; panel < P; panel++) weight.read(panel, group, groups[panel]);
        const int64_t end = std::min(in, begin + weight.group_columns());
        for (int64_t column = begin; column < end; column += 2 * W::STEPS)
            each_constant<W::STEPS>([&](auto step) {
                Pairs pairs[P][PARTS];
                for (int panel = 0; panel < P; panel++)
                    weight.template pairs<decltype(step)::value>(panel, column, groups[panel], pairs[panel]);
                f(column + 2 * step, pairs);
            });
    }
}

// y[token][row] for the rows of P panels and T tokens.
template <int P, int T, class W>
void multiply(const bfloat16* x, const W& weight, const bfloat16* bias, bfloat16* y, int64_t in, int64_t out,
              int64_t x_token) {
    Sums sums[T][P][PARTS] = {};
    each_pair<P>(weight, in, [&](int64_t column, const Pairs (&pairs)[P][PARTS]) {
        for (int token = 0; token < T; token++) {
            uint32_t pair;
            std::memcpy(&pair, x + token * x_token + column, sizeof pair);
            const Pairs inputs = Pairs{} + pair;
            for (int panel = 0; panel < P; panel++)
                for (int part = 0; part < PARTS; part++) add(sums[token][panel][part], pairs[panel][part], inputs);
        }
    });
    for (int token = 0; token < T; token++)
        for (int panel = 0; panel < P; panel++) {
            Floats sum = joined(sums[token][panel]);
            if (bias) sum += load(bias + panel * LANES);
            store(y + token * out + panel * LANES, sum);
        }
}

// panels_at(row): the panels from this row on. dequantise(row, panels): the same in bf16, for more tokens than are
// multiplied at a time.
template <int MOST_PANELS, int MOST_TOKENS, class A, class D>
void multiply_all(const bfloat16* x, A panels_at, D dequantise, const bfloat16* bias, bfloat16* y, int64_t tokens,
                  int64_t in, int64_t out, int64_t x_token) {
    const auto multiply_panels = [&](int64_t row, auto panels) {
        const auto all_tokens = [&](const auto& weight) {
            for (int64_t token = 0; token < tokens; token += MOST_TOKENS)
                with_constant<MOST_TOKENS>(std::min<int64_t>(MOST_TOKENS, tokens - token), [&](auto number) {
                    multiply<decltype(panels)::value, decltype(number)::value>(
                        x + token * x_token, weight, bias ? bias + row : nullptr, y + token * out + row, in, out,
                        x_token);
                });
        };
        if (tokens <= MOST_TOKENS) all_tokens(panels_at(row));
        else all_tokens(dequantise(row, panels));
    };
    constexpr int64_t ROWS = MOST_PANELS * LANES;
    parallel_for(out, ROWS, tokens * in * out > WORTH_PRODUCTS, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row += ROWS)
            with_constant<MOST_PANELS>(std::min<int64_t>(MOST_PANELS, (end - row) / LANES),
                                       [&](auto panels) { multiply_panels(row, panels); });
    });
}

template <class A, class D>
void multiply_any(const bfloat16* x, A panels_at, D dequantise, const bfloat16* bias, bfloat16* y, int64_t tokens,
                  int64_t in, int64_t out, int64_t x_token) {
    if (tokens == 1) multiply_all<PANELS_OF_ONE, 1>(x, panels_at, dequantise, bias, y, tokens, in, out, x_token);
    else multiply_all<PANELS, TOKENS>(x, panels_at, dequantise, bias, y, tokens, in, out, x_token);
}

// Panels in bf16 that were dequantised, in a buffer of the thread.
template <int P, class W>
PlainPanels dequantised(const W& weight, int64_t in) {
    thread_local std::vector<bfloat16> buffer;
    buffer.resize(PANELS * LANES * in);
    each_pair<P>(weight, in, [&](int64_t column, const Pairs (&pairs)[P][PARTS]) {
        for (int panel = 0; panel < P; panel++)
            std::memcpy(buffer.data() + (panel * in + column) * LANES, pairs[panel], sizeof pairs[panel]);
    });
    return {buffer.data(), in};
}

template <Format F>
void multiply_stored(const bfloat16* x, const Stored& stored, const bfloat16* bias, bfloat16* y, int64_t tokens,
                     int64_t in, int64_t out, int64_t x_token) {
    const auto panels_at = [&](int64_t row) { return StoredPanels<F>{stored, row}; };
    const auto dequantise = [&](int64_t row, auto panels) {
        return dequantised<std::min(decltype(panels)::value, PANELS)>(panels_at(row), in);
    };
    multiply_any(x, panels_at, dequantise, bias, y, tokens, in, out, x_token);
}

}  // namespace

// x: [tokens, in] with row stride x_token. weight: [out / LANES, in / 2, LANES, 2]. y: [tokens, out]. bias: [out] or
// null. All but x are contiguous.
extern "C" void linear_bf16(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y,
                            int64_t tokens, int64_t in, int64_t out, int64_t x_token) {
    const auto panels_at = [&](int64_t row) { return PlainPanels{weight + row * in, in}; };
    multiply_any(x, panels_at, [&](int64_t row, auto) { return panels_at(row); }, bias, y, tokens, in, out, x_token);
}

// Whether the processor rounds to bf16 and multiplies in it. Without, rounding takes longer than reading bf16.
extern "C" int64_t multiplies_bf16() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// As linear_bf16, for a quantised weight in panels (_stored_panels.h).
extern "C" void linear_bf16_stored(const bfloat16* x, const Weight* weight, const bfloat16* bias, bfloat16* y,
                                   int64_t tokens, int64_t in, int64_t out, int64_t x_token) {
    const Stored stored(*weight, out, in);
    const auto run = [&](auto format) {
        multiply_stored<decltype(format)::value>(x, stored, bias, y, tokens, in, out, x_token);
    };
    if (weight->format == Format::FP8) run(std::integral_constant<Format, Format::FP8>());
    else if (weight->format == Format::INT8) run(std::integral_constant<Format, Format::INT8>());
    else run(std::integral_constant<Format, Format::UINT4>());
}

}  // namespace opset
