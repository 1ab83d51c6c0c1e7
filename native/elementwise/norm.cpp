// Layer norm, and RMS norms: plain, and over groups of channels with a gate.

#include "bind/kernel_binding.h"
#include "elementwise/norm_row.h"

namespace ostinato {
namespace {

// Call body(begin, count) for the vectors of `size` elements; the last may have fewer than LANES.
template <typename Body>
void by_vectors(std::int64_t size, Body&& body) {
    const std::int64_t whole = size / LANES * LANES;
    for (std::int64_t i = 0; i < whole; i += LANES) body(i, LANES);
    if (whole < size) body(whole, static_cast<int>(size - whole));
}

struct RmsNorm : Arguments {
    // [tokens, size] or [tokens, heads, size]. Float32 is rounded to the dtype of the weight first.
    FIELD(Vectors<FLOATS>, x);
    FIELD(Array<VALUES>, weight);  // [size]
    FIELD(float, eps);
    FIELD(float, offset);
    FIELD(OptionalTensor<Array<VALUES>>, residual);  // as out
    FIELD(Array<VALUES>, out);  // as x

    void check(const Reader& reader) const {
        reader.expect(x.dtype == FLOAT32 || x.dtype == weight.dtype, "x is in float32 or in the dtype of the weight");
    }
};

template <typename T>
struct Rounded {
    T value;
};

void rms_norm(const ThreadGroup& threads, std::int64_t tokens, const RmsNorm& in) {
    const bool has_heads = in.x.dims == 3;
    const std::int64_t heads = has_heads ? in.x.shape[1] : 1, size = in.weight.shape[0];
    const std::int64_t head_stride = has_heads ? in.x.strides[1] : 0;
    const Range mine = threads.split(tokens * heads);
    const bool rounds = in.x.dtype != in.weight.dtype;
    with_dtype(in.weight.dtype, [&](auto type) {
        using T = decltype(type);
        T* rounded = rounds ? &threads.thread_scratch<Rounded<T>>(size)->value : nullptr;
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const T* from = rounded;
            if (rounds) {
                const float* x = in.x.row<const float>(i / heads) + i % heads * head_stride;
                by_vectors(size, [&](std::int64_t j, int n) { store_partial(rounded + j, load_partial(x + j, n), n); });
            } else {
                from = in.x.row<const T>(i / heads) + i % heads * head_stride;
            }
            const T* residual = in.residual ? in.residual.at<const T>() + i * size : nullptr;
            norm_row(from, in.weight.at<const T>(), residual, in.out.at<T>() + i * size, size, in.eps, in.offset);
        }
    });
}

// Compute y [size] = (x [size] - mean(x)) / sqrt(variance(x) + eps) * weight [size] + bias [size]
template <typename T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* y, std::int64_t size, float eps) {
    const auto sum_of = [&](auto&& term) {
        Float sums[4] = {};
        by_vectors(size, [&](std::int64_t i, int n) {
            Float& sum = sums[i / LANES % 4];
            sum += term(i, n);
        });
        return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    };
    const float count = static_cast<float>(size);
    const float mean = sum_of([&](std::int64_t i, int n) { return load_partial(x + i, n); }) / count;
    const float squares = sum_of([&](std::int64_t i, int n) {
        Float apart = load_partial(x + i, n) - mean;
        for (int j = n; j < LANES; ++j) apart[j] = 0.0f;
        return apart * apart;
    });
    const float factor = 1.0f / std::sqrt(squares / count + eps);
    by_vectors(size, [&](std::int64_t i, int n) {
        const Float normed = (load_partial(x + i, n) - mean) * factor;
        store_partial(y + i, normed * load_partial(weight + i, n) + load_partial(bias + i, n), n);
    });
}

struct LayerNorm : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, size]
    FIELD(Array<VALUES>, weight);  // [size], as bias
    FIELD(Array<VALUES>, bias);
    FIELD(float, eps);
    FIELD(Array<VALUES>, out);  // [tokens, size]
};

void layer_norm(const ThreadGroup& threads, std::int64_t tokens, const LayerNorm& in) {
    const std::int64_t size = in.x.shape[1];
    const Range mine = threads.split(tokens);
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            layer_norm_row(in.x.row<const T>(i), in.weight.at<const T>(), in.bias.at<const T>(),
                           in.out.at<T>() + i * size, size, in.eps);
        }
    });
}

// Return the factor of a gate: silu(gate), or its sigmoid.
template <bool IS_SIGMOID>
Float apply_gate(Float gate) {
    if constexpr (IS_SIGMOID) return 1.0f / (1.0f + exp(-gate));
    else return silu(gate);
}

// `is_one`: all elements have one gate.
template <bool IS_SIGMOID, typename T>
void gate_row(const T* x, const T* gate, T* y, std::int64_t size, bool is_one) {
    const Float all = is_one ? splat(load_masked(gate, 1)[0]) : Float{};
    by_vectors(size, [&](std::int64_t i, int n) {
        const Float by = is_one ? all : load_partial(gate + i, n);
        store_partial(y + i, load_partial(x + i, n) * apply_gate<IS_SIGMOID>(by), n);
    });
}

// Compute norm_row(x * apply_gate(gate)), or norm_row(x) * apply_gate(gate). `values` [size] is scratch memory.
template <bool IS_SIGMOID, typename T>
void gated_norm_row(const T* x, const T* gate, const T* weight, T* y, std::int64_t size, float eps,
                    bool norm_before_gate, float* values) {
    Float squares[4] = {};
    by_vectors(size, [&](std::int64_t i, int n) {
        const Float gated = apply_gate<IS_SIGMOID>(load_partial(gate + i, n));
        const Float v = norm_before_gate ? load_partial(x + i, n) : load_partial(x + i, n) * gated;
        store_partial(values + i, norm_before_gate ? gated : v, n);
        Float& sum_of = squares[i / LANES % 4];
        sum_of = fma(v, v, sum_of);
    });
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(size);
    const float factor = 1.0f / std::sqrt(mean + eps);
    by_vectors(size, [&](std::int64_t i, int n) {
        const Float v = load_partial(values + i, n);
        const Float normed = (norm_before_gate ? load_partial(x + i, n) : v) * factor * load_partial(weight + i, n);
        store_partial(y + i, norm_before_gate ? normed * v : normed, n);
    });
}

struct GatedRmsNorm : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, size]
    // [tokens, size]; without a weight also [tokens, heads, size / heads], or [tokens, heads] with one gate for each head.
    FIELD(Vectors<VALUES>, gate);
    // [size], or [group_size] for all groups; without it there is no norm.
    FIELD(OptionalTensor<Array<VALUES>>, weight);
    FIELD(float, eps);
    FIELD(std::optional<std::int64_t>, group_size);
    FIELD(bool, norm_before_gate);
    FIELD(bool, gate_is_sigmoid);
    FIELD(Array<VALUES>, out);  // [tokens, size]

    void check(const Reader& reader) const {
        const std::int64_t heads = gate.shape[1], size = gate.dims == 3 ? heads * gate.shape[2] : heads;
        reader.expect(size == x.shape[1] || (!weight && gate.dims == 2 && x.shape[1] % heads == 0), "as many gates");
        reader.expect(!weight || gate.dims == 2, "gates of heads stand alone");
    }
};

template <bool IS_SIGMOID>
void gated_norm(const ThreadGroup& threads, std::int64_t tokens, const GatedRmsNorm& in) {
    const bool has_heads = in.gate.dims == 3, is_one = !has_heads && in.gate.shape[1] != in.x.shape[1];
    const std::int64_t size = in.x.shape[1];
    const std::int64_t group_size = has_heads || is_one ? size / in.gate.shape[1] : in.group_size.value_or(size);
    const std::int64_t groups = size / group_size, gate_stride = has_heads ? in.gate.strides[1] : is_one ? 1 : group_size;
    const Range mine = threads.split(tokens * groups);
    float* values = threads.thread_scratch<float>(group_size);
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t token = i / groups, first = i % groups * group_size;
            const T* from = in.x.row<const T>(token) + first;
            const T* by = in.gate.row<const T>(token) + i % groups * gate_stride;
            T* to = in.out.at<T>() + token * size + first;
            if (in.weight) {
                const T* weight = in.weight.at<const T>() + (in.weight.shape[0] == size ? first : 0);
                gated_norm_row<IS_SIGMOID>(from, by, weight, to, group_size, in.eps, in.norm_before_gate, values);
            } else {
                gate_row<IS_SIGMOID>(from, by, to, group_size, is_one);
            }
        }
    });
}

void gated_rms_norm(const ThreadGroup& threads, std::int64_t tokens, const GatedRmsNorm& in) {
    in.gate_is_sigmoid ? gated_norm<true>(threads, tokens, in) : gated_norm<false>(threads, tokens, in);
}

KERNEL(gated_rms_norm);
KERNEL(layer_norm);
KERNEL(rms_norm);

}  // namespace
}  // namespace ostinato
