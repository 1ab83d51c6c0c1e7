// A matrix product with weights [out, in] as all ways of computing it have it: its operands, and what becomes of its sums
// on their way out: scales, bias, activation and residual.
#pragma once

#include <type_traits>
#include <utility>

#include "arguments.h"
#include "blocks.h"
#include "dot.h"
#include "fixed.h"
#include "team.h"

namespace ostinato {

// Tokens of storage type T as they are multiplied: bfloat16 where the target multiplies that, else float32.
#if defined(__AVX512BF16__)
template <typename T>
using LhsType = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;
#else
template <typename T>
using LhsType = float;
#endif

// Whether tokens of storage type T may be made 16-bit integers.
#if defined(OSTINATO_I16)
template <typename T>
constexpr bool LHS_CAN_BE_I16 = !std::is_same_v<T, float>;

// So many of them, at the most, are made so and multiplied with such rows as they lie.
template <typename T>
inline int max_i16_tokens(const BlockFormat& format) {
    if (format.i16_scale_span == 0) return 0;
    if (std::is_same_v<LhsType<T>, bf16>) return format.min_bf16_tokens - 1;
    return LANES == 8 ? MAX_I16_BLOCK_TOKENS_AVX2 : MAX_I16_BLOCK_TOKENS_AVX512;
}
#else
template <typename T>
constexpr bool LHS_CAN_BE_I16 = false;
#endif

enum Activation : int { NONE, RELU2, SILU, SWIGLU, GEGLU, GELU, GELU_TANH };

// By its name in ops/activations.py, None where there is none.
inline bool from_python(PyObject* value, Activation& to) {
    static const std::pair<const char*, Activation> NAMES[] = {
        {"relu2", RELU2}, {"silu", SILU}, {"swiglu", SWIGLU}, {"geglu", GEGLU}, {"gelu", GELU},
        {"gelu_pytorch_tanh", GELU_TANH}};
    to = NONE;
    if (value == Py_None) return true;
    for (const auto& [name, activation] : NAMES) {
        if (PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, name) == 0) to = activation;
    }
    return to != NONE;
}

// Whether half of the outputs are the gates of the others.
inline bool has_gates(Activation activation) { return activation == SWIGLU || activation == GEGLU; }

// `gated` counts where there are gates.
inline Float activated(Activation activation, Float value, Float gated) {
    switch (activation) {
        case SWIGLU: return silu(value) * gated;
        case GEGLU: return gelu_tanh(value) * gated;
        case SILU: return silu(value);
        case RELU2: return value < Float{} ? Float{} : value * value;  // NaN stays NaN
        case GELU: return gelu(value);
        case GELU_TANH: return gelu_tanh(value);
        default: return value;
    }
}

struct Epilogue {
    const void* bias;        // [out] in T
    const float* scale;      // [out]
    const float* row_scale;  // [out], of quantised weights
    const void* residual;    // [tokens, result] in Y
    std::int64_t residual_stride;
    std::int64_t y_stride;
    std::int64_t size;  // outputs per token, after the activation
    Activation activation;
};

// The same for tokens from `token` on.
template <typename Y>
inline Epilogue from_token(const Epilogue& o, std::int64_t token) {
    Epilogue rest = o;
    if (o.residual) rest.residual = static_cast<const Y*>(o.residual) + token * o.residual_stride;
    return rest;
}

// Rows [n, k] of a weight, with `scales` [n, k / group] where they are quantised in groups, or of a `format`.
template <typename W>
struct WeightView {
    const W* first;
    std::int64_t n, k;
    const float* scales = nullptr;
    std::int64_t group = 0;
    const BlockFormat* format = nullptr;
    bool fixed_order = false;  // blocks are multiplied as they are for any number of tokens

    std::int64_t stride() const { return row_stride<W>(format, k); }
    const W* at(std::int64_t row) const { return first + row * stride(); }
};

// The first steps of the epilogue, for up to LANES outputs from `row` on.
template <typename T>
inline Float finish(Float value, const Epilogue& o, std::int64_t row, int count) {
    if (o.row_scale) value *= load_partial(o.row_scale + row, count);
    if (o.bias) value += load_partial(static_cast<const T*>(o.bias) + row, count);
    if (o.scale) value *= load_partial(o.scale + row, count);
    return value;
}

// One token's outputs, `count` from `row` on, of their `sums`; `gated` are those of the half that is gated.
//
// Sums are read in whole vectors.
template <typename T, typename Y>
inline void put_outputs(const float* sums, const float* gated, const Epilogue& o, std::int64_t token, std::int64_t row,
                        int count, Y* y) {
    for (int i = 0; i < count; i += LANES) {
        const int here = count - i;
        const Float second =
            has_gates(o.activation) ? finish<T>(load(gated + i), o, o.size + row + i, here) : Float{};
        Float value = activated(o.activation, finish<T>(load(sums + i), o, row + i, here), second);
        if (o.residual) {
            value += load_partial(static_cast<const Y*>(o.residual) + token * o.residual_stride + row + i, here);
        }
        store_partial(y + token * o.y_stride + row + i, value, here);
    }
}

// Tokens in blocks of up to `most`, of sizes as equal as can be.
struct EvenBlocks {
    std::int64_t tokens;
    int count;

    EvenBlocks(std::int64_t tokens, int most) : tokens(tokens), count(static_cast<int>((tokens + most - 1) / most)) {}

    std::int64_t begin(int number) const { return tokens * number / count; }
    int size(int number) const { return static_cast<int>(begin(number + 1) - begin(number)); }
};

// Tokens in blocks of `most` and what is left of them: the larger a block, the less of its time goes into sums across
// vectors.
struct FullBlocks {
    std::int64_t tokens;
    int most, count;

    FullBlocks(std::int64_t tokens, int most)
        : tokens(tokens), most(most), count(static_cast<int>((tokens + most - 1) / most)) {}

    std::int64_t begin(int number) const { return std::int64_t{number} * most; }
    int size(int number) const { return static_cast<int>(std::min<std::int64_t>(most, tokens - begin(number))); }
};

// Those that rows of W are multiplied with. With 16 registers, 3 tokens fill them best, and 6 are two times 3, not 4 and 2.
template <typename W>
using TokenBlocks = std::conditional_t<LANES == 8 && !std::is_same_v<W, BlockByte>, EvenBlocks, FullBlocks>;

}  // namespace ostinato
