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
// `group` is not 0, or is in blocks of `format`. It may have a `bias` [experts, n].
template <typename W>
struct ExpertWeights {
    const W* first;
    const float* scales;
    std::int64_t group, n, k;
    const BlockFormat* format = nullptr;
    const float* bias = nullptr;

    WeightView<W> of(std::int64_t expert) const {
        const W* weights = first + expert * n * row_stride<W>(format, k);
        if (format) return {weights, n, k, nullptr, 0, format};
        if (!scales || group == 0) return {weights, n, k};
        return {weights, n, k, scales + expert * n * ((k + group - 1) / group), group};
    }

    // Return the scales of an expert's rows, if each row has one, or null; and its biases, or null.
    const float* row_scales(std::int64_t expert) const { return scales && group == 0 ? scales + expert * n : nullptr; }
    const float* biases(std::int64_t expert) const { return bias ? bias + expert * n : nullptr; }
};

}  // namespace ostinato
