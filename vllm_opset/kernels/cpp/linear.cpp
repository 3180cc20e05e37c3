// linear in fp32 for a few tokens: it reads the weight once for all of them, without packing. A quantised weight is read
// as it is stored.
#include "_stored.h"

namespace opset {
namespace {

constexpr int64_t BLOCK = 32;  // rows of the weight that one thread multiplies at a time
constexpr int64_t PREFETCH_DISTANCE = 64;   // elements of a row that are prefetched before they are needed
constexpr int64_t CHAIN = 256;  // products in one sequential sum, because rounding errors grow with its length

// Computes y[token][row] for ROWS rows of the weight and GROUPS * LANES tokens. x is [in, GROUPS * LANES].
template <int ROWS, int GROUPS>
inline void multiply(const float* x, const float* weight, const float* bias, float* y, int64_t tokens, int64_t in,
                     int64_t y_token) {
    Floats totals[ROWS][GROUPS];
    for (int row = 0; row < ROWS; row++)
        for (int group = 0; group < GROUPS; group++) totals[row][group] = Floats{} + (bias ? bias[row] : 0.0f);
    for (int64_t first = 0; first < in; first += CHAIN) {
        Floats sums[ROWS][GROUPS] = {};
        for (int64_t i = first; i < std::min(first + CHAIN, in); i++) {
            if (i % LANES == 0)
                for (int row = 0; row < ROWS; row++) prefetch(weight + row * in + i + PREFETCH_DISTANCE);
            for (int group = 0; group < GROUPS; group++) {
                const Floats inputs = load(x + (i * GROUPS + group) * LANES);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++) sums[row][group] += weight[row * in + i] * inputs;
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int group = 0; group < GROUPS; group++) totals[row][group] += sums[row][group];
    }
    for (int64_t token = 0; token < tokens; token++)
        for (int row = 0; row < ROWS; row++) y[token * y_token + row] = totals[row][token / LANES][token % LANES];
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

template <int GROUPS, class W>
void multiply_all(const float* x, const W& weight, const float* bias, float* y, int64_t tokens, int64_t in,
                  int64_t out, int64_t x_token) {
    constexpr int64_t ROWS = 12 / GROUPS;  // this many sums fit the registers and hide their latency
    std::vector<float> side_by_side(in * GROUPS * LANES);
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t i = 0; i < in; i++) side_by_side[i * GROUPS * LANES + token] = x[token * x_token + i];
    parallel_for(out, ROWS, out * in > WORTH_THREADS, [&](int64_t begin, int64_t end) {
        std::vector<float> buffer;
        const auto rows = weight.rows(ROWS, buffer);
        const auto part = [&](auto number, int64_t row) {
            constexpr int NUMBER = decltype(number)::value;
            multiply<NUMBER, GROUPS>(side_by_side.data(), rows(row, NUMBER), bias ? bias + row : nullptr, y + row,
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
    else if (tokens <= LANES) multiply_all<1>(x, weight, bias, y, tokens, in, out, x_token);
    else multiply_all<2>(x, weight, bias, y, tokens, in, out, x_token);
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
