// Products of int8 rows that have one scale with tokens that are quantised to int8 (W8A8, ops/reference/matmul.py). A
// token has one scale of its own.
//
// Sums of products are 32-bit integers, and exact for up to INT8_MAX_K inputs. So their order does not matter: all
// drivers give the same bits for a token, whatever m is. All write outputs by one function that is compiled once.
#pragma once

#include "core/amx.h"
#include "gemm/large_m.h"
#include "quant/int8.h"

#if defined(OSTINATO_HAS_AVX512_VNNI) || defined(OSTINATO_TILES)

namespace ostinato {

constexpr int INT8_VECTOR = 64;  // integers

// Tokens in memory that all threads share, zero from their last input to whole vectors.
struct Int8Tokens {
    std::int64_t count, stride;
    float* scales;  // NaN if an input is not finite
    std::int32_t* sums;  // of a token's integers
    std::int8_t* integers;

    // A stride is an odd number of cache lines: tokens some KiB apart would evict each other from an L1 cache.
    Int8Tokens(std::int64_t count, std::int64_t in)
        : count(count), stride(((in + INT8_VECTOR - 1) / INT8_VECTOR | 1) * INT8_VECTOR) {}

    std::int64_t padded_count() const { return (count + LANES - 1) / LANES * LANES; }

    std::int64_t bytes() const { return count * stride + 2 * padded_count() * sizeof(float); }

    // Place the tokens in memory of `bytes` bytes.
    void place(std::byte* memory) {
        scales = reinterpret_cast<float*>(memory);
        sums = reinterpret_cast<std::int32_t*>(scales + padded_count());
        integers = reinterpret_cast<std::int8_t*>(sums + padded_count());
    }

    const std::int8_t* at(std::int64_t token) const { return integers + token * stride; }

    template <typename T>
    void quantize(std::int64_t token, const T* x, std::int64_t in) const {
        const float largest = largest_magnitude(x, in);
        const float factor = largest > std::ldexp(1.0f, INT8_LEAST_EXPONENT) ? MAX_INT8 / largest : 0.0f;
        scales[token] = largest <= std::numeric_limits<float>::max() ? (factor > 0 ? largest / MAX_INT8 : 0.0f)
                                                                     : std::numeric_limits<float>::quiet_NaN();
        std::int8_t* to = integers + token * stride;
        __m512i sum = _mm512_setzero_si512();
        for (std::int64_t i = 0; i < stride; i += LANES) {
            const Float value = i < in ? load_partial(x + i, in - i) : Float{};
            const __m512i whole = _mm512_cvtps_epi32((__m512)(value * factor));  // ties to even
            sum = _mm512_add_epi32(sum, whole);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(whole));
        }
        sums[token] = _mm512_reduce_add_epi32(sum);
    }
};

// Quantise a group of tokens by all threads. -> the tokens, and `more` bytes of shared memory behind them
template <typename T>
std::pair<Int8Tokens, std::byte*> quantize_tokens_int8(const ThreadGroup& threads, std::int64_t count, const T* x,
                                                       std::int64_t x_stride, std::int64_t in, std::int64_t more = 0) {
    Int8Tokens tokens(count, in);
    std::byte* memory = threads.group_scratch<std::byte>(tokens.bytes() + more);
    tokens.place(memory);
    const Range mine = threads.split_shared(count);
    for (std::int64_t t = mine.begin; t < mine.end; ++t) tokens.quantize(t, x + t * x_stride, in);
    threads.barrier();
    return {tokens, memory + tokens.bytes()};
}

// Write `count` outputs of a token from `row` on, from the sums of `size` rows, the latter half of which may be gates.
// `offset` was added to each weight.
template <typename T, typename Y>
[[gnu::noinline]] void put_int8_outputs(const std::int32_t* sums, int size, const Int8Tokens& tokens, std::int64_t token,
                                        int offset, const Epilogue& o, std::int64_t row, int count, Y* y) {
    float values[PANEL_OUTPUTS];
    for (int i = 0; i < size; i += LANES) {
        Int integers;
        std::memcpy(&integers, sums + i, sizeof(integers));
        integers = bits_as<Int>(bits_as<UInt>(integers) - static_cast<std::uint32_t>(offset) * static_cast<std::uint32_t>(tokens.sums[token]));
        store(values + i, __builtin_convertvector(integers, Float) * tokens.scales[token]);
    }
    put_outputs<T>(values, values + size / 2, o, token, row, count, y);
}

#if defined(OSTINATO_HAS_AVX512_VNNI)
constexpr int VNNI_OFFSET = 128;  // makes weights unsigned, as VPDPBUSD wants one operand

// Compute panel[four of inputs][vector] = inputs `begin` to `end` of PANEL_OUTPUTS rows, plus the offset.
inline void pack_panel_int8(const std::int8_t* const* rows, std::int64_t begin, std::int64_t end, __m512i* panel) {
    for (std::int64_t i = begin; i < end; i += INT8_VECTOR, panel += LANES * PANEL_VECTORS) {
        for (int v = 0; v < PANEL_VECTORS; ++v) {
            Float fours[LANES];
            read_fours(rows + v * LANES, i, end, fours);
            for (int u = 0; u < LANES; ++u) panel[u * PANEL_VECTORS + v] = _mm512_xor_si512((__m512i)fours[u], _mm512_set1_epi8(-VNNI_OFFSET));
        }
    }
}

// Compute sums[t][output] += the products of COUNT tokens with the inputs of a panel; the first span assigns.
template <int COUNT>
inline void multiply_panel_int8(const std::int8_t* x, std::int64_t stride, const __m512i* panel, std::int64_t inputs,
                                bool first, std::int32_t* sums) {
    __m512i total[COUNT][PANEL_VECTORS];
#pragma GCC unroll 6
    for (int t = 0; t < COUNT; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; ++v) {
            total[t][v] = first ? _mm512_setzero_si512() : _mm512_loadu_si512(sums + t * PANEL_OUTPUTS + v * LANES);
        }
    }
    for (std::int64_t i = 0; i < inputs; i += 4, panel += PANEL_VECTORS) {
#pragma GCC unroll 6
        for (int t = 0; t < COUNT; ++t) {
            std::int32_t four;
            std::memcpy(&four, x + t * stride + i, sizeof(four));
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; ++v) {
                total[t][v] = _mm512_dpbusd_epi32(total[t][v], panel[v], _mm512_set1_epi32(four));
            }
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < COUNT; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; ++v) _mm512_storeu_si512(sums + t * PANEL_OUTPUTS + v * LANES, total[t][v]);
    }
}

// Compute all outputs with vectors, in groups of tokens.
template <typename T, typename Y>
void gemm_int8_vnni(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride,
                    const WeightView<std::int8_t>& w, const Epilogue& all, Y* y_of_all) {
    constexpr std::int64_t SPAN = PANEL_BYTES / PANEL_OUTPUTS;
    const EvenBlocks groups(tokens, MAX_GROUP_TOKENS);
    for (int group = 0; group < groups.count; ++group) {
        const std::int64_t group_begin = groups.begin(group);
        const Int8Tokens made = quantize_tokens_int8(threads, groups.size(group), x + group_begin * x_stride, x_stride, w.k).first;
        const Epilogue o = from_token<Y>(all, group_begin);
        Y* y = y_of_all + group_begin * o.y_stride;
        const EvenBlocks blocks(made.count, PANEL_TOKENS);
        __m512i* panel = reinterpret_cast<__m512i*>(threads.thread_scratch<Float>(PANEL_BYTES / sizeof(Float) + made.count * PANEL_VECTORS));
        auto* sums = reinterpret_cast<std::int32_t*>(panel + PANEL_BYTES / sizeof(Float));
        const int width = panel_width(o);
        for (const std::int64_t number : threads.claims((o.size + width - 1) / width)) {
            const PanelRowPointers<std::int8_t> rows(w, o, number), next_rows(w, o, number + 1);
            for (std::int64_t begin = 0; begin < w.k; begin += SPAN) {
                const std::int64_t end = std::min(w.k, begin + SPAN);
                const bool last = end == w.k;
                const std::int64_t next = last ? 0 : end, next_end = std::min(w.k, next + SPAN);
                pack_panel_int8(rows.row, begin, end, panel);
                for (int block = 0; block < blocks.count; ++block) {
                    prefetch_rows(w, last ? next_rows : rows, next, next_end, block, blocks.count);
                    const std::int64_t t = blocks.begin(block);
                    with_constant<PANEL_TOKENS>(blocks.size(block), [&](auto some) {
                        multiply_panel_int8<some.value>(made.at(t) + begin, made.stride, panel, end - begin, begin == 0, sums + t * PANEL_OUTPUTS);
                    });
                    for (std::int64_t i = t; last && i < blocks.begin(block + 1); ++i) {
                        put_int8_outputs<T>(sums + i * PANEL_OUTPUTS, PANEL_OUTPUTS, made, i, VNNI_OFFSET, o, rows.first,
                                            static_cast<int>(rows.count), y);
                    }
                }
            }
        }
    }
}
#endif

}  // namespace ostinato

#endif
