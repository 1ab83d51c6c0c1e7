// The experts of a mixture-of-experts layer, on vectors.
//
// The choices of all tokens are sorted by expert, so that each expert's weights are read once for all tokens that chose
// it. Threads share the rows of each expert: rows of `up` give an intermediate value per choice, rows of `down` are
// added up per token. A thread adds whole sums, expert after expert, so the number of threads changes no bit; in a
// fixed order neither do other tokens.
#pragma once

#include "core/thread_group.h"
#include "gemm/expert_routing.h"
#include "gemm/ukernels/dot_rows.h"

namespace ostinato {

// Call body(row, choice, sums) for panels of the rows `mine` of each expert, from `row` on, and for all choices of that
// expert: sums[2][EPILOGUE_ROWS]. The second half has the rows `second` further on, if not 0. `wide` has room for MR
// converted rows, as far apart as the tokens; integers need none.
template <typename X, typename W, typename Body>
void each_panel(const ExpertAssignment& chosen, const ExpertWeights<W>& stack, Range mine, std::int64_t second, const X* x,
                std::int64_t x_stride, X* wide, float* sums, Body&& body) {
    const std::int64_t most = tokens_in_cache<X>(stack.k);
    constexpr int STRIDE = 2 * EPILOGUE_ROWS;
    chosen.each([&](std::int64_t expert, std::int64_t next, std::int64_t begin, std::int64_t end) {
        const WeightView<W> rows = stack.of(expert);
        for (std::int64_t from = begin; from < end; from += most) {
            const std::int64_t to = std::min(end, from + most);
            const auto multiply = [&](std::int64_t row, std::int64_t last, const W* then, float* to_sums) {
                const X* some = x + from * x_stride;
                if constexpr (std::is_same_v<X, i16>) {
                    dot_rows(rows, row, last, then, to - from, some, x_stride, to_sums, STRIDE);
                } else {
                    dot_rows(rows, row, last, then, to - from, some, x_stride, to_sums, STRIDE, wide, x_stride);
                }
                stack.finish(expert, row, last, to - from, to_sums, STRIDE);
            };
            // Behind the last panel come the first rows of the next group of choices.
            const W* first_then = stack.of(to < end ? expert : next).at(mine.begin);
            for (std::int64_t row = mine.begin; row < mine.end; row += EPILOGUE_ROWS) {
                const std::int64_t last = std::min(mine.end, row + EPILOGUE_ROWS);
                const W* then = last < mine.end ? rows.at(last) : first_then;
                multiply(row, last, second ? rows.at(row + second) : then, sums);
                if (second) multiply(row + second, last + second, then, sums + EPILOGUE_ROWS);
                for (std::int64_t at = from; at < to; ++at) body(row, at, sums + (at - from) * STRIDE);
            }
        }
    });
}

// Tokens as products take them, `stride` elements apart.
template <typename X>
struct PreparedTokens {
    static std::int64_t stride(std::int64_t size) { return padded_stride(size); }

    template <typename T, typename W>
    static void make(const ExpertWeights<W>&, const T* from, std::int64_t size, X* to) {
        if constexpr (std::is_same_v<T, X>) {
            std::copy(from, from + size, to);
        } else {
            std::transform(from, from + size, to, [](T value) { return to_float(value); });
        }
    }
};

#if defined(OSTINATO_I16)
template <>
struct PreparedTokens<i16> {
    static std::int64_t stride(std::int64_t size) { return I16TokenLayout(size).token_size(); }

    // Quantize a token. One with an element that is not finite gives NaN with all weights.
    template <typename T, typename W>
    static void make(const ExpertWeights<W>& stack, const T* from, std::int64_t size, i16* to) {
        if (quantize_token_i16(stack.format->i16_scale_span, stack.format->i16_order, from, size, to)) return;
        const I16TokenLayout layout(size);
        std::fill(to, to + layout.size, i16{});
        std::fill(layout.scales(to), layout.scales(to) + 2 * layout.subblocks, std::numeric_limits<float>::quiet_NaN());
    }
};
#endif

// Prepare all tokens; threads share them.
template <typename X, typename T, typename W, typename From>
void prepare_tokens(const ThreadGroup& threads, const ExpertWeights<W>& stack, std::int64_t places, From&& from, X* to) {
    const Range mine = threads.split(places);
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
        PreparedTokens<X>::make(stack, static_cast<const T*>(from(i)), stack.k, to + i * PreparedTokens<X>::stride(stack.k));
    }
    threads.barrier();
}

// Compute a layer with tokens multiplied as X. Intermediate values have the type Inner: X, or a type that is quantised
// to X.
template <typename X, typename Inner, typename T, typename W>
void multiply_by_experts(const ThreadGroup& threads, const ExpertAssignment& chosen, const T* x, std::int64_t x_stride, const MoeShape& layer,
                         const ExpertWeights<W>& up, const ExpertWeights<W>& down, const T* residual, std::int64_t residual_stride, T* y,
                         std::int64_t y_stride, X* wide, float* sums) {
    const std::int64_t tokens = chosen.tokens, places = tokens * chosen.top_k, size = layer.size, inner = layer.inner;
    const std::int64_t size_stride = padded_stride(size), in_stride = PreparedTokens<X>::stride(size), inner_stride = padded_stride(inner);
    constexpr bool AS_MADE = std::is_same_v<X, Inner>;
    const std::int64_t down_stride = AS_MADE ? 0 : PreparedTokens<X>::stride(inner);
    const std::int64_t totals_bytes = tokens * size_stride * sizeof(float);
    std::byte* shared = threads.group_scratch<std::byte>(totals_bytes + places * (in_stride + down_stride) * sizeof(X) +
                                               places * inner_stride * sizeof(Inner));
    float* totals = reinterpret_cast<float*>(shared);
    X* inputs = reinterpret_cast<X*>(shared + totals_bytes);
    Inner* inners = reinterpret_cast<Inner*>(inputs + places * in_stride);

    prepare_tokens<X, T>(threads, up, places, [&](std::int64_t i) { return x + chosen.token(i) * x_stride; }, inputs);

    const bool is_gated = has_gates(layer.activation);
    each_panel(chosen, up, threads.split(inner, EPILOGUE_ROWS), is_gated ? inner : 0, inputs, in_stride, wide, sums,
               [=](std::int64_t row, std::int64_t i, const float* sum) {
                   for (int r = 0; r < EPILOGUE_ROWS; r += LANES) {
                       const Float value = layer.activate(load(sum + r), load(sum + EPILOGUE_ROWS + r));
                       store(inners + i * inner_stride + row + r, value);
                   }
               });
    threads.barrier();

    const Range mine = threads.split(size, EPILOGUE_ROWS);
    for (std::int64_t t = 0; t < tokens; ++t) {
        std::fill(totals + t * size_stride + mine.begin, totals + t * size_stride + mine.end, 0.0f);
    }
    const auto add_up = [&](const X* multiplied, std::int64_t stride) {
        each_panel(chosen, down, mine, 0, multiplied, stride, wide, sums,
                   [&](std::int64_t row, std::int64_t i, const float* sum) {
                       float* total = totals + chosen.token(i) * size_stride + row;
                       const Float weight = splat(chosen.weight(i));
                       for (int r = 0; r < EPILOGUE_ROWS; r += LANES) {
                           store(total + r, fma(weight, load(sum + r), load(total + r)));
                       }
                   });
    };
    if constexpr (AS_MADE) {
        if (mine.begin == mine.end) return;
        add_up(inners, inner_stride);
    } else {
        X* made = reinterpret_cast<X*>(inners + places * inner_stride);
        prepare_tokens<X, Inner>(threads, down, places, [&](std::int64_t i) { return inners + i * inner_stride; }, made);
        if (mine.begin == mine.end) return;
        add_up(made, down_stride);
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
        const T* added = residual ? residual + t * residual_stride : nullptr;
        store_with_residual(totals + t * size_stride, added, y + t * y_stride, mine.begin, mine.end);
    }
}

// Compute a layer with tokens multiplied as X: integers, or the type that T is multiplied in.
template <typename X, typename T, typename W>
void run_experts(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride, const float* choices,
                 std::int64_t top_k, const MoeShape& layer, const ExpertWeights<W>& up, const ExpertWeights<W>& down, const T* residual,
                 std::int64_t residual_stride, T* y, std::int64_t y_stride) {
    constexpr bool IN_INTEGERS = std::is_same_v<X, i16>;
    const std::int64_t experts = layer.experts, places = tokens * top_k;
    const std::int64_t most = std::min(places, std::max(tokens_in_cache<X>(layer.size), tokens_in_cache<X>(layer.inner)));
    const std::int64_t wide_size = IN_INTEGERS ? 0 : MR * std::max(padded_stride(layer.size), padded_stride(layer.inner));
    float* wide = threads.thread_scratch<float>(wide_size + most * 2 * EPILOGUE_ROWS + places + experts + 1);
    float* sums = wide + wide_size;
    auto* order = reinterpret_cast<std::int32_t*>(sums + most * 2 * EPILOGUE_ROWS);
    ExpertAssignment chosen{choices, tokens, top_k, experts, order, order + places};
    chosen.sort();
    using Inner = std::conditional_t<IN_INTEGERS, T, X>;
    multiply_by_experts<X, Inner>(threads, chosen, x, x_stride, layer, up, down, residual, residual_stride, y, y_stride,
                                  reinterpret_cast<X*>(wide), sums);
}

}  // namespace ostinato
