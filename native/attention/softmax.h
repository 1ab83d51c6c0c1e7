// Softmax of attention: weights of one tile, sums of several tiles added, and scales of int8 keys and values.
//
// int8 keys and values are multiplied as integers. A key's scale multiplies its score, and a value's scale its weight:
// the result is the same as with scaled keys and values, and takes one multiplication in place of head_dim.
#pragma once

#include <type_traits>

#include "attention/operands.h"

namespace ostinato {
namespace attention {

// Stand-in for the scales of keys and values that have none.
struct NoScales {
    static constexpr bool ARE_THERE = false;

    NoScales(const float* = nullptr, const float* = nullptr) {}
    void take(const KeyOffsets&) {}
    Float score(Float score, std::int64_t) const { return score; }
    Float score_of(Float score, std::int64_t) const { return score; }
};

// Scales of a tile's keys and values, gathered from the caches by the index of a token's head.
class TileScales {
  public:
    static constexpr bool ARE_THERE = true;

    TileScales(const float* k_scales, const float* v_scales) : k_scales_(k_scales), v_scales_(v_scales) {}

    // Prefetch the scales of the heads [begin, end).
    void fetch(std::int64_t begin, std::int64_t end) const {
        constexpr std::int64_t LINE = 64 / sizeof(float);
        for (std::int64_t head = begin; head < end; head += LINE) {
            __builtin_prefetch(k_scales_ + head, 0, 2);
            __builtin_prefetch(v_scales_ + head, 0, 2);
        }
    }

    void take(const KeyOffsets& places) {
        for (int i = 0; i < TILE; ++i) keys_[i] = k_scales_[places.heads[i]];
        for (int i = 0; i < TILE; ++i) values_[i] = v_scales_[places.heads[i]];
    }

    // Scale the scores or weights of LANES keys.
    Float score(Float score, std::int64_t vector) const { return score * load(keys_ + vector * LANES); }
    Float weight(Float weight, std::int64_t vector) const { return weight * load(values_ + vector * LANES); }

    // Scale the scores or weights of one key, in every lane.
    Float score_of(Float score, std::int64_t key) const { return score * splat(keys_[key]); }
    Float weight_of(Float weight, std::int64_t key) const { return weight * splat(values_[key]); }

  private:
    const float *k_scales_, *v_scales_;
    float keys_[TILE], values_[TILE];
};

// Scales of caches that hold S.
template <typename S>
using ScalesOf = std::conditional_t<std::is_same_v<S, std::int8_t>, TileScales, NoScales>;

// Products that become capped scores, cap * tanh(inner * product), `inner` being scale / cap (Gemma 2). tanh(y) is
// 1 - 2 / (1 + e^(2 y)), and for |y| < 1/4, where that loses digits, its series.
template <typename Scales>
struct CappedScores {
    static constexpr bool ARE_THERE = Scales::ARE_THERE;
    const Scales& scales;
    float inner, cap;

    Float score(Float score, std::int64_t vector) const { return capped(scales.score(score, vector)); }
    Float score_of(Float score, std::int64_t key) const { return capped(scales.score_of(score, key)); }
    Float weight(Float weight, std::int64_t vector) const { return scales.weight(weight, vector); }
    Float weight_of(Float weight, std::int64_t key) const { return scales.weight_of(weight, key); }

  private:
    Float capped(Float product) const {
        constexpr float MOST = 20.0f;  // tanh of more is 1
        const Float y = product * inner, square = y * y, below = y > MOST ? splat(MOST) : y;
        const Float large = 1.0f - 2.0f / (1.0f + exp2(below * (2.0f * LOG2_E)));
        Float series = fma(square, splat(62.0f / 2835.0f), splat(-17.0f / 315.0f));
        series = fma(square, fma(square, series, splat(2.0f / 15.0f)), splat(-1.0f / 3.0f));
        return cap * (square < 0.0625f ? fma(y * square, series, y) : large);
    }
};

// Softmax state of one query row: the maximum score, and the sum of the weights relative to it. Scores are powers of 2.
struct Softmax {
    float largest, total;
};

// Turn scores [TILE] of keys [first, end) into weights 2^(factor * score - largest), as words, which take no more
// memory; the other keys get 0. The total is of the rounded weights. With `scales`, scores are multiplied by the keys'
// scales before the softmax, and weights by the values' scales after it, without changing the total.
template <typename T, typename Scales = NoScales>
__attribute__((noinline)) Softmax softmax(float* scores, std::int64_t first, std::int64_t end, float factor,
                                          const Scales& scales = {}) {
    constexpr int ELEMENTS = LaneOperand<T>::ELEMENTS;
    const Float none = splat(-std::numeric_limits<float>::infinity());
    const auto hide = [&](std::int64_t vector) {
        Int key;
        for (int i = 0; i < LANES; ++i) key[i] = i;
        key += static_cast<std::int32_t>(vector * LANES);
        float* at = scores + vector * LANES;
        const auto from = static_cast<std::int32_t>(first), to = static_cast<std::int32_t>(end);
        store(at, (key >= from) & (key < to) ? scales.score(load(at), vector) * factor : none);
    };
    const std::int64_t groups = (end + ELEMENTS * LANES - 1) / (ELEMENTS * LANES);
    Float best = none;
    for (std::int64_t i = 0; i < groups * ELEMENTS; ++i) {
        if (i * LANES < first || (i + 1) * LANES > end) {
            hide(i);
        } else {
            store(scores + i * LANES, scales.score(load(scores + i * LANES), i) * factor);
        }
        best = max(best, load(scores + i * LANES));
    }
    const float most = reduce_max(best);
    Float total = {};
    for (std::int64_t i = 0; i < groups; ++i) {
        Float weights[ELEMENTS];
        for (int j = 0; j < ELEMENTS; ++j) weights[j] = exp2(load(scores + (i * ELEMENTS + j) * LANES) - most);
        if constexpr (Scales::ARE_THERE) {
            for (int j = 0; j < ELEMENTS; ++j) {
                total += weights[j];
                weights[j] = scales.weight(weights[j], i * ELEMENTS + j);
            }
            Float rounded = {};
            LaneOperand<T>::store_weights(scores + i * LANES, weights, rounded);
        } else {
            LaneOperand<T>::store_weights(scores + i * LANES, weights, total);
        }
    }
    for (std::int64_t i = groups; i < PANELS / ELEMENTS; ++i) store(scores + i * LANES, Float{});
    return {most, sum(total)};
}

// Add a tile's weighted sums [padded_dim] to a row's. The weights of each are relative to its own maximum (Milakov and
// Gimelshein 2018, eq. 4).
__attribute__((noinline)) inline void merge(Softmax& row, float* sums, Softmax tile, const float* tile_sums,
                                            std::int64_t padded_dim) {
    const float most = row.largest > tile.largest ? row.largest : tile.largest;
    Float apart = {};
    apart[0] = row.largest - most;
    apart[1] = tile.largest - most;
    const Float factors = exp2(apart);
    const float old = factors[0], added = factors[1];
    row = {most, row.total * old + tile.total * added};
    for (std::int64_t i = 0; i < padded_dim; i += LANES) {
        store(sums + i, fma(load(sums + i), splat(old), load(tile_sums + i) * added));
    }
}

// Return what the sums of a row are multiplied by. `sink` is null, or a score that adds to the total and has no value.
inline float quotient(Softmax row, const float* sink) {
    if (sink == nullptr) return 1.0f / row.total;
    const float score = *sink * LOG2_E, most = score > row.largest ? score : row.largest;
    Float apart = {};
    apart[0] = row.largest - most;
    apart[1] = score - most;
    const Float weights = exp2(apart);
    return weights[0] / (row.total * weights[0] + weights[1]);
}

// Write the quotient. Adding 0 removes the sign of a zero, which depends on how the sum was formed.
template <typename T>
__attribute__((noinline)) void finish(Softmax row, const float* sums, T* out, std::int64_t dim,
                                      const float* sink = nullptr) {
    constexpr int ELEMENTS = LaneOperand<T>::ELEMENTS;
    const float factor = quotient(row, sink);
    for (std::int64_t i = 0; i < dim; i += ELEMENTS * LANES) {
        Float parts[ELEMENTS];
        for (int j = 0; j < ELEMENTS; ++j) parts[j] = load(sums + i + j * LANES);
        LaneOperand<T>::in_order(parts);
        for (int j = 0; j < ELEMENTS; ++j) {
            const std::int64_t at = i + j * LANES;
            if (at < dim) store_partial(out + at, parts[j] * factor + 0.0f, dim - at);
        }
    }
}

}  // namespace attention
}  // namespace ostinato
