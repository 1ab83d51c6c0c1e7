// Weights of a product: rows of a storage type, perhaps with scales, or in blocks of a format; and the weights of
// experts.
#pragma once

#include "gemm/block_ops.h"

namespace ostinato {

// Rows [n, k] of a weight, with `scales` [n, k / group] if it is quantised in groups, or in blocks of `format`.
template <typename W>
struct WeightView {
    const W* first;
    std::int64_t n, k;
    const float* scales = nullptr;
    std::int64_t group = 0;
    const BlockFormat* format = nullptr;
    bool fixed_order = false;  // multiply blocks exactly for any number of tokens

    std::int64_t stride() const { return row_stride<W>(format, k); }
    const W* at(std::int64_t row) const { return first + row * stride(); }
};

// A weight of all experts, [experts, n, k]. If quantised, it has `scales` [experts, n], or [experts, n, k / group] if
// `group` is not 0, or is in blocks of `format`.
template <typename W>
struct ExpertWeights {
    const W* first;
    const float* scales;
    std::int64_t group, n, k;
    const BlockFormat* format = nullptr;
    bool fixed_order = false;

    WeightView<W> of(std::int64_t expert) const {
        const W* weights = first + expert * n * row_stride<W>(format, k);
        if (format) return {weights, n, k, nullptr, 0, format, fixed_order};
        if (!scales || group == 0) return {weights, n, k};
        return {weights, n, k, scales + expert * n * ((k + group - 1) / group), group};
    }

    // Multiply the sums of rows `begin` to `end` of an expert by their scales, if each row has one.
    void scale(std::int64_t expert, std::int64_t begin, std::int64_t end, std::int64_t tokens, float* sums,
               int stride) const {
        if (!scales || group != 0) return;
        const float* from = scales + expert * n;
        for (std::int64_t row = begin; row < end; row += LANES) {
            const Float factor = load_partial(from + row, end - row);
            for (std::int64_t t = 0; t < tokens; ++t) {
                float* to = sums + t * stride + (row - begin);
                store(to, load(to) * factor);
            }
        }
    }
};

}  // namespace ostinato
