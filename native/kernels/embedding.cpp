// The vectors of tokens.

#include "../kernels.h"
#include "../simd.h"

namespace ostinato {
namespace {

// Elements `begin` to `begin + count` of a row of 8-bit weights; the row's scales are one, or one per `group` elements.
template <typename T>
void expand(const std::int8_t* row, const float* scales, std::int64_t group, std::int64_t begin, std::int64_t count,
            float multiplier, T* to) {
    for (std::int64_t j = 0; j < count; j += LANES) {
        const float scale = scales[group ? (begin + j) / group : 0] * multiplier;
        const int rest = static_cast<int>(count - j);
        if (rest >= LANES) {
            store(to + j, load(row + begin + j) * scale);
        } else {
            store_first(to + j, load_first(row + begin + j, rest) * scale, rest);
        }
    }
}

// `token_ids` [tokens] int64, `weight` [vocab, hidden] -> `out` [tokens, hidden]: rows of `weight` times `multiplier`.
//
// With `scales`, `weight` is int8: they are [vocab], or, if `group` is not 0 (but a multiple of LANES), one for each
// `group` elements of a row.
void embedding(const Team& team, std::int64_t tokens, Address token_ids, Address weight, std::int64_t weight_stride,
               Address scales, std::int64_t group, Address out, std::int64_t hidden, float multiplier, int dtype) {
    // Threads share the elements, not the tokens: one token alone is worth sharing too.
    constexpr std::int64_t GRAIN = 512;
    const std::int64_t parts = (hidden + GRAIN - 1) / GRAIN;
    const Range mine = team.split(tokens * parts);
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t token = i / parts, begin = i % parts * GRAIN;
            const std::int64_t count = std::min(GRAIN, hidden - begin);
            const std::int64_t row = at<const std::int64_t>(token_ids)[token];
            T* to = at<T>(out) + token * hidden + begin;
            if (scales) {
                const std::int64_t groups = group ? (hidden + group - 1) / group : 1;
                const std::int8_t* integers = at<const std::int8_t>(weight) + row * weight_stride;
                expand(integers, at<const float>(scales) + row * groups, group, begin, count, multiplier, to);
                continue;
            }
            const T* from = at<const T>(weight) + row * weight_stride + begin;
            if (multiplier == 1.0f) {
                std::memcpy(to, from, sizeof(T) * count);
                continue;
            }
            std::int64_t j = 0;
            for (; j + LANES <= count; j += LANES) store(to + j, load(from + j) * multiplier);
            const int rest = static_cast<int>(count - j);
            if (rest) store_first(to + j, load_first(from + j, rest) * multiplier, rest);
        }
    });
}

}  // namespace

void bind_embedding(Module& module) { bind<embedding>(module, "embedding"); }

}  // namespace ostinato
