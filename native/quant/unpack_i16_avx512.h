// Unpacking of a block's integers to 16 bits, for products with i16 tokens, with AVX-512.
//
// Four subblocks of 32 elements become four vectors of 32 words. Integers of 4 bits need only shifts and masks: the
// lower half of each word's first byte, then of its second, then the upper halves. So a vector holds the even or the
// odd elements of some subblocks, and a token's integers have that order (quant/quantize_tokens_i16.h). Integers are
// read unsigned, as the block has them; their offset `LEAST` is added with the sums of a token's elements.
#pragma once

#include <array>

#include "quant/block_scales.h"
#include "quant/quantize_tokens_i16.h"

#if defined(OSTINATO_I16) && defined(OSTINATO_HAS_AVX512)

namespace ostinato {

// Shift or mask all words or bytes.
template <int BY>
inline __m512i words_down(__m512i words) { return _mm512_srli_epi16(words, BY); }
inline __m512i low_words(__m512i words) { return _mm512_and_si512(words, _mm512_set1_epi16(15)); }
inline __m512i low_bytes(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline __m512i high_bytes(__m512i bytes) { return low_bytes(words_down<4>(bytes)); }
inline __m512i load_64_bytes(const void* from) { return _mm512_loadu_si512(from); }

// Return the bits of `b` where MASK is set, else those of `a`.
template <int MASK>
inline __m512i merged(__m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(MASK)), b, a, 0xCA);
}

// Gather 8 words of each of four small blocks from byte AT on, or with SAME the same word 8 times. They come from two
// vectors; the second one ends with the blocks.
template <typename F, int AT, bool SAME = false>
inline __m512i words_of_four(const std::uint8_t* block) {
    constexpr int LAST = 4 * F::BYTES - 64;  // bytes before the second vector
    static_assert(LAST >= 0 && LAST <= 64 && F::BYTES % 2 == 0 && AT % 2 == 0);
    static constexpr std::array<std::uint16_t, 32> PLACES = [] {
        std::array<std::uint16_t, 32> places{};
        for (int i = 0; i < 32; ++i) {
            const int word = (i / 8 * F::BYTES + AT) / 2 + (SAME ? 0 : i % 8);
            places[i] = static_cast<std::uint16_t>(word < 32 ? word : 32 + word - LAST / 2);
        }
        return places;
    }();
    return _mm512_permutex2var_epi16(load_64_bytes(block), _mm512_loadu_si512(PLACES.data()),
                                     load_64_bytes(block + LAST));
}

// Return the first words of a superblock's eight small blocks, then their second words.
template <typename F>
inline __m256i first_words_of_eight(const std::uint8_t* block) {
    static_assert(3 * F::BYTES + 4 <= 64);
    static constexpr std::array<std::uint16_t, 32> PLACES = [] {
        std::array<std::uint16_t, 32> places{};
        for (int i = 0; i < 16; ++i) places[i] = static_cast<std::uint16_t>(i % 4 * F::BYTES / 2 + i / 8 + i / 4 % 2 * 32);
        return places;
    }();
    return _mm512_castsi512_si256(_mm512_permutex2var_epi16(
        load_64_bytes(block), _mm512_loadu_si512(PLACES.data()), load_64_bytes(block + 4 * F::BYTES)));
}

// Return a vector from two addresses of 32 bytes.
inline __m512i halves_from(const std::uint8_t* first, const std::uint8_t* second) {
    const auto at = [](const std::uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); };
    return _mm512_inserti64x4(_mm512_castsi256_si512(at(first)), at(second), 1);
}

inline __m512i in_both_halves(const std::uint8_t* from) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Split bytes into even and odd ones, as words.
inline void bytes_apart(__m512i bytes, __m512i* to) {
    to[0] = _mm512_and_si512(bytes, _mm512_set1_epi16(0xFF));
    to[1] = words_down<8>(bytes);
}

// Split half bytes: the lower halves of even and odd bytes, then the upper halves.
inline void halves_apart(__m512i bytes, __m512i* to) {
    to[0] = low_words(bytes);
    to[1] = low_words(words_down<8>(bytes));
    to[2] = low_words(words_down<4>(bytes));
    to[3] = words_down<12>(bytes);
}

// Integers of a block as i16 vectors. `read` unpacks four subblocks: the STEP'th four of a superblock whose first block
// is `block`. The first two vectors share their subblocks, and so do the second two; with the order BLOCKS all four do.
template <typename F>
struct UnpackI16;

// Number that an integer of 1 is read as in odd subblocks.
template <typename F>
constexpr float ODD_UNIT = 1;
template <> inline constexpr float ODD_UNIT<Q4_K> = 16;

// Formats with half bytes: `bytes` returns the 16 bytes of four subblocks each.
template <typename F, int AT, int LEAST_OF>
struct UnpackNibbles {
    static constexpr I16Order ORDER = I16Order::BLOCKS;
    static constexpr int LEAST = LEAST_OF;

    template <int STEP>
    static __m512i bytes(const std::uint8_t* block) {
        if constexpr (F::ELEMENTS == SUBBLOCK) {
            return words_of_four<F, AT>(block + STEP * STEP_SUBBLOCKS * F::BYTES);
        } else if constexpr (F::ELEMENTS == 2 * SUBBLOCK) {
            const std::uint8_t* first = block + 2 * STEP * F::BYTES + AT;
            return halves_from(first, first + F::BYTES);
        } else if constexpr (F::ELEMENTS == STEP_ELEMENTS) {
            return load_64_bytes(block + STEP * F::BYTES + AT);
        } else {
            return load_64_bytes(block + STEP * STEP_ELEMENTS / 2 + AT);
        }
    }

    template <int STEP>
    static void read(const std::uint8_t* block, __m512i* to) { halves_apart(bytes<STEP>(block), to); }
};

template <> struct UnpackI16<Q4_0> : UnpackNibbles<Q4_0, 2, -8> {};
template <> struct UnpackI16<Q4_1> : UnpackNibbles<Q4_1, 4, 0> {};
template <int SIZE> struct UnpackI16<Int4<SIZE>> : UnpackNibbles<Int4<SIZE>, 4, 0> {};

// The numbers of IQ4_NL and IQ4_XS plus 128.
template <typename F, int AT>
struct UnpackIq4 : UnpackNibbles<F, AT, -128> {
    template <int STEP>
    static void read(const std::uint8_t* block, __m512i* to) {
        const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(IQ4_VALUES));
        const __m512i table = _mm512_broadcast_i32x4(_mm_add_epi8(values, _mm_set1_epi8(-128)));
        const __m512i indices = UnpackNibbles<F, AT, -128>::template bytes<STEP>(block);
        bytes_apart(_mm512_shuffle_epi8(table, low_bytes(indices)), to);
        bytes_apart(_mm512_shuffle_epi8(table, high_bytes(indices)), to + 2);
    }
};

template <> struct UnpackI16<IQ4_NL> : UnpackIq4<IQ4_NL, 2> {};
template <> struct UnpackI16<IQ4_XS> : UnpackIq4<IQ4_XS, 8> {};

// Upper halves stay where they are, which saves a shift: odd subblocks are read 16 times as large.
template <> struct UnpackI16<Q4_K> {
    static constexpr I16Order ORDER = I16Order::HALVES;
    static constexpr int LEAST = 0;

    template <int STEP>
    static void read(const std::uint8_t* block, __m512i* to) {
        const __m512i even = load_64_bytes(block + 16 + STEP * STEP_ELEMENTS / 2), odd = words_down<8>(even);
        const __m512i upper = _mm512_set1_epi16(0xF0);
        to[0] = low_words(even);
        to[1] = low_words(odd);
        to[2] = _mm512_and_si512(even, upper);
        to[3] = _mm512_and_si512(odd, upper);
    }
};

template <> struct UnpackI16<Q5_K> {
    static constexpr I16Order ORDER = I16Order::HALVES;
    static constexpr int LEAST = 0;

    template <int STEP>
    static void read(const std::uint8_t* block, __m512i* to) {
        constexpr int FIRST_SUBBLOCK = STEP * STEP_SUBBLOCKS;
        const __m512i four = load_64_bytes(block + 48 + STEP * STEP_ELEMENTS / 2), fifth = in_both_halves(block + 16);
        bytes_apart(with_fifth<FIRST_SUBBLOCK>(low_bytes(four), fifth), to);
        bytes_apart(with_fifth<FIRST_SUBBLOCK + 1>(high_bytes(four), fifth), to + 2);
    }

  private:
    // Insert the fifth bits of subblocks P and P + 2.
    template <int P>
    static __m512i with_fifth(__m512i four, __m512i bits) {
        constexpr long long FIRST = (4 - P) & 63, SECOND = (2 - P) & 63;
        const __m512i moved = _mm512_rolv_epi64(
            bits, _mm512_setr_epi64(FIRST, FIRST, FIRST, FIRST, SECOND, SECOND, SECOND, SECOND));
        return merged<0x10>(four, moved);
    }
};

// Integers are read with their sign, 256 times as large, above a byte of zeros: the 16 elements of a scale have no
// sums.
template <> struct UnpackI16<Q6_K> {
    static constexpr I16Order ORDER = I16Order::BYTES;
    static constexpr int LEAST = 0;
    static constexpr float UNIT = 256;  // value that an integer of 1 is read as

    template <int STEP>
    static void read(const std::uint8_t* block, __m512i* to) {
        const __m512i four = load_64_bytes(block + STEP * STEP_ELEMENTS / 2);
        const __m512i two = in_both_halves(block + 128 + STEP * SUBBLOCK);
        const __m512i up = _mm512_sllv_epi64(two, _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2));
        const __m512i down = _mm512_srlv_epi64(two, _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2));
        apart(merged<0x30>(low_bytes(four), up), to);
        apart(merged<0x30>(high_bytes(four), down), to + 2);
    }

  private:
    static void apart(__m512i bytes, __m512i* to) {
        const __m512i integers = _mm512_sub_epi8(bytes, _mm512_set1_epi8(32));
        to[0] = _mm512_slli_epi16(integers, 8);
        to[1] = _mm512_and_si512(integers, _mm512_set1_epi16(static_cast<short>(0xFF00)));
    }
};

// Formats with a fifth bit, which is tested in place: the fifth bits of each half are one word of a block.
template <typename F, int HALVES_AT, int FIFTH_AT, int LEAST_OF>
struct UnpackFiveBits : UnpackNibbles<F, HALVES_AT, LEAST_OF> {
    template <int STEP>
    static void read(const std::uint8_t* block, __m512i* to) {
        block += STEP * STEP_SUBBLOCKS * F::BYTES;
        halves_apart(words_of_four<F, HALVES_AT>(block), to);
        const __m512i bits[] = {words_of_four<F, FIFTH_AT, true>(block), words_of_four<F, FIFTH_AT + 2, true>(block)};
        const __m512i even = _mm512_broadcast_i32x4(_mm_setr_epi16(1, 4, 16, 64, 256, 1024, 4096, 16384));
        const __m512i odd = _mm512_slli_epi16(even, 1);
        unrolled<4>([&](auto v) __attribute__((always_inline)) {
            const __mmask32 set = _mm512_test_epi16_mask(bits[v / 2], v % 2 ? odd : even);
            to[v] = _mm512_mask_add_epi16(to[v], set, to[v], _mm512_set1_epi16(16));
        });
    }
};

template <> struct UnpackI16<Q5_0> : UnpackFiveBits<Q5_0, 6, 2, -16> {};
template <> struct UnpackI16<Q5_1> : UnpackFiveBits<Q5_1, 8, 4, 0> {};

template <> struct UnpackI16<Q8_0> {
    static constexpr I16Order ORDER = I16Order::BYTES;
    static constexpr int LEAST = -128;

    template <int STEP>
    static void read(const std::uint8_t* block, __m512i* to) {
        block += STEP * STEP_SUBBLOCKS * Q8_0::BYTES + 2;
        for (int pair = 0; pair < 2; ++pair, block += 2 * Q8_0::BYTES) {
            const __m512i both = halves_from(block, block + Q8_0::BYTES);
            bytes_apart(_mm512_xor_si512(both, _mm512_set1_epi8(-128)), to + 2 * pair);
        }
    }
};

}  // namespace ostinato

#endif
