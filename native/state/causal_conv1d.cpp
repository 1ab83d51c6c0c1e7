// The short depthwise convolution of a state layer, and one with gaps between its taps, with their last inputs kept in
// slots.

#include <type_traits>

#include "bind/kernel_binding.h"
#include "core/simd.h"
#include "gemm/epilogue.h"
#include "state/step_rows.h"

namespace ostinato {
namespace {

// Channels per thread at least: whole cache lines of any storage type.
constexpr std::int64_t GRAIN = 64;

// Tokens computed together: each input is converted once for all of them.
constexpr int TOKENS_PER_STEP = 4;

// Compute y[t][c] = silu(bias[c] + sum_j weight[j, c] * inputs[t + j * dilation][c]), or with NONE the sum alone, for
// TOKENS tokens and `count` channels; the sum is in the order of j. `weight` [width, stride] and `bias` are floats. W is
// the width where that is a constant and `dilation` is 1, else 0.
template <int W, int TOKENS, Activation ACTIVATION, typename T>
void convolve(const T* const* inputs, const float* weight, std::int64_t stride, const float* bias, T* y,
              std::int64_t y_stride, std::int64_t count, int width, int dilation) {
    const auto at_channel = [&](std::int64_t c, auto&& input, auto&& put) {
        Float totals[TOKENS];
        if constexpr (W > 0) {
            Float wide[W - 1 + TOKENS];
            for (int i = 0; i < W - 1 + TOKENS; ++i) wide[i] = input(inputs[i] + c);
            for (int t = 0; t < TOKENS; ++t) {
                totals[t] = load(bias + c);
                for (int j = 0; j < W; ++j) totals[t] = fma(wide[t + j], load(weight + j * stride + c), totals[t]);
            }
        } else {
            for (int t = 0; t < TOKENS; ++t) {
                totals[t] = load(bias + c);
                for (int j = 0; j < width; ++j) {
                    totals[t] = fma(input(inputs[t + j * dilation] + c), load(weight + j * stride + c), totals[t]);
                }
            }
        }
        if constexpr (ACTIVATION == SILU) silu(totals);
        for (int t = 0; t < TOKENS; ++t) put(y + t * y_stride + c, totals[t]);
    };
    const std::int64_t whole = count / LANES * LANES;
    const int rest = static_cast<int>(count - whole);
    for (std::int64_t c = 0; c < whole; c += LANES) {
        at_channel(c, [](const T* from) { return load(from); }, [](T* to, Float value) { store(to, value); });
    }
    if (rest == 0) return;
    at_channel(whole, [&](const T* from) { return load_masked(from, rest); },
               [&](T* to, Float value) { store_masked(to, value, rest); });
}

struct CausalConv1d : StepRows {
    FIELD(Strided<VALUES>, x);  // [tokens, channels]
    FIELD(Array<VALUES>, weight);  // [width, channels]
    FIELD(OptionalTensor<Array<VALUES>>, bias);  // [channels]
    FIELD(Strided<VALUES>, conv_states);  // [slots, width - 1, channels]
    FIELD(Activation, activation);  // SILU or NONE
    FIELD(Array<VALUES>, out);  // [tokens, channels]
};

struct DilatedConv1d : StepRows {
    FIELD(Strided<VALUES>, x);  // [tokens, channels]
    FIELD(Array<VALUES>, weight);  // [width, channels]
    FIELD(std::int64_t, dilation);
    FIELD(Strided<VALUES>, conv_states);  // [slots, (width - 1) * dilation, channels]
    FIELD(Array<VALUES>, out);  // [tokens, channels]
};

struct Convolution {
    const Tensor &x, &weight, &bias, &states, &out;  // `bias` may have no address
    Activation activation;
    int dilation;
};

// Compute a convolution along rows; threads share the channels.
void convolve_rows(const ThreadGroup& threads, std::int64_t tokens, const StepRows& rows, const Convolution& in) {
    const std::int64_t channels = in.x.shape[1];
    const int width = static_cast<int>(in.weight.shape[0]), dilation = in.dilation;
    const Range mine = threads.split(channels, GRAIN);
    const std::int64_t count = mine.end - mine.begin;
    if (count == 0) return;
    const std::int64_t stride = (count + LANES - 1) / LANES * LANES;
    const int kept = (width - 1) * dilation;

    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        const std::int64_t floats = (width + 1) * stride;
        float* weights = threads.thread_scratch<float>(floats + kept * stride + (kept + TOKENS_PER_STEP) * 2);
        float* biases = weights + width * stride;
        T* before = reinterpret_cast<T*>(weights + floats);
        const T** inputs = reinterpret_cast<const T**>(weights + floats + kept * stride);
        const auto widen = [&](const T* from, float* to) {
            for (std::int64_t c = 0; c < count; ++c) to[c] = from ? to_float(from[mine.begin + c]) : 0.0f;
        };
        for (int j = 0; j < width; ++j) widen(in.weight.at<const T>() + j * channels, weights + j * stride);
        widen(in.bias.at<const T>(), biases);

        rows.each_row(tokens, [&](const StepRow& row) {
            const auto output = [&](std::int64_t token) { return in.out.at<T>() + token * channels + mine.begin; };
            if (rows.is_padding(row)) {
                for (std::int64_t t = row.begin; t < row.end; ++t) std::fill_n(output(t), count, T{});
                return;
            }
            // A copy, since the row's first token may overwrite the slot that the others read.
            for (int j = 0; j < kept; ++j) {
                const T* from = in.states.row<const T>(row.read_slot) + j * channels + mine.begin;
                if (row.read_slot) {
                    std::copy_n(from, count, before + j * stride);
                } else {
                    std::fill_n(before + j * stride, count, T{});
                }
            }
            // The input at an offset from the row's first token; negative offsets are inputs of earlier steps.
            const auto input = [&](std::int64_t offset) {
                return offset < 0 ? before + (kept + offset) * stride
                                  : in.x.row<const T>(row.begin + offset) + mine.begin;
            };
            const auto run = [&](auto at_once, std::int64_t t) {
                constexpr int TOKENS = at_once;
                for (int i = 0; i < kept + TOKENS; ++i) inputs[i] = input(t - kept + i);
                T* to = output(row.begin + t);
                const auto with = [&](auto known, auto activation) {
                    convolve<known, TOKENS, activation>(inputs, weights, stride, biases, to, channels, count, width,
                                                        dilation);
                };
                constexpr std::integral_constant<int, 0> any_width;
                constexpr std::integral_constant<Activation, NONE> none;
                constexpr std::integral_constant<Activation, SILU> silu;
                if (in.activation == NONE) {
                    if (width == 3 && dilation == 1) {
                        with(std::integral_constant<int, 3>{}, none);
                    } else {
                        with(any_width, none);
                    }
                } else if (width == 4 && dilation == 1) {
                    with(std::integral_constant<int, 4>{}, silu);
                } else {
                    with(any_width, silu);
                }
            };
            const std::int64_t length = row.end - row.begin;
            std::int64_t t = 0;
            for (; t + TOKENS_PER_STEP <= length; t += TOKENS_PER_STEP) run(std::integral_constant<int, TOKENS_PER_STEP>{}, t);
            for (; t < length; ++t) run(std::integral_constant<int, 1>{}, t);
            rows.each_written(row, [&](std::int64_t done, std::int64_t slot) {
                T* to = in.states.row<T>(slot) + mine.begin;
                for (int j = 0; j < kept; ++j) std::copy_n(input(done - kept + j), count, to + j * channels);
            });
        });
    });
}

void causal_conv1d(const ThreadGroup& threads, std::int64_t tokens, const CausalConv1d& in) {
    convolve_rows(threads, tokens, in, {in.x, in.weight, in.bias, in.conv_states, in.out, in.activation, 1});
}

void dilated_conv1d(const ThreadGroup& threads, std::int64_t tokens, const DilatedConv1d& in) {
    const Tensor none;
    convolve_rows(threads, tokens, in, {in.x, in.weight, none, in.conv_states, in.out, SILU, static_cast<int>(in.dilation)});
}

KERNEL(causal_conv1d);
KERNEL(dilated_conv1d);

}  // namespace
}  // namespace ostinato
