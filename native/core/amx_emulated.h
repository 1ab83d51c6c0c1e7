// Tiles in plain C++: the operations of Intel's manual (LDTILECFG, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS), bit for
// bit.
//
// Where the processor raises an exception, the process ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/denormals.h"
#include "core/simd.h"

namespace ostinato {
namespace tiles {
namespace emulated {

class State {
  public:
    void configure(int palette, const std::uint8_t* rows, const std::uint16_t* row_bytes) {
        require(palette == 1, "the only palette is 1");
        for (int tile = 0; tile < TILES; ++tile) {
            require(rows[tile] <= ROWS && row_bytes[tile] <= BYTES && row_bytes[tile] % 4 == 0, "a tile is too large");
            rows_[tile] = rows[tile];
            row_bytes_[tile] = row_bytes[tile];
        }
        std::memset(data_, 0, sizeof(data_));
        palette_ = palette;
    }

    void release() { palette_ = 0; }

    int palette() const { return palette_; }

    void zero(int tile) {
        check(tile);
        std::memset(data_[tile], 0, sizeof(data_[tile]));
    }

    void load(int tile, const void* from, std::int64_t stride) {
        zero(tile);
        for (int row = 0; row < rows_[tile]; ++row) {
            std::memcpy(data_[tile][row], static_cast<const char*>(from) + row * stride, row_bytes_[tile]);
        }
    }

    void store(int tile, void* to, std::int64_t stride) const {
        check(tile);
        for (int row = 0; row < rows_[tile]; ++row) {
            std::memcpy(static_cast<char*>(to) + row * stride, data_[tile][row], row_bytes_[tile]);
        }
    }

    // Compute TDPBF16PS: sum the products of the first and of the second elements of pairs separately, each step with
    // one rounding, starting at zero. Then add both sums, and the result to the tile. Denormals, read or written, are
    // zero.
    void multiply_add(int to, int left, int right) {
        check_product(to, left, right);
        const int pairs = row_bytes_[left] / 4;
        const FlushDenormals flush;
        for (int row = 0; row < rows_[to]; ++row) {
            Float first = {}, second = {};
            for (int k = 0; k < pairs; ++k) {
                const auto pair = bits_as<std::uint32_t>(data_[left][row][k]);
                const auto of_columns = bits_as<UInt>(ostinato::load(data_[right][k]));
                first = fma(splat_bits(pair << 16), bits_as<Float>(of_columns << 16), first);
                second = fma(splat_bits(pair & HIGH), bits_as<Float>(of_columns & HIGH), second);
            }
            ostinato::store(data_[to][row], ostinato::load(data_[to][row]) + (first + second));
        }
    }

    // Compute TDPBSSD: add the products of fours of signed bytes to 32-bit integers, which wrap around.
    void multiply_add_int8(int to, int left, int right) {
        check_product(to, left, right);
        for (int row = 0; row < rows_[to]; ++row) {
            auto sums = bits_as<UInt>(ostinato::load(data_[to][row]));
            for (int k = 0; k < row_bytes_[left] / 4; ++k) {
                std::int8_t four[4], of_columns[BYTES];
                std::memcpy(four, &data_[left][row][k], sizeof(four));
                std::memcpy(of_columns, data_[right][k], sizeof(of_columns));
                for (int i = 0; i < BYTES; ++i) sums[i / 4] += static_cast<std::uint32_t>(four[i % 4] * of_columns[i]);
            }
            ostinato::store(data_[to][row], bits_as<Float>(sums));
        }
    }

  private:
    static constexpr int TILES = 8, ROWS = 16, BYTES = 64;
    static constexpr std::uint32_t HIGH = 0xFFFF0000;

    static Float splat_bits(std::uint32_t bits) { return bits_as<Float>(UInt{} + bits); }

    static void require(bool holds, const char* what) {
        if (holds) return;
        std::fprintf(stderr, "tiles: %s\n", what);
        std::abort();
    }

    void check(int tile) const {
        require(palette_ == 1, "they are not configured");
        require(tile >= 0 && tile < TILES && rows_[tile] > 0, "there is no such tile");
    }

    void check_product(int to, int left, int right) const {
        check(to), check(left), check(right);
        require(rows_[to] == rows_[left] && row_bytes_[to] == row_bytes_[right] && rows_[right] == row_bytes_[left] / 4,
                "the shapes of three tiles do not fit");
    }

    int palette_ = 0;
    int rows_[TILES] = {}, row_bytes_[TILES] = {};
    alignas(BYTES) float data_[TILES][ROWS][BYTES / 4] = {};
};

inline State& state() {
    static thread_local State of_thread;
    return of_thread;
}

}  // namespace emulated
}  // namespace tiles
}  // namespace ostinato
