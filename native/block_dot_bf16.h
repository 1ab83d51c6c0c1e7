// Products with weights in blocks where pairs of bfloat16 are multiplied.
//
// Tokens are multiplied with a block's integers, which bfloat16 has a place for each of; what 32 elements give is
// multiplied by their scale in float32. With minima, the sum of 32 elements of a token is multiplied by theirs. Sums go on
// in ascending order in one accumulator: a result depends on its own token and row alone.
#pragma once

#include "block_lookup.h"

namespace ostinato {

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

#if defined(__AVX512BF16__)
constexpr int GROUP = 256;  // elements whose scales are made ready together: all of a block, or those of several

// The halves at the beginnings of eight blocks; with two each, the first eight numbers are of four of them.
template <typename F>
inline __m128i first_halves(const std::uint8_t* block) {
    const auto at = [&](int i) { return static_cast<short>(block[i * F::BYTES] | block[i * F::BYTES + 1] << 8); };
    return _mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}

// The first words of four blocks; behind the last, its own.
template <typename F>
inline __m128i first_words(const std::uint8_t* block, int last = 3) {
    const auto at = [&](int i) { return static_cast<int>(word_at(block + std::min(i, last) * F::BYTES)); };
    return _mm_setr_epi32(at(0), at(1), at(2), at(3));
}

inline void put_scales(float* to, __m128i integers, float factor) {
    _mm512_store_ps(to, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(integers)), _mm512_set1_ps(factor)));
}

// Those of Q4_K and Q5_K: eight scales, eight minima.
inline void six_bit_scales(const std::uint8_t* block, float* to) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));
    const __m128i first_two = _mm_shuffle_epi32(packed, _MM_SHUFFLE(2, 1, 2, 1));
    const __m128i low = _mm_and_si128(first_two, _mm_set1_epi8(0x3F));
    const __m128i four = _mm_srlv_epi32(_mm_shuffle_epi32(packed, _MM_SHUFFLE(3, 3, 3, 3)), _mm_setr_epi32(0, 4, 0, 4));
    const __m128i high = _mm_or_si128(_mm_and_si128(four, _mm_set1_epi8(0x0F)),
                                      _mm_and_si128(_mm_srli_epi32(first_two, 2), _mm_set1_epi8(0x30)));
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpacklo_epi32(low, high)));
    const __m512 of_scales = _mm512_broadcastss_ps(_mm_cvtph_ps(packed));
    const __m512 of_minima = _mm512_set1_ps(-half_at(block + 2));
    _mm512_store_ps(to, _mm512_mul_ps(numbers, _mm512_mask_blend_ps(0xFF00, of_scales, of_minima)));
}

// Those of IQ4_XS: eight scales.
inline void split_scales(const std::uint8_t* block, float* to) {
    const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(block[2] | block[3] << 8), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word_at(block + 4))), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i both = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                                         _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4));
    const __m256 numbers = _mm256_cvtepi32_ps(_mm256_sub_epi32(both, _mm256_set1_epi32(32)));
    _mm256_store_ps(to, _mm256_mul_ps(numbers, _mm256_set1_ps(half_at(block))));
}

// The scales and minima of a group, or of so many blocks of it: in turns, or eight scales and eight minima, or zero points.
template <typename F>
struct Scales {
    static constexpr int BLOCKS = GROUP / F::ELEMENTS;
    static constexpr bool IN_TURNS = F::HAS_MINIMUM && F::ELEMENTS == PART;
    alignas(64) float numbers[16];

    [[gnu::always_inline]] Scales(const std::uint8_t* block, int blocks) {
        if (blocks == BLOCKS) {
            of_group(block);
        } else {
            of_rest(block, blocks);
        }
    }

    // Where a format has them, the zero point of a part instead.
    float minimum(int part) const {
        return numbers[IN_TURNS ? 2 * part + 1 : 8 + (F::HAS_ZERO ? part * PART / F::SCALED : part)];
    }
    float scale(int part) const { return numbers[IN_TURNS ? 2 * part : part * PART / F::SCALED]; }

    // What the sums of pairs of a part's elements are multiplied with.
    Float of_pairs(int part) const {
        if constexpr (F::SCALED == PART / 2) {
            const __m512 first = _mm512_set1_ps(numbers[2 * part]), second = _mm512_set1_ps(numbers[2 * part + 1]);
            return (Float)_mm512_mask_blend_ps(0xFF00, first, second);
        } else {
            return splat(scale(part));
        }
    }

  private:
    [[gnu::always_inline]] void of_group(const std::uint8_t* block) {
        if constexpr (F::ELEMENTS == GROUP && F::HAS_MINIMUM) {
            six_bit_scales(block, numbers);
        } else if constexpr (F::ELEMENTS == GROUP && F::SCALED == PART) {
            split_scales(block, numbers);
        } else if constexpr (F::ELEMENTS == GROUP) {
            put_scales(numbers, _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 192)), half_at(block + 208));
        } else if constexpr (F::HAS_ZERO) {
            for (int b = 0; b < BLOCKS; b += 4) put_with_zeros(first_words<F>(block + b * F::BYTES, BLOCKS - 1), b);
        } else if constexpr (IN_TURNS) {
            const __m256i halves = _mm256_setr_m128i(first_words<F>(block), first_words<F>(block + 4 * F::BYTES));
            _mm512_store_ps(numbers, _mm512_cvtph_ps(halves));
        } else {
            _mm256_store_ps(numbers, _mm256_cvtph_ps(first_halves<F>(block)));
        }
    }

    // Apart, and never inline: a call within the loops would have all sums go through memory.
    [[gnu::noinline, gnu::cold]] void of_rest(const std::uint8_t* block, int blocks) {
        for (int b = 0; b < blocks; ++b, block += F::BYTES) {
            if constexpr (F::HAS_ZERO) {
                numbers[b] = bits_as<float>(word_at(block) & ~std::uint32_t{0xFF});
                numbers[8 + b] = block[0];
            } else {
                float* of_block = numbers + b * (IN_TURNS ? 2 : 1);
                F::scales(block, of_block, of_block + 1);
            }
        }
    }

    void put_with_zeros(__m128i words, int at) {
        const __m128i zero = _mm_set1_epi32(0xFF);
        _mm_store_si128(reinterpret_cast<__m128i*>(numbers + at), _mm_andnot_si128(zero, words));
        _mm_store_ps(numbers + 8 + at, _mm_cvtepi32_ps(_mm_and_si128(zero, words)));
    }
};

template <typename F>
inline __m512bh integers_of(const std::uint8_t* block, int part, [[maybe_unused]] const Table& table) {
    if constexpr (F::BITS == 8) {
        return Dot<bf16, std::int8_t>::read(reinterpret_cast<const std::int8_t*>(block + 2));
    } else {
        return look_up<F>(block, part, table);
    }
}

// Its weights, each rounded once.
template <typename F>
inline __m512bh rounded_weights(const std::uint8_t* block, int part, const Scales<F>& scales, int of_group) {
    if constexpr (F::BITS < 6) {
        return look_up<F>(block, part, table_of<F>(scales.scale(of_group), scales.minimum(of_group)));
    } else if constexpr (F::BITS == 8) {
        const auto* integers = reinterpret_cast<const std::int8_t*>(block + 2);
        const float scale = scales.scale(of_group);
        return _mm512_cvtne2ps_pbh((__m512)(load(integers + LANES) * scale), (__m512)(load(integers) * scale));
    } else {
        // The even ones and the odd ones, each as the upper half of a float; then in turns again.
        const __m512i integers = (__m512i)look_up<F>(block, part, table_of<F>(block)), upper = _mm512_set1_epi32(-65536);
        const Float scale = scales.of_pairs(of_group);
        const Float even = (Float)_mm512_slli_epi32(integers, 16) * scale;
        const Float odd = (Float)_mm512_and_si512(integers, upper) * scale;
        alignas(64) static constexpr std::uint16_t IN_TURNS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_load_si512(IN_TURNS), rounded);
    }
}

template <typename F, int TOKENS, bool ROUNDED = false>
void dot_blocks(const Tokens<bf16>& tokens, const InBlocks* const* rows, const RowsToCome& next, std::int64_t count,
                float* sums, int stride) {
    using D = Dot<bf16, bf16>;
    constexpr int BLOCKS = Scales<F>::BLOCKS, PARTS = F::ELEMENTS / PART, TOGETHER = Places<F>::TOGETHER;
    Float total[TOKENS][DOT_ROWS];
    clear(total);
    const std::int64_t token_stride = tokens.stride ? tokens.stride : PART;
    const std::int64_t step = tokens.stride ? PART : PART * TOKENS;
    const bf16* x = tokens.x;
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    for (std::int64_t b = 0; b < count; b += BLOCKS) {
        const std::uint8_t* block[DOT_ROWS];
        for (int r = 0; r < DOT_ROWS; ++r) block[r] = &rows[r][b * F::BYTES].byte;
        const int here = static_cast<int>(std::min<std::int64_t>(BLOCKS, count - b));
        next(b * F::BYTES, here * F::BYTES);
        const Scales<F> scales[DOT_ROWS] = {{block[0], here}, {block[1], here}, {block[2], here}, {block[3], here}};
        for (int i = 0; i < here; ++i) {
            Table tables[DOT_ROWS];
            if constexpr (F::BITS < 8 && !ROUNDED) {
                for (int r = 0; r < DOT_ROWS; ++r) tables[r] = table_of<F>(block[r]);
            }
#pragma GCC unroll 1
            for (int first = 0; first < PARTS; first += TOGETHER)
#pragma GCC unroll 4
            for (int part = first; part < first + TOGETHER; ++part, x += step) {
                const int of_group = i * PARTS + part;
                __m512bh w[DOT_ROWS];
#pragma GCC unroll 4
                for (int r = 0; r < DOT_ROWS; ++r) {
                    w[r] = ROUNDED ? rounded_weights<F>(block[r], part, scales[r], of_group)
                                   : integers_of<F>(block[r], part, tables[r]);
                }
#pragma GCC unroll 6
                for (int t = 0; t < TOKENS; ++t) {
                    const __m512bh token = D::read(x + t * token_stride);
#pragma GCC unroll 4
                    for (int r = 0; r < DOT_ROWS; ++r) {
                        if constexpr (ROUNDED) {
                            total[t][r] = D::multiply_add(total[t][r], token, w[r]);
                        } else {
                            const Float part_sums = D::multiply_add(Float{}, token, w[r]);
                            total[t][r] = fma(part_sums, scales[r].of_pairs(of_group), total[t][r]);
                        }
                    }
                    if constexpr (F::HAS_MINIMUM && !ROUNDED) {
                        const Float sum = D::multiply_add(Float{}, token, ones);
#pragma GCC unroll 4
                        for (int r = 0; r < DOT_ROWS; ++r) {
                            total[t][r] = fma(sum, splat(scales[r].minimum(of_group)), total[t][r]);
                        }
                    }
                }
            }
            for (int r = 0; r < DOT_ROWS; ++r) block[r] += F::BYTES;
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * stride);
}

// sums[t * stride + r] of up to TOKENS, an even number, and DOT_ROWS rows of rounded weights: 24 accumulators, two rows
// and a token. Behind the last of `some` tokens it is multiplied once more.
template <typename F, int TOKENS>
void dot_wide_blocks(int some, const Tokens<bf16>& tokens, const InBlocks* const* rows, const RowsToCome& next,
                     std::int64_t count, float* sums, int stride) {
    using D = Dot<bf16, bf16>;
    constexpr int BLOCKS = Scales<F>::BLOCKS, PARTS = F::ELEMENTS / PART, TOGETHER = Places<F>::TOGETHER, PAIR = 2;
    const std::int64_t token_stride = tokens.stride ? tokens.stride : PART;
    const std::int64_t step = tokens.stride ? PART : PART * some;
    const std::int64_t last = (some - 1) * token_stride;
    for (int first_row = 0; first_row < DOT_ROWS; first_row += PAIR) {
        Float total[TOKENS][PAIR] = {};
        const bf16* x = tokens.x;
        for (std::int64_t b = 0; b < count; b += BLOCKS) {
            const int here = static_cast<int>(std::min<std::int64_t>(BLOCKS, count - b));
            const std::uint8_t* block[PAIR] = {&rows[first_row][b * F::BYTES].byte, &rows[first_row + 1][b * F::BYTES].byte};
            if (first_row == 0) next(b * F::BYTES, here * F::BYTES);
            const Scales<F> scales[PAIR] = {{block[0], here}, {block[1], here}};
            for (int i = 0; i < here; ++i) {
#pragma GCC unroll 1
                for (int first = 0; first < PARTS; first += TOGETHER)
#pragma GCC unroll 4
                    for (int part = first; part < first + TOGETHER; ++part, x += step) {
                        const __m512bh w[PAIR] = {rounded_weights<F>(block[0], part, scales[0], i * PARTS + part),
                                                  rounded_weights<F>(block[1], part, scales[1], i * PARTS + part)};
#pragma GCC unroll 12
                        for (int t = 0; t < TOKENS; ++t) {
                            const __m512bh token = D::read(x + (t == TOKENS - 1 ? last : t * token_stride));
                            total[t][0] = D::multiply_add(total[t][0], token, w[0]);
                            total[t][1] = D::multiply_add(total[t][1], token, w[1]);
                        }
                    }
                block[0] += F::BYTES;
                block[1] += F::BYTES;
            }
        }
#pragma GCC unroll 12
        for (int t = 0; t < TOKENS; t += 2) {
            float of_two[2 * PAIR];
            sum4(total[t], of_two);
            for (int i = 0; i < 2 * PAIR; ++i) {
                if (t + i / PAIR < some) sums[(t + i / PAIR) * stride + first_row + i % PAIR] = of_two[i];
            }
        }
    }
}

// From how many tokens on rounding a format's weights costs less than scaling its sums, token by token. Results follow:
// a number for all formats of so many bits, as docs/gguf.md has it.
template <typename F>
constexpr int LEAST_ROUNDED = F::BITS == 6 ? 5 : 3;

template <typename F>
void dot_rounded_blocks(int tokens, const Tokens<bf16>& x, const InBlocks* const* rows, const InBlocks* const* next,
                        int prefetch, std::int64_t count, float* sums, int stride) {
    const RowsToCome to_come{next, prefetch};
    const auto few = [&](auto some) {
        if constexpr (some.value >= LEAST_ROUNDED<F>) {  // of more tokens, blocks have half of WIDE_TOKENS at least
            dot_blocks<F, some.value, true>(x, rows, to_come, count, sums, stride);
        }
    };
    switch (tokens) {
        case 3: return few(std::integral_constant<int, 3>{});
        case 4: return few(std::integral_constant<int, 4>{});
        case 5: return few(std::integral_constant<int, 5>{});
        case 6: return few(std::integral_constant<int, 6>{});
        case 7:
        case 8: return dot_wide_blocks<F, 8>(tokens, x, rows, to_come, count, sums, stride);
        case 9:
        case 10: return dot_wide_blocks<F, 10>(tokens, x, rows, to_come, count, sums, stride);
        default: return dot_wide_blocks<F, 12>(tokens, x, rows, to_come, count, sums, stride);
    }
}

// to[i] = the weights `begin` to `end` of a row.
template <typename F>
void expand_to_bf16(const InBlocks* row, std::int64_t begin, std::int64_t end, bf16* to) {
    constexpr int BLOCKS = Scales<F>::BLOCKS, PARTS = F::ELEMENTS / PART;
    const std::int64_t last = (end + F::ELEMENTS - 1) / F::ELEMENTS;
    for (std::int64_t b = begin / F::ELEMENTS; b < last; b += BLOCKS) {
        const std::uint8_t* block = &row[b * F::BYTES].byte;
        const int here = static_cast<int>(std::min<std::int64_t>(BLOCKS, last - b));
        const Scales<F> scales(block, here);
        for (int i = 0; i < here; ++i, block += F::BYTES) {
            for (int part = 0; part < PARTS; ++part) {
                const std::int64_t at = (b + i) * F::ELEMENTS + part * PART;
                if (at < begin || at >= end) continue;
                const __m512bh weights = rounded_weights<F>(block, part, scales, i * PARTS + part);
                std::memcpy(to, &weights, sizeof(weights));
                to += PART;
            }
        }
    }
}
#endif

}  // namespace ostinato
