// Quantised weights in panels, dequantised in registers to the pairs of columns that linear_bf16.cpp multiplies.
#pragma once

#include "_stored.h"

namespace opset {

// Two neighbouring columns of LANES rows as they are stored: 32 bytes, a row's first column before its second one. With
// two values a byte, the low bits hold these columns, and the high ones the two columns after them.
template <Format F>
struct StoredPanels {
    static constexpr int STEPS = F == Format::UINT4 ? 2 : 1;  // pairs of columns in 32 bytes
    static constexpr int VECTORS = 2 * PARTS;
    const Stored& stored;
    int64_t first_row;

    // What all rows of a panel have in a group of columns, twice for each row.
    struct Group {
        PartFloats scales[VECTORS], zero_points[VECTORS];
    };

    int64_t group_columns() const { return stored.group_columns; }

    void read(int64_t panel, int64_t group, Group& to) const {
        float scales[LANES], zero_points[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t row = first_row + panel * LANES + lane;
            // Rows of int4 have scales of their own, and many of them, so that a division would take time.
            const int64_t scale_row = F == Format::UINT4 ? row : row / stored.group_rows;
            const int64_t at = scale_row * stored.weight.scale_columns + group;
            scales[lane] = stored.template scale<F>(at);
            if (F == Format::UINT4) zero_points[lane] = stored.weight.zero_points ? stored.weight.zero_points[at] : 8;
        }
        twice(load(scales) * Decode<F>::FACTOR, to.scales);
        if (F == Format::UINT4) twice(load(zero_points), to.zero_points);
    }

    static void twice(Floats values, PartFloats (&to)[VECTORS]) {
        const Floats both[] = {
            __builtin_shufflevector(values, values, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
            __builtin_shufflevector(values, values, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15)};
        std::memcpy(to, both, sizeof both);
    }

    // The pair of columns that is `step` after the one at `column`.
    template <int STEP>
    void pairs(int64_t panel, int64_t column, const Group& group, PartWords (&to)[PARTS]) const {
        const int64_t row = first_row + panel * LANES;
        const uint8_t* from = stored.weight.values + row * stored.row_bytes + column * LANES / STEPS;
        __builtin_prefetch(from + PREFETCH_BYTES);
        PartFloats values[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            const PartIntegers bytes = integers(reinterpret_cast<const int8_t*>(from + i * PART));
            if (F == Format::FP8) values[i] = bits_of<PartFloats>((bytes << 20) & int32_t(0x87f00000));
            else if (F == Format::INT8) values[i] = numbers(bytes);
            else values[i] = numbers((STEP ? bytes >> 4 : bytes) & 15) - group.zero_points[i];
            values[i] *= group.scales[i];
        }
#ifdef __AVX512BF16__
        to[0] = bits_of<PartWords>(_mm512_cvtne2ps_pbh(__m512(values[1]), __m512(values[0])));
#else
        bfloat16 rounded[2 * LANES];
        for (int i = 0; i < VECTORS; i++) store_weights(rounded + i * PART, values[i]);
        std::memcpy(to, rounded, sizeof rounded);
#endif
    }

    static constexpr int64_t PREFETCH_BYTES = 1024;
};

}  // namespace opset
