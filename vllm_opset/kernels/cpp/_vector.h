// Vectors of 16 floats: one register of AVX-512, two of AVX2 or four of NEON. The compiler splits them.
#pragma once

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include <utility>

#include "_types.h"

namespace opset {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));

// The registers that hold LANES floats. GCC splits larger vectors badly, so loops that matter are written in these.
#ifdef __AVX512F__
constexpr int PARTS = 1;
#else
constexpr int PARTS = 2;
#endif
constexpr int PART = LANES / PARTS;
typedef float PartFloats __attribute__((vector_size(4 * PART)));
typedef int32_t PartIntegers __attribute__((vector_size(4 * PART)));
typedef uint32_t PartWords __attribute__((vector_size(4 * PART)));
typedef uint16_t PartHalves __attribute__((vector_size(2 * PART)));

inline PartFloats load_part(const float* from) {
    PartFloats wide;
    std::memcpy(&wide, from, sizeof wide);
    return wide;
}

inline PartFloats load_part(const bfloat16* from) {
    PartHalves narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    return bits_of<PartFloats>(__builtin_convertvector(narrow, PartWords) << 16);
}

// Loads a register in one piece. If several are copied together and there is no AVX-512, GCC moves pieces of 16 bytes
// through the stack. The processor then waits whenever it loads a register from two of them.
inline PartWords load_words(const void* from) {
    PartWords words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

inline Floats joined(const PartFloats (&parts)[PARTS]) {
#ifdef __AVX512F__
    return parts[0];
#else
    return __builtin_shufflevector(parts[0], parts[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#endif
}

inline void store_part(float* to, PartFloats value) { std::memcpy(to, &value, sizeof value); }

inline Floats load(const float* from) {
    Floats wide;
    std::memcpy(&wide, from, sizeof wide);
    return wide;
}

inline Floats load(const bfloat16* from) {
    typedef uint16_t Halves __attribute__((vector_size(32)));
    typedef uint32_t Words __attribute__((vector_size(64)));
    Halves narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    return bits_of<Floats>(__builtin_convertvector(narrow, Words) << 16);
}

// Fetches a line from memory into the second-level cache. If it went to the first one, it would occupy one of the few
// buffers in which loads wait for memory: on an AMD EPYC experts were then read at 0.6 to 0.8 times the speed.
// ALWAYS_INLINE is needed here and in callers that do nothing else: GCC takes calls without other effects for useless.
#define ALWAYS_INLINE __attribute__((always_inline))
ALWAYS_INLINE inline void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

template <class E>
inline void store(E* to, Floats value) {
#pragma omp simd
    for (int i = 0; i < LANES; i++) to[i] = narrow<E>(value[i]);
}

// The first of the two lanes that fold<WIDTH> adds for lane i.
template <int WIDTH>
constexpr int lane_of(int i) {
    return i / WIDTH % 2 * PART + i / (2 * WIDTH) * (2 * WIDTH) + i % WIDTH;
}

// Sums of neighbouring groups of WIDTH lanes. The sums of a become the even groups, the sums of b the odd groups.
template <int WIDTH, int... I>
inline PartFloats fold(PartFloats a, PartFloats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, lane_of<WIDTH>(I)...) +
           __builtin_shufflevector(a, b, lane_of<WIDTH>(I) + WIDTH...);
}

// Lane i of the result is the sum of the lanes of rows[i].
template <int WIDTH = PART / 2>
inline PartFloats sums(const PartFloats (&rows)[2 * WIDTH]) {
    PartFloats folded[WIDTH];
    for (int i = 0; i < WIDTH; i++)
        folded[i] = fold<WIDTH>(rows[i], rows[i + WIDTH], std::make_integer_sequence<int, PART>());
    if constexpr (WIDTH == 1) return folded[0];
    else return sums<WIDTH / 2>(folded);
}

}  // namespace opset
