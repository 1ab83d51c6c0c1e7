// Layer norm, and RMS norms: plain, and over groups of channels with a SiLU gate.

#include "../kernels.h"
#include "../simd.h"

namespace ostinato {
namespace {

// Calls body(begin, count) for the vectors of `size` elements, of which the last may have fewer than LANES.
template <typename Body>
void by_vectors(std::int64_t size, Body&& body) {
    const std::int64_t whole = size / LANES * LANES;
    for (std::int64_t i = 0; i < whole; i += LANES) body(i, LANES);
    if (whole < size) body(whole, static_cast<int>(size - whole));
}

// y [size] = x [size] / sqrt(mean(x^2) + eps) * weight [size]
template <typename T, typename X>
void norm_row(const X* x, const T* weight, T* y, std::int64_t size, float eps) {
    const std::int64_t whole = size / LANES * LANES;
    const int rest = static_cast<int>(size - whole);
    Float squares[4] = {};
    std::int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        for (int j = 0; j < 4; ++j) {
            const Float v = load(x + i + j * LANES);
            squares[j] += v * v;
        }
    }
    for (; i < whole; i += LANES) {
        const Float v = load(x + i);
        squares[0] += v * v;
    }
    if (rest) {
        const Float v = load_first(x + whole, rest);
        squares[1] += v * v;
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(size);
    const float factor = 1.0f / std::sqrt(mean + eps);
    for (i = 0; i < whole; i += LANES) store(y + i, load(x + i) * factor * load(weight + i));
    if (rest) {
        store_first(y + whole, load_first(x + whole, rest) * factor * load_first(weight + whole, rest), rest);
    }
}

// `x` [tokens, heads, size] with strides in elements -> `y` [tokens, heads, size], contiguous.
void rms_norm(const Team& team, std::int64_t tokens, Address x, std::int64_t token_stride, std::int64_t head_stride,
              Address weight, Address y, std::int64_t heads, std::int64_t size, float eps, int dtype) {
    const Range mine = team.split(tokens * heads);
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const T* from = at<const T>(x) + i / heads * token_stride + i % heads * head_stride;
            norm_row(from, at<const T>(weight), at<T>(y) + i * size, size, eps);
        }
    });
}

// y [size] = (x [size] - mean(x)) / sqrt(variance(x) + eps) * weight [size] + bias [size]
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
    const float mean = sum_of([&](std::int64_t i, int n) { return load_some(x + i, n); }) / count;
    const float squares = sum_of([&](std::int64_t i, int n) {
        Float apart = load_some(x + i, n) - mean;
        for (int j = n; j < LANES; ++j) apart[j] = 0.0f;
        return apart * apart;
    });
    const float factor = 1.0f / std::sqrt(squares / count + eps);
    by_vectors(size, [&](std::int64_t i, int n) {
        const Float normed = (load_some(x + i, n) - mean) * factor;
        store_some(y + i, normed * load_some(weight + i, n) + load_some(bias + i, n), n);
    });
}

// `x` [tokens, size] with its stride in elements -> `y` [tokens, size], contiguous.
void layer_norm(const Team& team, std::int64_t tokens, Address x, std::int64_t stride, Address weight, Address bias,
                Address y, std::int64_t size, float eps, int dtype) {
    const Range mine = team.split(tokens);
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            layer_norm_row(at<const T>(x) + i * stride, at<const T>(weight), at<const T>(bias), at<T>(y) + i * size,
                           size, eps);
        }
    });
}

template <typename T>
void gate_row(const T* x, const T* gate, T* y, std::int64_t size) {
    by_vectors(size, [&](std::int64_t i, int n) {
        store_some(y + i, load_some(x + i, n) * silu(load_some(gate + i, n)), n);
    });
}

// norm_row(x * silu(gate)), or norm_row(x) * silu(gate). `values` [size] is to work in.
template <typename T>
void gated_norm_row(const T* x, const T* gate, const T* weight, T* y, std::int64_t size, float eps,
                    bool norm_before_gate, float* values) {
    Float squares[4] = {};
    by_vectors(size, [&](std::int64_t i, int n) {
        const Float gated = silu(load_some(gate + i, n));
        const Float v = norm_before_gate ? load_some(x + i, n) : load_some(x + i, n) * gated;
        store_some(values + i, norm_before_gate ? gated : v, n);
        Float& sum_of = squares[i / LANES % 4];
        sum_of = fma(v, v, sum_of);
    });
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(size);
    const float factor = 1.0f / std::sqrt(mean + eps);
    by_vectors(size, [&](std::int64_t i, int n) {
        const Float v = load_some(values + i, n);
        const Float normed = (norm_before_gate ? load_some(x + i, n) : v) * factor * load_some(weight + i, n);
        store_some(y + i, norm_before_gate ? normed * v : normed, n);
    });
}

// `x`, `gate` [tokens, size] with strides in elements, `weight` [size] or null, which leaves the norm out
// -> `y` [tokens, size], contiguous.
void gated_rms_norm(const Team& team, std::int64_t tokens, Address x, std::int64_t x_stride, Address gate,
                    std::int64_t gate_stride, Address weight, Address y, std::int64_t size, std::int64_t group_size,
                    float eps, bool norm_before_gate, int dtype) {
    const std::int64_t groups = size / group_size;
    const Range mine = team.split(tokens * groups);
    float* values = team.own<float>(group_size);
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t token = i / groups, first = i % groups * group_size;
            const T* from = at<const T>(x) + token * x_stride + first;
            const T* by = at<const T>(gate) + token * gate_stride + first;
            T* to = at<T>(y) + token * size + first;
            if (weight) {
                gated_norm_row(from, by, at<const T>(weight) + first, to, group_size, eps, norm_before_gate, values);
            } else {
                gate_row(from, by, to, group_size);
            }
        }
    });
}

}  // namespace

void bind_norm(Module& module) {
    bind<gated_rms_norm>(module, "gated_rms_norm");
    bind<layer_norm>(module, "layer_norm");
    bind<rms_norm>(module, "rms_norm");
}

}  // namespace ostinato
