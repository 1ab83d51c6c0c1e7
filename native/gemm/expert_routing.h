// Routing of tokens to experts: the choices of all tokens, sorted by expert, and the shape of a layer.
#pragma once

#include <algorithm>

#include "core/thread_group.h"
#include "gemm/epilogue.h"

namespace ostinato {

// Return a stride of an odd number of cache lines, so that tokens do not compete for places in the cache.
inline std::int64_t padded_stride(std::int64_t size) { return (size + 63) / 64 * 64 + 32; }

// Choices of all tokens, sorted by expert. `choices` [tokens, 2, top_k] has indices of experts, then weights.
struct ExpertAssignment {
    const float* choices;
    std::int64_t tokens, top_k, experts;
    std::int32_t* order;   // [tokens * top_k] indices of (token, choice), by expert, then in their own order
    std::int32_t* starts;  // [experts + 1] index in `order` where each expert's choices begin

    std::int64_t token(std::int64_t at) const { return order[at] / top_k; }
    std::int64_t count(std::int64_t expert) const { return starts[expert + 1] - starts[expert]; }
    int expert(std::int64_t place) const { return static_cast<int>(choices[place / top_k * top_k + place]); }

    void sort() {
        std::fill(starts, starts + experts + 1, 0);
        const std::int64_t places = tokens * top_k;
        for (std::int64_t place = 0; place < places; ++place) ++starts[expert(place) + 1];
        for (std::int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
        for (std::int64_t place = 0; place < places; ++place) order[starts[expert(place)]++] = place;
        std::copy_backward(starts, starts + experts, starts + experts + 1);
        starts[0] = 0;
    }
};

struct MoeShape {
    std::int64_t experts, size, inner;
    Activation activation;
    Clamp clamp;
};

}  // namespace ostinato
