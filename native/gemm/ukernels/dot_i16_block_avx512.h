// Dot products of a few i16 tokens with rows in blocks, for AVX-512: one instruction multiplies 32 pairs and adds each
// to a sum (two instructions without VNNI). Products that share a scale are added in integers; minima are multiplied
// with the sums of the token's elements.
#pragma once

#include "gemm/block_ops.h"
#include "quant/unpack_i16_avx512.h"

#if defined(OSTINATO_I16) && defined(OSTINATO_HAS_AVX512)

namespace ostinato {

static_assert(SUPERBLOCK == I16_TOKEN_PADDING);

inline __m512i add_products(__m512i to, __m512i a, __m512i b) {
#if defined(OSTINATO_HAS_AVX512_VNNI)
    return _mm512_dpwssd_epi32(to, a, b);
#else
    return _mm512_add_epi32(to, _mm512_madd_epi16(a, b));
#endif
}

// Formats whose scales and minima have 6 bits each.
template <typename F>
constexpr bool HAS_SIX_BITS = F::ELEMENTS == SUPERBLOCK && F::HAS_MINIMUM;

// Lane of a superblock's first scale; minima begin in lane 0.
template <typename F>
constexpr int FIRST_SCALE = HAS_SIX_BITS<F> ? SUBBLOCKS : 0;

// Scales of a superblock's eight subblocks, or the sixteen of Q6_K; and the minimum of each subblock, which is
// multiplied with the sum of a token's elements. Other lanes have no meaning.
template <typename F>
struct I16SuperblockScales {
    static constexpr bool HAS_MINIMUM = F::HAS_MINIMUM || F::HAS_ZERO || UnpackI16<F>::LEAST != 0;
    __m512 scale, minimum;

    I16SuperblockScales() = default;
    [[gnu::always_inline]] explicit I16SuperblockScales(const std::uint8_t* block) {
        if constexpr (F::SCALED < SUBBLOCK) {
            scale = _mm512_mul_ps(byte_scales(block), _mm512_set1_ps(1 / UnpackI16<F>::UNIT));
        } else if constexpr (F::ELEMENTS == SUPERBLOCK) {
            scale = eight(split_scales(block));
        } else if constexpr (F::HAS_ZERO) {
            const __m256i words = words_of<F>(block, SUPERBLOCK / F::ELEMENTS);
            const __m256 scales = scales_of(words);
            scale = per_subblock(scales);
            minimum = per_subblock(minima_of(scales, zeros_of(words)));
        } else if constexpr (3 * F::BYTES + 4 <= 64) {
            const __m512 both = _mm512_cvtph_ps(first_words_of_eight<F>(block));
            scale = eight(_mm512_castps512_ps256(both));
            if constexpr (F::HAS_MINIMUM) minimum = eight(_mm512_extractf32x8_ps(both, 1));
        } else if constexpr (F::HAS_MINIMUM) {
            const __m128i first = halves_of_four<F>(block), second = halves_of_four<F>(block + 4 * F::BYTES);
            scale = eight(_mm256_cvtph_ps(_mm_unpacklo_epi64(first, second)));
            minimum = eight(_mm256_cvtph_ps(_mm_unpackhi_epi64(first, second)));
        } else {
            scale = eight(_mm256_cvtph_ps(first_halves<F>(block)));
        }
        if constexpr (UnpackI16<F>::LEAST != 0) minimum = _mm512_mul_ps(scale, _mm512_set1_ps(UnpackI16<F>::LEAST));
    }

  private:
    static __m512 eight(__m256 floats) { return _mm512_zextps256_ps512(floats); }

    // Spread one value per block to its subblocks.
    static __m512 per_subblock(__m256 each) {
        constexpr int SUBBLOCKS_PER_BLOCK = F::ELEMENTS / SUBBLOCK;
        if constexpr (SUBBLOCKS_PER_BLOCK == 1) return eight(each);
        const __m256i places = _mm256_srlv_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(SUBBLOCKS_PER_BLOCK / 2));
        return eight(_mm256_permutevar8x32_ps(each, places));
    }
};

// Scales of a superblock of MR rows, each of which decodes its own.
template <typename F>
struct I16RowScales {
    const std::uint8_t* const* block;

    template <int ROW>
    I16SuperblockScales<F> row() const { return I16SuperblockScales<F>(block[ROW]); }
};

// The same with 6 bits, decoded together: one by one they would take as many instructions as the products.
template <typename F>
struct SixBitRowScales {
    __m512 factors;  // of each row: of its scales, and of its minima; behind them, of scales of odd subblocks
    alignas(64) std::uint8_t integers[MR][2 * SUBBLOCKS];  // minima, then scales

    [[gnu::always_inline]] explicit SixBitRowScales(const std::uint8_t* const* block) {
        static_assert(MR == 4);
        const auto in_each = [](int a, int b, int c, int d) {
            return _mm512_broadcast_i32x4(_mm_setr_epi32(a, b, c, d));
        };
        __m512i heads = _mm512_castsi128_si512(beginning(block[0]));
        heads = _mm512_inserti32x4(heads, beginning(block[1]), 1);
        heads = _mm512_inserti32x4(heads, beginning(block[2]), 2);
        heads = _mm512_inserti32x4(heads, beginning(block[3]), 3);
        // The upper bits of the last four numbers lie above the first four, their lower bits in the third word.
        const __m512i first = _mm512_shuffle_epi32(heads, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(1, 1, 2, 2)));
        const __m512i third = _mm512_shuffle_epi32(heads, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(3, 3, 3, 3)));
        const __m512i low = _mm512_and_si512(_mm512_srlv_epi32(third, in_each(0, 4, 0, 0)),
                                             in_each(0, 0x0F0F0F0F, 0, 0x0F0F0F0F));
        const __m512i high = _mm512_srlv_epi32(first, in_each(0, 2, 0, 2));
        const __m512i of_high = in_each(0x3F3F3F3F, 0x30303030, 0x3F3F3F3F, 0x30303030);
        _mm512_store_si512(integers, _mm512_ternarylogic_epi32(of_high, high, low, 0xCA));
        const __m512i pairs = _mm512_permutexvar_epi32(in_each(0, 4, 8, 12), heads);
        constexpr float ODD = 1 / ODD_UNIT<F>;
        factors = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(pairs)),
                                _mm512_setr_ps(1, -1, 1, -1, 1, -1, 1, -1, ODD, ODD, ODD, ODD, ODD, ODD, ODD, ODD));
    }

    template <int ROW>
    [[gnu::always_inline]] I16SuperblockScales<F> row() const {
        constexpr int EVEN = 2 * ROW, MINIMUM = EVEN + 1, ODD = EVEN + 8;
        const __m512i places = _mm512_setr_epi32(MINIMUM, MINIMUM, MINIMUM, MINIMUM, MINIMUM, MINIMUM, MINIMUM, MINIMUM,
                                                 EVEN, ODD, EVEN, ODD, EVEN, ODD, EVEN, ODD);
        const __m128i own = _mm_load_si128(reinterpret_cast<const __m128i*>(integers[ROW]));
        I16SuperblockScales<F> scales;
        scales.scale = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(own)),
                                     _mm512_permutexvar_ps(places, factors));
        scales.minimum = scales.scale;  // in its first lanes
        return scales;
    }
};

// Load a token's values per subblock of a superblock, in the order of its scales; eight of them twice.
template <typename F>
inline __m512 of_token(const float* each) {
    const __m512 twice = _mm512_broadcast_f32x8(_mm256_loadu_ps(each));
    if constexpr (F::SCALED >= SUBBLOCK) return twice;
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), twice);
}

// Return the index of the scale of each lane, for the sums of the first two vectors that UnpackI16<F> reads, or of the
// second two.
template <typename F>
constexpr std::array<std::int32_t, 16> places_of_scales(int step, int second) {
    constexpr I16Order ORDER = UnpackI16<F>::ORDER;
    std::array<std::int32_t, 16> places{};
    for (int lane = 0; lane < 16; ++lane) {
        const int of_step = ORDER == I16Order::BLOCKS   ? lane / 4
                            : ORDER == I16Order::HALVES ? second + lane / 8 * 2
                                                          : 2 * second + lane / 8;
        const int subblock = STEP_SUBBLOCKS * step + of_step;
        places[lane] = F::SCALED < SUBBLOCK ? 2 * subblock + lane / 4 % 2 : FIRST_SCALE<F> + subblock;
    }
    return places;
}

template <typename F, int TOKENS>
void dot_i16_blocks(const Tokens<i16>& tokens, const BlockByte* const* rows, const RowPrefetch& next,
                      std::int64_t count, float* sums, int stride) {
    using Read = UnpackI16<F>;
    constexpr int BLOCKS = SUPERBLOCK / F::ELEMENTS, STEPS = SUPERBLOCK / STEP_ELEMENTS;
    constexpr int SUMS = Read::ORDER == I16Order::BLOCKS ? 1 : 2;  // per step; each has subblocks of its own
    const I16TokenLayout layout(count * F::ELEMENTS);
    Float total[TOKENS][MR];
    clear(total);
    const auto multiply = [&](const I16SuperblockScales<F>& scales, const std::uint8_t* block, std::int64_t subblock,
                              __m512(&of_row)[TOKENS]) __attribute__((always_inline)) {
        __m512 of_superblock[TOKENS];
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; ++t) {
            const i16* token = tokens.x + t * tokens.stride;
            of_superblock[t] = _mm512_mul_ps(scales.scale, of_token<F>(layout.scales(token) + subblock));
            if constexpr (I16SuperblockScales<F>::HAS_MINIMUM) {
                of_row[t] = _mm512_mask3_fmadd_ps(scales.minimum, of_token<F>(layout.sums(token) + subblock), of_row[t],
                                                  (1 << SUBBLOCKS) - 1);
            }
        }
        unrolled<STEPS>([&](auto step) __attribute__((always_inline)) {
            __m512i integers[4];
            Read::template read<step>(block, integers);
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) {
                const i16* x = tokens.x + t * tokens.stride + subblock * SUBBLOCK + step * STEP_ELEMENTS;
                unrolled<SUMS>([&](auto second) __attribute__((always_inline)) {
                    static constexpr auto PLACES = places_of_scales<F>(step, second);
                    __m512i sum = _mm512_setzero_si512();
                    unrolled<4 / SUMS>([&](auto i) __attribute__((always_inline)) {
                        constexpr int v = second * 4 / SUMS + i;
                        sum = add_products(sum, integers[v], _mm512_loadu_si512(x + v * 2 * LANES));
                    });
                    const __m512 of_sums = _mm512_permutexvar_ps(_mm512_loadu_si512(PLACES.data()), of_superblock[t]);
                    of_row[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), of_sums, of_row[t]);
                });
            }
        });
    };
    const auto multiply_rows = [&](const std::uint8_t* const* block, std::int64_t b) __attribute__((always_inline)) {
        const std::conditional_t<HAS_SIX_BITS<F>, SixBitRowScales<F>, I16RowScales<F>> scales{block};
        unrolled<MR>([&](auto r) __attribute__((always_inline)) {
            __m512 of_row[TOKENS];
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) of_row[t] = (__m512)total[t][r];
            multiply(scales.template row<r>(), block[r], b * F::ELEMENTS / SUBBLOCK, of_row);
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) total[t][r] = (Float)of_row[t];
        });
    };
    std::int64_t b = 0;
    for (; b + BLOCKS <= count; b += BLOCKS) {
        const std::uint8_t* block[MR];
        for (int r = 0; r < MR; ++r) block[r] = &rows[r][b * F::BYTES].byte;
        next(b * F::BYTES, BLOCKS * F::BYTES);
        multiply_rows(block, b);
    }
    if (BLOCKS > 1 && b < count) {
        next(b * F::BYTES, (count - b) * F::BYTES);
        // Rows that are no whole superblocks: their last blocks, then zeros.
        std::uint8_t rest[MR][BLOCKS * F::BYTES] = {};
        const std::uint8_t* block[MR];
        for (int r = 0; r < MR; ++r) {
            std::memcpy(rest[r], &rows[r][b * F::BYTES].byte, (count - b) * F::BYTES);
            block[r] = rest[r];
        }
        multiply_rows(block, b);
    }
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) sum4(total[t], sums + t * stride);
}

}  // namespace ostinato

#endif
