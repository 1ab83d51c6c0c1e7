// The Mamba-1 recurrence, token by token, for decoding and for prompts (Gu and Dao 2023, arXiv 2312.00752, section 3):
// h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t,  y_t = h_t C_t + D x_t. Each channel has a state, whose elements have their
// own decay rates.
//
// The order of all sums is fixed, and every sum is fused explicitly, so that a token's bits depend on nothing but its
// inputs and the state before it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/transpose.h"
#include "state/ssd_recurrence.h"

namespace ostinato {

// Channels that a thread takes at a time. With states of 16 floats, they and their rates stay in an L1 cache.
constexpr std::int64_t CHANNEL_BLOCK = 64;
static_assert(CHANNEL_BLOCK % LANES == 0);

// Return the sum of each of LANES vectors, in their order. The vectors are overwritten.
[[gnu::always_inline]] inline Float sums_of(Float (&vectors)[LANES]) {
    for (int count = LANES / 2; count > 0; count /= 2) {
        for (int i = 0; i < count; ++i) {
            const Float low = interleave_low(vectors[i], vectors[i + count]);
            vectors[i] = low + interleave_high(vectors[i], vectors[i + count]);
        }
    }
    return vectors[0];
}

// Compute `rates` [count, padded(size)]: A = -exp(A_log) of `count` channels, for powers of 2 in place of e.
inline void put_rates(const float* A_log, std::int64_t count, std::int64_t size, float* rates) {
    for (std::int64_t c = 0; c < count; ++c) {
        for (std::int64_t i = 0; i < size; i += LANES) {
            store(rates + c * padded(size) + i, -LOG2_E * exp2(LOG2_E * load_partial(A_log + c * size + i, size - i)));
        }
    }
}

// Some consecutive tokens of a row for a block of its channels. Per token, `steps`, `added` (step * x) and `y` are
// CHANNEL_BLOCK floats apart, `B` and `C` padded(size). The words of noise have the same layout; without noise, states
// are rounded to nearest.
class SelectiveTokens {
  public:
    std::int64_t count = 0;
    float *steps, *added, *y, *B, *C;
    std::uint32_t *column_noise, *channel_noise;
    bool is_noisy = false;

    // Return tokens `begin` to `end - 1`.
    SelectiveTokens part(std::int64_t begin, std::int64_t end) const {
        SelectiveTokens tokens = *this;
        tokens.count = end - begin;
        for (float** each : {&tokens.steps, &tokens.added, &tokens.y}) *each += begin * CHANNEL_BLOCK;
        for (float** each : {&tokens.B, &tokens.C}) *each += begin * padded(size_);
        tokens.column_noise += begin * padded(size_);
        tokens.channel_noise += begin * CHANNEL_BLOCK;
        return tokens;
    }

    // Return the floats for up to `most` tokens.
    static std::int64_t floats(std::int64_t most, std::int64_t size) {
        return most * (4 * CHANNEL_BLOCK + 3 * padded(size));
    }

    SelectiveTokens(float* memory, std::int64_t most, std::int64_t size) : size_(size) {
        steps = memory;
        added = steps + most * CHANNEL_BLOCK;
        y = added + most * CHANNEL_BLOCK;
        B = y + most * CHANNEL_BLOCK;
        C = B + most * padded(size);
        column_noise = reinterpret_cast<std::uint32_t*>(C + most * padded(size));
        channel_noise = column_noise + most * padded(size);
    }

    // Load token i of `channels` channels: their `x`, `dt` and `dt_bias`, and the token's `B` and `C`.
    template <typename T>
    void load_token(std::int64_t i, const T* x, const T* dt, const float* dt_bias, std::int64_t channels, const T* of_B,
                    const T* of_C) {
        for (std::int64_t c = 0; c < channels; c += LANES) {
            const std::int64_t rest = channels - c;
            const Float step = softplus(load_partial(dt + c, rest) + load_partial(dt_bias + c, rest));
            store(steps + i * CHANNEL_BLOCK + c, step);
            store(added + i * CHANNEL_BLOCK + c, step * load_partial(x + c, rest));
        }
        to_floats(of_B, B + i * padded(size_), size_);
        to_floats(of_C, C + i * padded(size_), size_);
    }

    // Compute the noise of the state after token i, which is at `position`, for the channels from `first` on.
    template <typename S>
    void load_noise(std::int64_t i, std::int64_t position, std::int64_t layer, std::int64_t first,
                    std::int64_t channels) {
        put_noise<S>(position, layer, 0, size_, column_noise + i * padded(size_));
        put_noise<S>(position, layer, size_ + first, channels, channel_noise + i * CHANNEL_BLOCK);
    }

    // Write the outputs of token i: y + D x.
    template <typename T>
    void store_token(std::int64_t i, const T* x, const float* D, std::int64_t channels, T* out) const {
        for (std::int64_t c = 0; c < channels; c += LANES) {
            const std::int64_t rest = channels - c;
            const Float sums = load(y + i * CHANNEL_BLOCK + c);
            store_partial(out + c, fma(load_partial(D + c, rest), load_partial(x + c, rest), sums), rest);
        }
    }

  private:
    std::int64_t size_;
};

// Apply token i to up to LANES states of `size`: from `from` [count, size] to `to`, which may be the same, past the
// caches if AROUND. `first` is the index of the first channel in its block, and `rates` are those of this channel. V is
// the number of vectors of a state without remainder; or 0, for any `size`.
template <int V, bool NOISY, bool AROUND, typename S>
[[gnu::always_inline]] inline void advance_group(const SelectiveTokens& tokens, std::int64_t i, std::int64_t first,
                                                 int count, std::int64_t size, const float* rates, const S* from,
                                                 S* to) {
    const std::int64_t stride = V ? V * LANES : padded(size);
    const int vectors = static_cast<int>(stride / LANES);
    const float* const B = tokens.B + i * stride;
    const float* const C = tokens.C + i * stride;
    Float sums[LANES];
    for (int c = count; c < LANES; ++c) sums[c] = Float{};
    for (int c = 0; c < count; ++c) {
        const std::int64_t place = i * CHANNEL_BLOCK + first + c;
        const Float step = splat(tokens.steps[place]), added = splat(tokens.added[place]);
        UInt noise = {};
        if constexpr (NOISY) noise += tokens.channel_noise[place];
        Float sum = {};
        for (int v = 0; v < vectors; ++v) {
            const std::int64_t at = c * size + v * LANES, rest = V ? std::int64_t{LANES} : size - v * LANES;
            const Float decay = exp2(step * load(rates + c * stride + v * LANES));
            const Float state = fma(added, load(B + v * LANES), load_partial(from + at, rest) * decay);
            sum = fma(state, load(C + v * LANES), sum);
            const RoundedState<S> rounded = [&] {
                if constexpr (NOISY) {
                    return RoundedState<S>(state, load_words(tokens.column_noise + i * stride + v * LANES) ^ noise);
                } else {
                    return RoundedState<S>(state);
                }
            }();
            if (rest < LANES) {
                store_masked(to + at, rounded.value(), static_cast<int>(rest));
            } else if constexpr (AROUND) {
                rounded.stream(to + at);
            } else {
                rounded.store(to + at);
            }
        }
        sums[c] = sum;
    }
    store(tokens.y + i * CHANNEL_BLOCK + first, sums_of(sums));
}

// Apply the tokens to `channels` states of `size`, read from `from` (null: zeros) [channels, size], and write the
// states after token i to `to(i)`, unless that is null; y becomes h C. Between tokens a state has its storage type S,
// as if each token had been a call of its own. `to(i)` may be `from`; other targets are written past the caches if
// `streams`: then call `end_streams` before another thread reads them. `ahead` is prefetched, if not null. `own`
// [LANES, size] is scratch memory.
template <int V, bool NOISY, typename S, typename To>
void advance_channels(const SelectiveTokens& tokens, std::int64_t channels, std::int64_t size, const float* rates,
                      const S* from, const S* ahead, const To& to, bool streams, S* own) {
    for (std::int64_t first = 0; first < channels; first += LANES) {
        const int count = static_cast<int>(std::min<std::int64_t>(LANES, channels - first));
        if (ahead) {
            const char* next = reinterpret_cast<const char*>(ahead + first * size);
            for (std::int64_t at = 0; at < count * size * std::int64_t{sizeof(S)}; at += 64) __builtin_prefetch(next + at);
        }
        const S* source = from ? from + first * size : own;
        if (!from) std::fill_n(own, count * size, S{});
        for (std::int64_t i = 0; i < tokens.count; ++i) {
            S* const target = to(i);
            S* const at = target ? target + first * size : own;
            const bool around = V && streams && target && target != from && i + 1 == tokens.count &&
                                reinterpret_cast<std::uintptr_t>(at) % sizeof(RoundedState<S>) == 0;
            const float* const own_rates = rates + first * padded(size);
            if (around) {
                advance_group<V, NOISY, true>(tokens, i, first, count, size, own_rates, source, at);
            } else {
                advance_group<V, NOISY, false>(tokens, i, first, count, size, own_rates, source, at);
            }
            source = at;
        }
    }
}

// Call `advance_channels` for states of any `size`, rounded with the tokens' noise if they have any.
template <typename S, typename To>
void advance_block(const SelectiveTokens& tokens, std::int64_t channels, std::int64_t size, const float* rates,
                   const S* from, const S* ahead, const To& to, bool streams, S* own) {
    const auto advance = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        if constexpr (sizeof(S) == 2) {
            if (tokens.is_noisy) {
                return advance_channels<V, true>(tokens, channels, size, rates, from, ahead, to, streams, own);
            }
        }
        advance_channels<V, false>(tokens, channels, size, rates, from, ahead, to, streams, own);
    };
    switch (size % LANES ? 0 : size / LANES) {
        case 1: return advance(std::integral_constant<int, 1>{});
        case 2: return advance(std::integral_constant<int, 2>{});
        default: return advance(std::integral_constant<int, 0>{});
    }
}

}  // namespace ostinato
