// route: the experts that each token goes to, by scores in float32, and their weights.

#include "bind/kernel_binding.h"
#include "gemm/small_m.h"

namespace ostinato {
namespace {

// Return the most tokens of `size` elements that stay in the L2 cache.
template <typename T>
inline std::int64_t tokens_in_cache(std::int64_t size) {
    return std::max<std::int64_t>(L2_TOKEN_BYTES / (size * sizeof(T)), 4 * NR);
}

// Compute scores[t * stride + row] = x[t] . row for the rows `mine`; up to MR - 1 more of each token are written.
template <typename T>
void multiply_rows(const WeightView<T>& w, Range mine, std::int64_t tokens, const T* x, std::int64_t x_stride, float* scores,
                   std::int64_t stride) {
    const TokenBlocks<T> blocks(tokens, NR);
    for (std::int64_t row = mine.begin; row < mine.end; row += MR) {
        // Behind the last row it is the last row again, whose result is not used. The first block of tokens prefetches
        // the next rows.
        const T *here[MR], *then[MR];
        for (int r = 0; r < MR; ++r) {
            here[r] = w.at(std::min(row + r, w.n - 1));
            then[r] = w.at(std::min(row + MR + r, w.n - 1));
        }
        for (int block = 0; block < blocks.count; ++block) {
            const std::int64_t t = blocks.begin(block);
            dot_tokens<NR, false>(blocks.size(block), block == 0 ? MR : 0, Tokens<T>{x + t * x_stride, x_stride},
                                  static_cast<const T* const*>(here), static_cast<const T* const*>(then), w.k,
                                  static_cast<const float* const*>(nullptr), 0, scores + t * stride + row,
                                  static_cast<int>(stride));
        }
    }
}

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Return the index of the first maximum of `count` values, which are followed by NEVER up to whole vectors.
inline std::int64_t best_of(const float* values, std::int64_t count) {
    Float most = splat(NEVER);
    for (std::int64_t i = 0; i < count; i += LANES) most = max(load(values + i), most);
    const float best = reduce_max(most);
    std::int64_t place = 0;
    while (place < count - 1 && values[place] != best) ++place;
    return place;
}

// Write the indices of the `chosen` greatest of `count` values in descending order. The values are overwritten.
inline void take_best(float* values, std::int64_t count, std::int64_t chosen, float* places) {
    for (std::int64_t k = 0; k < chosen; ++k) {
        const std::int64_t place = best_of(values, count);
        places[k] = static_cast<float>(place);
        values[place] = NEVER;
    }
}

// Set values to NEVER outside the `chosen` groups whose two best values have the greatest sums. `room` [groups +
// LANES].
inline void allow_groups(float* values, std::int64_t count, std::int64_t groups, std::int64_t chosen, float* room) {
    const std::int64_t size = count / groups;
    for (std::int64_t g = 0; g < groups; ++g) {
        float best = NEVER, second = NEVER;
        for (std::int64_t i = g * size; i < (g + 1) * size; ++i) {
            if (values[i] > best) {
                second = best;
                best = values[i];
            } else if (values[i] > second) {
                second = values[i];
            }
        }
        room[g] = best + second;
    }
    std::fill_n(room + groups, LANES, NEVER);
    for (std::int64_t k = 0; k < chosen; ++k) room[best_of(room, groups)] = std::numeric_limits<float>::quiet_NaN();
    for (std::int64_t g = 0; g < groups; ++g) {
        if (room[g] == room[g]) std::fill_n(values + g * size, size, NEVER);
    }
}

// Return the sum of e^(value - best) over `count` values; whole vectors are read.
inline float sum_of_powers(const float* values, std::int64_t count, float best) {
    Float total = {};
    for (std::int64_t i = 0; i < count; i += LANES) {
        Float power = exp(load(values + i) - best);
        for (std::int64_t lane = count - i; lane < LANES; ++lane) power[lane] = 0;
        total += power;
    }
    return sum(total);
}

struct Route : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, size]
    FIELD(Array<VALUES>, weight);  // [experts, size]
    FIELD(OptionalTensor<Array<FLOAT32>>, correction_bias);  // [experts]; without it a softmax of scores, not sigmoids
    FIELD(std::int64_t, top_k);
    FIELD(std::int64_t, num_groups);
    FIELD(std::int64_t, top_groups);
    FIELD(bool, normalize);
    FIELD(float, scaling);
    FIELD(bool, softmax_over_all);  // the softmax is over all scores, not over the chosen ones
    FIELD(float, sum_epsilon);
    FIELD(OptionalTensor<Array<FLOAT32>>, bias);  // [experts], added to the scores
    FIELD(OptionalTensor<Array<FLOAT32>>, expert_scales);  // [experts], each multiplies its expert's weight
    FIELD(Array<FLOAT32>, out);  // [tokens, 2, top_k]: indices of experts, then weights
};

void route(const ThreadGroup& threads, std::int64_t tokens, const Route& in) {
    const std::int64_t experts = in.weight.shape[0], size = in.weight.shape[1], top_k = in.top_k, groups = in.num_groups;
    const float* bias = in.correction_bias.at<const float>();
    const float* scales = in.expert_scales.at<const float>();
    const std::int64_t stride = (experts + LANES - 1) / LANES * LANES + LANES;
    float* scores = threads.group_scratch<float>(tokens * stride);
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        const WeightView<T> rows{in.weight.at<const T>(), experts, size};
        const Range mine = threads.split(experts, MR);
        const std::int64_t most = tokens_in_cache<T>(size);
        for (std::int64_t first = 0; first < tokens && mine.begin < mine.end; first += most) {
            multiply_rows(rows, mine, std::min(most, tokens - first), in.x.row<const T>(first), in.x.strides[0],
                          scores + first * stride, stride);
        }
    });
    threads.barrier();

    float* choice = threads.thread_scratch<float>(stride + groups + LANES);
    const Range mine = threads.split(tokens);
    for (std::int64_t t = mine.begin; t < mine.end; ++t) {
        float* of_token = scores + t * stride;
        float* places = in.out.row<float>(t);
        float* weights = places + top_k;
        for (std::int64_t i = 0; i < experts; i += LANES) {
            const int count = static_cast<int>(std::min<std::int64_t>(LANES, experts - i));
            Float value = load(of_token + i);
            if (in.bias) {
                value += load_masked(in.bias.at<const float>() + i, count);
                store(of_token + i, value);
            }
            if (bias) {
                value = 1.0f / (1.0f + exp(-value));
                store(of_token + i, value);
                value += load_masked(bias + i, count);
            }
            // NaN is chosen last, so that the chosen experts always exist.
            store(choice + i, value == value ? value : splat(std::numeric_limits<float>::lowest()));
            for (int lane = count; lane < LANES; ++lane) choice[i + lane] = NEVER;
        }
        if (bias && groups > 1) allow_groups(choice, experts, groups, in.top_groups, choice + stride);
        take_best(choice, experts, top_k, places);

        const float best = of_token[static_cast<std::int64_t>(places[0])];
        float total = 0;
        for (std::int64_t k = 0; k < top_k; ++k) {
            const float value = of_token[static_cast<std::int64_t>(places[k])];
            weights[k] = bias ? value : exp(value - best);
            total += weights[k];
        }
        if (!bias && in.softmax_over_all) total = sum_of_powers(of_token, experts, best);
        const float divisor = bias ? (in.normalize ? total + in.sum_epsilon : 1.0f) : total;
        for (std::int64_t k = 0; k < top_k; ++k) {
            weights[k] = weights[k] / divisor * in.scaling;
            if (scales) weights[k] *= scales[static_cast<std::int64_t>(places[k])];
        }
    }
}

KERNEL(route);

}  // namespace
}  // namespace ostinato
