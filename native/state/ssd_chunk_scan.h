// One thread's work of the chunked scan: the chunks of a row, for some heads of one group at a time.
//
// A state is transposed in the thread's memory, [state, head_dim]: so all products have head_dim in their vectors and
// nothing is summed across a vector. Each sum is in the order of its terms.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <type_traits>

#include "core/noise.h"
#include "core/thread_group.h"
#include "core/transpose.h"
#include "state/packable.h"

namespace ostinato {

// Rows of sums in registers, beside a row of factors: 32 registers, or 16 with AVX2.
#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)
constexpr int TILE_ROWS = 4;
#else
constexpr int TILE_ROWS = 8;
#endif
constexpr int TILE_VECTORS = 2;

// Left operand of a register tile: a matrix whose elements are loaded one by one.
struct TileFactors {
    const float* first;
    std::int64_t row_stride, column_stride;
};

// Sums of a register tile [TILE_ROWS, VECTORS * LANES] of a matrix product.
template <int VECTORS>
struct Tile {
    Float sums[TILE_ROWS][VECTORS];

    void clear() {
        for (auto& row : sums) {
            for (Float& sum : row) sum = Float{};
        }
    }

    // Add factors [TILE_ROWS, count] @ values [count, VECTORS * LANES], in the order of `count`.
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

// Call `body(std::integral_constant<int, vectors>, first column)` for every panel of `columns`, a multiple of LANES.
template <typename Body>
inline void for_panels(std::int64_t columns, Body&& body) {
    std::int64_t column = 0;
    for (; column + TILE_VECTORS * LANES <= columns; column += TILE_VECTORS * LANES) {
        body(std::integral_constant<int, TILE_VECTORS>{}, column);
    }
    for (; column < columns; column += LANES) body(std::integral_constant<int, 1>{}, column);
}

// Heads that a thread takes at once; they share B, C and their products. Their states should fit its cache.
constexpr int HEADS = SCAN_HEADS;
constexpr int CHECKPOINT_STATE = HEADS;  // index of one more state

struct Sizes {
    std::int64_t heads, head_dim, groups, state;
    std::int64_t chunk;  // tokens
    bool on_matrix_units = false;  // matrix units have larger tiles than vectors

    // Padded sizes: whole vectors and whole tiles, with zeros.
    std::int64_t columns() const { return round_up(head_dim, LANES); }
    std::int64_t state_rows() const { return round_up(state, on_matrix_units ? 2 * LANES : TILE_ROWS); }
    std::int64_t tokens() const { return round_up(chunk, on_matrix_units ? 2 * LANES : TILE_ROWS); }
    std::int64_t token_columns() const { return round_up(chunk, on_matrix_units ? 2 * LANES : LANES); }
    std::int64_t state_elements() const { return state_rows() * columns(); }

    static std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }
};

template <typename T>
void copy_as_floats(const T* from, float* to, std::int64_t count) {
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; ++i) to[i] = to_float(from[i]);
}

// Scratch memory and steps of one thread: a chunk of one row, and the states of some heads.
class ChunkScan {
  public:
    ChunkScan(const Sizes& sizes, const ThreadGroup& threads) : sizes_(sizes) {
        const std::int64_t tokens = sizes.tokens(), token_columns = sizes.token_columns();
        const std::int64_t square = tokens * token_columns, by_column = tokens * sizes.columns();
        const std::int64_t parts[] = {(HEADS + 1) * sizes.state_elements(),
                                      sizes.state_rows() * token_columns,
                                      tokens * Sizes::round_up(sizes.state, LANES),
                                      square,
                                      square,
                                      square,
                                      token_columns,
                                      token_columns,
                                      token_columns,
                                      token_columns,
                                      by_column,
                                      by_column,
                                      by_column,
                                      sizes.state,
                                      sizes.columns()};
        std::int64_t total = 0;
        for (const std::int64_t part : parts) total += Sizes::round_up(part, LANES);
        float* next = threads.thread_scratch<float>(total);
        std::fill_n(next, total, 0.0f);
        float** const pointers[] = {&states_, &B_,    &C_, &scores_,    &added_, &weights_, &steps_,       &logs_,
                                    &until_,  &sums_, &x_, &remaining_, &y_,     &column_noise_, &channel_noise_};
        for (std::size_t i = 0; i < std::size(parts); ++i) {
            *pointers[i] = next;
            next += Sizes::round_up(parts[i], LANES);
        }
    }

    // Load B and C [tokens, state] of the group for `count` tokens, and compute their products.
    template <typename T>
    void load_group(const T* B, std::int64_t B_stride, const T* C, std::int64_t C_stride, std::int64_t count) {
        const std::int64_t rows = sizes_.state, columns = sizes_.token_columns();
        count_ = count;
        for (std::int64_t t = 0; t < count; ++t) copy_as_floats(C + t * C_stride, C_ + t * C_row(), rows);
        for (std::int64_t first = 0; first < columns; first += LANES) {
            for (std::int64_t n = 0; n < rows; n += LANES) {
                Float square[LANES];
                for (int i = 0; i < LANES; ++i) {
                    square[i] = first + i < count ? load_partial(B + (first + i) * B_stride + n, rows - n) : Float{};
                }
                transpose(square);
                for (int i = 0; i < LANES && n + i < sizes_.state_rows(); ++i) {
                    store(B_ + (n + i) * columns + first, square[i]);
                }
            }
        }
        for (std::int64_t t = 0; t < count; t += TILE_ROWS) {
            for_panels(columns, [&](auto vectors, std::int64_t column) {
                if (column >= t + TILE_ROWS) return;
                Tile<vectors> tile;
                tile.clear();
                tile.add({C_ + t * C_row(), C_row(), 1}, B_ + column, columns, rows);
                tile.keep(scores_ + t * columns + column, columns);
            });
        }
    }

    // Compute a head's step and decay at each token. `dt` [tokens] is strided.
    template <typename T>
    void load_steps(const T* dt, std::int64_t stride, float bias, float least, float most, float A) {
        const std::int64_t columns = sizes_.token_columns();
        for (std::int64_t t = 0; t < count_; ++t) steps_[t] = to_float(dt[t * stride]);
        for (std::int64_t t = 0; t < columns; t += LANES) {
            Float step = softplus(load(steps_ + t) + bias);
            step = step < least ? splat(least) : step;
            step = step > most ? splat(most) : step;
            store(steps_ + t, step);
            store(logs_ + t, step * A);
            store(sums_ + t, Float{});
        }
        // Sums begin at each token. Differences of sums from the chunk's begin would be small differences of large
        // numbers, without their last digits.
        float from_begin = 0.0f;
        for (std::int64_t t = 0; t < count_; ++t) {
            const float log = logs_[t];
            from_begin += log;
            until_[t] = from_begin;
            for (std::int64_t s = 0; s <= t; s += LANES) {
                const Int token = lane_numbers() + static_cast<std::int32_t>(s);
                const Int now = splat_int(t);
                Float sum = load(sums_ + s) + log;
                sum = token < now ? sum : Float{};
                store(sums_ + s, sum);
                store(added_ + t * columns + s, exp(sum) * load(steps_ + s));
            }
        }
        for (std::int64_t t = 0; t < columns; t += LANES) store(until_ + t, exp(load(until_ + t)));
    }

    template <typename T>
    void load_x(const T* x, std::int64_t stride) {
        for (std::int64_t t = 0; t < count_; ++t) copy_as_floats(x + t * stride, x_ + t * sizes_.columns(), sizes_.head_dim);
        // Values that the last tile reads beyond the chunk's end are multiplied by zero.
        std::fill(x_ + count_ * sizes_.columns(), x_ + padded_count() * sizes_.columns(), 0.0f);
    }

    // Compute y [tokens, head_dim] and the state after the chunk. Without `has_state` the state before it is zero.
    template <typename T>
    void advance(int head, bool has_state, float D, T* y, std::int64_t stride) {
        put_weights(D);
        put_remaining(count_);
        for_panels(sizes_.columns(), [&](auto vectors, std::int64_t column) {
            put_outputs<vectors>(head, has_state, column);
            put_state<vectors>(head, has_state, count_, head, column);
        });
        for (std::int64_t t = 0; t < count_; ++t) {
            const float* const from = y_ + t * sizes_.columns();
            for (std::int64_t p = 0; p < sizes_.head_dim; p += LANES) {
                store_partial(y + t * stride + p, load(from + p), sizes_.head_dim - p);
            }
        }
    }

    // Compute the state after the first `count` tokens of the chunk into CHECKPOINT_STATE; the head's state is
    // unchanged.
    void checkpoint_state(int head, bool has_state, std::int64_t count) {
        put_remaining(count);
        for_panels(sizes_.columns(), [&](auto vectors, std::int64_t column) {
            put_state<vectors>(head, has_state, count, CHECKPOINT_STATE, column);
        });
    }

    // Load a state from a slot's [head_dim, state].
    template <typename S>
    void load_state(int head, const S* slot) {
        for_squares(state_of(head), [&](float* to, std::int64_t stride, std::int64_t p, std::int64_t n) {
            Float square[LANES];
            for (int i = 0; i < LANES; ++i) {
                square[i] = p + i < sizes_.head_dim ? load_partial(slot + (p + i) * sizes_.state + n, sizes_.state - n)
                                                    : Float{};
            }
            transpose(square);
            for (int i = 0; i < LANES && n + i < sizes_.state_rows(); ++i) store(to + i * stride, square[i]);
        });
    }

    // Compute the noise with which a head's states are rounded to S after the token at `position`; without `layer`
    // there is none.
    template <typename S>
    void load_noise(std::int64_t position, std::optional<std::int64_t> layer, std::int64_t head) {
        has_noise_ = layer.has_value() && sizeof(S) == 2;
        if (!has_noise_) return;
        const std::int64_t state = sizes_.state, head_dim = sizes_.head_dim;
        put_noise<S>(position, *layer, 0, state, reinterpret_cast<std::uint32_t*>(column_noise_));
        put_noise<S>(position, *layer, state + head * head_dim, head_dim,
                     reinterpret_cast<std::uint32_t*>(channel_noise_));
    }

    // Round the state to S.
    template <typename S>
    void round_state(int head) {
        for_panels(sizes_.columns(), [&](auto vectors, std::int64_t column) {
            float* at = state_of(head) + column * sizes_.state_rows();
            for (std::int64_t n = 0; n < sizes_.state; ++n) {
                const UInt noise = UInt{} + bits_as<std::uint32_t>(column_noise_[n]);
                for (int v = 0; v < vectors; ++v, at += LANES) {
                    const UInt of_channels = bits_as<UInt>(load(channel_noise_ + column + v * LANES));
                    store(at, rounded_state<S>(load(at), noise ^ of_channels).value());
                }
            }
        });
    }

    // Round the state to 8 bits: neighbours in a slot's rows are rows here.
    void round_to_int8(int head) {
        for_panels(sizes_.columns(), [&](auto vectors, std::int64_t column) {
            constexpr std::int64_t STRIDE = vectors * LANES;
            for (std::int64_t n = 0; n < sizes_.state; n += INT8_STATE_BLOCK) {
                const std::int64_t count = std::min<std::int64_t>(INT8_STATE_BLOCK, sizes_.state - n);
                for (int v = 0; v < vectors; ++v) {
                    float* const block = state_of(head) + column * sizes_.state_rows() + n * STRIDE + v * LANES;
                    Int most{};
                    for (std::int64_t i = 0; i < count; ++i) {
                        const Int bits = bits_as<Int>(load(block + i * STRIDE)) & 0x7FFFFFFF;
                        most = bits > most ? bits : most;
                    }
                    const Float scale = packing_scale(bits_as<Float>(most));
                    for (std::int64_t i = 0; i < count; ++i) {
                        store(block + i * STRIDE, packable(load(block + i * STRIDE), scale));
                    }
                }
            }
        });
    }

    template <typename S>
    void store_state(int head, S* slot) {
        for_squares(state_of(head), [&](float* from, std::int64_t stride, std::int64_t p, std::int64_t n) {
            Float square[LANES];
            for (int i = 0; i < LANES; ++i) {
                square[i] = n + i < sizes_.state_rows() ? load(from + i * stride) : Float{};
            }
            transpose(square);
            const UInt noise = bits_as<UInt>(load(column_noise_ + n));
            for (int i = 0; i < LANES && p + i < sizes_.head_dim; ++i) {
                const RoundedState<S> vector = rounded_state<S>(square[i], noise ^ bits_as<std::uint32_t>(channel_noise_[p + i]));
                store_partial(slot + (p + i) * sizes_.state + n, vector.value(), sizes_.state - n);
            }
        });
    }

  protected:
    const Sizes sizes_;
    std::int64_t count_ = 0;  // tokens in this chunk
    float* states_;           // [HEADS and CHECKPOINT_STATE][panels of TILE_VECTORS][state_rows, columns of the panel]
    float* B_;                // [state_rows, token_columns]
    float* C_;                // [tokens, state]
    float* scores_;           // [tokens t, token_columns s]: C_t B_s
    float* added_;            // [t, s]: step s and its decay until after t
    float* weights_;          // [t, s]: factor of x_s in y_t
    float* steps_;            // [token_columns]
    float* logs_;             // [token_columns]: logarithms of each token's decay
    float* until_;            // [token_columns]: decay of the state before the chunk until after t
    float* sums_;             // [token_columns]
    float* x_;                // [tokens, columns]
    float* remaining_;        // [tokens, columns]: addition of x to the state
    float* y_;                // [tokens, columns]
    bool has_noise_ = false;
    float* column_noise_;     // [state] words
    float* channel_noise_;    // [columns] words

    template <typename S>
    RoundedState<S> rounded_state(Float value, UInt noise) const {
        return has_noise_ ? RoundedState<S>(value, noise) : RoundedState<S>(value);
    }

    std::int64_t C_row() const { return Sizes::round_up(sizes_.state, LANES); }
    float* state_of(int head) const { return states_ + head * sizes_.state_elements(); }

    // Return the factors of x in y_t for a vector of tokens from `s` on.
    Float weight_of(std::int64_t t, std::int64_t s, float D) const {
        const std::int64_t at = t * sizes_.token_columns() + s;
        const Int now = splat_int(t), token = lane_numbers() + static_cast<std::int32_t>(s);
        Float weight = load(added_ + at) * load(scores_ + at);
        weight = token == now ? weight + D : weight;
        return token <= now ? weight : Float{};
    }

  private:
    std::int64_t padded_count() const { return Sizes::round_up(count_, TILE_ROWS); }

    static Int splat_int(std::int64_t value) { return Int{} + static_cast<std::int32_t>(value); }

    static Int lane_numbers() {
        Int numbers;
        for (int i = 0; i < LANES; ++i) numbers[i] = i;
        return numbers;
    }

    void put_weights(float D) {
        const std::int64_t columns = sizes_.token_columns();
        for (std::int64_t t = 0; t < padded_count(); ++t) {
            for (std::int64_t s = 0; s < columns; s += LANES) {
                store(weights_ + t * columns + s, t < count_ ? weight_of(t, s, D) : Float{});
            }
        }
    }

    void put_remaining(std::int64_t count) {
        const float* added = added_ + (count - 1) * sizes_.token_columns();
        for (std::int64_t t = 0; t < count; ++t) {
            for (std::int64_t p = t * sizes_.columns(); p < (t + 1) * sizes_.columns(); p += LANES) {
                store(remaining_ + p, load(x_ + p) * added[t]);
            }
        }
    }

    template <int VECTORS>
    void put_outputs(int head, bool has_state, std::int64_t column) {
        const std::int64_t columns = sizes_.columns(), token_columns = sizes_.token_columns();
        const float* const state = state_of(head) + column * sizes_.state_rows();
        for (std::int64_t t = 0; t < padded_count(); t += TILE_ROWS) {
            Tile<VECTORS> tile;
            tile.clear();
            if (has_state) {
                tile.add({C_ + t * C_row(), C_row(), 1}, state, VECTORS * LANES, sizes_.state);
                for (int i = 0; i < TILE_ROWS; ++i) {
                    for (Float& sum : tile.sums[i]) sum *= until_[t + i];
                }
            }
            tile.add({weights_ + t * token_columns, token_columns, 1}, x_ + column, columns, t + TILE_ROWS);
            tile.keep(y_ + t * columns + column, columns);
        }
    }

    template <int VECTORS>
    void put_state(int head, bool has_state, std::int64_t count, int to, std::int64_t column) {
        constexpr std::int64_t STRIDE = VECTORS * LANES;
        const std::int64_t token_columns = sizes_.token_columns();
        const float* const before = state_of(head) + column * sizes_.state_rows();
        float* const after = state_of(to) + column * sizes_.state_rows();
        const float decay = until_[count - 1];
        for (std::int64_t n = 0; n < sizes_.state_rows(); n += TILE_ROWS) {
            Tile<VECTORS> tile;
            tile.clear();
            if (has_state) {
                for (int i = 0; i < TILE_ROWS; ++i) {
                    for (int v = 0; v < VECTORS; ++v) {
                        tile.sums[i][v] = load(before + (n + i) * STRIDE + v * LANES) * decay;
                    }
                }
            }
            tile.add({B_ + n * token_columns, token_columns, 1}, remaining_ + column, sizes_.columns(), count);
            tile.keep(after + n * STRIDE, STRIDE);
        }
    }

    // Call `body(address, stride, p, n)` for every square of LANES x LANES of a state.
    template <typename Body>
    void for_squares(float* state, Body&& body) const {
        for_panels(sizes_.columns(), [&](auto vectors, std::int64_t column) {
            const std::int64_t stride = vectors * LANES;
            for (std::int64_t n = 0; n < sizes_.state; n += LANES) {
                for (int v = 0; v < vectors; ++v) {
                    float* const first = state + column * sizes_.state_rows() + n * stride + v * LANES;
                    body(first, stride, column + v * LANES, n);
                }
            }
        });
    }
};

}  // namespace ostinato
