// linear: y = x W^T + b, with scale, activation and residual on the way out.
//
// Many tokens are computed as many.h says; few, or all in a fixed order, as few.h does.

#include "../bind.h"
#include "../few.h"
#include "../many.h"

namespace ostinato {
namespace {

struct Linear : Arguments {
    FIELD(Floats, x);                  // [tokens, in]
    FIELD(Tensor, weight);             // [out, in], of x's dtype or int8
    FIELD(MaybeTensor, bias);          // [out]
    FIELD(MaybeTensor, residual);      // as the result
    FIELD(Activation, activation);
    FIELD(MaybeTensor, scale);         // [out] float32
    FIELD(MaybeTensor, weight_scale);  // of int8: [out], or [out, in / group_size] if that is not 0, float32
    FIELD(std::int64_t, group_size);
    FIELD(bool, fixed_order);
    FIELD(Tensor, out);                // [tokens, out], or [tokens, out / 2] if gated
};

// In `fixed_order` a token's bits do not depend on how many tokens are computed with it.
void linear(const Team& team, std::int64_t tokens, const Linear& in) {
    const std::int64_t in_size = in.weight.shape[1], out_size = in.weight.shape[0];
    const auto* bias = in.bias.at<const void>();
    const auto* residual = in.residual.at<const void>();
    Output o{bias, in.scale.at<const float>(), nullptr, residual, in.residual.strides[0], in.out.strides[0],
             in.activation == SWIGLU ? out_size / 2 : out_size, in.activation};
    const float* scales = in.weight_scale.at<const float>();
    if (scales && in.group_size == 0) {
        o.row_scale = scales;
        scales = nullptr;
    }
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        const auto run = [&](auto* weights) {
            using W = std::remove_const_t<std::remove_pointer_t<decltype(weights)>>;
            const Weights<W> all{weights, in_size, out_size, scales, in.group_size};
            const auto compute = [&](auto* to) {
                if (in.fixed_order || tokens < MANY<Operand<T>, W>) {
                    multiply_few(team, tokens, in.x.at<const T>(), in.x.strides[0], all, o, to);
                } else {
                    multiply_many(team, tokens, in.x.at<const T>(), in.x.strides[0], all, o, to);
                }
            };
            if (in.out.dtype == FLOAT32) {
                compute(in.out.at<float>());
            } else if constexpr (!std::is_same_v<T, float>) {
                compute(in.out.at<T>());
            }
        };
        if (in.weight.dtype == INT8) {
            run(in.weight.at<const std::int8_t>());
        } else {
            run(in.weight.at<const T>());
        }
    });
}

KERNEL(linear);

}  // namespace
}  // namespace ostinato
