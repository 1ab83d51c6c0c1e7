// Rounding of float32 states to 8 bits, so that the prefix cache can pack them without loss:
// src/ostinato/ops/reference/stochastic_rounding.py is the definition.
#pragma once

#include <algorithm>
#include <limits>

#include "quant/int8.h"

namespace ostinato {

// Return whether states are rounded after the token before `position`.
inline bool is_packed_at(std::int64_t position) { return position % INT8_STATE_TOKENS == 0; }

// Return the end of the tokens from `token` on, which is at `position`, after which states are rounded next; or `end`, if
// that is before it.
inline std::int64_t next_packed(std::int64_t token, std::int64_t position, std::int64_t end) {
    return std::min(end, token + INT8_STATE_TOKENS - position % INT8_STATE_TOKENS);
}

// Return the scales for blocks with these largest magnitudes: the quotient by MAX_INT8 with 16 significant bits, rounded
// up. So integers up to MAX_INT8 times a scale are exact.
inline Float packing_scale(Float largest) {
    constexpr float LEAST = 0x1p-100f;
    const Float up = bits_as<Float>((bits_as<UInt>(largest / splat(MAX_INT8)) + 0xFF) & ~0xFFu);
    const Float scale = largest < splat(LEAST) ? splat(1.0f) : up;  // such small values become 0
    return largest <= splat(std::numeric_limits<float>::max()) ? scale
                                                               : splat(std::numeric_limits<float>::quiet_NaN());
}

inline Float packable(Float value, Float scale) { return ((value / scale + ROUND) - ROUND) * scale; }

// Round the block of up to INT8_STATE_BLOCK neighbours at `values`.
inline void round_block(float* values, std::int64_t count) {
    const Float scale = packing_scale(splat(largest_magnitude(values, count)));
    for (std::int64_t i = 0; i < count; i += LANES) {
        store_partial(values + i, packable(load_partial(values + i, count - i), scale), count - i);
    }
}

// Round `rows` rows of `size` elements.
inline void round_rows(float* values, std::int64_t rows, std::int64_t size) {
    for (std::int64_t row = 0; row < rows; ++row, values += size) {
        for (std::int64_t i = 0; i < size; i += INT8_STATE_BLOCK) {
            round_block(values + i, std::min<std::int64_t>(INT8_STATE_BLOCK, size - i));
        }
    }
}

template <typename S>
void round_rows(S*, std::int64_t, std::int64_t) {}  // states of 16 bits are not packed

}  // namespace ostinato
