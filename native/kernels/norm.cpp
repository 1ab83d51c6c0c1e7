// RMS norms: plain, and over groups of channels with a SiLU gate.

#include "../kernels.h"
#include "../simd.h"

namespace ostinato {
namespace {

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

}  // namespace

void bind_norm(Module& module) { bind<rms_norm>(module, "rms_norm"); }

}  // namespace ostinato
