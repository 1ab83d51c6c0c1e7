// linear: y = x W^T + b, with scale, activation and residual on the way out.
//
// Many tokens are computed as many.h says; few, or all in a fixed order, in panels of 16 rows of weights, which the
// threads share out. A panel is read from memory once for all tokens, and while it is multiplied the next one is fetched.

#include "../kernels.h"
#include "../many.h"
#include "../product.h"

namespace ostinato {
namespace {

constexpr int PANEL = 16;
constexpr std::int64_t GROUP_BYTES = 512 * 1024;  // of tokens that are multiplied with one panel: they stay in the L2

template <typename X, typename W>
constexpr std::int64_t padded_size(std::int64_t in) {
    constexpr int STEP = Dot<X, W>::STEP;
    return (in + STEP - 1) / STEP * STEP;
}

// While a block of tokens is multiplied with DOT_ROWS rows, `count` of the rows that come next are fetched, from the
// `first` on: all of them by the first blocks together.
struct Fetch {
    int first, count;
};

inline Fetch fetch_of(int number, int blocks) {
    constexpr Fetch SHARES[4][4] = {{{0, 4}}, {{0, 2}, {2, 2}}, {{0, 2}, {2, 1}, {3, 1}}, {{0, 1}, {1, 1}, {2, 1}, {3, 1}}};
    return number < 4 ? SHARES[std::min(blocks, 4) - 1][number] : Fetch{0, 0};
}

template <int TOKENS, bool PACKED, typename... Args>
inline void dot_with_prefetch(int prefetch, const Args&... args) {
    if constexpr (!PACKED) {  // always a single block, which fetches all rows
        dot_block<TOKENS, DOT_ROWS, PACKED>(args...);
    } else if (prefetch == DOT_ROWS) {
        dot_block<TOKENS, DOT_ROWS, PACKED>(args...);
    } else if (prefetch == 0) {
        dot_block<TOKENS, 0, PACKED>(args...);
    } else if (prefetch == 1) {
        dot_block<TOKENS, 1, PACKED>(args...);
    } else {
        dot_block<TOKENS, 2, PACKED>(args...);
    }
}

template <int TOKENS, bool PACKED, typename... Args>
inline void dot_tokens(int tokens, const Args&... args) {
    if constexpr (TOKENS > 0) {
        if (tokens == TOKENS) {
            dot_with_prefetch<TOKENS, PACKED>(args...);
        } else {
            dot_tokens<TOKENS - 1, PACKED>(tokens, args...);
        }
    }
}

// sums[t * stride + r] of all tokens and a panel's rows, from `row` on; the panel `next_row` comes next.
//
// Four rows stay in the L1 while the tokens pass by.
template <bool PACKED, typename X, typename W>
void panel_sums(const Weights<W>& w, std::int64_t row, std::int64_t next_row, const X* x, std::int64_t x_stride,
                const Blocks& blocks, float* sums, int stride) {
    const std::int64_t groups = w.scales ? (w.in + w.group - 1) / w.group : 0;
    const std::int64_t padded = padded_size<X, W>(w.in);
    for (int sub = 0; sub < PANEL; sub += DOT_ROWS) {
        const W* rows[DOT_ROWS];
        const W* next[DOT_ROWS];
        const float* scales[DOT_ROWS];
        for (int r = 0; r < DOT_ROWS; ++r) {
            // Behind the last row it is computed once more, and thrown away.
            const std::int64_t at_row = std::min(row + sub + r, w.out - 1);
            const std::int64_t next_at = sub + DOT_ROWS < PANEL ? at_row + DOT_ROWS : next_row + r;
            rows[r] = w.rows + at_row * w.in;
            next[r] = w.rows + std::min(next_at, w.out - 1) * w.in;
            scales[r] = w.scales + at_row * groups;
        }
        for (int number = 0; number < blocks.count; ++number) {
            const Fetch fetch = fetch_of(number, blocks.count);
            const std::int64_t begin = blocks.begin(number);
            const Tokens<X> tokens{x + (PACKED ? begin * padded : 0), x_stride};
            dot_tokens<DOT_TOKENS, PACKED>(blocks.size(number), fetch.count, tokens, rows, next + fetch.first, w.in,
                                           w.scales ? scales : nullptr, w.group, sums + begin * stride + sub, stride);
        }
    }
}

template <bool PACKED, typename T, typename Y, typename X, typename W>
void multiply(const Team& team, std::int64_t first, const X* x, std::int64_t x_stride, const Blocks& blocks,
              const Weights<W>& w, const Output& o, Y* y) {
    const bool gated = o.activation == SWIGLU;
    const Range panels = team.split((o.size + PANEL - 1) / PANEL);
    constexpr int STRIDE = 2 * PANEL;
    float* sums = team.own<float>(blocks.tokens * STRIDE);
    for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
        const std::int64_t row = panel * PANEL;
        const int count = static_cast<int>(std::min<std::int64_t>(PANEL, o.size - row));
        panel_sums<PACKED>(w, row, gated ? o.size + row : row + PANEL, x, x_stride, blocks, sums, STRIDE);
        if (gated) {
            panel_sums<PACKED>(w, o.size + row, row + PANEL, x, x_stride, blocks, sums + PANEL, STRIDE);
        }
        for (std::int64_t t = 0; t < blocks.tokens; ++t) {
            put_outputs<T>(sums + t * STRIDE, sums + t * STRIDE + PANEL, o, first + t, row, count, y);
        }
    }
}

// Packs tokens as `Tokens` has them, block after block, for all threads.
template <typename X, typename W, typename T>
const X* pack(const Team& team, const T* x, std::int64_t x_stride, std::int64_t in, const Blocks& blocks) {
    constexpr int STEP = Dot<X, W>::STEP;
    const std::int64_t padded = padded_size<X, W>(in);
    X* packed = team.shared<X>(blocks.tokens * padded);
    const Range mine = team.split(blocks.tokens);
    for (int number = 0; number < blocks.count; ++number) {
        const int size = blocks.size(number);
        for (int t = 0; t < size; ++t) {
            const std::int64_t token = blocks.begin(number) + t;
            if (token < mine.begin || token >= mine.end) continue;
            X* to = packed + blocks.begin(number) * padded + t * STEP;
            for (std::int64_t i = 0; i < in; i += STEP, to += size * STEP) {
                const T* from = x + token * x_stride + i;
                const int count = static_cast<int>(std::min<std::int64_t>(STEP, in - i));
                if constexpr (std::is_same_v<X, T>) {
                    if (count == STEP) {
                        std::memcpy(to, from, STEP * sizeof(X));
                    } else {
                        std::memset(to, 0, STEP * sizeof(X));
                        std::memcpy(to, from, count * sizeof(X));
                    }
                } else {
                    store(to, count == STEP ? load(from) : load_first(from, count));
                }
            }
        }
    }
    team.barrier();
    return packed;
}

// The path of few tokens, whose sums have a fixed order: a token's bits do not depend on how many are computed with it.
template <typename T, typename Y, typename W>
void multiply_few(const Team& team, std::int64_t tokens, const T* x, std::int64_t x_stride, const Weights<W>& w,
                  const Output& o, Y* y) {
    if constexpr (std::is_same_v<T, Operand<T>>) {
        if (tokens <= DOT_TOKENS) {
            multiply<false, T>(team, 0, x, x_stride, Blocks(tokens, DOT_TOKENS), w, o, y);
            return;
        }
    }
    using X = Operand<T>;
    const std::int64_t most = std::max<std::int64_t>(GROUP_BYTES / (w.in * sizeof(X)) / DOT_TOKENS, 4) * DOT_TOKENS;
    for (std::int64_t first = 0; first < tokens; first += most) {
        const Blocks blocks(std::min(most, tokens - first), DOT_TOKENS);
        const X* packed = pack<X, W>(team, x + first * x_stride, x_stride, w.in, blocks);
        multiply<true, T>(team, first, packed, 0, blocks, w, o, y);
    }
}

// `x` [tokens, in], `w` [out, in] in `dtype` or int8 (`w_dtype` 3) -> `y` [tokens, out] ([tokens, out / 2] if gated).
//
// Quantised weights have `w_scales`: [out], or [out, in / group] if `group` is not 0. Addresses of 0 are left out. In
// `fixed_order` a token's bits do not depend on how many tokens are computed with it.
void linear(const Team& team, std::int64_t tokens, Address x, std::int64_t x_stride, Address w, Address w_scales,
            std::int64_t group, Address bias, Address scale, Address residual, std::int64_t residual_stride, Address y,
            std::int64_t y_stride, std::int64_t in, std::int64_t out, int activation, int dtype, int w_dtype,
            int y_dtype, int fixed_order) {
    Output o{at<const void>(bias), at<const float>(scale), nullptr, at<const void>(residual), residual_stride,
             y_stride, activation == SWIGLU ? out / 2 : out, activation};
    const float* scales = at<const float>(w_scales);
    if (scales && group == 0) {
        o.row_scale = scales;
        scales = nullptr;
    }
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        const auto run = [&](auto* weights) {
            using W = std::remove_const_t<std::remove_pointer_t<decltype(weights)>>;
            const Weights<W> all{weights, in, out, scales, group};
            const auto compute = [&](auto* to) {
                if (fixed_order || tokens < MANY<W>) {
                    multiply_few(team, tokens, at<const T>(x), x_stride, all, o, to);
                } else {
                    multiply_many(team, tokens, at<const T>(x), x_stride, all, o, to);
                }
            };
            if (y_dtype == FLOAT32) {
                compute(at<float>(y));
            } else if constexpr (!std::is_same_v<T, float>) {
                compute(at<T>(y));
            }
        };
        if (w_dtype == INT8) {
            run(at<const std::int8_t>(w));
        } else {
            run(at<const T>(w));
        }
    });
}

}  // namespace

void bind_linear(Module& module) { bind<linear>(module, "linear"); }

}  // namespace ostinato
