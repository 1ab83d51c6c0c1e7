// Small matrix products with their sums in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace ostinato {

// As many rows of sums as leave registers for a row of factors: 32 registers, or 16 with AVX2.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int TILE_ROWS = 4;
#else
constexpr int TILE_ROWS = 8;
#endif
constexpr int TILE_VECTORS = 2;

// A matrix [rows, columns] of factors that are taken one by one.
struct TileFactors {
    const float* first;
    std::int64_t row_stride, column_stride;
};

// The sums of a part [TILE_ROWS, VECTORS * LANES] of a matrix product.
template <int VECTORS>
struct Tile {
    Float sums[TILE_ROWS][VECTORS];

    void clear() {
        for (auto& row : sums) {
            for (Float& sum : row) sum = Float{};
        }
    }

    // += factors [TILE_ROWS, count] @ values [count, VECTORS * LANES], in the order of `count`.
    __attribute__((always_inline)) void add(TileFactors factors, const float* values, std::int64_t stride,
                                            std::int64_t count) {
        for (std::int64_t k = 0; k < count; ++k) {
            Float row[VECTORS];
            for (int v = 0; v < VECTORS; ++v) row[v] = load(values + k * stride + v * LANES);
            const float* column = factors.first + k * factors.column_stride;
            for (int i = 0; i < TILE_ROWS; ++i) {
                const Float factor = splat(column[i * factors.row_stride]);
                for (int v = 0; v < VECTORS; ++v) sums[i][v] += factor * row[v];
            }
        }
    }

    void keep(float* to, std::int64_t stride) const {
        for (int i = 0; i < TILE_ROWS; ++i) {
            for (int v = 0; v < VECTORS; ++v) store(to + i * stride + v * LANES, sums[i][v]);
        }
    }
};

// Calls `body(std::integral_constant<int, vectors>, first column)` for every panel of `columns`, a multiple of LANES.
template <typename Body>
inline void for_panels(std::int64_t columns, Body&& body) {
    std::int64_t column = 0;
    for (; column + TILE_VECTORS * LANES <= columns; column += TILE_VECTORS * LANES) {
        body(std::integral_constant<int, TILE_VECTORS>{}, column);
    }
    for (; column < columns; column += LANES) body(std::integral_constant<int, 1>{}, column);
}

}  // namespace ostinato
