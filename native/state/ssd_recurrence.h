// The Mamba-2 recurrence, token by token, shared by kernels that must give the same bits (Dao and Gu 2024, arXiv
// 2405.21060, sections 2 and 6): h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,  y_t = h_t C_t + D x_t.
//
// The order of all sums is fixed, and every sum is fused explicitly, so that a token's bits depend on nothing but its
// inputs and the state before it.
#pragma once

#include <type_traits>
#include <utility>

#include "core/noise.h"
#include "core/simd.h"

namespace ostinato {

// Return `size` rounded up to whole vectors.
inline std::int64_t padded(std::int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// Convert `count` elements of T to floats, with zeros up to a whole vector.
template <typename T>
void to_floats(const T* from, float* to, std::int64_t count) {
    const std::int64_t whole = count / LANES * LANES;
    for (std::int64_t i = 0; i < whole; i += LANES) store(to + i, load(from + i));
    if (whole < count) store(to + whole, load_masked(from + whole, static_cast<int>(count - whole)));
}

// Compute `to` [padded(count)] = step * x: the addition of a token to a state, per element of B.
template <typename T>
void scale_input(const T* x, float step, float* to, std::int64_t count) {
    to_floats(x, to, count);
    for (std::int64_t i = 0; i < count; i += LANES) store(to + i, load(to + i) * step);
}

// Compute `out` [count] = sums + D x, rounded to T.
template <typename T>
void add_skip(const float* sums, float D, const T* x, T* out, std::int64_t count) {
    const std::int64_t whole = count / LANES * LANES;
    const int rest = static_cast<int>(count - whole);
    for (std::int64_t i = 0; i < whole; i += LANES) store(out + i, fma(splat(D), load(x + i), load(sums + i)));
    if (rest) {
        const Float last = fma(splat(D), load_masked(x + whole, rest), load_masked(sums + whole, rest));
        store_masked(out + whole, last, rest);
    }
}

using Limits = std::pair<float, float>;  // minimum and maximum of time steps

// Compute one token's time steps softplus(dt + dt_bias), clamped to `limits`, and decays exp(step * A) with A =
// -exp(A_log). `dt`, `dt_bias`, `A_log` [heads] -> `steps`, `decays` [padded(heads)].
template <typename T>
void step_sizes(const T* dt, const float* dt_bias, const float* A_log, std::int64_t heads, Limits limits,
                float* steps, float* decays) {
    const auto [least, most] = limits;
    const auto take = [&, least = least, most = most](Float raw, Float bias, Float log, std::int64_t at) {
        Float step = softplus(raw + bias);
        step = step < least ? splat(least) : step;
        step = step > most ? splat(most) : step;
        store(steps + at, step);
        store(decays + at, exp(-(step * exp(log))));
    };
    const std::int64_t whole = heads / LANES * LANES;
    for (std::int64_t i = 0; i < whole; i += LANES) take(load(dt + i), load(dt_bias + i), load(A_log + i), i);
    if (const int rest = static_cast<int>(heads - whole)) {
        const auto first = [&](auto* from) { return load_masked(from + whole, rest); };
        take(first(dt), first(dt_bias), first(A_log), whole);
    }
}

// Some consecutive tokens of one head, for some of its channels. Strides per token in floats: `per_head` of `decays`,
// `per_state` of `B` and `C` [padded(size)], `per_channel` of `added` (step * x) and `y`. The words of noise have the
// same layout; without noise, states are rounded to nearest.
struct HeadTokens {
    std::int64_t count;
    const float* decays;
    std::int64_t per_head;
    const float *B, *C;
    std::int64_t per_state;
    const float* added;
    float* y;
    std::int64_t per_channel;
    const std::uint32_t *column_noise = nullptr, *channel_noise = nullptr;

    // Return tokens `begin` to `end - 1`.
    HeadTokens part(std::int64_t begin, std::int64_t end) const {
        HeadTokens tokens = *this;
        tokens.count = end - begin;
        tokens.decays += begin * per_head;
        tokens.B += begin * per_state;
        tokens.C += begin * per_state;
        tokens.added += begin * per_channel;
        tokens.y += begin * per_channel;
        if (column_noise) tokens.column_noise += begin * per_state;
        if (channel_noise) tokens.channel_noise += begin * per_channel;
        return tokens;
    }
};

// Bytes that a core prefetches ahead of the present state: the hardware's prefetch ends with each page.
constexpr std::int64_t PREFETCH_AHEAD = 4096;

// Apply the tokens to channels begin..end-1 of a head's state [head_dim, size], read from `from` (null: zeros), and
// write the state after token i to `to(i)`, unless that is null; y becomes h C. Between tokens a state has its storage
// type S, as if each token had been a call of its own. `to(i)` may be `from`. Call `end_streams` before another thread
// reads a state.
//
// V is the number of vectors of a state, which stay in registers; or 0, for any `size`, with `h` [padded(size)] as
// scratch memory.
template <int V, bool NOISY, typename S, typename To>
void update_channels(const HeadTokens& tokens, std::int64_t begin, std::int64_t end, std::int64_t size, const S* from,
                     const To& to, Float* h) {
    Float registers[V ? V : 1];
    if (V) h = registers;
    const int whole = V ? V : static_cast<int>(size / LANES);
    const int rest = V ? 0 : static_cast<int>(size % LANES);
    for (std::int64_t p = begin; p < end; ++p) {
        if (from) {
            const char* ahead = reinterpret_cast<const char*>(from + p * size) + PREFETCH_AHEAD;
            for (std::int64_t i = 0; i < size * std::int64_t{sizeof(S)}; i += 64) __builtin_prefetch(ahead + i);
        }
        for (int v = 0; v < whole; ++v) h[v] = from ? load(from + p * size + v * LANES) : Float{};
        if (rest) h[whole] = from ? load_masked(from + p * size + whole * LANES, rest) : Float{};
        for (std::int64_t i = 0; i < tokens.count; ++i) {
            const Float decay = splat(tokens.decays[i * tokens.per_head]);
            const Float added = splat(tokens.added[i * tokens.per_channel + p]);
            const float* B = tokens.B + i * tokens.per_state;
            const float* C = tokens.C + i * tokens.per_state;
            Float sums[4] = {};
            for (int v = 0; v < whole + (rest > 0); ++v) {
                h[v] = fma(added, load(B + v * LANES), h[v] * decay);
                sums[v % 4] = fma(h[v], load(C + v * LANES), sums[v % 4]);
            }
            tokens.y[i * tokens.per_channel + p] = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));

            UInt channel = {};
            if constexpr (NOISY) channel += tokens.channel_noise[i * tokens.per_channel + p];
            const auto rounded = [&](int v) {
                if constexpr (NOISY) {
                    return RoundedState<S>(h[v], load_words(tokens.column_noise + i * tokens.per_state + v * LANES) ^ channel);
                } else {
                    return RoundedState<S>(h[v]);
                }
            };
            const bool goes_on = i + 1 < tokens.count;
            S* const target = to(i);
            S* const at = target ? target + p * size : nullptr;
            const bool streams = target != from && reinterpret_cast<std::uintptr_t>(at) % sizeof(RoundedState<S>) == 0;
            for (int v = 0; v < whole; ++v) {
                const RoundedState<S> vector = rounded(v);
                if (goes_on) h[v] = vector.value();
                if (!target) continue;
                streams ? vector.stream(at + v * LANES) : vector.store(at + v * LANES);
            }
            if (rest) {
                h[whole] = rounded(whole).value();
                if (target) store_masked(at + whole * LANES, h[whole], rest);
            }
        }
    }
}

// Call `update_channels` for states of any `size`, rounded with the tokens' noise if they have any.
template <typename S, typename To>
void update_head(const HeadTokens& tokens, std::int64_t begin, std::int64_t end, std::int64_t size, const S* from,
                 const To& to, Float* h) {
    const auto update = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        if constexpr (sizeof(S) == 2) {
            if (tokens.column_noise) return update_channels<V, true>(tokens, begin, end, size, from, to, h);
        }
        update_channels<V, false>(tokens, begin, end, size, from, to, h);
    };
    switch (size % LANES ? 0 : size / LANES) {
        case 1: return update(std::integral_constant<int, 1>{});
        case 2: return update(std::integral_constant<int, 2>{});
        case 4: return update(std::integral_constant<int, 4>{});
        case 8: return update(std::integral_constant<int, 8>{});
        case 16: return update(std::integral_constant<int, 16>{});
        default: return update(std::integral_constant<int, 0>{});
    }
}

}  // namespace ostinato
