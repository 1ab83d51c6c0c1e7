// Operands of attention: heads of queries, keys and values as words, and weights as words.
//
// A word is what one lane multiplies at once: one element as a float, or two elements where the CPU adds products of
// pairs of bf16. Words have 32 bits and are held in vectors of floats.
#pragma once

#include <algorithm>

#include "core/simd.h"

namespace ostinato {
namespace attention {

constexpr int TILE = ATTENTION_TILE;
constexpr int PANELS = TILE / LANES;

template <typename T>
struct LaneOperand {
    static constexpr int ELEMENTS = 1;

    template <typename S>
    static Float load(const S* from) {
        return ostinato::load(from);
    }

    static void multiply_add(Float& sum, Float vector, const float* scalar) {
        sum = fma(vector, splat(*scalar), sum);
    }

    // Store LANES words of weights, and add the rounded weights to `total`.
    static void store_weights(float* words, const Float (&weights)[1], Float& total) {
        store(words, weights[0]);
        total += weights[0];
    }

    // Rearrange LANES words of each of ELEMENTS keys so that a word holds all these keys' elements of one dimension.
    static void across_keys(Float (&)[1]) {}

    // Put sums over such words into the order of the dimensions.
    static void in_order(Float (&)[1]) {}
};

#if defined(OSTINATO_HAS_AVX512_BF16)
template <>
struct LaneOperand<bf16> {
    static constexpr int ELEMENTS = 2;

    static Float load(const bf16* from) { return ostinato::load(reinterpret_cast<const float*>(from)); }

    // int8 values are exact in bfloat16.
    static Float load(const std::int8_t* from) {
        const Float first = ostinato::load(from), second = ostinato::load(from + LANES);
        return (Float)(__m512bh)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }

    static void multiply_add(Float& sum, Float vector, const float* scalar) {
        std::int32_t word;
        std::memcpy(&word, scalar, sizeof(word));
        sum = (Float)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)vector, (__m512bh)_mm512_set1_epi32(word));
    }

    static void store_weights(float* words, const Float (&weights)[2], Float& total) {
        const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
        std::memcpy(words, &rounded, sizeof(rounded));
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
        total = (Float)_mm512_dpbf16_ps((__m512)total, rounded, ones);
    }

    // Within each 128 bits, the first vector takes dimensions 0 to 3 of 8, the second the others.
    static void across_keys(Float (&words)[2]) {
        const auto first = (__m512i)words[0], second = (__m512i)words[1];
        words[0] = (Float)_mm512_unpacklo_epi16(first, second);
        words[1] = (Float)_mm512_unpackhi_epi16(first, second);
    }

    static void in_order(Float (&sums)[2]) {
        const Float low = sums[0], high = sums[1];
        sums[0] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        sums[1] = __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
};
#endif

// Sizes of one head in words and vectors; elements beyond head_dim are 0.
template <typename T>
struct Head {
    std::int64_t dim;

    std::int64_t words() const { return (dim + LaneOperand<T>::ELEMENTS - 1) / LaneOperand<T>::ELEMENTS; }
    std::int64_t padded_words() const { return (words() + LANES - 1) / LANES * LANES; }
    std::int64_t padded_dim() const { return padded_words() * LaneOperand<T>::ELEMENTS; }

    // Load words [begin, begin + LANES) of a head that is stored as T or as int8.
    template <typename S>
    Float load_words(const S* head, std::int64_t begin) const {
        constexpr int COUNT = LANES * LaneOperand<T>::ELEMENTS;
        const std::int64_t first = begin * LaneOperand<T>::ELEMENTS;
        if (dim - first >= COUNT) return LaneOperand<T>::load(head + first);
        S elements[COUNT] = {};
        std::memcpy(elements, head + first, sizeof(S) * (dim - first));
        return LaneOperand<T>::load(elements);
    }
};

// Offsets of a tile's keys and values in elements from the start of either cache, for keys [first, end). Lanes without
// a key have the offset of the nearest; they are never used, or have a weight of 0.
struct KeyOffsets {
    std::int64_t first, end;
    std::int64_t offsets[TILE];
    std::int64_t heads[TILE];  // the same in heads of a token, for the scales

    // Fill the lanes that have no key with the nearest key's offset.
    void fill_up(std::int64_t (&of)[TILE]) const {
        for (std::int64_t i = 0; i < first; ++i) of[i] = of[first];
        for (std::int64_t i = end; i < TILE; ++i) of[i] = of[end - 1];
    }
};

// True if heads are prefetched line by line, evenly over the present work, as measured with AVX2 on Zen 3. There, all
// four lines of a head at once, in the first quarter of the work, delayed loads that were needed meanwhile.
constexpr bool LINE_BY_LINE = LANES == 8;

// Prefetch of the heads that are needed next, spread evenly over `steps` of the present work. Blocks are scattered in
// memory, so the hardware predicts little; many lines at once would only wait for each other.
class HeadPrefetch {
  public:
    template <typename T>
    HeadPrefetch(const T* cache, const KeyOffsets* places, std::int64_t dim, std::int64_t steps)
        : cache_(reinterpret_cast<const char*>(cache)), size_(sizeof(T)), bytes_(sizeof(T) * dim) {
        if (places == nullptr) return;
        next_ = places->offsets + places->first;
        end_ = places->offsets + places->end;
        const std::int64_t pieces = (end_ - next_) * (LINE_BY_LINE ? (bytes_ + LINE - 1) / LINE : 1);
        count_ = static_cast<int>((pieces + steps - 1) / steps);
    }

    [[gnu::always_inline]] void step() {
        for (int i = 0; i < count_ && next_ < end_; ++i) {
            const char* head = cache_ + *next_ * size_;
            do {
                __builtin_prefetch(head + at_, 0, 2);
                at_ += LINE;
            } while (!LINE_BY_LINE && at_ < bytes_);
            if (at_ >= bytes_) ++next_, at_ = 0;
        }
    }

  private:
    static constexpr std::int64_t LINE = 64;
    const char* cache_;
    std::int64_t size_, bytes_, at_ = 0;
    int count_ = 0;
    const std::int64_t *next_ = nullptr, *end_ = nullptr;
};

}  // namespace attention
}  // namespace ostinato
