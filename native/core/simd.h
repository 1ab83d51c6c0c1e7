// Vectors of floats for any target, and the storage types that kernels load and store.
//
// All arithmetic is in float32. The code uses the compiler's vector extension, and intrinsics only for instructions
// that it cannot express.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "sizes.h"

namespace ostinato {

#if defined(OSTINATO_HAS_AVX512)
constexpr int LANES = 16;
#elif defined(OSTINATO_HAS_AVX2)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
static_assert(LANES <= VECTOR);

typedef float Float __attribute__((vector_size(LANES * 4)));
typedef std::int32_t Int __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t UInt __attribute__((vector_size(LANES * 4)));
typedef std::uint16_t U16Vec __attribute__((vector_size(LANES * 2)));
typedef std::int8_t LaneBytes __attribute__((vector_size(LANES)));

constexpr float LOG2_E = 1.44269504f;
// 1.5 * 2^23: adding it rounds a float to the nearest integer, which is then in the lowest bits.
constexpr float ROUND = 12582912.0f;

struct bf16 {
    std::uint16_t bits;
};

struct half {
    std::uint16_t bits;
};

// One integer of a block-fixed-point token (quant/quantize_tokens_i16.h).
struct i16 {
    std::int16_t integer;
};

inline Float splat(float value) { return value - Float{}; }  // minus zero, unlike plus zero, costs nothing

#if defined(__aarch64__)
using float16 = __fp16;  // older GCC knows _Float16 there in C alone
#else
using float16 = _Float16;
#endif

template <typename To, typename From>
inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &value, sizeof(to));
    return to;
}

// Scalars.

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) { return bits_as<float>(std::uint32_t{value.bits} << 16); }

inline float to_float(half value) {
#if defined(OSTINATO_HAS_AVX2)
    return _cvtsh_ss(value.bits);
#else
    return static_cast<float>(bits_as<float16>(value.bits));
#endif
}

// Return the nearest value of a storage type, ties to even; NaN stays NaN.
template <typename T>
inline T from_float(float value);

template <>
inline float from_float<float>(float value) {
    return value;
}

template <>
inline bf16 from_float<bf16>(float value) {
    const auto bits = bits_as<std::uint32_t>(value);
    if (value != value) return {static_cast<std::uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline half from_float<half>(float value) {
#if defined(OSTINATO_HAS_AVX2)
    return {static_cast<std::uint16_t>(_cvtss_sh(value, 0))};
#else
    return {bits_as<std::uint16_t>(static_cast<float16>(value))};
#endif
}

// Vectors: load and store LANES elements of a storage type, at any address.

inline Float load(const float* from) {
    Float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline Float load(const bf16* from) {
#if defined(OSTINATO_HAS_AVX512)  // one instruction; the compiler's own conversion takes four
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (Float)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(OSTINATO_HAS_AVX2)  // two instructions; the compiler's own conversion takes six
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Float)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
    U16Vec bits;
    std::memcpy(&bits, from, sizeof(bits));
    return bits_as<Float>(__builtin_convertvector(bits, UInt) << 16);
#endif
}

inline Float load(const half* from) {
#if defined(OSTINATO_HAS_AVX512)
    return (Float)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(OSTINATO_HAS_AVX2)
    return (Float)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Float value;
    for (int i = 0; i < LANES; ++i) value[i] = to_float(from[i]);
    return value;
#endif
}

inline Float load(const std::int8_t* from) {
#if defined(OSTINATO_HAS_AVX512)
    return (Float)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(OSTINATO_HAS_AVX2)
    return (Float)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    LaneBytes bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(__builtin_convertvector(bytes, Int), Float);
#endif
}

inline void store(float* to, Float value) { std::memcpy(to, &value, sizeof(value)); }

inline void store(bf16* to, Float value) {
#if defined(OSTINATO_HAS_AVX512_BF16)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to, &rounded, sizeof(rounded));
#else
    const UInt bits = bits_as<UInt>(value);
    const UInt nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const UInt wide = value != value ? (bits >> 16) | 0x40 : nearest;
#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512)  // the compiler's own conversion takes more
    const __m128i low = _mm256_castsi256_si128((__m256i)wide), high = _mm256_extracti128_si256((__m256i)wide, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
#else
    const U16Vec rounded = __builtin_convertvector(wide, U16Vec);
    std::memcpy(to, &rounded, sizeof(rounded));
#endif
#endif
}

inline void store(half* to, Float value) {
#if defined(OSTINATO_HAS_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)value, 0));
#elif defined(OSTINATO_HAS_AVX2)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)value, 0));
#else
    for (int i = 0; i < LANES; ++i) to[i] = from_float<half>(value[i]);
#endif
}

// Store past the caches to an address that is a multiple of the vector's size, for memory that was not read. Other
// threads see it after `end_streams`.
inline void stream(float* to, Float value) {
#if defined(OSTINATO_HAS_AVX512)
    _mm512_stream_ps(to, (__m512)value);
#elif defined(OSTINATO_HAS_AVX2)
    _mm256_stream_ps(to, (__m256)value);
#else
    store(to, value);
#endif
}

template <typename T>
inline void stream(T* to, U16Vec bits) {
    static_assert(sizeof(T) == 2);
#if defined(OSTINATO_HAS_AVX512)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)bits);
#elif defined(OSTINATO_HAS_AVX2)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)bits);
#else
    std::memcpy(to, &bits, sizeof(bits));
#endif
}

inline void end_streams() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Load `count` elements, fewer than LANES. The others are zero, and no memory behind the elements is read.
template <typename T>
inline Float load_masked(const T* from, int count) {
    T elements[LANES] = {};
    std::memcpy(elements, from, sizeof(T) * count);
    return load(elements);
}

template <typename T>
inline void store_masked(T* to, Float value, int count) {
    T elements[LANES];
    store(elements, value);
    std::memcpy(to, elements, sizeof(T) * count);
}

// Load up to LANES elements.
template <typename T>
inline Float load_partial(const T* from, std::int64_t count) {
    return count >= LANES ? load(from) : load_masked(from, static_cast<int>(count));
}

template <typename T>
inline void store_partial(T* to, Float value, std::int64_t count) {
    count >= LANES ? store(to, value) : store_masked(to, value, static_cast<int>(count));
}

inline Float max(Float a, Float b) { return a > b ? a : b; }

// Return a * b + c with one rounding, for sums that must have the same bits wherever they are compiled: the compiler
// may fuse differently from place to place.
inline Float fma(Float a, Float b, Float c) {
#if defined(OSTINATO_HAS_AVX512)
    return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(OSTINATO_HAS_AVX2)
    return (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

inline float sum(Float value) {
#if defined(OSTINATO_HAS_AVX512)
    return _mm512_reduce_add_ps((__m512)value);
#elif defined(OSTINATO_HAS_AVX2)
    const __m128 fours = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    const __m128 twos = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
    return _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehdup_ps(twos)));
#else
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) value[i] += value[i + width];
    }
    return value[0];
#endif
}

inline float reduce_max(Float value) {
#if defined(OSTINATO_HAS_AVX512)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float best = value[0];
    for (int i = 1; i < LANES; ++i) best = value[i] > best ? value[i] : best;
    return best;
#endif
}

// Return e^x to 2 units in the last place: x = n log 2 + r with |r| <= log(2) / 2, e^r by its Taylor polynomial of
// degree 7, and 2^n through the exponent bits. The result is 0 where it would be denormal, and infinity above 88.37;
// NaN stays NaN.
inline Float exp(Float x) {
    constexpr float LEAST = -87.3f, MOST = 88.37f;
    const Float clamped = x < LEAST ? splat(LEAST) : (x > MOST ? splat(MOST) : x);
    const Float shifted = clamped * LOG2_E + ROUND;
    const Float n = shifted - ROUND;
    const Float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    Float p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // The low bits of `shifted` hold n as an integer.
    const Int exponent = (bits_as<Int>(shifted) - bits_as<std::int32_t>(ROUND) + 127) << 23;
    Float result = p * bits_as<Float>(exponent);
    result = x < LEAST ? Float{} : result;
    result = x > MOST ? splat(std::numeric_limits<float>::infinity()) : result;
    return x != x ? x : result;
}

// Compute 2^r for each |r| <= 1/2, by the polynomial of degree 5 with p(0) = 1 and the least maximum relative error,
// 9e-8.
template <int N>
inline void exp2_fraction(const Float (&r)[N], Float (&power)[N]) {
    constexpr float FACTORS[] = {0.00967151273f, 0.0555073374f, 0.240222421f, 0.693146978f, 1.0f};
    for (int i = 0; i < N; ++i) power[i] = splat(0.00132647273f);
    for (const float factor : FACTORS) {
        for (int i = 0; i < N; ++i) power[i] = fma(power[i], r[i], splat(factor));
    }
}

inline Float exp2_fraction(Float r) {
    const Float one[] = {r};
    Float power[1];
    exp2_fraction(one, power);
    return power[0];
}

// Return 2^x to 2 units in the last place for x up to 127: x = n + r with |r| <= 1/2. The result is 0 where it would be
// denormal; NaN stays NaN.
inline Float exp2(Float x) {
    constexpr float LEAST = -126.0f;
    const Float clamped = x < LEAST ? splat(LEAST) : x;  // minus infinity has no fraction
#if defined(OSTINATO_HAS_AVX512)
    const Float n = (Float)_mm512_roundscale_ps((__m512)clamped, 0);
#else
    const Float shifted = clamped + ROUND;
    const Float n = shifted - ROUND;
#endif
    const Float r = clamped - n;
    const Float p = exp2_fraction(r);
#if defined(OSTINATO_HAS_AVX512)
    const Float result = (Float)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    // Unsigned, since it may overflow for NaN, whose result is not used.
    const UInt exponent = (bits_as<UInt>(shifted) - bits_as<std::uint32_t>(ROUND)) << 23;
    const Float result = x != x ? x : bits_as<Float>(bits_as<UInt>(p) + exponent);
#endif
    return x < LEAST ? Float{} : result;
}

// Return log(1 + u) for u >= 0, to a few units in the last place, also for a tiny u. With 1 + u = 2^n m and m near 1,
// it is n log 2 + 2 artanh((m - 1) / (m + 1)) by its series, plus the rounding error of 1 + u divided by 1 + u.
inline Float log1p(Float u) {
    constexpr std::int32_t SQRT_HALF = 0x3F3504F3;  // the bits of sqrt(0.5)
    const Float whole = 1.0f + u;
    const Float lost = u - (whole - 1.0f);
    const Int n = (bits_as<Int>(whole) - SQRT_HALF) >> 23;
    const Float exponent = __builtin_convertvector(n, Float);
    const Float m = bits_as<Float>(bits_as<Int>(whole) - (n << 23));
    const Float s = (m - 1.0f) / (m + 1.0f);
    const Float squared = s * s;
    Float p = splat(2.0f / 9);
    p = fma(p, squared, splat(2.0f / 7));
    p = fma(p, squared, splat(2.0f / 5));
    p = fma(p, squared, splat(2.0f / 3));
    const Float logarithm = fma(p * squared, s, 2.0f * s) + fma(exponent, splat(-2.12194440e-4f), lost / whole);
    return fma(exponent, splat(0.693359375f), logarithm);
}

// Return log(1 + e^x), which is x from 20 on, as in torch.
inline Float softplus(Float x) {
    const Float small = log1p(exp(x > 20.0f ? Float{} : x));
    return x > 20.0f ? x : small;
}

// Compute x / (1 + e^-x) for each, to a few units in the last place. Several values are computed step by step together,
// since each step depends on the one before and a processor looks ahead over few values.
template <int N>
inline void silu(Float (&x)[N]) {
#if defined(OSTINATO_HAS_AVX2)
    // Clamped, unlike exp2: beyond +-87 the quotient is 1 or 0.
    constexpr float LIMIT = 87.0f, LOG2_E_REST = 1.92596299e-8f;
    Float minus[N], shifted[N], r[N], power[N];
    for (int i = 0; i < N; ++i) {
#if defined(OSTINATO_HAS_AVX512)
        const __m512 value = (__m512)x[i];
        minus[i] = -(Float)_mm512_min_ps(_mm512_set1_ps(LIMIT), _mm512_max_ps(_mm512_set1_ps(-LIMIT), value));
#else
        const __m256 value = (__m256)x[i];
        minus[i] = -(Float)_mm256_min_ps(_mm256_set1_ps(LIMIT), _mm256_max_ps(_mm256_set1_ps(-LIMIT), value));
#endif
    }
    for (int i = 0; i < N; ++i) shifted[i] = fma(minus[i], splat(LOG2_E), splat(ROUND));
    for (int i = 0; i < N; ++i) r[i] = fma(minus[i], splat(LOG2_E), ROUND - shifted[i]);
    for (int i = 0; i < N; ++i) r[i] = fma(minus[i], splat(LOG2_E_REST), r[i]);
    exp2_fraction(r, power);
    // The addition cancels all but the low bits of `ROUND`. Unsigned, since it may overflow for NaN.
    for (int i = 0; i < N; ++i) power[i] = bits_as<Float>(bits_as<UInt>(power[i]) + (bits_as<UInt>(shifted[i]) << 23));
    for (int i = 0; i < N; ++i) {
#if defined(OSTINATO_HAS_AVX512)
        // A reciprocal estimate of 14 bits and one Newton step: a division would take longer than all other steps.
        const __m512 divisor = (__m512)(1.0f + power[i]), estimate = _mm512_rcp14_ps(divisor);
        const __m512 rest = _mm512_fnmadd_ps(divisor, estimate, _mm512_set1_ps(2.0f));
        const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x[i], _mm512_set1_ps(-LIMIT), _CMP_NLT_UQ);
        x[i] = x[i] * (Float)_mm512_maskz_mul_ps(counts, estimate, rest);
#else
        x[i] = x[i] / (x[i] < -LIMIT ? splat(std::numeric_limits<float>::infinity()) : 1.0f + power[i]);
#endif
    }
#else
    for (int i = 0; i < N; ++i) x[i] = x[i] / (1.0f + exp(-x[i]));
#endif
}

inline Float silu(Float x) {
    Float one[] = {x};
    silu(one);
    return one[0];
}

// Return x times the normal distribution function of x, to a relative error of 1e-6. That function is half of erfc(-x /
// sqrt(2)), and erfc(z) = e^(-z^2) p(t) / (1 + 2 z) for z >= 0 and t = (z - 2) / (z + 2), with the best polynomial of
// degree 9 up to z = 10; beyond, it is 0.
inline Float gelu(Float x) {
    Float z = max(x, -x) * 0.707106781f;
    z = z > 10.0f ? splat(10.0f) : z;
    const Float t = (z - 2.0f) / (z + 2.0f);
    Float p = splat(-0.000409451156f);
    p = fma(p, t, splat(-0.00124133723f));
    p = fma(p, t, splat(0.00132048578f));
    p = fma(p, t, splat(0.00864263663f));
    p = fma(p, t, splat(-0.008061659f));
    p = fma(p, t, splat(-0.0542076565f));
    p = fma(p, t, splat(0.164055553f));
    p = fma(p, t, splat(-0.166031092f));
    p = fma(p, t, splat(-0.0927639922f));
    p = fma(p, t, splat(1.27697839f));
    const Float half = 0.5f * exp(-0.5f * x * x) * p / (1.0f + 2.0f * z);
    return x * (x < 0.0f ? half : 1.0f - half);
}

// Return the approximation 0.5 x (1 + tanh(y)) of gelu, y = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + e^(-2 y)).
inline Float gelu_tanh(Float x) {
    const Float y = 1.59576912f * x * (1.0f + 0.044715f * x * x);
    return x / (1.0f + exp(-y));
}

inline float exp(float x) { return exp(splat(x))[0]; }

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

// Return log(1 + e^x), which is x from 20 on, as in torch.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Element types of tensors. The first three are storage types of values that are computed in float32.
enum DType : int { FLOAT32, BFLOAT16, FLOAT16, INT8, INT32, INT64, FLOAT64, UINT8 };
constexpr std::int64_t DTYPE_BYTES[] = {4, 2, 2, 1, 4, 8, 8, 1};

// Call `body` with `number`, from 1 to MOST, as a constant.
template <int MOST, typename Body>
inline void with_constant(std::int64_t number, Body&& body) {
    if constexpr (MOST > 1) {
        if (number < MOST) return with_constant<MOST - 1>(number, body);
    }
    body(std::integral_constant<int, MOST>{});
}

// Call `body` with a value of the storage type that `dtype` names.
template <typename Body>
inline void with_dtype(DType dtype, Body&& body) {
    if (dtype == FLOAT32) {
        body(float{});
    } else if (dtype == BFLOAT16) {
        body(bf16{});
    } else {
        body(half{});
    }
}

}  // namespace ostinato
