// The vectors of tokens.

#include "../kernels.h"
#include "../simd.h"

namespace ostinato {
namespace {

// `token_ids` [tokens] int64, `weight` [vocab, hidden] -> `out` [tokens, hidden]: rows of `weight` times `multiplier`.
void embedding(const Team& team, std::int64_t tokens, Address token_ids, Address weight, std::int64_t weight_stride,
               Address out, std::int64_t hidden, float multiplier, int dtype) {
    // Threads share the elements, not the tokens: one token alone is worth sharing too.
    constexpr std::int64_t GRAIN = 512;
    const std::int64_t parts = (hidden + GRAIN - 1) / GRAIN;
    const Range mine = team.split(tokens * parts);
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t token = i / parts, begin = i % parts * GRAIN;
            const std::int64_t count = std::min(GRAIN, hidden - begin);
            const T* from = at<const T>(weight) + at<const std::int64_t>(token_ids)[token] * weight_stride + begin;
            T* to = at<T>(out) + token * hidden + begin;
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
