// moe: the experts of a mixture-of-experts layer. The rows of ops/ukernels.py say which driver computes it.

#include "bind/kernel_binding.h"
#include "gemm/select.h"

namespace ostinato {
namespace {

struct Moe : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, size]
    FIELD(Array<FLOAT32>, choices);  // [tokens, 2, top_k]
    FIELD(Array<WEIGHTS>, up);  // [experts, inner, or 2 * inner if gated, size]
    FIELD(Array<WEIGHTS>, down);  // [experts, size, inner]
    FIELD(Activation, activation);
    FIELD(OptionalTensor<Strided<VALUES>>, residual);  // [tokens, size]
    // Scales of int8 weights: [experts, rows], or one per group of a row; the same for down_scale.
    FIELD(OptionalTensor<Array<FLOAT32>>, up_scale);
    FIELD(OptionalTensor<Array<FLOAT32>>, down_scale);
    FIELD(std::optional<std::int64_t>, group_size);
    FIELD(BlockParts, up_blocks);  // one format for all experts, if weights are bytes, as down_blocks
    FIELD(BlockParts, down_blocks);
    FIELD(OptionalTensor<Array<FLOAT32>>, up_bias);  // [experts, rows], as down_bias
    FIELD(OptionalTensor<Array<FLOAT32>>, down_bias);
    FIELD(Clamp, clamp);
    FIELD(bool, fixed_order);
    FIELD(Strided<VALUES>, out);  // [tokens, size]
    Rhs up_rows = rows_of(up, up_scale, up_blocks, down.shape[1], up_bias);
    Rhs down_rows = rows_of(down, down_scale, down_blocks, inner(), down_bias);
    Candidates candidates{{Op::MOE, x.dtype, up_rows.kind() | down_rows.kind(), std::min(up_rows.k, down_rows.k), fixed_order}};
    // Of one expert's products; the last of the experts' own rows takes them.
    Candidates of_up{{Op::LINEAR, x.dtype, up_rows.kind(), up_rows.k, fixed_order}};
    Candidates of_down{{Op::LINEAR, x.dtype, down_rows.kind(), down_rows.k, fixed_order}};

    Rhs rows_of(const Tensor& weight, const Tensor& scale, const BlockParts& blocks, std::int64_t k, const Tensor& bias) const {
        return {weight.address, weight.dtype, weight.shape[1], k, scale.at<const float>(), group_size.value_or(0),
                blocks.empty() ? nullptr : blocks[0].format, bias.at<const float>()};
    }

    std::int64_t inner() const {
        if (down_blocks.empty()) return down.shape[2];
        const BlockFormat& format = *down_blocks[0].format;
        return down.shape[2] / format.bytes * format.elements;
    }

    void check(const Reader& reader) const {
        for (const auto& [weight, scale] : {std::pair<Tensor, Tensor>{up, up_scale}, {down, down_scale}}) {
            const bool has_scale = scale.address != nullptr;
            reader.expect((weight.dtype == INT8) == has_scale, "8-bit weights have scales, and no others");
        }
        for (const auto& [weight, blocks] : {std::pair<Tensor, BlockParts>{up, up_blocks}, {down, down_blocks}}) {
            reader.expect((weight.dtype == UINT8) == (blocks.size() == 1), "weights in blocks have a format, and no others");
        }
        const std::int64_t rows = (has_gates(activation) ? 2 : 1) * inner();
        reader.expect(up.shape[1] == rows, "an expert has as many rows as its activation takes");
    }
};

// Compute a layer. In `fixed_order` a token's bits do not depend on how many tokens are computed with it.
void moe(const ThreadGroup& threads, std::int64_t tokens, const Moe& in) {
    if (tokens == 0) return;
    const std::int64_t top_k = in.choices.shape[2];
    const MoeShape layer{in.down.shape[0], in.down.shape[1], in.inner(), in.activation, in.clamp};
    const auto* choices = in.choices.at<const float>();
    const int row = in.candidates.at(
        [&](Unit unit) { return unit == Unit::MEAN_PER_EXPERT ? tokens * top_k / layer.experts : tokens; });
    MOE_FUNCTIONS[row](threads, {tokens, top_k, in.x.dtype, in.x.address, in.x.strides[0], choices, layer, in.up_rows,
                                 in.down_rows, in.of_up, in.of_down, in.residual.address, in.residual.strides[0], in.out.address,
                                 in.out.strides[0]});
}

KERNEL(moe);

}  // namespace
}  // namespace ostinato
