// Rows of a quantised matrix, as it is stored (ops/schemes.py says how), dequantised into the cache where they are
// multiplied. Each value times its scale is computed in fp32 and rounded to the element type once.
#pragma once

#include "_dot.h"

namespace opset {

enum class Format : int64_t { PLAIN, FP8, INT8, UINT4, FP4 };

// As `Weight` of _stored.py. scales, [scale_rows, scale_columns], are of scale_type, and of FP4 bytes of e8m0.
// zero_points: bytes of their shape, or null. If there are several experts, theirs follow each other.
struct Weight {
    const uint8_t* values;
    const void* scales;
    const uint8_t* zero_points;
    Format format;
    int64_t scale_type, scale_rows, scale_columns;
};

typedef int8_t Bytes __attribute__((vector_size(16)));

inline Bytes load_bytes(const uint8_t* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

inline PartFloats numbers(PartIntegers values) { return __builtin_convertvector(values, PartFloats); }

inline void store_weights(float* to, PartFloats values) { store_part(to, values); }

// Rounds as `narrow` does.
inline void store_weights(bfloat16* to, PartFloats values) {
#ifdef __AVX512BF16__
    const auto rounded = _mm512_cvtneps_pbh(__m512(values));  // subnormals become 0, as where they are multiplied
#else
    const PartWords wide = bits_of<PartWords>(values), even = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    const PartHalves rounded = __builtin_convertvector(values == values ? even : PartWords{} + 0x7fc0, PartHalves);
#endif
    std::memcpy(to, &rounded, sizeof rounded);
}

inline PartIntegers integers(const int8_t* from) {
#if defined(__AVX512F__)
    return PartIntegers(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return PartIntegers(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    PartIntegers values;
    for (int i = 0; i < PART; i++) values[i] = from[i];
    return values;
#endif
}

// Writes 16 elements: f of 16 bytes as integers.
template <class E, class F>
inline void write_weights(E* to, Bytes stored, F f) {
    int8_t bytes[LANES];
    std::memcpy(bytes, &stored, sizeof bytes);
    for (int part = 0; part < PARTS; part++) store_weights(to + part * PART, f(integers(bytes + part * PART)));
}

// Twice the values of e2m1, which are integers.
inline Bytes doubled_e2m1(Bytes nibbles) {
    constexpr Bytes DOUBLED = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#ifdef __clang__
    Bytes values;
    for (int i = 0; i < LANES; i++) values[i] = DOUBLED[nibbles[i]];
    return values;
#else
    return __builtin_shuffle(DOUBLED, nibbles);
#endif
}

// How 16 bytes of a format become VALUES elements. The scale of a group is multiplied by FACTOR first.
template <Format F>
struct Decode;

template <>
struct Decode<Format::INT8> {
    static constexpr int VALUES = LANES;
    static constexpr float FACTOR = 1.0f;
    template <class E>
    static void write(E* to, Bytes stored, float scale, float) {
        write_weights(to, stored, [&](PartIntegers values) { return numbers(values) * scale; });
    }
};

template <>
struct Decode<Format::FP8> {
    static constexpr int VALUES = LANES;
    // The exponent of e4m3, taken for one of fp32, is too small by this. Subnormals stay right. _stored.py keeps no
    // NaNs, and no scales that would overflow.
    static constexpr float FACTOR = 0x1p120f;
    template <class E>
    static void write(E* to, Bytes stored, float scale, float) {
        // The sign fills all bits above the exponent; the mask keeps one of them.
        write_weights(to, stored, [&](PartIntegers bits) {
            return bits_of<PartFloats>((bits << 20) & int32_t(0x87f00000)) * scale;
        });
    }
};

template <>
struct Decode<Format::UINT4> {
    static constexpr int VALUES = 2 * LANES;
    static constexpr float FACTOR = 1.0f;
    template <class E>
    static void write(E* to, Bytes stored, float scale, float zero_point) {
        typedef uint8_t Unsigned __attribute__((vector_size(16)));
        const auto value = [&](PartIntegers nibbles) { return (numbers(nibbles) - zero_point) * scale; };
        write_weights(to, stored & 15, value);
        write_weights(to + LANES, Bytes(Unsigned(stored) >> 4), value);
    }
};

template <>
struct Decode<Format::FP4> {
    static constexpr int VALUES = 2 * LANES;
    static constexpr float FACTOR = 0.5f;
    template <class E>
    static void write(E* to, Bytes stored, float scale, float) {
        typedef uint8_t Unsigned __attribute__((vector_size(16)));
        const Bytes low = doubled_e2m1(stored & 15), high = doubled_e2m1(Bytes(Unsigned(stored) >> 4));
        const auto first = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const auto last =
            __builtin_shufflevector(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        const auto value = [&](PartIntegers doubled) { return numbers(doubled) * scale; };
        write_weights(to, first, value);
        write_weights(to + LANES, last, value);
    }
};

// One stored matrix [rows, columns]: that of one expert, or of a layer.
struct Stored {
    Weight weight;
    int64_t columns, row_bytes, group_rows, group_columns;

    Stored(const Weight& of, int64_t rows, int64_t columns, int64_t expert = 0)
        : weight(of), columns(columns),
          row_bytes(of.format == Format::UINT4 || of.format == Format::FP4 ? columns / 2 : columns),
          group_rows(group_size(rows, of.scale_rows)), group_columns(group_size(columns, of.scale_columns)) {
        const int64_t scales = expert * of.scale_rows * of.scale_columns;
        weight.values += expert * rows * row_bytes;
        const int64_t bytes_of_scale = of.format == Format::FP4 ? 1 : of.scale_type == 0 ? 4 : 2;
        weight.scales = static_cast<const uint8_t*>(of.scales) + scales * bytes_of_scale;
        if (of.zero_points) weight.zero_points += scales;
    }

    // As in ops/schemes.py: a scale for each, one for all, or groups of a power of two.
    static int64_t group_size(int64_t size, int64_t scales) {
        if (scales == size) return 1;
        if (scales == 1) return size;
        int64_t group = 1;
        while (group * scales < size) group *= 2;
        return group;
    }

    template <Format F>
    float scale(int64_t at) const {
        if constexpr (F == Format::FP4) {
            const uint32_t exponent = static_cast<const uint8_t*>(weight.scales)[at];
            return bits_of<float>(exponent == 255 ? 0x7fc00000u : exponent ? exponent << 23 : 1u << 22);
        } else {
            if (weight.scale_type == 0) return static_cast<const float*>(weight.scales)[at];
            return widen(static_cast<const bfloat16*>(weight.scales)[at]);
        }
    }

    template <Format F, class E>
    void read_as(int64_t row, E* to) const {
        using D = Decode<F>;
        const uint8_t* from = weight.values + row * row_bytes;
        const int64_t first = row / group_rows * weight.scale_columns;
        for (int64_t group = 0; group < weight.scale_columns; group++) {
            const float factor = scale<F>(first + group) * D::FACTOR;
            const float zero_point = weight.zero_points ? weight.zero_points[first + group] : 8;
            const int64_t end = std::min(columns, (group + 1) * group_columns);
            int64_t column = group * group_columns;
            for (; column + D::VALUES <= end; column += D::VALUES, from += LANES, to += D::VALUES) {
                __builtin_prefetch(from + TILE * row_bytes);
                D::write(to, load_bytes(from), factor, zero_point);
            }
            if (const int64_t left = end - column) {  // rows of two values a byte have none
                uint8_t bytes[LANES] = {};
                E values[D::VALUES];
                std::memcpy(bytes, from, left);
                D::write(values, load_bytes(bytes), factor, zero_point);
                std::memcpy(to, values, left * sizeof(E));
                from += left, to += left;
            }
        }
    }

    template <class E>
    void read(int64_t row, E* to) const {
        switch (weight.format) {
            case Format::FP8: return read_as<Format::FP8>(row, to);
            case Format::INT8: return read_as<Format::INT8>(row, to);
            case Format::UINT4: return read_as<Format::UINT4>(row, to);
            case Format::FP4: return read_as<Format::FP4>(row, to);
            case Format::PLAIN: return;
        }
    }
};

// Rows for multiply_rows, dequantised into a buffer that the next ones overwrite.
template <class E>
struct StoredRows {
    Stored stored;
    E* buffer;  // for TILE rows

    const E* operator()(int64_t row, int64_t number) const {
        for (int64_t i = 0; i < number; i++) stored.read(row + i, buffer + i * stored.columns);
        return buffer;
    }

    // Dequantising bounds the speed, and memory does not.
    template <int>
    void fetch(int64_t, int64_t) const {}
};

}  // namespace opset
