// Draw from one row of logits with Gumbel noise, among the tokens that top-k, top-p and min-p keep.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "core/noise.h"
#include "core/simd.h"

namespace ostinato {
namespace draw {

constexpr std::int64_t BLOCK = SAMPLE_BLOCK;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// How one row is drawn, as ops/reference/sample.py describes it.
struct Settings {
    float temperature;
    std::int64_t top_k;
    double top_p, min_p;
    std::uint32_t key[2];
};

inline std::uint32_t lanes_of(Int mask) {
#if defined(OSTINATO_HAS_AVX512)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(OSTINATO_HAS_AVX2)
    return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)mask));
#else
    std::uint32_t lanes = 0;
    for (int i = 0; i < LANES; ++i) lanes |= static_cast<std::uint32_t>(mask[i] & 1) << i;
    return lanes;
#endif
}

// Call `body(vector, index of its first element)` for `row` from `begin` to `end`; the last vector is padded with -inf.
template <typename Body>
inline void each_vector(const float* row, std::int64_t begin, std::int64_t end, Body&& body) {
    std::int64_t i = begin;
    for (; i + LANES <= end; i += LANES) body(load(row + i), i);
    if (i < end) {
        float elements[LANES];
        std::fill(elements, elements + LANES, -INFINITE);
        std::memcpy(elements, row + i, sizeof(float) * (end - i));
        body(load(elements), i);
    }
}

// Return the maximum of a block, NaN if it has one.
inline float block_top(const float* row, std::int64_t begin, std::int64_t end) {
    Float best = splat(-INFINITE);
    Int odd = {};
    each_vector(row, begin, end, [&](Float v, std::int64_t) {
        best = max(v, best);
        odd |= v != v;
    });
#if defined(OSTINATO_HAS_AVX512)
    const float top = _mm512_reduce_max_ps((__m512)best);
#else
    const float top = reduce_max(best);
#endif
    return lanes_of(odd) ? std::numeric_limits<float>::quiet_NaN() : top;
}

inline std::int64_t first_equal(const float* row, std::int64_t begin, std::int64_t end, float value) {
    std::int64_t i = begin;
    while (i < end && row[i] != value) ++i;
    return i;
}

// Return the sum of e^x.
inline double mass(const float* values, std::int64_t count) {
    typedef double Double __attribute__((vector_size(LANES * 8)));
    Double total = {};
    each_vector(values, 0, count, [&](Float v, std::int64_t) { total += __builtin_convertvector(exp(v), Double); });
    double all = 0;
    for (int i = 0; i < LANES; ++i) all += total[i];
    return all;
}

// Return the value at which the weight of `values`, added in descending order, reaches `target`; -inf if it never does.
// `weigh(values, count)` returns their weight. All three arrays have room for `count` and are overwritten.
template <typename Weigh>
inline float quickselect_threshold(float* values, float* above, float* below, std::int64_t count, double target, Weigh&& weigh) {
    double reached = 0;
    float last = 0;
    bool is_above = false;
    while (count > 0) {
        float a = values[0], b = values[count / 2];
        const float c = values[count - 1];
        if (a > b) std::swap(a, b);
        const float pivot = std::max(a, std::min(b, c));
        std::int64_t num_above = 0, num_below = 0;
        for (std::int64_t i = 0; i < count; ++i) {  // without branches, which would be unpredictable
            const float value = values[i];
            above[num_above] = value;
            num_above += value > pivot;
            below[num_below] = value;
            num_below += value < pivot;
        }
        const double weight = weigh(above, num_above);
        if (reached + weight >= target) {
            std::swap(values, above);
            count = num_above;
            is_above = true;
            continue;
        }
        reached += weight + static_cast<double>(count - num_above - num_below) * weigh(&pivot, 1);
        if (reached >= target) return pivot;
        last = pivot;
        std::swap(values, below);
        count = num_below;
    }
    // Weights that are added in another order may stay below their earlier sum.
    return is_above ? last : -INFINITE;
}

// One row of logits minus its maximum, divided by the temperature.
class Row {
  public:
    // Prepare a row. `tops` [blocks] are maxima of the logits and become those of the values; `scratch` is [3, vocab].
    Row(const float* logits, std::int64_t vocab, float best, float* tops, const Settings& settings, float* scratch)
        : logits_(logits), vocab_(vocab), best_(best), tops_(tops), settings_(settings), scratch_(scratch) {
        for (std::int64_t b = 0; b < blocks(); ++b) tops_[b] = (tops_[b] - best_) / settings_.temperature;
        restrict_to_kept();
    }

    std::int64_t draw() const {
        // The block of the best token comes first: its result rules out most of the others.
        const std::int64_t first = std::max_element(tops_, tops_ + blocks()) - tops_;
        Best best{-INFINITE, -1};
        draw_block(first, best);
        for (std::int64_t b = 0; b < blocks(); ++b) {
            if (b != first) draw_block(b, best);
        }
        return best.token;
    }

  private:
    struct Best {
        float value;
        std::int64_t token;
    };

    std::int64_t blocks() const { return (vocab_ + BLOCK - 1) / BLOCK; }

    // Set the threshold below which tokens are not drawn.
    void restrict_to_kept() {
        if (0 < settings_.top_k && settings_.top_k < vocab_) {
            threshold_ = quickselect_threshold(values(), values() + vocab_, values() + 2 * vocab_, collect(least_of_top_k()),
                                       static_cast<double>(settings_.top_k),
                                       [](const float*, std::int64_t count) { return static_cast<double>(count); });
        }
        if (settings_.top_p < 1) {
            const double whole = kept_mass();
            // Values below this have at most the rest of the probability together; with room for rounding.
            const double least = std::log((1 - settings_.top_p) * whole / static_cast<double>(vocab_)) - 1e-3;
            const std::int64_t count = collect(std::max(threshold_, static_cast<float>(least)));
            threshold_ = std::max(threshold_, quickselect_threshold(values(), values() + vocab_, values() + 2 * vocab_, count,
                                                            settings_.top_p * whole, mass));
        }
        if (settings_.min_p > 0) threshold_ = std::max(threshold_, static_cast<float>(std::log(settings_.min_p)));
    }

    // Return a bound that at least `top_k` values reach: as many blocks do.
    float least_of_top_k() const {
        if (settings_.top_k > blocks()) return -INFINITE;
        std::copy(tops_, tops_ + blocks(), values());
        std::nth_element(values(), values() + settings_.top_k - 1, values() + blocks(), std::greater<float>());
        return values()[settings_.top_k - 1];
    }

    // Call `body(values, index of the first, end)` for the vectors of blocks that reach `least`.
    template <typename Body>
    void each_that_reaches(float least, Body&& body) const {
        for (std::int64_t b = 0; b < blocks(); ++b) {
            if (tops_[b] < least) continue;
            const std::int64_t end = std::min(vocab_, (b + 1) * BLOCK);
            each_vector(logits_, b * BLOCK, end, [&](Float v, std::int64_t i) {
                body((v - best_) / settings_.temperature, i, end);
            });
        }
    }

    // Write the values from `least` up to the scratch. -> their number
    std::int64_t collect(float least) const {
        float* to = values();
        each_that_reaches(least, [&](Float v, std::int64_t i, std::int64_t end) {
            std::uint32_t lanes = lanes_of(v >= least);
            if (end - i < LANES) lanes &= (1u << (end - i)) - 1;
            for (; lanes; lanes &= lanes - 1) *to++ = v[__builtin_ctz(lanes)];
        });
        return to - values();
    }

    // Return the sum of e^x over the values from the threshold up.
    double kept_mass() const {
        typedef double Double __attribute__((vector_size(LANES * 8)));
        Double total = {};
        each_that_reaches(threshold_, [&](Float v, std::int64_t, std::int64_t) {
            total += __builtin_convertvector(exp(v < threshold_ ? splat(-INFINITE) : v), Double);
        });
        double all = 0;
        for (int i = 0; i < LANES; ++i) all += total[i];
        return all;
    }

    // Draw the noise of a block's tokens, where they can still exceed `best`, or equal it with a lower index.
    void draw_block(std::int64_t b, Best& best) const {
        const float top = tops_[b];
        if (top < threshold_) return;
        double most = most_bits(top, best.value);
        const std::int64_t begin = b * BLOCK, end = std::min(vocab_, begin + BLOCK);
        UInt token;
        for (int i = 0; i < LANES; ++i) token[i] = static_cast<std::uint32_t>(begin + i);
        for (std::int64_t i = begin; i < end && most >= 0; i += LANES, token += LANES) {
            const UInt bits = mix(mix(token ^ settings_.key[0]) + settings_.key[1]);
            std::uint32_t lanes = lanes_of(bits <= static_cast<std::uint32_t>(most));
            if (end - i < LANES) lanes &= (1u << (end - i)) - 1;
            for (; lanes; lanes &= lanes - 1) {
                const int lane = __builtin_ctz(lanes);
                const float value = (logits_[i + lane] - best_) / settings_.temperature;
                if (value < threshold_) continue;
                const float raced = value + gumbel(bits[lane]);
                if (raced > best.value || (raced == best.value && i + lane < best.token)) {
                    best = {raced, i + lane};
                    most = most_bits(top, best.value);
                }
            }
        }
    }

    // Return the largest hash with which a token of value `top` reaches `best`; negative if none does. Noise above
    // GUMBEL_MIDDLE comes from the half of distances w where e^-noise = -log(1 - w) >= w.
    static double most_bits(float top, float best) {
        const double needed = static_cast<double>(best) - static_cast<double>(top);
        if (!(needed > GUMBEL_MIDDLE + 0.001)) return 4294967295.0;
        // Room for the rounding of the noise and of the sum.
        return std::min(std::exp(-needed) * (1 + 1e-5) * 4294967296.0 - 0.5, 2147483647.0);
    }

    static float gumbel(std::uint32_t bits) {
        const float distance = (static_cast<float>(bits & 0x7FFFFFFF) + 0.5f) * 0x1p-32f;
        return -std::log(bits >> 31 ? -std::log(distance) : -std::log1p(-distance));
    }

    float* values() const { return scratch_; }

    const float* logits_;
    std::int64_t vocab_;
    float best_;
    float* tops_;
    const Settings& settings_;
    float* scratch_;
    float threshold_ = -INFINITE;
};

}  // namespace draw
}  // namespace ostinato
