// A group of values as 8-bit integers with one scale; ops/int8.py defines the numbers.
#pragma once

#include <algorithm>

#include "simd.h"

namespace ostinato {

// The largest magnitude; NaN where there is one, whose bits are above infinity's.
template <typename T>
inline float largest_magnitude(const T* values, std::int64_t count) {
    Int most{};
    for (std::int64_t i = 0; i < count; i += LANES) {
        const Int bits = bits_as<Int>(load_partial(values + i, count - i)) & 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    std::int32_t best = 0;
    for (int i = 0; i < LANES; ++i) best = std::max(best, static_cast<std::int32_t>(most[i]));
    return bits_as<float>(best);
}

// Writes the integers of `count` values. -> their scale
template <typename T>
inline float quantize_group(const T* values, std::int64_t count, std::int8_t* to) {
    constexpr float LARGEST = 127.0f;
    const float scale = largest_magnitude(values, count) / LARGEST;
    const Float divisor = splat(scale > 0.0f ? scale : 1.0f), most = splat(LARGEST);
    for (std::int64_t i = 0; i < count; i += LANES) {
        Float whole = load_partial(values + i, count - i) / divisor;
        whole = max(whole < most ? whole : most, -most) + ROUND;
        // The integer stands in the lowest bits.
        const LaneBytes bytes = __builtin_convertvector(bits_as<Int>(whole), LaneBytes);
        if (count - i >= LANES) {
            std::memcpy(to + i, &bytes, LANES);
        } else {
            std::memcpy(to + i, &bytes, count - i);
        }
    }
    return scale;
}

}  // namespace ostinato
