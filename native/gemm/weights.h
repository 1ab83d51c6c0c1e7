// Weights of a product: rows of a storage type, perhaps with scales, or in blocks of a format.
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

}  // namespace ostinato
