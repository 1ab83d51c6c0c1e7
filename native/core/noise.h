// Stochastic rounding of states to 16 bits: src/ostinato/ops/reference/stochastic_rounding.py is the definition.
#pragma once

#include <type_traits>

#include "core/simd.h"
#include "hash.h"

namespace ostinato {

// Hash 32-bit integers: a bijection that spreads every input bit.
inline UInt mix(UInt x) {
    x = (x ^ (x >> HASH_SHIFTS[0])) * HASH_MULTIPLIERS[0];
    x = (x ^ (x >> HASH_SHIFTS[1])) * HASH_MULTIPLIERS[1];
    return x ^ (x >> HASH_SHIFTS[2]);
}

// Bits of a float that rounding to S drops.
template <typename S>
constexpr int DROPPED_BITS = std::is_same_v<S, bf16> ? 16 : 13;

// Write the noise of a state of layer `layer` after the token at `position`, for rounding to S: words `first` to `first
// + count - 1`, and enough to fill the last vector. Words [0, size) belong to the columns, the others to the channels.
template <typename S>
void put_noise(std::int64_t position, std::int64_t layer, std::int64_t first, std::int64_t count, std::uint32_t* to) {
    UInt at = UInt{} + static_cast<std::uint32_t>(position);
    at = mix(mix(at) + static_cast<std::uint32_t>(layer));
    for (int i = 0; i < LANES; ++i) at[i] += static_cast<std::uint32_t>(first + i);
    for (std::int64_t i = 0; i < count; i += LANES, at += LANES) {
        const UInt words = mix(at) >> (32 - DROPPED_BITS<S>);  // the upper bits of a word
        std::memcpy(to + i, &words, sizeof(words));
    }
}

inline UInt load_words(const std::uint32_t* from) {
    UInt words;
    std::memcpy(&words, from, sizeof(words));
    return words;
}

// Return `value` rounded to the bits of S, up or down by `noise`: the exclusive or of the words of its column and its
// channel.
template <typename S>
U16Vec rounded_bits(Float value, UInt noise) {
    const UInt bits = bits_as<UInt>(value);
    if constexpr (std::is_same_v<S, bf16>) {
        // A NaN stays NaN only without noise.
        return __builtin_convertvector((bits + (value == value ? noise : UInt{})) >> 16, U16Vec);
    } else {
        constexpr std::uint32_t REBIAS = (127 - 15) << 10, INFINITE = 0x7C00, NAN_BITS = 0x7E00;
        constexpr float LEAST_NORMAL = 0x1p-14f, UNITS = 0x1p37f;  // below the smallest normal number, units are 2^-24
        const UInt magnitude = bits & 0x7FFFFFFF;
        const Float size = bits_as<Float>(magnitude);
        const Int small = size < LEAST_NORMAL;
        const Int units = __builtin_convertvector(small ? size * UNITS : Float{}, Int);
        const UInt rebiased = magnitude - (REBIAS << 13);
        UInt rounded = ((small ? bits_as<UInt>(units) : rebiased) + noise) >> 13;
        rounded = rounded > INFINITE ? UInt{} + INFINITE : rounded;
        rounded = value != value ? UInt{} + NAN_BITS : rounded;
        return __builtin_convertvector(rounded | ((bits >> 16) & 0x8000), U16Vec);
    }
}

// A vector of a state in its storage type S.
template <typename S>
struct RoundedState {
    U16Vec bits;

    RoundedState(Float value, UInt noise) : bits(rounded_bits<S>(value, noise)) {}
    explicit RoundedState(Float value) { ostinato::store(reinterpret_cast<S*>(&bits), value); }

    Float value() const { return load(reinterpret_cast<const S*>(&bits)); }
    void store(S* to) const { std::memcpy(to, &bits, sizeof(bits)); }
    void stream(S* to) const { ostinato::stream(to, bits); }
};

template <>
struct RoundedState<float> {
    Float bits;

    RoundedState(Float value, UInt) : bits(value) {}
    explicit RoundedState(Float value) : bits(value) {}

    Float value() const { return bits; }
    void store(float* to) const { ostinato::store(to, bits); }
    void stream(float* to) const { ostinato::stream(to, bits); }
};

}  // namespace ostinato
