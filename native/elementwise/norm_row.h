// RMS norm of one row.
#pragma once

#include "core/simd.h"

namespace ostinato {

// Compute y [size] = x [size] / sqrt(mean(x^2) + eps) * (weight [size] + offset) + residual [size], if there is one
template <typename T>
void norm_row(const T* x, const T* weight, const T* residual, T* y, std::int64_t size, float eps, float offset) {
    const std::int64_t whole = size / LANES * LANES;
    const int rest = static_cast<int>(size - whole);
    Float squares[4] = {};
    std::int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        for (int j = 0; j < 4; ++j) {
            const Float v = load(x + i + j * LANES);
            squares[j] += v * v;
        }
    }
    for (; i < whole; i += LANES) {
        const Float v = load(x + i);
        squares[0] += v * v;
    }
    if (rest) {
        const Float v = load_masked(x + whole, rest);
        squares[1] += v * v;
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(size);
    const float factor = 1.0f / std::sqrt(mean + eps);
    for (i = 0; i < whole; i += LANES) {
        const Float normed = load(x + i) * factor * (load(weight + i) + offset);
        store(y + i, residual ? normed + load(residual + i) : normed);
    }
    if (rest) {
        const Float normed = load_masked(x + whole, rest) * factor * (load_masked(weight + whole, rest) + offset);
        store_masked(y + whole, residual ? normed + load_masked(residual + whole, rest) : normed, rest);
    }
}

}  // namespace ostinato
