// linear: y = x W^T + b, with scale, activation and residual on the way out.
//
// Outputs are computed in panels of 16 rows of weights, which the threads share out. A panel is read from memory once
// for all tokens, and while it is multiplied the next one is fetched.

#include "../dot.h"
#include "../kernels.h"

namespace ostinato {
namespace {

constexpr int PANEL = 16;
constexpr std::int64_t GROUP_BYTES = 384 * 1024;  // of tokens that are multiplied with one panel: they stay in the L2
constexpr int INT8 = 3;

enum Activation : int { NONE = 0, RELU2 = 1, SILU = 2, SWIGLU = 3 };

struct Output {
    const void* bias;        // [out] in T
    const float* scale;      // [out]
    const float* row_scale;  // [out], of quantised weights
    const void* residual;    // [tokens, result] in T
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
            value += vector_at(static_cast<const T*>(o.residual) + token * o.residual_stride, row + i, here);
        }
        Y* to = y + token * o.y_stride + row + i;
        if (here >= LANES) {
            store(to, value);
        } else {
            store_first(to, value, here);
        }
    }
}

template <int TOKENS, typename X, typename W>
void dot_with_prefetch(int prefetch, const X* x, std::int64_t x_stride, const W* const* w, std::int64_t size,
                       const W* const* next, const float* const* scales, std::int64_t group, float* sums, int stride) {
    if (prefetch == 0) {
        dot_block<TOKENS, 0>(x, x_stride, w, size, next, scales, group, sums, stride);
    } else if (prefetch == 1) {
        dot_block<TOKENS, 1>(x, x_stride, w, size, next, scales, group, sums, stride);
    } else {
        dot_block<TOKENS, DOT_ROWS>(x, x_stride, w, size, next, scales, group, sums, stride);
    }
}

template <int TOKENS, typename... Args>
inline void dot_tokens(int tokens, Args... args) {
    if constexpr (TOKENS > 0) {
        if (tokens == TOKENS) {
            dot_with_prefetch<TOKENS>(args...);
        } else {
            dot_tokens<TOKENS - 1>(tokens, args...);
        }
    }
}

// The sums of a panel's rows, from `row` on, for `count` tokens. `block` is the number of this block of tokens, of
// `blocks`: the panel `next_row` on is fetched in equal parts by the first four.
template <typename X, typename W>
void panel_sums(const Weights<W>& w, std::int64_t row, std::int64_t next_row, const X* x, std::int64_t x_stride,
                int count, int block, int blocks, float* sums, int stride) {
    for (int sub = 0; sub < PANEL; sub += DOT_ROWS) {
        const W* rows[DOT_ROWS];
        const W* next[DOT_ROWS];
        const float* scales[DOT_ROWS];
        const int prefetch = blocks == 1 ? DOT_ROWS : (block < DOT_ROWS ? 1 : 0);
        for (int r = 0; r < DOT_ROWS; ++r) {
            // Behind the last row it is computed once more, and thrown away.
            const std::int64_t at_row = std::min(row + sub + r, w.out - 1);
            rows[r] = w.rows + at_row * w.in;
            const int fetched = blocks == 1 ? sub + r : sub + (block + r) % DOT_ROWS;
            next[r] = w.rows + std::min(next_row + fetched, w.out - 1) * w.in;
            scales[r] = w.scales ? w.scales + at_row * ((w.in + w.group - 1) / w.group) : nullptr;
        }
        dot_tokens<DOT_TOKENS>(count, prefetch, x, x_stride, rows, w.in, next, w.scales ? scales : nullptr, w.group,
                               sums + sub, stride);
    }
}

template <typename T, typename Y, typename X, typename W>
void multiply(const Team& team, std::int64_t tokens, const X* x, std::int64_t x_stride, const Weights<W>& w,
              const Output& o, Y* y) {
    const bool gated = o.activation == SWIGLU;
    const Range panels = team.split((o.size + PANEL - 1) / PANEL);
    const std::int64_t group_tokens =
        std::max<std::int64_t>(GROUP_BYTES / (w.in * sizeof(X)) / DOT_TOKENS, 4) * DOT_TOKENS;
    float sums[DOT_TOKENS][2 * PANEL];
    for (std::int64_t first = 0; first < tokens; first += group_tokens) {
        const std::int64_t here = std::min(group_tokens, tokens - first);
        const int blocks = static_cast<int>((here + DOT_TOKENS - 1) / DOT_TOKENS);
        for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
            const std::int64_t row = panel * PANEL;
            const int count = static_cast<int>(std::min<std::int64_t>(PANEL, o.size - row));
            for (int block = 0; block < blocks; ++block) {
                const std::int64_t begin = first + here * block / blocks, end = first + here * (block + 1) / blocks;
                const int width = static_cast<int>(end - begin);
                const X* from = x + begin * x_stride;
                panel_sums(w, row, row + PANEL, from, x_stride, width, block, blocks, sums[0], 2 * PANEL);
                if (gated) {
                    panel_sums(w, o.size + row, o.size + row + PANEL, from, x_stride, width, block, blocks,
                               sums[0] + PANEL, 2 * PANEL);
                }
                for (int t = 0; t < width; ++t) put_outputs<T>(sums[t], o, begin + t, row, count, y);
            }
        }
    }
}

// `x` [tokens, in] as the inner loop wants it: bfloat16 where the target multiplies that, else float32.
template <typename T, typename Body>
void with_operand(const Team& team, std::int64_t tokens, const T* x, std::int64_t x_stride, std::int64_t in,
                  Body&& body) {
    constexpr bool as_is = std::is_same_v<T, float>
#if defined(__AVX512BF16__)
                           || std::is_same_v<T, bf16>
#endif
        ;
    if constexpr (as_is) {
        body(x, x_stride);
    } else {
        float* converted = team.shared<float>(tokens * in);
        const Range mine = team.split(tokens);
        for (std::int64_t t = mine.begin; t < mine.end; ++t) {
            std::int64_t i = 0;
            for (; i + LANES <= in; i += LANES) store(converted + t * in + i, load(x + t * x_stride + i));
            for (; i < in; ++i) converted[t * in + i] = to_float(x[t * x_stride + i]);
        }
        team.barrier();
        body(static_cast<const float*>(converted), in);
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
        with_operand(team, tokens, at<const T>(x), x_stride, in, [&](auto* operand, std::int64_t operand_stride) {
            const auto run = [&](auto* weights) {
                using W = std::remove_const_t<std::remove_pointer_t<decltype(weights)>>;
                const Weights<W> all{weights, in, out, scales, group};
                if (y_dtype == FLOAT32) {
                    multiply<T>(team, tokens, operand, operand_stride, all, o, at<float>(y));
                } else if constexpr (!std::is_same_v<T, float>) {
                    multiply<T>(team, tokens, operand, operand_stride, all, o, at<T>(y));
                }
            };
            if (w_dtype == INT8) {
                run(at<const std::int8_t>(w));
            } else {
                run(at<const T>(w));
            }
        });
    });
}

}  // namespace

void bind_linear(Module& module) { bind<linear>(module, "linear"); }

}  // namespace ostinato
