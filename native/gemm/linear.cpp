// linear: y = x W^T + b, with scale, activation and residual in the epilogue.
//
// The first path that accepts a product computes it, in this order. In a fixed order only the last one does.
//
// 1. gemm/large_m_amx.h, with matrix units: MIN_AMX_TOKENS or more bfloat16 tokens.
// 2. gemm/small_m.h, `gemv_i16`: up to `max_i16_tokens` tokens in bfloat16 or float16, quantised to 16-bit integers,
//    with rows in blocks (not float8), or with AVX2 alone also with int8 rows that have one scale.
// 3. gemm/large_m_i16_avx2.h, with AVX2 alone: more tokens of the same kind with the same weights.
// 4. gemm/mid_m_dequant_bf16.h, with AVX512-BF16 but no matrix units: MIN_DEQUANT_TOKENS to MIN_PANEL_TOKENS - 1
//    bfloat16 tokens with int8 rows that have one scale and whole subblocks, or with rows in blocks.
// 5. gemm/large_m_avx2.h with AVX2 alone, from `avx2::min_m` tokens on; elsewhere gemm/large_m.h, from LARGE_M on.
// 6. gemm/small_m.h, `gemm_small_m`: all other products.
//
// Rows in blocks of different formats are one product each, into their parts of the outputs. If the weights' inputs
// have another order, tokens are permuted first, MAX_GROUP_TOKENS at a time.

#include "bind/kernel_binding.h"
#include "gemm/large_m.h"
#include "gemm/large_m_amx.h"
#include "gemm/large_m_avx2.h"
#include "gemm/large_m_i16_avx2.h"
#include "gemm/mid_m_dequant_bf16.h"
#include "gemm/small_m.h"

namespace ostinato {
namespace {

struct Linear : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, in]
    FIELD(Array<WEIGHTS>, weight);  // [out, in], or bytes
    FIELD(OptionalTensor<Array<VALUES>>, bias);  // [out]
    FIELD(OptionalTensor<Strided<FLOATS>>, residual);  // as `out`
    FIELD(Activation, activation);
    FIELD(OptionalTensor<Array<FLOAT32>>, scale);  // [out]
    FIELD(IgnoredArgument, out_dtype);
    FIELD(OptionalTensor<Array<FLOAT32>>, weight_scale);  // of int8 weights: [out], or [out, in / group_size]
    FIELD(std::optional<std::int64_t>, group_size);
    FIELD(BlockParts, blocks);  // if weights are bytes
    // [in], the input that each element of a row belongs to; without it, in order.
    FIELD(OptionalTensor<Array<INT32>>, order);
    FIELD(bool, fixed_order);
    FIELD(Strided<FLOATS>, out);  // [tokens, out], or [tokens, out / 2] if gated

    void check(const Reader& reader) const {
        reader.expect((weight.dtype == INT8) == bool(weight_scale), "8-bit weights have scales, and no others");
        reader.expect((weight.dtype == UINT8) == !blocks.empty(), "weights in blocks have formats, and no others");
        reader.expect(blocks.size() < 2 || activation != SWIGLU, "gates and what they gate have one format");
        for (const BlockPart& part : blocks) {
            reader.expect(x.shape[1] % part.format->elements == 0, "rows are whole blocks");
        }
        reader.expect(x.shape[0] < 2 || x.strides[0] != 0, "tokens lie apart");
        reader.expect(!order || order.shape[0] == x.shape[1], "each input has its place in the order");
        reader.expect(out.dtype == FLOAT32 || out.dtype == x.dtype, "the result is in float32 or in the dtype of x");
        reader.expect(!residual || residual.dtype == out.dtype, "the residual has another dtype than the result");
    }
};

// Return the address `count` elements further, or null if there is no tensor.
inline const void* behind(const Tensor& tensor, std::int64_t count) {
    return tensor.address ? tensor.address + count * tensor.element_bytes() : nullptr;
}

template <typename T>
struct Ordered {
    T value;
};

// Permute the inputs of tokens by `order`. Each thread does so for itself, which is faster than waiting for others.
template <typename T>
const T* in_order(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t stride, const Tensor& order) {
    const std::int64_t size = order.shape[0];
    const auto* from = order.at<const std::int32_t>();
    T* ordered = &threads.thread_scratch<Ordered<T>>(tokens * size)->value;
    for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t i = 0; i < size; ++i) ordered[t * size + i] = x[t * stride + from[i]];
    }
    return ordered;
}

// Compute the outputs of the tokens `begin` to `begin + tokens`.
void multiply_some(const ThreadGroup& threads, std::int64_t begin, std::int64_t tokens, const Linear& in) {
    const std::int64_t in_size = in.x.shape[1];
    const std::int64_t group = in.group_size.value_or(0);
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        const T* x = in.x.row<const T>(begin);
        std::int64_t x_stride = in.x.strides[0];
        if (in.order) {
            x = in_order(threads, tokens, x, x_stride, in.order);
            x_stride = in_size;
        }
        // Computes the outputs of `out_size` rows of weights, from output `first` on.
        const auto run = [&](auto* weights, std::int64_t first, std::int64_t out_size, const BlockFormat* format) {
            using W = std::remove_const_t<std::remove_pointer_t<decltype(weights)>>;
            Epilogue o{behind(in.bias, first), static_cast<const float*>(behind(in.scale, first)), nullptr,
                     behind(in.residual, begin * in.residual.strides[0] + first), in.residual.strides[0],
                     in.out.strides[0],
                     has_gates(in.activation) ? out_size / 2 : out_size, in.activation};
            const float* scales = in.weight_scale.at<const float>();
            if (scales && group == 0) {
                o.row_scale = scales;
                scales = nullptr;
            }
            const WeightView<W> all{weights, out_size, in_size, scales, group, format, in.fixed_order};
            const auto compute = [&](auto* start) {
                auto* to = start + begin * in.out.strides[0] + first;
#if defined(OSTINATO_TILES)
                if constexpr (std::is_same_v<T, bf16>) {
                    if (!in.fixed_order && tokens >= MIN_AMX_TOKENS) {
                        tiles::gemm_large_m(threads, tokens, x, x_stride, all, o, to);
                        return;
                    }
                }
#endif
#if defined(OSTINATO_I16)
                if constexpr (LHS_CAN_BE_I16<T> && HAS_I16<W>) {
                    if (tokens <= max_i16_tokens<T>(all)) {
                        gemv_i16(threads, tokens, x, x_stride, all, o, to);
                        return;
                    }
#if defined(OSTINATO_GEMM_AVX2)
                    if (i16_scale_span(all) != 0) {
                        avx2::gemm_large_m_i16(threads, tokens, x, x_stride, all, o, to);
                        return;
                    }
#endif
                }
#endif
#if defined(OSTINATO_DEQUANT_BF16)
                if constexpr (std::is_same_v<T, bf16> && !std::is_same_v<W, bf16>) {
                    if (accepts_dequant_bf16(tokens, all)) {
                        gemm_mid_m_dequant_bf16(threads, tokens, x, x_stride, all, o, to);
                        return;
                    }
                }
#endif
#if defined(OSTINATO_GEMM_AVX2)
                if (!in.fixed_order && tokens >= avx2::min_m<W>(in_size)) {
                    avx2::gemm_large_m(threads, tokens, x, x_stride, all, o, to);
                    return;
                }
#else
                if (!in.fixed_order && tokens >= LARGE_M<LhsType<T>, W>) {
                    gemm_large_m(threads, tokens, x, x_stride, all, o, to);
                    return;
                }
#endif
                gemm_small_m(threads, tokens, x, x_stride, all, o, to);
            };
            if (in.out.dtype == FLOAT32) {
                compute(in.out.at<float>());
            } else if constexpr (!std::is_same_v<T, float>) {
                compute(in.out.at<T>());
            }
        };
        if (in.weight.dtype == INT8) {
            run(in.weight.at<const std::int8_t>(), 0, in.weight.shape[0], nullptr);
        } else if (in.blocks.empty()) {
            run(in.weight.at<const T>(), 0, in.weight.shape[0], nullptr);
        }
        const auto* bytes = in.weight.at<const BlockByte>();
        std::int64_t first = 0;
        for (const BlockPart& part : in.blocks) {
            run(bytes, first, part.rows, part.format);
            bytes += part.rows * part.format->row_bytes(in_size);
            first += part.rows;
        }
    });
}

// Compute all outputs. In `fixed_order` a token's bits do not depend on how many tokens are computed with it.
void linear(const ThreadGroup& threads, std::int64_t tokens, const Linear& in) {
    const std::int64_t at_once = in.order ? MAX_GROUP_TOKENS : tokens;
    for (std::int64_t t = 0; t < tokens; t += at_once) multiply_some(threads, t, std::min(at_once, tokens - t), in);
}

KERNEL(linear);

}  // namespace
}  // namespace ostinato
