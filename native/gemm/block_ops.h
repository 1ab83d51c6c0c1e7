// Weights in blocks: what a kernel is told of a format (ops/blocks/formats.py has their names and sizes), and where each
// one's own functions are.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/arguments.h"
#include "core/amx.h"
#include "gemm/ukernels/dot.h"
#include "quant/block_format.h"

namespace ostinato {

// What products with tokens of storage type X call. A row has `count` blocks.
template <typename X>
struct BlockOps {
    // sums[t * stride + r] = tokens[t] . rows[r] for up to AT_ONCE tokens and DOT_ROWS rows, while `prefetch` of the rows
    // `next` are fetched.
    void (*dot)(int tokens, const Tokens<X>& x, const BlockByte* const* rows, const BlockByte* const* next, int prefetch,
                std::int64_t count, float* sums, int stride);
    // to[i] = the elements `begin` to `end` of a row, both multiples of PART.
    void (*dequantize)(const BlockByte* row, std::int64_t begin, std::int64_t end, X* to);
};

// One line of each row that is to come, for every line of those that are multiplied.
struct RowPrefetch {
    const BlockByte* const* rows;
    int count;

    void operator()(std::int64_t from, std::int64_t bytes) const {
        for (int p = 0; p < count; ++p) {
            for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(&rows[p][from + i].byte, 0, 2);
        }
    }
};

constexpr int MAX_BF16_TOKENS = 12;  // tokens of bfloat16 that are multiplied with rounded weights together, at the most

// Processors that multiply bfloat16 in vectors alone make rows bfloat16 as wide_rows.h has it.
#if defined(__AVX512BF16__) && !defined(OSTINATO_TILES)
#define OSTINATO_DEQUANT_BF16
#endif

constexpr int DEQUANT_STRIDE = DEQUANT_SPAN + SUBBLOCK;  // from row to row of a span: an odd number of cache lines

// A few tokens times a span of DOT_ROWS rows that is bfloat16. Meanwhile a share of the groups of the span that comes next,
// of these rows or of others, is made so, and what is further away is fetched.
struct DequantStep {
    Tokens<bf16> tokens;
    const bf16* rows;
    bf16* made;
    const BlockByte *next[MR], *to_come[MR];
    int subblocks, next_subblocks;
    int share, shares;
    bool is_first, is_last;  // of a row's spans
    Float* totals;           // [tokens][DOT_ROWS] from span to span
    float* sums;             // [tokens][DOT_ROWS], `sums_stride` from token to token, of the last
    int sums_stride;
};

struct BlockFormat {
    const char* name;
    std::int64_t elements, bytes;  // of a block
    BlockOps<float> with_f32;
    BlockOps<bf16> with_bf16;  // without AVX512-BF16, `dot` is null
    // As `dot`, which multiplies exactly, with weights rounded to bfloat16: from so many tokens on, in blocks of 3 to
    // WIDE_TOKENS. Without AVX512-BF16 it is null.
    decltype(with_bf16.dot) dot_bf16 = nullptr;
    int min_bf16_tokens = 0;
    // With rounded weights: 3 to DOT_TOKENS tokens. Without OSTINATO_WIDE_ROWS it is null.
    void (*dequant_dot)(int tokens, const DequantStep& work) = nullptr;
    // panel[(i - begin) * stride] = the elements i, `begin` to `end`, of LANES rows, both multiples of PART. With AVX2 alone,
    // else null.
    void (*pack)(const BlockByte* const* rows, std::int64_t begin, std::int64_t end, int stride, Float* panel) = nullptr;
    // Of tokens in 16-bit integers, with scales for each `fixed_span` elements. A span of 0: there is none.
    BlockOps<i16> with_i16 = {};
    int i16_scale_span = 0;
    I16Order i16_order = I16Order::LINEAR;
#if defined(__AVX2__) && !defined(__AVX512F__)
    // As `pack`, integers in pairs as fixed_panel.h has them: of each `integer_sum` elements a scale, and of each part a
    // minimum where there are any.
    void (*pack_i16)(const BlockByte* const* rows, std::int64_t begin, std::int64_t end, int stride, __m256i* to,
                          Float* scales, Float* minima) = nullptr;
    int i16_sum = 0;
    bool has_minima = false;
#endif

    std::int64_t row_bytes(std::int64_t in) const { return in / elements * bytes; }

    template <typename X>
    const BlockOps<X>& products() const {
        if constexpr (std::is_same_v<X, bf16>) {
            return with_bf16;
        } else if constexpr (std::is_same_v<X, i16>) {
            return with_i16;
        } else {
            return with_f32;
        }
    }
};

// The format of that name, null if there is none.
const BlockFormat* block_format(const std::string& name);

// Rows of a matrix that have one format.
struct BlockPart {
    const BlockFormat* format;
    std::int64_t rows;
};

// All rows, one part behind the other; none where weights do not lie in blocks.
using BlockParts = std::vector<BlockPart>;

inline bool from_python(PyObject* value, BlockParts& to) {
    if (value == Py_None) return true;
    std::vector<std::pair<std::string, std::int64_t>> named;
    if (!nb::try_cast(nb::handle(value), named)) return false;
    for (const auto& [name, rows] : named) {
        const BlockFormat* format = block_format(name);
        if (!format) return false;
        to.push_back({format, rows});
    }
    return true;
}

// Bytes, or elements, from row to row of weights [rows, in].
template <typename W>
inline std::int64_t row_stride(const BlockFormat* format, std::int64_t in) {
    if constexpr (std::is_same_v<W, BlockByte>) {
        return format->row_bytes(in);
    } else {
        return in;
    }
}

}  // namespace ostinato
