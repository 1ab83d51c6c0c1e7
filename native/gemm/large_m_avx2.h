// Blocked GEMM for AVX2, with 8 floats per vector and 16 registers: vectors hold outputs, as in gemm/large_m.h.
//
// A span of some rows is converted to floats and transposed into a panel, once, in the L1 cache, which two threads may
// share. All tokens are multiplied with it. Weights are transposed as pairs of bfloat16 or fours of int8 in 32 bits, so
// that a transpose moves 2 or 4 inputs at once.
#pragma once

#include "gemm/large_m.h"

#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)
#define OSTINATO_GEMM_AVX2

namespace ostinato::avx2 {

constexpr int STEP = 16;  // inputs transposed together
constexpr int VECTORS = PANEL_VECTORS, OUTPUTS = PANEL_OUTPUTS;
static_assert(LANES == AVX2_LANES);

// Compute to[i * VECTORS] = input `begin + i` of 8 rows, for STEP inputs.
inline void pack_step(const float* const* rows, std::int64_t begin, Float* to) {
#pragma GCC unroll 4
    for (int i = 0; i < STEP; i += 4) {
        __m256i units[4];
        read_units([&](int r) { return rows[r] + begin + i; }, units);
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) to[(i + u) * VECTORS] = (Float)units[u];
    }
}

inline void pack_step(const bf16* const* rows, std::int64_t begin, Float* to) {
#pragma GCC unroll 2
    for (int i = 0; i < STEP; i += 8) {
        __m256i pairs[4];
        read_units([&](int r) { return rows[r] + begin + i; }, pairs);
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) {
            to[(i + 2 * u) * VECTORS] = first_of_pairs(pairs[u]);
            to[(i + 2 * u + 1) * VECTORS] = second_of_pairs(pairs[u]);
        }
    }
}

inline void pack_step(const std::int8_t* const* rows, std::int64_t begin, Float* to) {
    __m256i fours[4];
    read_units([&](int r) { return rows[r] + begin; }, fours);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
        Float* of_unit = to + 4 * u * VECTORS;
        const auto put = [&](int i, __m256i at_top) {
            of_unit[i * VECTORS] = (Float)_mm256_cvtepi32_ps(_mm256_srai_epi32(at_top, 24));
        };
        put(0, _mm256_slli_epi32(fours[u], 24));
        put(1, _mm256_slli_epi32(fours[u], 16));
        put(2, _mm256_slli_epi32(fours[u], 8));
        put(3, fours[u]);
    }
}

// Pack other types, which are converted row by row.
template <typename W>
inline void pack_step(const W* const* rows, std::int64_t begin, Float* to) {
    float wide[LANES][STEP];
    const float* wide_rows[LANES];
    for (int r = 0; r < LANES; ++r) {
        wide_rows[r] = wide[r];
        for (int i = 0; i < STEP; i += LANES) store(wide[r] + i, load(rows[r] + begin + i));
    }
    pack_step(wide_rows, 0, to);
}

// Compute panel[i][vector] = inputs `begin` to `end` of OUTPUTS rows. Up to STEP - 1 more inputs are written.
template <typename W>
inline void pack_rows(const W* const* rows, std::int64_t begin, std::int64_t end, Float* panel) {
    for (int v = 0; v < VECTORS; ++v) {
        const W* const* of = rows + v * LANES;
        std::int64_t i = begin;
        for (; i + STEP <= end; i += STEP) pack_step(of, i, panel + (i - begin) * VECTORS + v);
        if (i == end) continue;
        W rest[LANES][STEP] = {};
        const W* of_rest[LANES];
        for (int r = 0; r < LANES; ++r) {
            of_rest[r] = rest[r];
            std::memcpy(rest[r], of[r] + i, (end - i) * sizeof(W));
        }
        pack_step(of_rest, 0, panel + (i - begin) * VECTORS + v);
    }
}

// Pack rows in blocks.
inline void pack_rows(const BlockFormat& format, const BlockByte* const* rows, std::int64_t begin, std::int64_t end,
                       Float* panel) {
    for (int v = 0; v < VECTORS; ++v) format.pack(rows + v * LANES, begin, end, VECTORS, panel + v);
}

// Compute sums[t][output] += scale[output] * sum_i x[t][i] * panel[i][output] for TOKENS tokens, AVX2_PANEL_K apart.
// Scales are optional; the first span assigns instead of adding.
template <int TOKENS, typename W>
inline void multiply_floats(const float* x, const Float* panel, std::int64_t size, const float* scales, bool first,
                           float* sums, LinePrefetch<W>& fetch) {
    Float total[TOKENS][VECTORS] = {};
    const auto multiply = [&](std::int64_t i) __attribute__((always_inline)) {
        Float rows[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) rows[v] = panel[i * VECTORS + v];
#pragma GCC unroll 6
        for (int t = 0; t < TOKENS; ++t) {
            const Float token = splat(x[t * AVX2_PANEL_K + i]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) total[t][v] = fma(token, rows[v], total[t][v]);
        }
    };
    LinePrefetch<W> fetching = fetch;
    std::int64_t i = 0;
    for (; i + PREFETCH_STEP <= size;) {
        fetching.step();
        for (const std::int64_t end = i + PREFETCH_STEP; i < end; i += 2) {
            multiply(i);
            multiply(i + 1);
        }
    }
    fetch = fetching;
    for (; i < size; ++i) multiply(i);
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            float* to = sums + (t * VECTORS + v) * LANES;
            // Fused explicitly: the compiler may fuse differently from shape to shape.
            const Float before = first ? Float{} : load(to);
            store(to, scales ? fma(total[t][v], load(scales + v * LANES), before) : before + total[t][v]);
        }
    }
}

// Copy tokens as [spans][tokens][AVX2_PANEL_K] floats, for all threads.
template <typename T>
const float* copy_tokens(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride, std::int64_t in) {
    const std::int64_t spans = (in + AVX2_PANEL_K - 1) / AVX2_PANEL_K;
    float* copies = threads.group_scratch<float>(spans * tokens * AVX2_PANEL_K);
    const Range mine = threads.split_shared(spans * tokens);
    for (std::int64_t number = mine.begin; number < mine.end; ++number) {
        const std::int64_t begin = number / tokens * AVX2_PANEL_K;
        const std::int64_t size = std::min<std::int64_t>(AVX2_PANEL_K, in - begin);
        const T* from = x + number % tokens * x_stride + begin;
        float* to = copies + number * AVX2_PANEL_K;
        for (std::int64_t i = 0; i < size; i += LANES) store(to + i, load_partial(from + i, size - i));
    }
    threads.barrier();
    return copies;
}

// Panel of floats, and the tokens [spans][tokens][AVX2_PANEL_K] that are multiplied with it.
template <typename W>
class F32Panel {
  public:
    using Token = float;
    static constexpr std::int64_t SIZE = AVX2_PANEL_K * VECTORS;

    F32Panel(const WeightView<W>& w, const Token* x, std::int64_t tokens, Float* memory)
        : w_(w), x_(x), tokens_(tokens), panel_(memory), groups_(w.scales ? (w.k + w.group - 1) / w.group : 0) {}

    // Return the end of the inputs that are multiplied together from `begin` on.
    std::int64_t end_of(std::int64_t begin) const {
        const std::int64_t end = std::min(begin / AVX2_PANEL_K * AVX2_PANEL_K + AVX2_PANEL_K, w_.k);
        return w_.scales ? std::min(end, (begin / w_.group + 1) * w_.group) : end;
    }

    void pack(const PanelRowPointers<W>& rows, std::int64_t begin, std::int64_t end) {
        begin_ = begin;
        end_ = end;
        if constexpr (std::is_same_v<W, BlockByte>) {
            pack_rows(*w_.format, rows.row, begin, end, panel_);
        } else {
            pack_rows(rows.row, begin, end, panel_);
        }
        if (!w_.scales) return;
        for (int r = 0; r < OUTPUTS; ++r) scales_[r] = w_.scales[rows.number[r] * groups_ + begin / w_.group];
    }

    // Add the products of `count` tokens from `first` on with the panel. The first inputs assign instead of adding.
    void multiply(std::int64_t first, int count, float* sums, LinePrefetch<W>& fetch) const {
        const float* x = x_ + begin_ / AVX2_PANEL_K * AVX2_PANEL_K * tokens_ + begin_ % AVX2_PANEL_K + first * AVX2_PANEL_K;
        const float* scales = w_.scales ? scales_ : nullptr;
        with_constant<PANEL_TOKENS>(count, [&](auto some) {
            multiply_floats<some.value>(x, panel_, end_ - begin_, scales, begin_ == 0, sums, fetch);
        });
    }

  private:
    const WeightView<W>& w_;
    const float* x_;
    std::int64_t tokens_;
    Float* panel_;
    std::int64_t groups_, begin_ = 0, end_ = 0;
    float scales_[OUTPUTS];
};

// Compute all outputs of some tokens. A token's bits do not depend on how many tokens are computed so.
template <typename T, typename Y, typename W>
void gemm_large_m(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t x_stride, const WeightView<W>& w,
              const Epilogue& o, Y* y) {
    const EvenBlocks groups(tokens, MAX_GROUP_TOKENS);
    for (int group = 0; group < groups.count; ++group) {
        const std::int64_t first = groups.begin(group), count = groups.size(group);
        const float* copies = copy_tokens(threads, count, x + first * x_stride, x_stride, w.k);
        multiply_panels<F32Panel<W>, T>(threads, first, count, copies, count, w, o, y);
    }
}

}  // namespace ostinato::avx2

#endif
