// Rotary position embedding of one head, in the half-split layout.
#pragma once

#include <algorithm>

#include "core/simd.h"

namespace ostinato {

// One head [head_dim] times `multiplier`, rounded to the storage type and read as floats.
template <typename T>
struct Scaled {
    const T* head;
    float multiplier;

    Float operator()(std::int64_t i, int count) const {
        const Float value = count == LANES ? load(head + i) : load_masked(head + i, count);
        if (multiplier == 1.0f) return value;
        T rounded[LANES];
        store(rounded, value * multiplier);
        return load(rounded);
    }
};

// Rotate element i of `from` with element half + i by angle i, and copy the elements behind the two halves.
template <typename T>
void rotate_head(Scaled<T> from, T* to, const float* cosines, const float* sines, std::int64_t half_size,
                 std::int64_t head_dim) {
    for (std::int64_t i = 0; i < half_size; i += LANES) {
        const int count = static_cast<int>(std::min<std::int64_t>(LANES, half_size - i));
        const Float first = from(i, count), second = from(half_size + i, count);
        if (count == LANES) {
            const Float cosine = load(cosines + i), sine = load(sines + i);
            store(to + i, first * cosine - second * sine);
            store(to + half_size + i, second * cosine + first * sine);
        } else {
            const Float cosine = load_masked(cosines + i, count), sine = load_masked(sines + i, count);
            store_masked(to + i, first * cosine - second * sine, count);
            store_masked(to + half_size + i, second * cosine + first * sine, count);
        }
    }
    for (std::int64_t i = 2 * half_size; i < head_dim; i += LANES) {
        const int count = static_cast<int>(std::min<std::int64_t>(LANES, head_dim - i));
        store_masked(to + i, from(i, count), count);
    }
}

}  // namespace ostinato
