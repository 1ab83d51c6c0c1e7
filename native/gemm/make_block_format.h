// Entry of a block format in the table of formats, made of its dot products, dequantizers and packing.
#pragma once

#include "gemm/ukernels/dot_bf16_block.h"
#include "gemm/ukernels/dot_f32_block.h"
#include "gemm/ukernels/dot_i16_block_avx2.h"
#include "gemm/ukernels/dot_i16_block_avx512.h"
#include "gemm/ukernels/dot_i16_planes.h"
#include "gemm/ukernels/pack_block_avx2.h"
#include "gemm/ukernels/pack_block_i16_avx512.h"

namespace ostinato {

#if defined(OSTINATO_I16)
template <typename F>
void dot_i16_blocks_up_to(int tokens, const Tokens<i16>& x, const BlockByte* const* rows, const BlockByte* const* next,
                           int prefetch, std::int64_t count, float* sums, int stride) {
    const RowPrefetch to_come{next, prefetch};
    with_constant<MAX_I16_TOKENS>(
        tokens, [&](auto some) { dot_i16_blocks<F, some.value>(x, rows, to_come, count, sums, stride); });
}
#endif

// Return the entry of format F.
template <typename F>
BlockFormat make_block_format(const BlockSize& size) {
    BlockFormat format{size.name, size.elements, size.bytes, {dot_blocks_up_to<F, float>, dequantize_blocks<F, float>}, {}};
#if defined(OSTINATO_HAS_AVX512_BF16)
    format.with_bf16 = {dot_blocks_up_to<F, bf16>, dequantize_blocks_to_bf16<F>};
    format.dot_bf16 = dot_bf16_blocks<F>;
#if defined(OSTINATO_DEQUANT_BF16)
    format.dequant_dot = dequant_dot<SuperblockRows<F, MR>>;
#endif
#else
    format.with_bf16.dequantize = dequantize_blocks<F, bf16>;
#endif
#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)
    format.pack = pack_blocks<F>;
#endif
#if defined(OSTINATO_I16)
    if constexpr (HAS_I16_PRODUCT<F>) {
        format.with_i16.dot = dot_i16_blocks_up_to<F>;
#if defined(OSTINATO_HAS_DOTPROD)
        format.i16_scale_span = SUBBLOCK;
#elif defined(OSTINATO_HAS_AVX512)
        format.i16_scale_span = SUBBLOCK;
        format.i16_order = UnpackI16<F>::ORDER;
#else
        format.i16_scale_span = std::clamp(F::SCALED, SUBBLOCK, I16_SCALE_SPAN);
        format.i16_order = UnpackI16Avx2<F>::IS_INTERLEAVED ? I16Order::INTERLEAVED_8 : I16Order::LINEAR;
#endif
#if defined(OSTINATO_I16_PANELS)
        format.pack_i16 = pack_blocks_i16<F>;
        format.i16_sum = I16_SUM<F>;
        format.has_minima = F::HAS_MINIMUM;
#endif
    }
#endif
    return format;
}

}  // namespace ostinato
