// Products with weights in blocks: a few tokens with a few rows, and rows made plain numbers.
//
// Tokens of bfloat16 are multiplied with a block's integers, which bfloat16 has a place for each of; what 32 elements give
// is multiplied by their scale in float32. Tokens of float32 are multiplied with scale * integer + minimum. In both, sums go
// on in ascending order in one accumulator: a result depends on its own token and row alone.
#pragma once

#include <array>

#include "block_numbers.h"

namespace ostinato {

// The factors of one block: of each `SCALED` elements a scale, and a minimum where there are any.
template <typename F>
struct Factors {
    static constexpr int COUNT = F::ELEMENTS / F::SCALED;
    float scale[COUNT], minimum[F::HAS_MINIMUM ? COUNT : 1];

    explicit Factors(const std::uint8_t* block) { F::scales(block, scale, minimum); }
};

// Vector `v` of the 32 elements of a part.
template <typename F>
inline Float number(const std::int8_t* integers, const Factors<F>& factors, int part, int v) {
    const int at = (part * PART + v * LANES) / F::SCALED;
    const Float integer = load(integers + v * LANES), scale = splat(factors.scale[at]);
    if constexpr (F::HAS_MINIMUM) return fma(integer, scale, splat(factors.minimum[at]));
    return integer * scale;
}

template <typename F, typename X>
void expand_blocks(const InBlocks* row, std::int64_t begin, std::int64_t end, X* to) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(row);
    for (std::int64_t i = begin; i < end;) {
        const std::uint8_t* block = bytes + i / F::ELEMENTS * F::BYTES;
        const Factors<F> factors(block);
        const std::int64_t last = std::min<std::int64_t>(end, (i / F::ELEMENTS + 1) * F::ELEMENTS);
        for (; i < last; i += PART, to += PART) {
            const int part = static_cast<int>(i % F::ELEMENTS) / PART;
            const Bytes integers = F::integers(block, part);
            alignas(PART) std::int8_t each[PART];
            std::memcpy(each, &integers, sizeof(each));
            for (int v = 0; v < PART / LANES; ++v) store(to + v * LANES, number<F>(each, factors, part, v));
        }
    }
}

// One line of each row that is to come, for every line of those that are multiplied.
struct RowsToCome {
    const InBlocks* const* rows;
    int count;

    void operator()(std::int64_t from, std::int64_t bytes) const {
        for (int p = 0; p < count; ++p) {
            for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(&rows[p][from + i].byte, 0, 2);
        }
    }
};

template <typename F, int TOKENS, bool PACKED>
void dot_blocks(const Tokens<float>& tokens, const InBlocks* const* rows, const RowsToCome& next, std::int64_t count,
                float* sums, int stride) {
    Float total[TOKENS][DOT_ROWS];
    clear(total);
    const std::int64_t token_stride = PACKED ? LANES : tokens.stride;
    const float* x = tokens.x;
    for (std::int64_t b = 0; b < count; ++b) {
        const std::uint8_t* block[DOT_ROWS];
        for (int r = 0; r < DOT_ROWS; ++r) block[r] = &rows[r][b * F::BYTES].byte;
        next(b * F::BYTES, F::BYTES);
        const Factors<F> factors[DOT_ROWS] = {Factors<F>(block[0]), Factors<F>(block[1]), Factors<F>(block[2]),
                                              Factors<F>(block[3])};
        for (int part = 0; part < F::ELEMENTS / PART; ++part) {
            alignas(PART) std::int8_t integers[DOT_ROWS][PART];
            for (int r = 0; r < DOT_ROWS; ++r) {
                const Bytes each = F::integers(block[r], part);
                std::memcpy(integers[r], &each, PART);
            }
            for (int v = 0; v < PART / LANES; ++v, x += PACKED ? LANES * TOKENS : LANES) {
                Float w[DOT_ROWS];
#pragma GCC unroll 4
                for (int r = 0; r < DOT_ROWS; ++r) w[r] = number<F>(integers[r], factors[r], part, v);
#pragma GCC unroll 6
                for (int t = 0; t < TOKENS; ++t) {
                    const Float token = load(x + t * token_stride);
#pragma GCC unroll 4
                    for (int r = 0; r < DOT_ROWS; ++r) total[t][r] = fma(token, w[r], total[t][r]);
                }
            }
        }
    }
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * stride);
}

#if defined(__AVX512BF16__)
// Integers of a range as bfloat16, by their lowest 5 or 6 bits.
template <int COUNT, int LEAST>
struct TableOfIntegers {
    alignas(64) std::array<std::uint16_t, COUNT> bits{};

    constexpr TableOfIntegers() {
        for (int value = LEAST; value < LEAST + COUNT; ++value) {
            const int size = value < 0 ? -value : value;
            int exponent = 0;
            while (size >> (exponent + 1)) ++exponent;
            const int plain = size == 0 ? 0 : (127 + exponent) << 7 | (size << (7 - exponent) & 0x7F);
            bits[value & (COUNT - 1)] = static_cast<std::uint16_t>(plain | (value < 0 ? 0x8000 : 0));
        }
    }
};
inline constexpr TableOfIntegers<32, -16> SIGNED_INTEGERS;
inline constexpr TableOfIntegers<32, 0> UNSIGNED_INTEGERS;
inline constexpr TableOfIntegers<64, -32> MORE_INTEGERS;

template <Range RANGE>
inline __m512bh to_bf16(Bytes integers) {
    if constexpr (RANGE == Range::BITS8) {
        alignas(64) std::int8_t each[PART];
        std::memcpy(each, &integers, sizeof(each));
        return Dot<bf16, std::int8_t>::read(each);
    } else {
        const __m512i index = _mm512_cvtepi8_epi16((__m256i)integers);
        if constexpr (RANGE == Range::BITS6) {
            const auto& table = MORE_INTEGERS.bits;
            return (__m512bh)_mm512_permutex2var_epi16(_mm512_load_si512(table.data()), index,
                                                       _mm512_load_si512(table.data() + 32));
        } else {
            const auto& table = RANGE == Range::BITS5 ? SIGNED_INTEGERS.bits : UNSIGNED_INTEGERS.bits;
            return (__m512bh)_mm512_permutexvar_epi16(index, _mm512_load_si512(table.data()));
        }
    }
}

// What the sums of pairs of a part's elements are multiplied with.
template <typename F>
inline Float scale_of(const Factors<F>& factors, int part) {
    if constexpr (F::SCALED == PART / 2) {
        return (Float)_mm512_insertf32x8(_mm512_set1_ps(factors.scale[2 * part]),
                                         _mm256_set1_ps(factors.scale[2 * part + 1]), 1);
    } else {
        return (Float)_mm512_set1_ps(factors.scale[part * PART / F::SCALED]);
    }
}

template <typename F, int TOKENS, bool PACKED>
void dot_blocks(const Tokens<bf16>& tokens, const InBlocks* const* rows, const RowsToCome& next, std::int64_t count,
                float* sums, int stride) {
    using D = Dot<bf16, bf16>;
    Float total[TOKENS][DOT_ROWS];
    clear(total);
    const std::int64_t token_stride = PACKED ? PART : tokens.stride;
    const bf16* x = tokens.x;
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    for (std::int64_t b = 0; b < count; ++b) {
        const std::uint8_t* block[DOT_ROWS];
        for (int r = 0; r < DOT_ROWS; ++r) block[r] = &rows[r][b * F::BYTES].byte;
        next(b * F::BYTES, F::BYTES);
        const Factors<F> factors[DOT_ROWS] = {Factors<F>(block[0]), Factors<F>(block[1]), Factors<F>(block[2]),
                                              Factors<F>(block[3])};
        for (int part = 0; part < F::ELEMENTS / PART; ++part, x += PACKED ? PART * TOKENS : PART) {
            __m512bh w[DOT_ROWS];
            Float scale[DOT_ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < DOT_ROWS; ++r) {
                w[r] = to_bf16<F::RANGE>(F::integers(block[r], part));
                scale[r] = scale_of(factors[r], part);
            }
#pragma GCC unroll 6
            for (int t = 0; t < TOKENS; ++t) {
                const __m512bh token = D::read(x + t * token_stride);
#pragma GCC unroll 4
                for (int r = 0; r < DOT_ROWS; ++r) {
                    total[t][r] = fma(D::multiply_add(Float{}, token, w[r]), scale[r], total[t][r]);
                }
                if constexpr (F::HAS_MINIMUM) {
                    const Float sum = D::multiply_add(Float{}, token, ones);
#pragma GCC unroll 4
                    for (int r = 0; r < DOT_ROWS; ++r) {
                        total[t][r] = fma(sum, splat(factors[r].minimum[part * PART / F::SCALED]), total[t][r]);
                    }
                }
            }
        }
    }
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * stride);
}
#endif

template <typename F, typename X, int TOKENS = DOT_TOKENS>
void dot_some_blocks(int tokens, const Tokens<X>& x, const InBlocks* const* rows, const InBlocks* const* next, int prefetch,
                     std::int64_t count, float* sums, int stride) {
    if constexpr (TOKENS > 0) {
        const RowsToCome to_come{next, prefetch};
        if (tokens < TOKENS) {
            dot_some_blocks<F, X, TOKENS - 1>(tokens, x, rows, next, prefetch, count, sums, stride);
        } else if (x.stride == 0) {
            dot_blocks<F, TOKENS, true>(x, rows, to_come, count, sums, stride);
        } else {
            dot_blocks<F, TOKENS, false>(x, rows, to_come, count, sums, stride);
        }
    }
}

template <typename F>
BlockFormat make_block_format(const char* name) {
    BlockFormat format{name, F::ELEMENTS, F::BYTES, {dot_some_blocks<F, float>, expand_blocks<F, float>}, {}};
    format.with_bf16.expand = expand_blocks<F, bf16>;
#if defined(__AVX512BF16__)
    format.with_bf16.dot = dot_some_blocks<F, bf16>;
#endif
    return format;
}

}  // namespace ostinato
