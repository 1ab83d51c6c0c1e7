// Blocked GEMM in 16-bit integers (quant/quantize_tokens_i16.h): as gemm/large_m_avx2.h, with panels of integers. One
// instruction multiplies two inputs of eight rows with AVX2, or of sixteen with AVX-512, where float32 takes one input,
// and packed weights need no conversion to floats.
//
// A panel holds pairs of inputs: the first and the third of each four, then the second and the fourth, so that a shift
// or a mask makes bytes 16 bits wide. Tokens have the same order. Products that share a scale of weights and a scale of
// a token are added in integers, then in float32, in ascending order.
#pragma once

#include <bitset>

#include "gemm/large_m_avx2.h"
#include "gemm/small_m.h"
#include "gemm/ukernels/pack_block_i16_avx512.h"

#if defined(OSTINATO_I16_PANELS)

namespace ostinato {

constexpr int SPAN = I16_TOKEN_PADDING, SPAN_SUBBLOCKS = SPAN / SUBBLOCK;  // inputs of a panel: a superblock

// A span of a token, with zeros behind its end.
struct I16TokenSpan {
    i16 numbers[SPAN];
    float scales[SPAN_SUBBLOCKS], sums[SPAN_SUBBLOCKS];
};

// Compute sums[t][output] += the products of TOKENS tokens, a span of each, with a panel of `size` inputs. SUM inputs
// are added in integers. SCALED: weights have a scale for each SUM; MINIMA: and a minimum for each subblock.
template <int TOKENS, int SUM, bool SCALED, bool MINIMA, typename W>
void multiply_panel_i16(const I16TokenSpan* x, const Int* panel, int size, const Float* scales, const Float* minima,
                       float* sums, LinePrefetch<W>& fetch) {
    LinePrefetch<W> fetching = fetch;
    for (int begin = 0; begin < size; begin += SUM) {
        Int part[TOKENS][PANEL_VECTORS] = {};
        const i16* numbers = x->numbers + begin;
        for (int i = 0; i < SUM; i += PREFETCH_STEP, numbers += PREFETCH_STEP, panel += PREFETCH_STEP / 2 * PANEL_VECTORS) {
            fetching.step();
            unrolled<PREFETCH_STEP / 2>([&](auto pair) __attribute__((always_inline)) {
                const Int* rows = panel + pair * PANEL_VECTORS;
#pragma GCC unroll 6
                for (int t = 0; t < TOKENS; ++t) {
                    std::int32_t two;
                    std::memcpy(&two, numbers + t * (sizeof(I16TokenSpan) / sizeof(i16)) + 2 * pair, sizeof(two));
                    const Int token = Int{} + two;
#pragma GCC unroll 4
                    for (int v = 0; v < PANEL_VECTORS; ++v) part[t][v] = add_pairs(part[t][v], rows[v], token);
                }
            });
        }
        asm volatile("" ::: "memory");  // the sums stay in memory between SUM inputs, since the registers are full
#pragma GCC unroll 6
        for (int t = 0; t < TOKENS; ++t) {
            const Float of_token = splat(x[t].scales[begin / SUBBLOCK]);
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; ++v) {
                float* to = sums + (t * PANEL_VECTORS + v) * LANES;
                const Float integers = __builtin_convertvector(part[t][v], Float);
                Float sum = load(to);
                if constexpr (MINIMA) {
                    sum = fma(minima[begin / SUBBLOCK * PANEL_VECTORS + v], splat(x[t].sums[begin / SUBBLOCK]), sum);
                }
                if constexpr (SCALED) {
                    sum = fma(integers, of_token * scales[begin / SUM * PANEL_VECTORS + v], sum);
                } else {
                    sum = fma(integers, of_token, sum);
                }
                store(to, sum);
            }
        }
    }
    fetch = fetching;
}

template <int SUM, bool SCALED, bool MINIMA, typename... Args>
inline void multiply_tokens_i16(int tokens, Args&... args) {
    with_constant<PANEL_TOKENS>(tokens, [&](auto some) { multiply_panel_i16<some.value, SUM, SCALED, MINIMA>(args...); });
}

// Compute pairs[number * PANEL_VECTORS] = inputs `begin` to `end` of LANES rows of int8 weights, with zeros up to a multiple of
// I16_I8_SUM.
inline void pack_i16(const std::int8_t* const* rows, std::int64_t begin, std::int64_t end, Int* pairs) {
#if defined(OSTINATO_HAS_AVX512)
    for (std::int64_t i = begin; i < end || (i - begin) % I16_I8_SUM != 0; i += 64, pairs += 32 * PANEL_VECTORS) {
        Float fours[LANES];
        read_fours(rows, i, end, fours);
        for (int u = 0; u < LANES; ++u) put_pairs(fours[u], PANEL_VECTORS, pairs + 2 * u * PANEL_VECTORS);
    }
#else
    constexpr int STEP = avx2::STEP;
    auto* to = reinterpret_cast<__m256i*>(pairs);
    const auto pack = [&](const std::int8_t* const* some, std::int64_t from) __attribute__((always_inline)) {
        __m256i fours[4];
        read_units([&](int r) { return some[r] + from; }, fours);
        unrolled<4>([&](auto u) __attribute__((always_inline)) {
            to[2 * u * PANEL_VECTORS] = even_bytes(fours[u]);
            to[(2 * u + 1) * PANEL_VECTORS] = odd_bytes(fours[u]);
        });
        to += STEP / 2 * PANEL_VECTORS;
    };
    std::int64_t i = begin;
    for (; i + STEP <= end; i += STEP) pack(rows, i);
    for (; i < end || (i - begin) % I16_I8_SUM != 0; i += STEP) {
        std::int8_t rest[LANES][STEP] = {};
        const std::int8_t* of_rest[LANES];
        for (int r = 0; r < LANES; ++r) {
            of_rest[r] = rest[r];
            if (i < end) std::memcpy(rest[r], rows[r] + i, end - i);
        }
        pack(of_rest, 0);
    }
#endif
}

// Panel of 16-bit integers, as F32Panel; tokens are [spans][tokens].
template <typename W>
class I16Panel {
  public:
    using Token = I16TokenSpan;
    static constexpr int LEAST_SUM = 16;  // the least `i16_sum` of a format, that of Q6_K
    static constexpr std::int64_t INTEGERS = SPAN / 2 * PANEL_VECTORS, SCALES = SPAN / LEAST_SUM * PANEL_VECTORS;
    static constexpr std::int64_t SIZE = INTEGERS + SCALES + SPAN_SUBBLOCKS * PANEL_VECTORS;

    I16Panel(const WeightView<W>& w, const Token* x, std::int64_t tokens, Float* memory)
        : w_(w), x_(x), tokens_(tokens), integers_(reinterpret_cast<Int*>(memory)), scales_(memory + INTEGERS),
          minima_(scales_ + SCALES) {}

    std::int64_t end_of(std::int64_t begin) const { return std::min<std::int64_t>(begin + SPAN, w_.k); }

    void pack(const PanelRowPointers<W>& rows, std::int64_t begin, std::int64_t end) {
        begin_ = begin;
        for (int v = 0; v < PANEL_VECTORS; ++v) {
            if constexpr (std::is_same_v<W, BlockByte>) {
                w_.format->pack_i16(rows.row + v * LANES, begin, end, PANEL_VECTORS, integers_ + v, scales_ + v, minima_ + v);
            } else {
                pack_i16(rows.row + v * LANES, begin, end, integers_ + v);
            }
        }
        size_ = static_cast<int>(end - begin);
        if constexpr (!std::is_same_v<W, BlockByte>) size_ = (size_ + I16_I8_SUM - 1) / I16_I8_SUM * I16_I8_SUM;
    }

    void multiply(std::int64_t first, int count, float* sums, LinePrefetch<W>& fetch) const {
        if (begin_ == 0) std::fill(sums, sums + count * PANEL_OUTPUTS, 0.0F);
        const I16TokenSpan* x = x_ + begin_ / SPAN * tokens_ + first;
        const Int* integers = integers_;
        const Float *scales = scales_, *minima = minima_;
        const int size = size_;
        if constexpr (!std::is_same_v<W, BlockByte>) {
            multiply_tokens_i16<I16_I8_SUM, false, false>(count, x, integers, size, scales, minima, sums, fetch);
        } else if (w_.format->has_minima) {
            multiply_tokens_i16<SUBBLOCK, true, true>(count, x, integers, size, scales, minima, sums, fetch);
        } else if (w_.format->i16_sum == LEAST_SUM) {
            multiply_tokens_i16<LEAST_SUM, true, false>(count, x, integers, size, scales, minima, sums, fetch);
        } else if (LANES == 16 || w_.format->i16_sum == SUBBLOCK) {
            multiply_tokens_i16<SUBBLOCK, true, false>(count, x, integers, size, scales, minima, sums, fetch);
        } else if constexpr (LANES == 8) {
            multiply_tokens_i16<I16_I8_SUM, true, false>(count, x, integers, size, scales, minima, sums, fetch);
        }
    }

  private:
    const WeightView<W>& w_;
    const I16TokenSpan* x_;
    std::int64_t tokens_;
    Int* integers_;
    Float *scales_, *minima_;
    std::int64_t begin_ = 0;
    int size_ = 0;
};

// Quantize a token of `in` elements to spans, `stride` apart; SCALED elements share a scale. -> false if an element is
// not finite
template <int SCALED, typename T>
bool quantize_spans_i16(const T* x, std::int64_t in, std::int64_t stride, I16TokenSpan* to) {
    for (std::int64_t begin = 0; begin < in; begin += SPAN, to += stride) {
        for (int i = 0; i < SPAN; i += SCALED) {
            float *scales = to->scales + i / SUBBLOCK, *sums = to->sums + i / SUBBLOCK;
            if (!quantize_span_i16<SCALED, I16Order::PAIRS_02_13>(x + begin + i, in - begin - i, to->numbers + i, scales, sums)) {
                return false;
            }
        }
    }
    return true;
}

// Compute all outputs of some tokens, for weights that have a product in integers. A token's bits do not depend on how
// many tokens are computed so. Tokens with an element that is not finite are computed in float32.
template <typename T, typename Y, typename W>
void gemm_large_m_i16(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride, const WeightView<W>& w,
                          const Epilogue& o, Y* y) {
    const std::int64_t spans = (w.k + SPAN - 1) / SPAN;
    const EvenBlocks groups(tokens, MAX_GROUP_TOKENS);
    for (int group = 0; group < groups.count; ++group) {
        const std::int64_t first = groups.begin(group), count = groups.size(group);
        I16TokenSpan* made = threads.group_scratch<I16TokenSpan>(spans * count);
        const Range mine = threads.split_shared(count);
        for (std::int64_t t = mine.begin; t < mine.end; ++t) {
            const T* from = x + (first + t) * x_stride;
            const bool finite = i16_scale_span(w) == SUBBLOCK ? quantize_spans_i16<SUBBLOCK>(from, w.k, count, made + t)
                                                      : quantize_spans_i16<I16_I8_SUM>(from, w.k, count, made + t);
            if (!finite) made[t].scales[0] = std::numeric_limits<float>::quiet_NaN();
        }
        threads.barrier();
        std::bitset<MAX_GROUP_TOKENS> finite;
        for (std::int64_t t = 0; t < count; ++t) finite[t] = !std::isnan(made[t].scales[0]);
        const auto each_run = [&](bool of, auto&& run) {
            for (std::int64_t begin = 0, end; begin < count; begin = end) {
                for (end = begin; end < count && finite[end] == finite[begin];) ++end;
                if (finite[begin] == of) run(begin, end - begin);
            }
        };
        each_run(true, [&](std::int64_t begin, std::int64_t some) {
            multiply_panels<I16Panel<W>, T>(threads, first + begin, some, made + begin, count, w, o, y);
        });
        // These overwrite the quantised tokens.
        each_run(false, [&](std::int64_t begin, std::int64_t some) {
            const std::int64_t t = first + begin;
#if defined(OSTINATO_HAS_AVX512)
            gemm_small_m(threads, some, x + t * x_stride, x_stride, w, from_token<Y>(o, t), y + t * o.y_stride);
#else
            avx2::gemm_large_m(threads, some, x + t * x_stride, x_stride, w, from_token<Y>(o, t), y + t * o.y_stride);
#endif
        });
    }
}

}  // namespace ostinato

#endif
