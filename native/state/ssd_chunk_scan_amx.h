// The chunked scan of bfloat16 inputs with its products on matrix units.
//
// B, C and x are operands without conversion. Their float32 partners are split into sums of bfloat16 numbers: two for
// states and weights, from which outputs are computed (2^-17 of each term is lost); three for additions to a state,
// which lose nothing that float32 would keep. A panel of 32 columns of a state is processed at a time, so that it and
// its results stay in the L1 cache.
//
// A result that is not finite stays so, but it may spread to the chunk's other tokens, and infinity may become NaN.
#pragma once

#include "core/amx.h"
#include "state/ssd_chunk_scan.h"

#if defined(OSTINATO_TILES)

namespace ostinato {

class TileScan : public ChunkScan {
  public:
    TileScan(const Sizes& sizes, const ThreadGroup& threads) : ChunkScan(sizes, threads) {
        const std::int64_t rows = sizes.state_rows(), columns = sizes.columns();
        const std::int64_t parts[] = {2 * SQUARE,   2 * SQUARE,   2 * SQUARE,      DEPTH * rows,
                                      DEPTH * rows, DEPTH * rows, DEPTH * columns, PARTS * DEPTH * columns,
                                      2 * SQUARE};
        std::int64_t total = 0;
        for (const std::int64_t part : parts) total += part;
        bf16* next = threads.thread_scratch<bf16>(total);
        std::fill_n(next, total, bf16{});
        bf16* pointers[std::size(parts)];
        for (std::size_t i = 0; i < std::size(parts); next += parts[i++]) pointers[i] = next;
        sums_of_x_ = reinterpret_cast<float*>(pointers[0]);
        sums_of_state_ = reinterpret_cast<float*>(pointers[1]);
        state_parts_ = pointers[2];
        C_rows_ = pointers[3];
        B_pairs_ = pointers[4];
        B_across_ = pointers[5];
        x_pairs_ = pointers[6];
        added_parts_ = pointers[7];
        weight_parts_ = pointers[8];
    }

    // Load the group as `ChunkScan` does.
    void load_group(const bf16* B, std::int64_t B_stride, const bf16* C, std::int64_t C_stride, std::int64_t count) {
        const std::int64_t rows = sizes_.state_rows();
        count_ = count;
        clear_sums();
        for (std::int64_t n = 0; n < rows; n += DEPTH) {
            Float halves[2][SIDE];
            for (std::int64_t t = 0; t < DEPTH; ++t) {
                halves[t / SIDE][t % SIDE] = t < count ? some_pairs(B + t * B_stride + n, sizes_.state - n) : Float{};
                const Float of_C = t < count ? some_pairs(C + t * C_stride + n, sizes_.state - n) : Float{};
                std::memcpy(C_rows_ + t * rows + n, &of_C, sizeof(of_C));
            }
            transpose(halves[0]);
            transpose(halves[1]);
            for (int half = 0; half < 2; ++half) {
                std::memcpy(B_pairs_ + half * SIDE * rows + n * SIDE, halves[half], sizeof(halves[half]));
            }
            for (int i = 0; i < SIDE; ++i) put_across(halves[0][i], halves[1][i], B_across_ + (n + 2 * i) * DEPTH);
        }
        for (std::int64_t n = 0; n < rows; n += DEPTH) {
            load_rows(C_rows_ + n, rows);
            tiles::load<6>(B_pairs_ + n * SIDE, tiles::ROW_BYTES);
            multiply<1>();
            if (has_both()) {
                tiles::load<7>(B_pairs_ + SIDE * (rows + n), tiles::ROW_BYTES);
                tiles::multiply_add<1, 1>();
            }
        }
        keep_sums<2>(scores_, sizes_.token_columns());
    }

    void load_x(const bf16* x, std::int64_t stride) {
        const std::int64_t head_dim = sizes_.head_dim;
        for (std::int64_t t = 0; t < DEPTH; t += 2) {
            for (std::int64_t p = 0; p < head_dim; p += SIDE) {
                const bf16* const at = x + t * stride + p;
                const Float even = t < count_ ? load_partial(at, head_dim - p) : Float{};
                const Float odd = t + 1 < count_ ? load_partial(at + stride, head_dim - p) : Float{};
                put_pair(even, odd, x_pairs_ + p * DEPTH + t * SIDE);
            }
        }
    }

    void advance(int head, bool has_state, float D, bf16* y, std::int64_t stride) {
        put_weights(D);
        put_added(count_);
        for_panels(sizes_.columns(), [&](auto vectors, std::int64_t column) {
            put_outputs<vectors>(head, has_state, column, y + column, stride);
            put_state<vectors>(head, has_state, count_, head, column);
        });
    }

    void checkpoint_state(int head, bool has_state, std::int64_t count) {
        put_added(count);
        for_panels(sizes_.columns(), [&](auto vectors, std::int64_t column) {
            put_state<vectors>(head, has_state, count, CHECKPOINT_STATE, column);
        });
    }

  private:
    static constexpr int SIDE = tiles::SIDE, DEPTH = tiles::DEPTH, ELEMENTS = tiles::ELEMENTS;
    static constexpr int SQUARE = DEPTH * DEPTH;
    static constexpr int PARTS = 3;
    static_assert(TILED_SCAN_CHUNK == DEPTH && SCAN_CHUNK <= DEPTH, "a chunk's tokens are the inputs of a tile");
    static_assert(TILE_VECTORS == 2, "a panel is two tiles wide");

    float* sums_of_x_;      // [32, columns of a panel]: of tokens, weights times x; of a state's rows, the additions
    float* sums_of_state_;  // [32, columns of a panel]: C times the state before the chunk
    bf16* state_parts_;     // [high and low][blocks of a panel][pairs of 32 rows][16 columns, 2]
    bf16* C_rows_;          // [32, state_rows]
    bf16* B_pairs_;         // [halves of the tokens][pairs of the state][16 tokens, 2]
    bf16* B_across_;        // [state_rows, 32]
    bf16* x_pairs_;         // [blocks of 16 columns][pairs of tokens][16 columns, 2]
    bf16* added_parts_;     // [blocks][PARTS][pairs of tokens][16 columns, 2]
    bf16* weight_parts_;    // [high and low][32 tokens t, 32 tokens s]

    bool has_both() const { return count_ > SIDE; }  // more than 16 tokens

    static UInt bits(Float value) { return bits_as<UInt>(value); }

    // Interleave the upper halves of two vectors: two bfloat16 numbers of each element.
    static void put_pair(Float even, Float odd, bf16* to) {
        const UInt both = (bits(even) >> 16) | (bits(odd) & 0xFFFF0000u);
        std::memcpy(to, &both, sizeof(both));
    }

    // Return the nearest float whose lower half is zero, the larger one of two.
    static Float rounded(Float value) { return bits_as<Float>((bits(value) + 0x8000u) & 0xFFFF0000u); }

    // Load 32 elements, or fewer with zeros behind them.
    static Float some_pairs(const bf16* from, std::int64_t count) {
        bf16 elements[DEPTH] = {};
        Float value;
        if (count >= DEPTH) {
            std::memcpy(&value, from, sizeof(value));
        } else {
            std::memcpy(elements, from, sizeof(bf16) * count);
            std::memcpy(&value, elements, sizeof(value));
        }
        return value;
    }

    // Transpose pairs of 32 tokens into two rows.
    static void put_across(Float first, Float second, bf16* to) {
        alignas(64) static constexpr std::int16_t EVEN[DEPTH] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                                 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                                 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
        const __m512i even = _mm512_load_si512(EVEN), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)first, even, (__m512i)second));
        _mm512_storeu_si512(to + DEPTH, _mm512_permutex2var_epi16((__m512i)first, odd, (__m512i)second));
    }

    static void clear_sums() {
        tiles::zero<0>();
        tiles::zero<1>();
        tiles::zero<2>();
        tiles::zero<3>();
    }

    // Load left operands of 32 rows, or of 16 if the chunk has no more tokens.
    void load_rows(const bf16* from, std::int64_t stride) const {
        tiles::load<4>(from, stride * sizeof(bf16));
        if (has_both()) tiles::load<5>(from + SIDE * stride, stride * sizeof(bf16));
    }

    template <int VECTORS>
    void multiply() const {
        tiles::multiply_add<0, 0>();
        if constexpr (VECTORS == 2) tiles::multiply_add<0, 1>();
        if (!has_both()) return;
        tiles::multiply_add<1, 0>();
        if constexpr (VECTORS == 2) tiles::multiply_add<1, 1>();
    }

    // Load right operands of a panel: a tile for each of its vectors.
    template <int VECTORS>
    static void load_blocks(const bf16* from, std::int64_t stride) {
        tiles::load<6>(from, tiles::ROW_BYTES);
        if constexpr (VECTORS == 2) tiles::load<7>(from + stride, tiles::ROW_BYTES);
    }

    template <int VECTORS>
    static void keep_sums(float* to, std::int64_t stride) {
        const std::int64_t bytes = stride * sizeof(float);
        tiles::store<0>(to, bytes);
        if constexpr (VECTORS == 2) tiles::store<1>(to + SIDE, bytes);
        tiles::store<2>(to + SIDE * stride, bytes);
        if constexpr (VECTORS == 2) tiles::store<3>(to + SIDE * stride + SIDE, bytes);
    }

    void put_weights(float D) {
        for (std::int64_t t = 0; t < sizes_.tokens(); ++t) {
            for (std::int64_t s = 0; s <= t; s += LANES) {
                const Float weight = t < count_ ? weight_of(t, s, D) : Float{};
                const Float high = rounded(weight);
                store(weight_parts_ + t * DEPTH + s, high);
                store(weight_parts_ + SQUARE + t * DEPTH + s, weight - high);
            }
        }
    }

    // Compute the additions of the first `count` tokens to the state, to be multiplied with B.
    void put_added(std::int64_t count) {
        const float* const factors = added_ + (count - 1) * sizes_.token_columns();
        for (std::int64_t p = 0; p < sizes_.columns(); p += SIDE) {
            for (std::int64_t t = 0; t < DEPTH; t += 2) {
                Float x;
                std::memcpy(&x, x_pairs_ + p * DEPTH + t * SIDE, sizeof(x));
                Float even = t < count ? bits_as<Float>(bits(x) << 16) * factors[t] : Float{};
                Float odd = t + 1 < count ? bits_as<Float>(bits(x) & 0xFFFF0000u) * factors[t + 1] : Float{};
                for (int part = 0; part < PARTS; ++part) {
                    const Float even_part = rounded(even), odd_part = rounded(odd);
                    put_pair(even_part, odd_part, added_parts_ + PARTS * p * DEPTH + part * ELEMENTS + t * SIDE);
                    even -= even_part;
                    odd -= odd_part;
                }
            }
        }
    }

    // Split 32 rows of a panel of a state into operands.
    template <int VECTORS>
    static void split(const float* from, bf16* to) {
        constexpr std::int64_t STRIDE = VECTORS * LANES;
        for (std::int64_t n = 0; n < DEPTH; n += 2) {
            for (int v = 0; v < VECTORS; ++v) {
                const Float even = load(from + n * STRIDE + v * LANES), odd = load(from + (n + 1) * STRIDE + v * LANES);
                const Float even_high = rounded(even), odd_high = rounded(odd);
                put_pair(even_high, odd_high, to + v * ELEMENTS + n * SIDE);
                put_pair(rounded(even - even_high), rounded(odd - odd_high), to + SQUARE + v * ELEMENTS + n * SIDE);
            }
        }
    }

    template <int VECTORS>
    void put_outputs(int head, bool has_state, std::int64_t column, bf16* y, std::int64_t y_stride) {
        constexpr std::int64_t STRIDE = VECTORS * LANES;
        const std::int64_t rows = sizes_.state_rows();
        const float* const state = state_of(head) + column * rows;
        clear_sums();
        for (int part = 0; part < 2; ++part) {
            load_rows(weight_parts_ + part * SQUARE, DEPTH);
            load_blocks<VECTORS>(x_pairs_ + column * DEPTH, ELEMENTS);
            multiply<VECTORS>();
        }
        keep_sums<VECTORS>(sums_of_x_, STRIDE);
        if (has_state) {
            clear_sums();
            for (std::int64_t n = 0; n < rows; n += DEPTH) {
                split<VECTORS>(state + n * STRIDE, state_parts_);
                load_rows(C_rows_ + n, rows);
                for (int part = 0; part < 2; ++part) {
                    load_blocks<VECTORS>(state_parts_ + part * SQUARE, ELEMENTS);
                    multiply<VECTORS>();
                }
            }
            keep_sums<VECTORS>(sums_of_state_, STRIDE);
        }
        for (std::int64_t t = 0; t < count_; ++t) {
            for (std::int64_t p = 0; p < STRIDE && column + p < sizes_.head_dim; p += LANES) {
                Float sum = load(sums_of_x_ + t * STRIDE + p);
                if (has_state) sum = fma(splat(until_[t]), load(sums_of_state_ + t * STRIDE + p), sum);
                store_partial(y + t * y_stride + p, sum, sizes_.head_dim - column - p);
            }
        }
    }

    // Compute the chunk's addition to 32 rows of a panel of a state.
    template <int VECTORS>
    void put_change(std::int64_t first, std::int64_t column) {
        clear_sums();
        tiles::load<4>(B_across_ + first * DEPTH, tiles::ROW_BYTES);
        tiles::load<5>(B_across_ + (first + SIDE) * DEPTH, tiles::ROW_BYTES);
        for (int part = 0; part < PARTS; ++part) {
            load_blocks<VECTORS>(added_parts_ + PARTS * column * DEPTH + part * ELEMENTS, PARTS * ELEMENTS);
            tiles::multiply_add<0, 0>();
            tiles::multiply_add<1, 0>();
            if constexpr (VECTORS == 2) {
                tiles::multiply_add<0, 1>();
                tiles::multiply_add<1, 1>();
            }
        }
        keep_sums<VECTORS>(sums_of_x_, VECTORS * LANES);
    }

    // Compute the state `to` after `count` tokens.
    template <int VECTORS>
    void put_state(int head, bool has_state, std::int64_t count, int to, std::int64_t column) {
        constexpr std::int64_t STRIDE = VECTORS * LANES;
        const float* const before = state_of(head) + column * sizes_.state_rows();
        float* const after = state_of(to) + column * sizes_.state_rows();
        const Float decay = splat(until_[count - 1]);
        for (std::int64_t n = 0; n < sizes_.state_rows(); n += DEPTH) {
            put_change<VECTORS>(n, column);
            for (std::int64_t i = 0; i < DEPTH * STRIDE; i += LANES) {
                const Float added = load(sums_of_x_ + i);
                store(after + n * STRIDE + i, has_state ? fma(load(before + n * STRIDE + i), decay, added) : added);
            }
        }
    }
};

}  // namespace ostinato
#endif
