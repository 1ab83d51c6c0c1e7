// Epilogue of a matrix product: scales, bias, activation and residual.
#pragma once

#include <array>
#include <optional>

#include "activations.h"
#include "bind/arguments.h"
#include "core/simd.h"

namespace ostinato {

// Read an activation by its name in ops/operations.py; None is NONE.
inline bool from_python(PyObject* value, Activation& to) {
    to = NONE;
    if (value == Py_None) return true;
    for (const auto& [name, activation] : ACTIVATION_NAMES) {
        if (PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, name) == 0) to = activation;
    }
    return to != NONE;
}

// Apply the activation to `value`, and multiply by `gated` if the activation has gates.
inline Float activated(Activation activation, Float value, Float gated) {
    switch (activation) {
        case SWIGLU: return silu(value) * gated;
        case GEGLU: return gelu_tanh(value) * gated;
        case SILU: return silu(value);
        case RELU2: return value < Float{} ? Float{} : value * value;  // NaN stays NaN
        case GELU: return gelu(value);
        case GELU_PYTORCH_TANH: return gelu_tanh(value);
        default: return value;
    }
}

// Clamp of a gated activation: the factor of gates in their sigmoid, the limit of gates and values, and what is added to
// values.
using Clamp = std::optional<std::array<float, 3>>;

inline Float activated(Activation activation, const Clamp& clamp, Float value, Float gated) {
    if (!clamp) return activated(activation, value, gated);
    const Float alpha = splat((*clamp)[0]), limit = splat((*clamp)[1]), offset = splat((*clamp)[2]);
    const Float gate = value > limit ? limit : value;  // NaN stays NaN
    const Float up = gated > limit ? limit : gated < -limit ? -limit : gated;
    return gate / (1.0f + exp(-(gate * alpha))) * (up + offset);
}

struct Epilogue {
    const void* bias;        // [out] in T
    const float* scale;      // [out]
    const float* row_scale;  // [out], the scales of quantised weights
    const void* residual;    // [tokens, outputs] in Y
    std::int64_t residual_stride;
    std::int64_t y_stride;
    std::int64_t size;  // outputs per token, after the activation
    Activation activation;
    const float* expert_bias = nullptr;  // [out], before `scale`, as `bias`
    Clamp clamp = {};

    // Return whether outputs are the sums, activated.
    bool is_plain() const { return !row_scale && !bias && !scale && !expert_bias && !clamp; }
};

// Return the epilogue for tokens from `token` on.
template <typename Y>
inline Epilogue from_token(const Epilogue& o, std::int64_t token) {
    Epilogue rest = o;
    if (o.residual) rest.residual = static_cast<const Y*>(o.residual) + token * o.residual_stride;
    return rest;
}

// Apply scales and bias to up to LANES outputs from `row` on.
template <typename T>
inline Float finish(Float value, const Epilogue& o, std::int64_t row, int count) {
    if (o.row_scale) value *= load_partial(o.row_scale + row, count);
    if (o.bias) value += load_partial(static_cast<const T*>(o.bias) + row, count);
    if (o.expert_bias) value += load_partial(o.expert_bias + row, count);
    if (o.scale) value *= load_partial(o.scale + row, count);
    return value;
}

// Write one token's outputs, `count` from `row` on, from their `sums`; `gated` are the sums of the gated half.
//
// Sums are read in whole vectors.
template <typename T, typename Y>
inline void put_outputs(const float* sums, const float* gated, const Epilogue& o, std::int64_t token, std::int64_t row,
                        int count, Y* y) {
    for (int i = 0; i < count; i += LANES) {
        const int here = count - i;
        const Float second =
            has_gates(o.activation) ? finish<T>(load(gated + i), o, o.size + row + i, here) : Float{};
        Float value = activated(o.activation, o.clamp, finish<T>(load(sums + i), o, row + i, here), second);
        if (o.residual) {
            value += load_partial(static_cast<const Y*>(o.residual) + token * o.residual_stride + row + i, here);
        }
        store_partial(y + token * o.y_stride + row + i, value, here);
    }
}

}  // namespace ostinato
