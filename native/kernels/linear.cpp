// linear: y = x W^T + b, with scale, activation and residual on the way out.
//
// Outputs are computed in panels of 16 rows of weights, which the threads share out. A panel is read from memory once
// for all tokens, and while it is multiplied the next one is fetched.

#include "../dot.h"
#include "../kernels.h"

namespace ostinato {
namespace {

constexpr int PANEL = 16;
constexpr std::int64_t GROUP_BYTES = 512 * 1024;  // of tokens that are multiplied with one panel: they stay in the L2
constexpr int INT8 = 3;

// Tokens of storage type T as they are multiplied: bfloat16 where the target multiplies that, else float32.
#if defined(__AVX512BF16__)
template <typename T>
using Operand = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;
#else
template <typename T>
using Operand = float;
#endif

template <typename X, typename W>
constexpr std::int64_t padded_size(std::int64_t in) {
    constexpr int STEP = Dot<X, W>::STEP;
    return (in + STEP - 1) / STEP * STEP;
}

enum Activation : int { NONE = 0, RELU2 = 1, SILU = 2, SWIGLU = 3 };

struct Output {
    const void* bias;        // [out] in T
    const float* scale;      // [out]
    const float* row_scale;  // [out], of quantised weights
    const void* residual;    // [tokens, result] in Y
    std::int64_t residual_stride;
    std::int64_t y_stride;
    std::int64_t size;  // outputs per token, after the activation
    int activation;
};

// Weights [out, in], with `scales` [out, in / group] where they are quantised in groups.
template <typename W>
struct Weights {
    const W* rows;
    std::int64_t in, out;
    const float* scales;
    std::int64_t group;
};

template <typename T>
inline Float vector_at(const T* from, std::int64_t i, int count) {
    return count >= LANES ? load(from + i) : load_first(from + i, count);
}

// The first steps of the epilogue, for up to LANES outputs from `row` on.
template <typename T>
inline Float finish(Float value, const Output& o, std::int64_t row, int count) {
    if (o.row_scale) value *= vector_at(o.row_scale, row, count);
    if (o.bias) value += vector_at(static_cast<const T*>(o.bias), row, count);
    if (o.scale) value *= vector_at(o.scale, row, count);
    return value;
}

// One token's outputs of a panel: `sums` [16], and behind them those of the gated half.
template <typename T, typename Y>
inline void put_outputs(const float* sums, const Output& o, std::int64_t token, std::int64_t row, int count, Y* y) {
    for (int i = 0; i < count; i += LANES) {
        const int here = count - i;
        Float value = finish<T>(load(sums + i), o, row + i, here);
        if (o.activation == SWIGLU) {
            value = silu(value) * finish<T>(load(sums + PANEL + i), o, o.size + row + i, here);
        } else if (o.activation == RELU2) {
            value = max(value, Float{});
            value *= value;
        } else if (o.activation == SILU) {
            value = silu(value);
        }
        if (o.residual) {
            value += vector_at(static_cast<const Y*>(o.residual) + token * o.residual_stride, row + i, here);
        }
        Y* to = y + token * o.y_stride + row + i;
        if (here >= LANES) {
            store(to, value);
        } else {
            store_first(to, value, here);
        }
    }
}

// Tokens in blocks of up to DOT_TOKENS, of sizes as equal as can be.
struct Blocks {
    std::int64_t tokens;
    int count;

    explicit Blocks(std::int64_t tokens) : tokens(tokens), count(int((tokens + DOT_TOKENS - 1) / DOT_TOKENS)) {}

    std::int64_t begin(int number) const { return tokens * number / count; }
    int size(int number) const { return static_cast<int>(begin(number + 1) - begin(number)); }
};

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
    if constexpr (!PACKED) {  // a single block
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
            put_outputs<T>(sums + t * STRIDE, o, first + t, row, count, y);
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

template <typename T, typename Y, typename W>
void multiply_all(const Team& team, std::int64_t tokens, const T* x, std::int64_t x_stride, const Weights<W>& w,
                  const Output& o, Y* y) {
    if constexpr (std::is_same_v<T, Operand<T>>) {
        if (tokens <= DOT_TOKENS) {
            multiply<false, T>(team, 0, x, x_stride, Blocks(tokens), w, o, y);
            return;
        }
    }
    using X = Operand<T>;
    const std::int64_t most = std::max<std::int64_t>(GROUP_BYTES / (w.in * sizeof(X)) / DOT_TOKENS, 4) * DOT_TOKENS;
    for (std::int64_t first = 0; first < tokens; first += most) {
        const Blocks blocks(std::min(most, tokens - first));
        const X* packed = pack<X, W>(team, x + first * x_stride, x_stride, w.in, blocks);
        multiply<true, T>(team, first, packed, 0, blocks, w, o, y);
    }
}

// `x` [tokens, in], `w` [out, in] in `dtype` or int8 (`w_dtype` 3) -> `y` [tokens, out] ([tokens, out / 2] if gated).
//
// Quantised weights have `w_scales`: [out], or [out, in / group] if `group` is not 0. Addresses of 0 are left out.
void linear(const Team& team, std::int64_t tokens, Address x, std::int64_t x_stride, Address w, Address w_scales,
            std::int64_t group, Address bias, Address scale, Address residual, std::int64_t residual_stride, Address y,
            std::int64_t y_stride, std::int64_t in, std::int64_t out, int activation, int dtype, int w_dtype,
            int y_dtype) {
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
            if (y_dtype == FLOAT32) {
                multiply_all(team, tokens, at<const T>(x), x_stride, all, o, at<float>(y));
            } else if constexpr (!std::is_same_v<T, float>) {
                multiply_all(team, tokens, at<const T>(x), x_stride, all, o, at<T>(y));
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
