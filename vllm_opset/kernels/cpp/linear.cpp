// linear in fp32 for a few tokens: it reads the weight once for all of them, without packing. A quantised weight is read
// as it is stored.
#include "_stored.h"

namespace opset {
namespace {

constexpr int64_t BLOCK = 32;  // rows of the weight that one thread multiplies at a time
constexpr int64_t PREFETCH_DISTANCE = 64;   // elements of a row that are prefetched before they are needed
constexpr int64_t CHAIN = 256;  // products in one sequential sum, because rounding errors grow with its length

// Computes y[token][row] for ROWS rows of the weight and VECTORS * PART tokens. x is [in, VECTORS * PART].
template <int ROWS, int VECTORS>
inline void multiply(const float* x, const float* weight, const float* bias, float* y, int64_t tokens, int64_t in,
                     int64_t y_token) {
    PartFloats totals[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int at = 0; at < VECTORS; at++) totals[row][at] = PartFloats{} + (bias ? bias[row] : 0.0f);
    for (int64_t first = 0; first < in; first += CHAIN) {
        PartFloats sums[ROWS][VECTORS] = {};
        for (int64_t i = first; i < std::min(first + CHAIN, in); i++) {
            if (i % LANES == 0)
                for (int row = 0; row < ROWS; row++) prefetch(weight + row * in + i + PREFETCH_DISTANCE);
            for (int at = 0; at < VECTORS; at++) {
                const PartFloats inputs = load_part(x + (i * VECTORS + at) * PART);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++) sums[row][at] += weight[row * in + i] * inputs;
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int at = 0; at < VECTORS; at++) totals[row][at] += sums[row][at];
    }
    for (int64_t token = 0; token < tokens; token++)
        for (int row = 0; row < ROWS; row++) y[token * y_token + row] = totals[row][token / PART][token % PART];
}

// The rows of a weight for one thread, which asks for at most `number` at a time.
struct Plain {
    const float* weight;
    int64_t in, out;

    PlainRows<float> rows(int64_t, std::vector<float>&) const { return {weight, in, out, weight}; }
};

struct Quantised {
    Stored stored;

    StoredRows<float> rows(int64_t number, std::vector<float>& buffer) const {
        buffer.resize(number * stored.columns);
        return {stored, buffer.data()};
    }
};

template <int VECTORS, class W>
void multiply_all(const float* x, const W& weight, const float* bias, float* y, int64_t tokens, int64_t in,
                  int64_t out, int64_t x_token) {
    constexpr int64_t ROWS = 12 / VECTORS;  // twelve sums fit the registers and hide their latency
    std::vector<float> side_by_side(in * VECTORS * PART);
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t i = 0; i < in; i++) side_by_side[i * VECTORS * PART + token] = x[token * x_token + i];
    parallel_for(out, ROWS, out * in > WORTH_THREADS, [&](int64_t begin, int64_t end) {
        std::vector<float> buffer;
        const auto rows = weight.rows(ROWS, buffer);
        const auto part = [&](auto number, int64_t row) {
            constexpr int NUMBER = decltype(number)::value;
            multiply<NUMBER, VECTORS>(side_by_side.data(), rows(row, NUMBER), bias ? bias + row : nullptr, y + row,
                                      tokens, in, out);
        };
        for (int64_t first = begin; first < end; first += ROWS) {
            if (first + ROWS <= end) part(std::integral_constant<int, ROWS>(), first);
            else
                for (int64_t row = first; row < end; row++) part(std::integral_constant<int, 1>(), row);
        }
    });
}

// For so few tokens that lanes for each of them would be idle.
template <class W>
void multiply_along_rows(const float* x, const W& weight, const float* bias, float* y, int64_t tokens, int64_t in,
                         int64_t out, int64_t x_token) {
    std::vector<const float*> inputs(tokens);
    for (int64_t token = 0; token < tokens; token++) inputs[token] = x + token * x_token;
    parallel_for(out, BLOCK, out * in > WORTH_THREADS, [&](int64_t begin, int64_t end) {
        std::vector<float> buffer;
        multiply_rows(weight.rows(TILE, buffer), begin, end, inputs.data(), tokens, in,
                      [&](int64_t row, int64_t token, float product) {
                          y[token * out + row] = bias ? product + bias[row] : product;
                      });
    });
}

template <class W>
void multiply_any(const float* x, const W& weight, const float* bias, float* y, int64_t tokens, int64_t in,
                  int64_t out, int64_t x_token) {
    if (tokens <= LANES / 2) multiply_along_rows(x, weight, bias, y, tokens, in, out, x_token);
    else
        with_constant<2 * PARTS>((tokens + PART - 1) / PART, [&](auto vectors) {
            multiply_all<decltype(vectors)::value>(x, weight, bias, y, tokens, in, out, x_token);
        });
}

}  // namespace

// x: [tokens, in] with at most 2 * LANES rows and row stride x_token. weight: [out, in], y: [tokens, out], both
// contiguous. bias: [out], contiguous, or null.
extern "C" void linear(const float* x, const float* weight, const float* bias, float* y, int64_t tokens, int64_t in,
                       int64_t out, int64_t x_token) {
    multiply_any(x, Plain{weight, in, out}, bias, y, tokens, in, out, x_token);
}

// As linear, for a quantised weight.
extern "C" void linear_stored(const float* x, const Weight* weight, const float* bias, float* y, int64_t tokens,
                              int64_t in, int64_t out, int64_t x_token) {
    multiply_any(x, Quantised{Stored(*weight, out, in)}, bias, y, tokens, in, out, x_token);
}

// The rows from `begin` to before `end` of a quantised weight [out, in], dequantised.
extern "C" void dequantise_rows(const Weight* weight, float* to, int64_t begin, int64_t end, int64_t in, int64_t out) {
    const Stored stored(*weight, out, in);
    parallel_for(end - begin, 1, (end - begin) * in > WORTH_THREADS, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) stored.read(begin + row, to + row * in);
    });
}

}  // namespace opset
