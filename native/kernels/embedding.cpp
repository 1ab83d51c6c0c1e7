// The vectors of tokens, and what takes their place.

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

// `ids` [tokens, count] int64, `weights` [tokens, count], `table` [rows, hidden] -> `out` [tokens, hidden]: weighted sums
// of rows of `table`.
void weighted_embedding(const Team& team, std::int64_t tokens, Address ids, Address weights, std::int64_t count,
                        Address table, Address out, std::int64_t hidden, int dtype) {
    const Range mine = team.split(tokens);
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t token = mine.begin; token < mine.end; ++token) {
            for (std::int64_t j = 0; j < hidden; j += LANES) {
                Float total = {};
                for (std::int64_t i = 0; i < count; ++i) {
                    const T* row = at<const T>(table) + at<const std::int64_t>(ids)[token * count + i] * hidden;
                    const Float weight = splat(at<const float>(weights)[token * count + i]);
                    total = fma(load_some(row + j, hidden - j), weight, total);
                }
                store_some(at<T>(out) + token * hidden + j, total, hidden - j);
            }
        }
    });
}

// `x` [tokens, hidden], `cells` [tokens] int64, `media` rows [hidden] that are `stride` elements apart: row `cells[token]`
// takes the place of the token's vector, or with `add` is added to it; tokens with cell 0 keep theirs.
void inject_media(const Team& team, std::int64_t tokens, Address x, Address cells, Address media, std::int64_t stride,
                  std::int64_t hidden, bool add, int dtype) {
    const Range mine = team.split(tokens);
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t token = mine.begin; token < mine.end; ++token) {
            const std::int64_t cell = at<const std::int64_t>(cells)[token];
            if (cell == 0) continue;
            const T* from = at<const T>(media) + cell * stride;
            T* to = at<T>(x) + token * hidden;
            if (!add) {
                std::memcpy(to, from, sizeof(T) * hidden);
                continue;
            }
            for (std::int64_t j = 0; j < hidden; j += LANES) {
                store_some(to + j, load_some(to + j, hidden - j) + load_some(from + j, hidden - j), hidden - j);
            }
        }
    });
}

}  // namespace

void bind_embedding(Module& module) {
    bind<embedding>(module, "embedding");
    bind<inject_media>(module, "inject_media");
    bind<weighted_embedding>(module, "weighted_embedding");
}

}  // namespace ostinato
