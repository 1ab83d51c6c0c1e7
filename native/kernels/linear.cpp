// linear: y = x W^T + b, with scale, activation and residual on the way out.
//
// Many tokens are computed as many.h says; few, or all in a fixed order, as few.h does.

#include "../few.h"
#include "../kernels.h"
#include "../many.h"

namespace ostinato {
namespace {

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
                if (fixed_order || tokens < MANY<Operand<T>, W>) {
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
