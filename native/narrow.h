// Matrix products of three tokens or more where vectors hold 8 floats and there are 16 of them (AVX2): vectors hold outputs,
// as in many.h, in panels of a shape that suits the number of tokens.
//
// A span of some rows is made wide and transposed into a panel, once, in the L1, which two threads may share. All tokens pass
// by. Weights are transposed while they are pairs of bfloat16 or four integers in 32 bits, so that a transpose moves 2 or 4
// inputs at once. With up to 12 sums, the panel's vectors and a token, a product uses 13 to 16 registers.
#pragma once

#include "product.h"
#include "transpose.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define OSTINATO_NARROW

namespace ostinato::narrow {

// From how many tokens on products are computed so, as measured: with two, reading the weights takes the time; with rows in
// blocks, making them wide does.
template <typename W>
constexpr std::int64_t LEAST_TOKENS = std::is_same_v<W, InBlocks> ? 20 : 3;
constexpr int STEP = 16;  // inputs that are transposed together

// A panel's vectors for a number of tokens, and the most tokens of a block: what fills the registers best.
template <int VECTORS_, int TOKENS_>
struct Shape {
    static constexpr int VECTORS = VECTORS_, TOKENS = TOKENS_, OUTPUTS = VECTORS * LANES;
    static_assert(VECTORS <= NARROW_VECTORS && LANES == NARROW_LANES);
};

template <typename Body>
inline void with_shape(std::int64_t tokens, Body&& body) {
    if (tokens <= 3) {
        body(Shape<4, 3>{});
    } else if (tokens == 4 || (tokens >= 7 && tokens <= 9)) {
        body(Shape<3, 4>{});
    } else {
        body(Shape<2, 6>{});
    }
}

// Of 8 rows, 4 times 32 bits from input `i` on, transposed: vector u holds what is u-th of each row.
template <typename W>
inline void read_units(const W* const* rows, std::int64_t i, __m256i (&units)[4]) {
    const auto both = [&](int r) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + i));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r + 4] + i)), 1);
    };
    const __m256i a = both(0), b = both(1), c = both(2), d = both(3);
    const __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
    const __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
    units[0] = _mm256_unpacklo_epi64(ab_low, cd_low);
    units[1] = _mm256_unpackhi_epi64(ab_low, cd_low);
    units[2] = _mm256_unpacklo_epi64(ab_high, cd_high);
    units[3] = _mm256_unpackhi_epi64(ab_high, cd_high);
}

// to[i * VECTORS] = input `begin + i` of 8 rows, for STEP inputs.
template <int VECTORS>
inline void pack_step(const float* const* rows, std::int64_t begin, Float* to) {
#pragma GCC unroll 4
    for (int i = 0; i < STEP; i += 4) {
        __m256i units[4];
        read_units(rows, begin + i, units);
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) to[(i + u) * VECTORS] = (Float)units[u];
    }
}

template <int VECTORS>
inline void pack_step(const bf16* const* rows, std::int64_t begin, Float* to) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
#pragma GCC unroll 2
    for (int i = 0; i < STEP; i += 8) {
        __m256i pairs[4];
        read_units(rows, begin + i, pairs);
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) {
            to[(i + 2 * u) * VECTORS] = (Float)_mm256_slli_epi32(pairs[u], 16);
            to[(i + 2 * u + 1) * VECTORS] = (Float)_mm256_and_si256(pairs[u], upper);
        }
    }
}

template <int VECTORS>
inline void pack_step(const std::int8_t* const* rows, std::int64_t begin, Float* to) {
    __m256i fours[4];
    read_units(rows, begin, fours);
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

// The same of numbers that are made wide one row after the other.
template <int VECTORS, typename W>
inline void pack_step(const W* const* rows, std::int64_t begin, Float* to) {
    float wide[LANES][STEP];
    const float* wide_rows[LANES];
    for (int r = 0; r < LANES; ++r) {
        wide_rows[r] = wide[r];
        for (int i = 0; i < STEP; i += LANES) store(wide[r] + i, load(rows[r] + begin + i));
    }
    pack_step<VECTORS>(wide_rows, 0, to);
}

// panel[i][vector] = inputs `begin` to `end` of OUTPUTS rows. Up to STEP - 1 inputs more are written.
template <int VECTORS, typename W>
inline void pack_panel(const W* const* rows, std::int64_t begin, std::int64_t end, Float* panel) {
    for (int v = 0; v < VECTORS; ++v) {
        const W* const* of = rows + v * LANES;
        std::int64_t i = begin;
        for (; i + STEP <= end; i += STEP) pack_step<VECTORS>(of, i, panel + (i - begin) * VECTORS + v);
        if (i == end) continue;
        W rest[LANES][STEP] = {};
        const W* of_rest[LANES];
        for (int r = 0; r < LANES; ++r) {
            of_rest[r] = rest[r];
            std::memcpy(rest[r], of[r] + i, (end - i) * sizeof(W));
        }
        pack_step<VECTORS>(of_rest, 0, panel + (i - begin) * VECTORS + v);
    }
}

// The same of rows in blocks, which are made plain numbers first.
template <int VECTORS>
inline void pack_panel(const BlockFormat& format, const InBlocks* const* rows, std::int64_t begin, std::int64_t end,
                       Float* panel) {
    float wide[LANES][NARROW_SPAN];
    for (int v = 0; v < VECTORS; ++v) {
        const float* wide_rows[LANES];
        for (int r = 0; r < LANES; ++r) {
            wide_rows[r] = wide[r];
            format.products<float>().expand(rows[v * LANES + r], begin, end, wide[r]);
        }
        for (std::int64_t i = 0; i < end - begin; i += STEP) {
            pack_step<VECTORS>(wide_rows, i, panel + i * VECTORS + v);
        }
    }
}

// Fetches what comes next, some lines at each step of the present work: many at once would wait for each other, and all
// that comes behind them, too.
template <typename W>
class Fetch {
  public:
    // Bytes `begin` to `end` of `count` rows, in so many `steps`.
    Fetch(const W* const* rows, int count, std::int64_t begin, std::int64_t end, std::int64_t steps)
        : row_(rows), last_(rows + count), begin_(begin), end_(end), at_(begin) {
        const std::int64_t lines = count * ((end - begin + LINE - 1) / LINE);
        at_once_ = static_cast<int>((lines + steps - 1) / steps);
    }

    [[gnu::always_inline]] void step() {
        for (int i = 0; i < at_once_ && row_ < last_; ++i) {
            __builtin_prefetch(reinterpret_cast<const char*>(*row_) + at_, 0, 2);
            at_ += LINE;
            if (at_ >= end_) ++row_, at_ = begin_;
        }
    }

  private:
    static constexpr std::int64_t LINE = 64;
    const W* const* row_;
    const W* const* last_;
    std::int64_t begin_, end_;
    std::int64_t at_;
    int at_once_;
};

constexpr int FETCH_STEP = 8;  // inputs

// sums[t][output] += scale[output] * sum_i x[t][i] * panel[i][output] of TOKENS tokens, NARROW_SPAN apart; without scales
// where there are none, and = in place of += in the first span.
template <int TOKENS, int VECTORS, typename W>
inline void multiply_panel(const float* x, const Float* panel, std::int64_t size, const float* scales, bool first,
                           float* sums, Fetch<W>& fetch) {
    Float total[TOKENS][VECTORS] = {};
    // The lesser number of tokens and vectors is held, and the others come one by one.
    const auto multiply = [&](std::int64_t i) __attribute__((always_inline)) {
        const Float* row = panel + i * VECTORS;
        if constexpr (VECTORS <= TOKENS) {
            Float rows[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) rows[v] = row[v];
#pragma GCC unroll 6
            for (int t = 0; t < TOKENS; ++t) {
                const Float token = splat(x[t * NARROW_SPAN + i]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) total[t][v] = fma(token, rows[v], total[t][v]);
            }
        } else {
            Float tokens[TOKENS];
#pragma GCC unroll 6
            for (int t = 0; t < TOKENS; ++t) tokens[t] = splat(x[t * NARROW_SPAN + i]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                const Float one = row[v];
#pragma GCC unroll 6
                for (int t = 0; t < TOKENS; ++t) total[t][v] = fma(tokens[t], one, total[t][v]);
            }
        }
    };
    // Two inputs at once, where registers suffice for them.
    constexpr int AT_ONCE = TOKENS * VECTORS + std::min(TOKENS, VECTORS) < 15 ? 2 : 1;
    Fetch<W> fetching = fetch;
    std::int64_t i = 0;
    for (; i + FETCH_STEP <= size;) {
        fetching.step();
        for (const std::int64_t end = i + FETCH_STEP; i < end; i += AT_ONCE) {
            unrolled<AT_ONCE>([&](auto u) __attribute__((always_inline)) { multiply(i + u); });
        }
    }
    fetch = fetching;
    for (; i < size; ++i) multiply(i);
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            float* to = sums + (t * VECTORS + v) * LANES;
            // Fused explicitly: what the compiler fuses by itself may differ from one shape to the next.
            const Float before = first ? Float{} : load(to);
            store(to, scales ? fma(total[t][v], load(scales + v * LANES), before) : before + total[t][v]);
        }
    }
}

template <int TOKENS, int VECTORS, typename... Args>
inline void multiply_tokens(int tokens, Args&... args) {
    if constexpr (TOKENS > 0) {
        if (tokens == TOKENS) {
            multiply_panel<TOKENS, VECTORS>(args...);
        } else {
            multiply_tokens<TOKENS - 1, VECTORS>(tokens, args...);
        }
    }
}

// Rows of weights that are multiplied together: with a gated half, as many of each half.
template <int OUTPUTS, typename W>
struct PanelRows {
    std::int64_t first, count;  // outputs of the result
    std::int64_t number[OUTPUTS];  // behind the last row it is computed once more, and thrown away
    const W* row[OUTPUTS];

    PanelRows(const Weights<W>& w, const Output& o, int width, std::int64_t panel)
        : first(panel * width), count(std::min<std::int64_t>(width, o.size - first)) {
        for (int r = 0; r < OUTPUTS; ++r) {
            const std::int64_t of_half = std::min(first + r % width, o.size - 1);
            number[r] = r < width ? of_half : o.size + of_half;
            row[r] = w.rows + number[r] * w.stride();
        }
    }
};

template <typename W>
inline std::int64_t bytes_of(const Weights<W>& w, std::int64_t inputs) {
    if constexpr (std::is_same_v<W, InBlocks>) {
        return inputs / w.format->elements * w.format->bytes;
    } else {
        return inputs * sizeof(W);
    }
}

// Tokens as [spans][tokens][NARROW_SPAN] floats, for all threads.
template <typename T>
const float* copy_tokens(const Team& team, std::int64_t tokens, const T* x, std::int64_t x_stride, std::int64_t in) {
    const std::int64_t spans = (in + NARROW_SPAN - 1) / NARROW_SPAN;
    float* copies = team.shared<float>(spans * tokens * NARROW_SPAN);
    const Range mine = team.split(spans * tokens);
    for (std::int64_t number = mine.begin; number < mine.end; ++number) {
        const std::int64_t begin = number / tokens * NARROW_SPAN;
        const std::int64_t size = std::min<std::int64_t>(NARROW_SPAN, in - begin);
        const T* from = x + number % tokens * x_stride + begin;
        float* to = copies + number * NARROW_SPAN;
        for (std::int64_t i = 0; i < size; i += LANES) store(to + i, load_some(from + i, size - i));
    }
    team.barrier();
    return copies;
}

// This thread's outputs of the tokens from `first` on, of which `x` are copies.
template <typename S, typename T, typename Y, typename W>
void multiply_group(const Team& team, std::int64_t first, std::int64_t tokens, const float* x, const Weights<W>& w,
                    const Output& o, Y* y) {
    const int width = has_gates(o.activation) ? S::OUTPUTS / 2 : S::OUTPUTS;
    const std::int64_t groups = w.scales ? (w.in + w.group - 1) / w.group : 0;
    const Range panels = team.split((o.size + width - 1) / width);
    const Blocks blocks(tokens, S::TOKENS);
    Float* panel = team.own<Float>(NARROW_SPAN * S::VECTORS + tokens * S::VECTORS);
    float* sums = reinterpret_cast<float*>(panel + NARROW_SPAN * S::VECTORS);
    const auto end_of = [&](std::int64_t begin) {
        const std::int64_t end = std::min(begin / NARROW_SPAN * NARROW_SPAN + NARROW_SPAN, w.in);
        return w.scales ? std::min(end, (begin / w.group + 1) * w.group) : end;
    };
    for (std::int64_t number = panels.begin; number < panels.end; ++number) {
        const PanelRows<S::OUTPUTS, W> rows(w, o, width, number), next_rows(w, o, width, number + 1);
        for (std::int64_t begin = 0, end; begin < w.in; begin = end) {
            end = end_of(begin);
            if constexpr (std::is_same_v<W, InBlocks>) {
                pack_panel<S::VECTORS>(*w.format, rows.row, begin, end, panel);
            } else {
                pack_panel<S::VECTORS>(rows.row, begin, end, panel);
            }
            float scales[S::OUTPUTS];
            if (w.scales) {
                for (int r = 0; r < S::OUTPUTS; ++r) scales[r] = w.scales[rows.number[r] * groups + begin / w.group];
            }
            const bool last = end == w.in;
            const W* const* next = last ? next_rows.row : rows.row;
            const std::int64_t next_begin = last ? 0 : end;
            Fetch<W> fetch(next, S::OUTPUTS, bytes_of(w, next_begin), bytes_of(w, end_of(next_begin)),
                           blocks.count * std::max<std::int64_t>((end - begin) / FETCH_STEP, 1));
            const std::int64_t size = end - begin;
            const float* of_span = x + begin / NARROW_SPAN * NARROW_SPAN * tokens + begin % NARROW_SPAN;
            const float* of_group = w.scales ? scales : nullptr;
            for (int block = 0; block < blocks.count; ++block) {
                const std::int64_t t = blocks.begin(block);
                const float* from = of_span + t * NARROW_SPAN;
                float* to = sums + t * S::OUTPUTS;
                const bool first_span = begin == 0;
                multiply_tokens<S::TOKENS, S::VECTORS>(blocks.size(block), from, panel, size, of_group, first_span, to,
                                                       fetch);
                if (!last) continue;
                for (std::int64_t i = t; i < blocks.begin(block + 1); ++i) {
                    const float* of_token = sums + i * S::OUTPUTS;
                    put_outputs<T>(of_token, of_token + width % S::OUTPUTS, o, first + i, rows.first,
                                   static_cast<int>(rows.count), y);
                }
            }
        }
    }
}

// All outputs of some tokens. A token's bits do not depend on how many are computed so.
template <typename T, typename Y, typename W>
void multiply(const Team& team, std::int64_t tokens, const T* x, std::int64_t x_stride, const Weights<W>& w,
              const Output& o, Y* y) {
    const Blocks groups(tokens, GROUP_TOKENS);
    for (int group = 0; group < groups.count; ++group) {
        const std::int64_t first = groups.begin(group), count = groups.size(group);
        const float* copies = copy_tokens(team, count, x + first * x_stride, x_stride, w.in);
        with_shape(count, [&](auto shape) { multiply_group<decltype(shape), T>(team, first, count, copies, w, o, y); });
    }
}

}  // namespace ostinato::narrow

#endif
