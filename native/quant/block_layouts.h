// The numbers in blocks of each format: integers, scales and minima. ops/quant/dequantize.py defines them.
//
// A weight is scale * integer, or scale * integer + minimum. A struct per format has: the elements and bytes of a
// block; the elements that share a scale; whether there are minima, or a zero point that is subtracted from the
// integers; the bits of an integer and, below 8, the `value` that they stand for; the scales and minima, and whether
// these are float16 at the beginning of the block; and the integers of 32 elements. Formats of float8 have numbers in
// place of integers.
#pragma once

#include "block_sizes.h"
#include "quant/block_format.h"
#include "quant/float8.h"

namespace ostinato {

typedef std::int8_t Bytes32 __attribute__((vector_size(SUBBLOCK)));

inline float half_at(const std::uint8_t* from) {
    half value;
    std::memcpy(&value, from, sizeof(value));
    return to_float(value);
}

inline std::uint32_t word_at(const std::uint8_t* from) {
    std::uint32_t value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline Bytes32 bytes_at(const std::uint8_t* from) {
    Bytes32 value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

// Return the same integer 32 times.
inline Bytes32 bytes_of(int value) { return static_cast<std::int8_t>(value) - Bytes32{}; }

// Return the lower halves of 16 bytes, then the upper halves.
inline Bytes32 halves_at(const std::uint8_t* from) {
#if defined(OSTINATO_HAS_AVX2)
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i moved = _mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4));
    return (Bytes32)_mm256_and_si256(moved, _mm256_set1_epi8(15));
#else
    Bytes32 value;
    for (int i = 0; i < SUBBLOCK / 2; ++i) {
        value[i] = from[i] & 15;
        value[i + SUBBLOCK / 2] = from[i] >> 4;
    }
    return value;
#endif
}

// Return the bits of 32 bytes from bit `shift` on, masked by `mask`.
inline Bytes32 bits_at(const std::uint8_t* from, int shift, int mask) {
    const Bytes32 bytes = bytes_at(from);
#if defined(OSTINATO_HAS_AVX2)
    const __m256i moved = _mm256_srl_epi16((__m256i)bytes, _mm_cvtsi32_si128(shift));
    return (Bytes32)_mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)));
#else
    typedef std::uint8_t Unsigned __attribute__((vector_size(SUBBLOCK)));
    return (Bytes32)((Unsigned)bytes >> shift & static_cast<std::uint8_t>(mask));
#endif
}

// Multiply bytes below 16 by 16.
inline Bytes32 four_bits_up(Bytes32 bytes) {
#if defined(OSTINATO_HAS_AVX2)
    return (Bytes32)_mm256_slli_epi16((__m256i)bytes, 4);  // GCC would double each four times
#else
    return bytes << 4;
#endif
}

// Return 32 bytes: 16 for each bit that is set, else 0.
inline Bytes32 fifth_bits_at(const std::uint8_t* from) {
    const std::uint32_t bits = word_at(from);
#if defined(OSTINATO_HAS_AVX2)
    const __m256i spread = _mm256_shuffle_epi8(
        _mm256_set1_epi32(static_cast<int>(bits)),
        _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m256i own = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ULL));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);
    return (Bytes32)_mm256_and_si256(is_set, _mm256_set1_epi8(16));
#else
    Bytes32 value;
    for (int i = 0; i < SUBBLOCK; ++i) value[i] = (bits >> i & 1) << 4;
    return value;
#endif
}

// Values of the indices 0 to 15 in IQ4_NL and IQ4_XS.
alignas(16) inline constexpr std::int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                           1,    13,   25,  38,  53,  69,  89,  113};

// Values of the codes 0 to 15 of MXFP4, doubled.
alignas(16) inline constexpr std::int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline Bytes32 values_of(const std::int8_t (&values)[16], Bytes32 index) {
#if defined(OSTINATO_HAS_AVX2)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
    return (Bytes32)_mm256_shuffle_epi8(table, (__m256i)index);
#else
    Bytes32 value;
    for (int i = 0; i < SUBBLOCK; ++i) value[i] = values[index[i]];
    return value;
#endif
}

// Blocks of 32 with one float16 scale, and in some formats a minimum behind it.
template <int BYTES_OF, bool MINIMUM, int BITS_OF, int LEAST = 0>
struct Small {
    static constexpr int ELEMENTS = SUBBLOCK, BYTES = BYTES_OF, SCALED = SUBBLOCK;
    static constexpr bool HAS_MINIMUM = MINIMUM, HAS_ZERO = false;
    static constexpr int BITS = BITS_OF;
    static constexpr bool HALF_SCALED = true;
    static constexpr int value(int bits) { return bits + LEAST; }
    static int least(const std::uint8_t*) { return LEAST; }
    static void scales(const std::uint8_t* block, float* scale, float* minimum) {
        *scale = half_at(block);
        if (MINIMUM) *minimum = half_at(block + 2);
    }
};

struct Q4_0 : Small<18, false, 4, -8> {
    static const std::uint8_t* halves(const std::uint8_t* block, int) { return block + 2; }
    static Bytes32 integers(const std::uint8_t* block, int) { return halves_at(block + 2) - bytes_of(8); }
};

struct Q4_1 : Small<20, true, 4> {
    static const std::uint8_t* halves(const std::uint8_t* block, int) { return block + 4; }
    static Bytes32 integers(const std::uint8_t* block, int) { return halves_at(block + 4); }
};

struct Q5_0 : Small<22, false, 5, -16> {
    static Bytes32 integers(const std::uint8_t* block, int) {
        return (halves_at(block + 6) | fifth_bits_at(block + 2)) - bytes_of(16);
    }
};

struct Q5_1 : Small<24, true, 5> {
    static Bytes32 integers(const std::uint8_t* block, int) { return halves_at(block + 8) | fifth_bits_at(block + 4); }
};

struct Q8_0 : Small<34, false, 8> {
    static Bytes32 integers(const std::uint8_t* block, int) { return bytes_at(block + 2); }
};

struct IQ4_NL : Small<18, false, 4> {
    static constexpr int value(int bits) { return IQ4_VALUES[bits]; }
    static Bytes32 integers(const std::uint8_t* block, int) { return values_of(IQ4_VALUES, halves_at(block + 2)); }
};

// A scale of 8 bits, the exponent of a power of 2, then doubled numbers: half of that power is the scale.
struct MXFP4 : Small<17, false, 4> {
    static constexpr bool HALF_SCALED = false;
    static constexpr int value(int bits) { return MXFP4_VALUES[bits]; }
    static void scales(const std::uint8_t* block, float* scale, float*) {
        const std::uint32_t exponent = block[0];
        *scale = bits_as<float>(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }
    static Bytes32 integers(const std::uint8_t* block, int) { return values_of(MXFP4_VALUES, halves_at(block + 1)); }
};

#if defined(OSTINATO_HAS_AVX2)
// Return the 6-bit integers of a block of Q4_K or Q5_K: eight scales, then eight minima.
inline __m128i six_bit_integers(const std::uint8_t* block) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));
    const __m128i first_two = _mm_shuffle_epi32(packed, _MM_SHUFFLE(2, 1, 2, 1));
    const __m128i low = _mm_and_si128(first_two, _mm_set1_epi8(0x3F));
    const __m128i four = _mm_srlv_epi32(_mm_shuffle_epi32(packed, _MM_SHUFFLE(3, 3, 3, 3)), _mm_setr_epi32(0, 4, 0, 4));
    const __m128i high = _mm_or_si128(_mm_and_si128(four, _mm_set1_epi8(0x0F)),
                                      _mm_and_si128(_mm_srli_epi32(first_two, 2), _mm_set1_epi8(0x30)));
    return _mm_unpacklo_epi32(low, high);
}
#endif

// Blocks of 256 with a scale of scales and a scale of minima, and 6 bits of each for eight subblocks.
template <int BYTES_OF, int BITS_OF>
struct WithSixBits {
    static constexpr int ELEMENTS = 256, BYTES = BYTES_OF, SCALED = SUBBLOCK;
    static constexpr bool HAS_MINIMUM = true, HAS_ZERO = false, HALF_SCALED = false;
    static constexpr int BITS = BITS_OF;
    static constexpr int value(int bits) { return bits; }
    static void scales(const std::uint8_t* block, float* scale, float* minimum) {
#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)
        // Values stay in registers: a load that spans several recent stores has to wait.
        const __m128i bytes = six_bit_integers(block);
        const __m128 halves = _mm_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block)));
        const auto floats = [](__m128i eight) { return (Float)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)); };
        store(scale, floats(bytes) * (Float)_mm256_broadcastss_ps(halves));
        store(minimum, floats(_mm_unpackhi_epi64(bytes, bytes)) * -(Float)_mm256_broadcastss_ps(_mm_movehdup_ps(halves)));
#else
        const std::uint32_t first = word_at(block + 4), second = word_at(block + 8), third = word_at(block + 12);
        std::uint32_t words[4] = {first & 0x3F3F3F3F, (third & 0x0F0F0F0F) | (first >> 2 & 0x30303030),
                                  second & 0x3F3F3F3F, (third >> 4 & 0x0F0F0F0F) | (second >> 2 & 0x30303030)};
        const float d = half_at(block), m = -half_at(block + 2);
        std::int8_t bytes[16];
        std::memcpy(bytes, words, sizeof(bytes));
        if constexpr (LANES <= 8) {
            for (int i = 0; i < 8; i += LANES) {
                store(scale + i, load(bytes + i) * d);
                store(minimum + i, load(bytes + 8 + i) * m);
            }
        } else {
            for (int i = 0; i < 8; ++i) scale[i] = d * bytes[i];
            for (int i = 0; i < 8; ++i) minimum[i] = m * bytes[8 + i];
        }
#endif
    }
};

struct Q4_K : WithSixBits<144, 4> {
    static Bytes32 integers(const std::uint8_t* block, int subblock) {
        return bits_at(block + 16 + subblock / 2 * SUBBLOCK, subblock % 2 * 4, 15);
    }
};

struct Q5_K : WithSixBits<176, 5> {
    static Bytes32 integers(const std::uint8_t* block, int subblock) {
        return bits_at(block + 48 + subblock / 2 * SUBBLOCK, subblock % 2 * 4, 15) | four_bits_up(bits_at(block + 16, subblock, 1));
    }
};

struct Q6_K {
    static constexpr int ELEMENTS = 256, BYTES = 210, SCALED = 16;
    static constexpr bool HAS_MINIMUM = false, HAS_ZERO = false, HALF_SCALED = false;
    static constexpr int BITS = 6;
    static constexpr int value(int bits) { return bits - 32; }
    static void scales(const std::uint8_t* block, float* scale, float*) {
        const float d = half_at(block + 208);
        const auto* bytes = reinterpret_cast<const std::int8_t*>(block + 192);
        for (int i = 0; i < 16; i += LANES) store(scale + i, load(bytes + i) * d);
    }
    static Bytes32 integers(const std::uint8_t* block, int subblock) {
        const int second = subblock / 4, quarter = subblock % 4;
        const Bytes32 low = bits_at(block + second * 64 + quarter % 2 * SUBBLOCK, quarter / 2 * 4, 15);
        const Bytes32 high = four_bits_up(bits_at(block + 128 + second * SUBBLOCK, quarter * 2, 3));
        return (low | high) - bytes_of(32);
    }
};

struct IQ4_XS {
    static constexpr int ELEMENTS = 256, BYTES = 136, SCALED = SUBBLOCK;
    static constexpr bool HAS_MINIMUM = false, HAS_ZERO = false, HALF_SCALED = false;
    static constexpr int BITS = 4;
    static constexpr int value(int bits) { return IQ4_VALUES[bits]; }
    static void scales(const std::uint8_t* block, float* scale, float*) {
        const float d = half_at(block);
        const int high = block[2] | block[3] << 8;
        for (int i = 0; i < 8; ++i) {
            const int low = block[4 + i / 2] >> i % 2 * 4 & 15;
            scale[i] = d * static_cast<float>((low | (high >> 2 * i & 3) << 4) - 32);
        }
    }
    static Bytes32 integers(const std::uint8_t* block, int subblock) {
        return values_of(IQ4_VALUES, halves_at(block + 8 + 16 * subblock));
    }
};

// The first 32 bits of an int4 block: a scale, with the zero point in its lowest bits.
constexpr int INT4_HEAD_BYTES = 4;
constexpr std::int64_t int4_bytes(std::int64_t elements) { return INT4_HEAD_BYTES + elements / 2; }

inline std::uint32_t int4_head(float scale, float zero) {
    return bits_as<std::uint32_t>(scale) | static_cast<std::uint32_t>(zero);
}

inline float int4_scale(std::uint32_t head) { return bits_as<float>(head & ~std::uint32_t{INT4_ZERO_BITS}); }

// Return the nearest number that leaves the bits of the zero point free.
inline float rounded_int4_scale(float scale) { return int4_scale(bits_as<std::uint32_t>(scale) + (INT4_ZERO_BITS + 1) / 2); }

// Own format: the head, then 16 bytes per subblock.
template <int SIZE>
struct Int4 {
    static constexpr int ELEMENTS = SIZE, BYTES = static_cast<int>(int4_bytes(SIZE)), SCALED = SIZE;
    static constexpr bool HAS_MINIMUM = false, HAS_ZERO = true, HALF_SCALED = false;
    static constexpr int BITS = 4;
    static constexpr int value(int bits) { return bits; }
    static void scales(const std::uint8_t* block, float* scale, float*) {
        *scale = int4_scale(word_at(block));
    }
    static int least(const std::uint8_t* block) { return -block[0]; }
    static const std::uint8_t* halves(const std::uint8_t* block, int subblock) { return block + INT4_HEAD_BYTES + 16 * subblock; }
    static Bytes32 integers(const std::uint8_t* block, int subblock) {
        return halves_at(halves(block, subblock)) - bytes_of(block[0]);
    }
};

// Own format: a float32 scale, then float8 numbers.
template <int SIZE>
struct Fp8 {
    static constexpr int ELEMENTS = SIZE, BYTES = 4 + SIZE, SCALED = SIZE;
    static constexpr bool HAS_MINIMUM = false, HAS_ZERO = false, HALF_SCALED = false;
    static constexpr int BITS = 8;
    static void scales(const std::uint8_t* block, float* scale, float*) {
        *scale = bits_as<float>(word_at(block)) * FLOAT8_FACTOR;
    }
    static const float8* numbers(const std::uint8_t* block, int subblock) {
        return reinterpret_cast<const float8*>(block + 4) + subblock * SUBBLOCK;
    }
};

template <typename F>
inline constexpr bool IS_FLOAT8 = false;
template <int SIZE>
inline constexpr bool IS_FLOAT8<Fp8<SIZE>> = true;

// True for formats with a dot product for i16 tokens.
template <typename F>
inline constexpr bool HAS_I16_PRODUCT = !IS_FLOAT8<F> && !std::is_same_v<F, MXFP4>;

template <typename F>
constexpr bool has_size(const BlockSize& size) {
    return F::ELEMENTS == size.elements && F::BYTES == size.bytes;
}

static_assert(has_size<Q4_0>(block_sizes::Q4_0) && has_size<Q4_1>(block_sizes::Q4_1));
static_assert(has_size<Q5_0>(block_sizes::Q5_0) && has_size<Q5_1>(block_sizes::Q5_1));
static_assert(has_size<Q8_0>(block_sizes::Q8_0) && has_size<IQ4_NL>(block_sizes::IQ4_NL));
static_assert(has_size<Q4_K>(block_sizes::Q4_K) && has_size<Q5_K>(block_sizes::Q5_K));
static_assert(has_size<Q6_K>(block_sizes::Q6_K) && has_size<IQ4_XS>(block_sizes::IQ4_XS));
static_assert(has_size<MXFP4>(block_sizes::MXFP4));
static_assert(has_size<Int4<32>>(block_sizes::int4_g32) && has_size<Int4<64>>(block_sizes::int4_g64));
static_assert(has_size<Int4<128>>(block_sizes::int4_g128) && has_size<Fp8<32>>(block_sizes::fp8_g32));
static_assert(has_size<Fp8<64>>(block_sizes::fp8_g64) && has_size<Fp8<128>>(block_sizes::fp8_g128));

}  // namespace ostinato
