// moe: the experts of a mixture-of-experts layer.
//
// The choices of all tokens are sorted by expert, so that each expert's weights are read once, for all tokens that chose
// it. Threads share out the rows of each expert: those of `up` give an intermediate value per choice, those of `down` are
// added up per token. A thread adds up whole sums, expert after expert, so that neither the number of threads nor other
// tokens change a bit.

#include "../dot_rows.h"
#include "../kernels.h"

namespace ostinato {
namespace {

enum Activation : int { RELU2 = 1, SILU = 2, SWIGLU = 3 };

#if defined(__AVX512BF16__)
template <typename T>
using Operand = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;
#else
template <typename T>
using Operand = float;
#endif

// Apart by an odd number of cache lines, so that tokens do not compete for places in the cache.
inline std::int64_t spaced(std::int64_t size) { return (size + 63) / 64 * 64 + 32; }

inline Float activated(int activation, Float value, Float gated) {
    if (activation == SWIGLU) return silu(value) * gated;
    if (activation == SILU) return silu(value);
    value = max(value, Float{});
    return value * value;
}

// What tokens chose, by expert: `choices` [tokens, 2, top_k] are numbers of experts, and their weights.
struct Chosen {
    const float* choices;
    std::int64_t tokens, top_k, experts;
    std::int32_t* order;   // [tokens * top_k] places of (token, choice), by expert, then in their own order
    std::int32_t* starts;  // [experts + 1] where each expert's begin in `order`

    std::int64_t token(std::int64_t at) const { return order[at] / top_k; }
    int expert(std::int64_t place) const { return static_cast<int>(of(place)[0]); }
    float weight(std::int64_t at) const { return of(order[at])[top_k]; }

    void sort() {
        std::fill(starts, starts + experts + 1, 0);
        const std::int64_t places = tokens * top_k;
        for (std::int64_t place = 0; place < places; ++place) ++starts[expert(place) + 1];
        for (std::int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
        for (std::int64_t place = 0; place < places; ++place) order[starts[expert(place)]++] = place;
        std::copy_backward(starts, starts + experts, starts + experts + 1);
        starts[0] = 0;
    }

    // Calls body(expert, next, begin, end) for each expert that was chosen, in ascending order; `next` is the one after it.
    template <typename Body>
    void each(Body&& body) const {
        std::int64_t e = after(-1);
        while (e < experts) {
            const std::int64_t next = after(e);
            body(e, next < experts ? next : e, starts[e], starts[e + 1]);
            e = next;
        }
    }

  private:
    const float* of(std::int64_t place) const { return choices + place / top_k * 2 * top_k + place % top_k; }

    std::int64_t after(std::int64_t e) const {
        do ++e;
        while (e < experts && starts[e] == starts[e + 1]);
        return e;
    }
};

// Calls body(row, count, begin, end, sums) for the `mine` of each expert's rows, a panel at a time, and for the choices
// `begin` to `end`: sums[choice - begin][2][PANEL_ROWS]. The second half are those of the rows `second` further on, if any.
template <typename X, typename W, typename Body>
void each_panel(const Chosen& chosen, const W* weights, std::int64_t all_rows, std::int64_t size, Range mine,
                std::int64_t second, const X* x, std::int64_t x_stride, float* sums, Body&& body) {
    const std::int64_t most = tokens_in_cache<X>(size);
    constexpr int STRIDE = 2 * PANEL_ROWS;
    chosen.each([&](std::int64_t expert, std::int64_t next, std::int64_t begin, std::int64_t end) {
        const Rows<W> rows{weights + expert * all_rows * size, all_rows, size};
        for (std::int64_t from = begin; from < end; from += most) {
            const std::int64_t to = std::min(end, from + most);
            // Behind the last panel come the first rows of the next group of choices.
            const W* first_then = weights + ((to < end ? expert : next) * all_rows + mine.begin) * size;
            for (std::int64_t row = mine.begin; row < mine.end; row += PANEL_ROWS) {
                const std::int64_t last = std::min(mine.end, row + PANEL_ROWS);
                const W* then = last < mine.end ? rows.at(last) : first_then;
                dot_rows(rows, row, last, second ? rows.at(row + second) : then, to - from, x + from * x_stride, x_stride,
                         sums, STRIDE);
                if (second) {
                    dot_rows(rows, row + second, last + second, then, to - from, x + from * x_stride, x_stride,
                             sums + PANEL_ROWS, STRIDE);
                }
                for (std::int64_t at = from; at < to; ++at) body(row, at, sums + (at - from) * STRIDE);
            }
        }
    });
}

template <typename T>
void put(const float* sums, const T* residual, T* y, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += LANES) {
        const int count = static_cast<int>(std::min<std::int64_t>(LANES, end - i));
        Float value = load(sums + i);
        if (residual) value += count == LANES ? load(residual + i) : load_first(residual + i, count);
        if (count == LANES) {
            store(y + i, value);
        } else {
            store_first(y + i, value, count);
        }
    }
}

// `x` [tokens, size], `choices` [tokens, 2, top_k] float32, `up` [experts, inner or 2 * inner if gated, size], `down`
// [experts, size, inner], `residual` [tokens, size] or 0 -> `y` [tokens, size].
void moe(const Team& team, std::int64_t tokens, Address x, std::int64_t x_stride, Address choices, std::int64_t top_k,
         Address up, Address down, Address residual, std::int64_t residual_stride, Address y, std::int64_t y_stride,
         std::int64_t experts, std::int64_t size, std::int64_t inner, int activation, int dtype) {
    if (tokens == 0) return;
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using X = Operand<T>;
        const std::int64_t places = tokens * top_k;
        const std::int64_t size_stride = spaced(size), inner_stride = spaced(inner);
        const std::int64_t most = std::min(places, std::max(tokens_in_cache<X>(size), tokens_in_cache<X>(inner)));
        float* sums = team.own<float>(most * 2 * PANEL_ROWS + places + experts + 1);
        auto* order = reinterpret_cast<std::int32_t*>(sums + most * 2 * PANEL_ROWS);
        Chosen chosen{at<const float>(choices), tokens, top_k, experts, order, order + places};
        chosen.sort();

        const std::int64_t totals_bytes = tokens * size_stride * sizeof(float);
        std::byte* shared = team.shared<std::byte>(totals_bytes + places * (size_stride + inner_stride) * sizeof(X));
        float* totals = reinterpret_cast<float*>(shared);
        X* inputs = reinterpret_cast<X*>(shared + totals_bytes);
        X* inners = inputs + places * size_stride;

        const Range copied = team.split(places);
        for (std::int64_t i = copied.begin; i < copied.end; ++i) {
            const T* from = at<const T>(x) + chosen.token(i) * x_stride;
            X* to = inputs + i * size_stride;
            if constexpr (std::is_same_v<T, X>) {
                std::copy(from, from + size, to);
            } else {
                std::transform(from, from + size, to, [](T value) { return to_float(value); });
            }
        }
        team.barrier();

        const bool gated = activation == SWIGLU;
        each_panel(chosen, at<const T>(up), gated ? 2 * inner : inner, size, team.split(inner, PANEL_ROWS),
                   gated ? inner : 0, inputs, size_stride, sums, [&](std::int64_t row, std::int64_t i, const float* sum) {
                       for (int r = 0; r < PANEL_ROWS; r += LANES) {
                           const Float value = activated(activation, load(sum + r), load(sum + PANEL_ROWS + r));
                           store(inners + i * inner_stride + row + r, value);
                       }
                   });
        team.barrier();

        const Range mine = team.split(size, PANEL_ROWS);
        if (mine.begin == mine.end) return;
        for (std::int64_t t = 0; t < tokens; ++t) {
            std::fill(totals + t * size_stride + mine.begin, totals + t * size_stride + mine.end, 0.0f);
        }
        each_panel(chosen, at<const T>(down), size, inner, mine, 0, inners, inner_stride, sums,
                   [&](std::int64_t row, std::int64_t i, const float* sum) {
                       float* total = totals + chosen.token(i) * size_stride + row;
                       const Float weight = splat(chosen.weight(i));
                       for (int r = 0; r < PANEL_ROWS; r += LANES) {
                           store(total + r, fma(weight, load(sum + r), load(total + r)));
                       }
                   });
        for (std::int64_t t = 0; t < tokens; ++t) {
            const T* added = residual ? at<const T>(residual) + t * residual_stride : nullptr;
            put(totals + t * size_stride, added, at<T>(y) + t * y_stride, mine.begin, mine.end);
        }
    });
}

}  // namespace

void bind_moe(Module& module) { bind<moe>(module, "moe"); }

}  // namespace ostinato
