// Keys and values as 8-bit integers, each token's head with a scale.
//
// The integers are multiplied as they are. A key's scale multiplies its score, a value's its weight, which is as if keys
// and values had been multiplied before, and takes one product for each in place of head_dim.
#pragma once

#include <type_traits>

#include "attention_words.h"

namespace ostinato {
namespace attention {

// Of keys and values that have none.
struct NoScales {
    static constexpr bool ARE_THERE = false;

    NoScales(const float* = nullptr, const float* = nullptr) {}
    void take(const KeyOffsets&) {}
    Float score(Float score, std::int64_t) const { return score; }
    Float score_of(Float score, std::int64_t) const { return score; }
};

// Those of a tile's keys and values, from those of the caches by the number of a token's head.
class TileScales {
  public:
    static constexpr bool ARE_THERE = true;

    TileScales(const float* k_scales, const float* v_scales) : k_scales_(k_scales), v_scales_(v_scales) {}

    // Fetches those of the heads [begin, end).
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

    // Scores or weights of LANES keys.
    Float score(Float score, std::int64_t vector) const { return score * load(keys_ + vector * LANES); }
    Float weight(Float weight, std::int64_t vector) const { return weight * load(values_ + vector * LANES); }

    // Of one key, in every lane.
    Float score_of(Float score, std::int64_t key) const { return score * splat(keys_[key]); }
    Float weight_of(Float weight, std::int64_t key) const { return weight * splat(values_[key]); }

  private:
    const float *k_scales_, *v_scales_;
    float keys_[TILE], values_[TILE];
};

// Of caches that hold S.
template <typename S>
using ScalesOf = std::conditional_t<std::is_same_v<S, std::int8_t>, TileScales, NoScales>;

}  // namespace attention
}  // namespace ostinato
