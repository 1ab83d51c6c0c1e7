// Left-hand side of a product: the type that tokens are multiplied in, and their division into blocks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm/block_ops.h"
#include "quant/quantize_tokens_i16.h"

namespace ostinato {

// Type in which tokens of storage type T are multiplied: bfloat16 where the target has its products, else float32.
#if defined(OSTINATO_BF16_PRODUCTS)
template <typename T>
using LhsType = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;
#else
template <typename T>
using LhsType = float;
#endif

// The same where weights are read in place: on ARM, bfloat16 has no products with weights in blocks.
template <typename T, typename W>
using InPlaceLhsType = std::conditional_t<LANES == 4 && std::is_same_v<W, BlockByte>, float, LhsType<T>>;

// Tokens in blocks of up to `most`, as equal as possible.
struct EvenBlocks {
    std::int64_t tokens;
    int count;

    EvenBlocks(std::int64_t tokens, int most) : tokens(tokens), count(static_cast<int>((tokens + most - 1) / most)) {}

    std::int64_t begin(int number) const { return tokens * number / count; }
    int size(int number) const { return static_cast<int>(begin(number + 1) - begin(number)); }
};

// The same for tokens that are multiplied with rounded weights.
struct RoundedBlocks : EvenBlocks {
    using EvenBlocks::EvenBlocks;
};

// Tokens in blocks of `most`, and one block with the rest: a larger block spends less of its time on sums across
// vectors.
struct FullBlocks {
    std::int64_t tokens;
    int most, count;

    FullBlocks(std::int64_t tokens, int most)
        : tokens(tokens), most(most), count(static_cast<int>((tokens + most - 1) / most)) {}

    std::int64_t begin(int number) const { return std::int64_t{number} * most; }
    int size(int number) const { return static_cast<int>(std::min<std::int64_t>(most, tokens - begin(number))); }
};

// Blocks of tokens for rows of W. With 16 registers, 3 tokens fill them best, and 6 are two blocks of 3, not 4 and 2.
template <typename W>
using TokenBlocks = std::conditional_t<LANES == 8 && !std::is_same_v<W, BlockByte>, EvenBlocks, FullBlocks>;

}  // namespace ostinato
