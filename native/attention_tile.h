// The arithmetic of attention on one tile: so many query rows against TILE keys of absolute positions.
//
// What a query row gets from a tile does not depend on which other rows are there: every score is one sum over head_dim
// in order, every weighted value one sum over the tile's keys in order, however many rows and columns a block of
// registers holds. Keys that a row does not see have a weight of 0, and adding 0 times a finite value changes no sum.
#pragma once

#include <algorithm>
#include <cstddef>

#include "simd.h"
#include "transpose.h"

namespace ostinato {
namespace attention {

constexpr int TILE = 128;  // keys
constexpr int PANELS = TILE / LANES;

// A word is what one lane multiplies at once: an element as a float, or, where the CPU adds products of pairs of bf16,
// two elements. Words are 32 bits wide and travel in vectors of floats.
template <typename T>
struct Words {
    static constexpr int ELEMENTS = 1;

    static Float load(const T* from) { return ostinato::load(from); }

    static void multiply_add(Float& sum, Float vector, const float* scalar) { sum += vector * *scalar; }

    // The weights that the values are multiplied by, as words; -> what they have become by rounding.
    static Float store_weights(float* words, int vector, Float weights) {
        store(words + vector * LANES, weights);
        return weights;
    }

    // LANES words of one dimension of `ELEMENTS` keys each.
    static Float join(Float first, Float) { return first; }
};

#if defined(__AVX512BF16__)
template <>
struct Words<bf16> {
    static constexpr int ELEMENTS = 2;

    static Float load(const bf16* from) { return ostinato::load(reinterpret_cast<const float*>(from)); }

    static void multiply_add(Float& sum, Float vector, const float* scalar) {
        std::int32_t word;
        std::memcpy(&word, scalar, sizeof(word));
        sum = (Float)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)vector, (__m512bh)_mm512_set1_epi32(word));
    }

    static Float store_weights(float* words, int vector, Float weights) {
        bf16* to = reinterpret_cast<bf16*>(words) + vector * LANES;
        store(to, weights);
        return ostinato::load(to);
    }

    static Float join(Float first, Float second) {
        return bits_as<Float>((bits_as<UInt>(first) >> 16) | bits_as<UInt>(second));
    }
};
#endif

// Sizes of one head, in words and vectors; what is beyond head_dim is 0.
template <typename T>
struct Head {
    std::int64_t dim;

    std::int64_t words() const { return (dim + Words<T>::ELEMENTS - 1) / Words<T>::ELEMENTS; }
    std::int64_t padded_words() const { return (words() + LANES - 1) / LANES * LANES; }
    std::int64_t padded_dim() const { return (dim + LANES - 1) / LANES * LANES; }

    // Words [begin, begin + LANES) of a head.
    Float load_words(const T* head, std::int64_t begin) const {
        constexpr int COUNT = LANES * Words<T>::ELEMENTS;
        const std::int64_t first = begin * Words<T>::ELEMENTS;
        if (dim - first >= COUNT) return Words<T>::load(head + first);
        T elements[COUNT] = {};
        std::memcpy(elements, head + first, sizeof(T) * (dim - first));
        return Words<T>::load(elements);
    }
};

// Fetches `count` heads, which the next tile needs, in so many `steps` between those of this one: a block's neighbours
// are not those of the text, so the hardware foresees little, and many lines at once would only wait for each other.
class Fetch {
  public:
    template <typename T>
    Fetch(const T* const* heads, std::int64_t count, std::int64_t dim, std::int64_t steps)
        : heads_(reinterpret_cast<const char* const*>(heads)), count_(count), bytes_(sizeof(T) * dim), steps_(steps) {}

    void step() {
        done_ += count_;
        for (; next_ * steps_ < done_; ++next_) {
            for (std::int64_t i = 0; i < bytes_; i += 64) __builtin_prefetch(heads_[next_] + i, 0, 2);
        }
    }

  private:
    const char* const* heads_;
    std::int64_t count_, bytes_, steps_, next_ = 0, done_ = 0;
};

// `keys`: LANES heads, null where there is none -> `panel` [padded words, LANES]: per word, all keys beside each other.
template <typename T>
void pack_keys(Head<T> head, const T* const* keys, float* panel, Fetch& fetch) {
    for (std::int64_t word = 0; word < head.words(); word += LANES) {
        Float rows[LANES];
        for (int i = 0; i < LANES; ++i) rows[i] = keys[i] ? head.load_words(keys[i], word) : Float{};
        fetch.step();
        transpose(rows);
        for (int i = 0; i < LANES; ++i) store(panel + (word + i) * LANES, rows[i]);
    }
}

// `values`: the heads of as many keys as a word holds, null where there is none -> `packed` [padded_dim] words.
template <typename T>
void pack_values(Head<T> head, const T* const* values, float* packed) {
    for (std::int64_t i = 0; i < head.dim; i += LANES) {
        Float parts[2] = {};
        for (int j = 0; j < Words<T>::ELEMENTS; ++j) {
            if (values[j]) parts[j] = load_some(values[j] + i, head.dim - i);
        }
        store(packed + i, Words<T>::join(parts[0], parts[1]));
    }
}

// One block of registers of `out` [ROWS, COLUMNS * LANES] = left [ROWS, depth] x right. Element k of a column of
// vectors stands at `right + k * step`, the next column `column` words further.
template <typename T, int ROWS, int COLUMNS>
void product_block(const float* left, std::int64_t left_stride, const float* right, std::int64_t step,
                   std::int64_t column, std::int64_t depth, float* out, std::int64_t out_stride) {
    Float sums[ROWS][COLUMNS] = {};
    for (std::int64_t k = 0; k < depth; ++k) {
        Float vectors[COLUMNS];
        for (int j = 0; j < COLUMNS; ++j) vectors[j] = load(right + k * step + j * column);
        for (int i = 0; i < ROWS; ++i) {
            for (int j = 0; j < COLUMNS; ++j) {
                Words<T>::multiply_add(sums[i][j], vectors[j], left + i * left_stride + k);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < COLUMNS; ++j) store(out + i * out_stride + j * LANES, sums[i][j]);
    }
}

constexpr int BLOCK_ROWS = 6;
constexpr int BLOCK_COLUMNS = LANES == 8 ? 2 : 4;  // what fits into the registers

template <typename T, int COLUMNS, int ROWS = BLOCK_ROWS, typename... Args>
void product_rows(std::int64_t rows, const Args&... args) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return product_rows<T, COLUMNS, ROWS - 1>(rows, args...);
    }
    product_block<T, ROWS, COLUMNS>(args...);
}

// As `product_block`, for `rows` up to BLOCK_ROWS and any number of columns of vectors from `begin` to `end`.
template <typename T>
void product(std::int64_t rows, std::int64_t begin, std::int64_t end, const float* left, std::int64_t left_stride,
             const float* right, std::int64_t step, std::int64_t column, std::int64_t depth, float* out,
             std::int64_t out_stride) {
    std::int64_t j = begin;
    const auto block = [&](auto columns) {
        constexpr int COLUMNS = decltype(columns)::value;
        for (; j + COLUMNS <= end; j += COLUMNS) {
            product_rows<T, COLUMNS>(rows, left, left_stride, right + j * column, step, column, depth, out + j * LANES,
                                     out_stride);
        }
    };
    block(std::integral_constant<int, BLOCK_COLUMNS>{});
    block(std::integral_constant<int, 2>{});
    block(std::integral_constant<int, 1>{});
}

struct Softmax {
    float largest, total;
};

// Turns scores [TILE] of keys [first, end) into weights exp(scale * score - largest) as words, which take no more room;
// those of the other keys are 0. The total is of the weights as they were rounded.
template <typename T>
__attribute__((noinline)) Softmax softmax(float* scores, std::int64_t first, std::int64_t end, float scale) {
    const int vectors = static_cast<int>((end + LANES - 1) / LANES);
    const auto from = static_cast<std::int32_t>(first), to = static_cast<std::int32_t>(end);
    Int key;
    for (int i = 0; i < LANES; ++i) key[i] = i;
    const Float none = splat(-std::numeric_limits<float>::infinity());
    Float best = none;
    for (int i = 0; i < vectors; ++i) {
        const Float score = load(scores + i * LANES) * scale;
        const Float seen = (key >= from) & (key < to) ? score : none;
        store(scores + i * LANES, seen);
        best = max(best, seen);
        key += LANES;
    }
    const float most = largest(best);
    Float total = {};
    for (int i = 0; i < vectors; ++i) {
        total += Words<T>::store_weights(scores, i, exp(load(scores + i * LANES) - most));
    }
    for (int i = vectors; i < PANELS; ++i) Words<T>::store_weights(scores, i, Float{});
    return {most, sum(total)};
}

// Adds a tile's part to a row's, both being weighted sums [padded_dim] whose weights are relative to their own largest
// score (Milakov and Gimelshein 2018, eq. 4).
__attribute__((noinline)) inline void merge(Softmax& row, float* sums, Softmax tile, const float* tile_sums,
                                            std::int64_t padded_dim) {
    const float most = row.largest > tile.largest ? row.largest : tile.largest;
    Float apart = {};
    apart[0] = row.largest - most;
    apart[1] = tile.largest - most;
    const Float factors = exp(apart);
    const float old = factors[0], added = factors[1];
    row = {most, row.total * old + tile.total * added};
    for (std::int64_t i = 0; i < padded_dim; i += LANES) {
        store(sums + i, load(sums + i) * old + load(tile_sums + i) * added);
    }
}

// The quotient, where a zero has no sign: how a sum of zeros came by one must not show.
template <typename T>
__attribute__((noinline)) void finish(Softmax row, const float* sums, T* out, std::int64_t dim) {
    const float factor = 1.0f / row.total;
    std::int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(out + i, load(sums + i) * factor + 0.0f);
    if (i < dim) store_first(out + i, load(sums + i) * factor + 0.0f, static_cast<int>(dim - i));
}

}  // namespace attention
}  // namespace ostinato
