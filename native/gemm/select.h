// Choice of a micro-kernel: the rows of ops/ukernels.py that this module has, by the rules that the file has in Python.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/thread_group.h"
#include "gemm/epilogue.h"
#include "gemm/expert_routing.h"
#include "gemm/weights.h"
#include "ukernels.h"

namespace ostinato {

// Weights of a type that is known at run time; `n` rows, of each expert if there are several.
struct Rhs {
    const std::byte* first;
    DType dtype;
    std::int64_t n, k;
    const float* scales = nullptr;
    std::int64_t group = 0;  // 0: a scale per row
    const BlockFormat* format = nullptr;
    const float* bias = nullptr;  // of experts; that of a linear is in its epilogue

    // Return the bit of its kind in RHS_KINDS.
    unsigned kind() const {
        if (!format) return 1u << (!scales ? 0 : group == 0 ? 1 : 2);
        std::size_t at = 0;
        while (std::strcmp(RHS_KINDS[at], format->name) != 0) ++at;
        return 1u << at;
    }

    // Return the weights of one of several experts.
    Rhs of_expert(std::int64_t expert) const {
        const std::int64_t row = expert * n;
        Rhs one = *this;
        one.first += row * (format ? format->row_bytes(k) : k * DTYPE_BYTES[dtype]);
        if (scales) one.scales += row * (group ? (k + group - 1) / group : 1);
        if (bias) one.bias += row;
        return one;
    }
};

// One `linear` of m tokens with rows of one kind.
struct Gemm {
    std::int64_t m;
    const std::byte* lhs;
    std::int64_t lhs_stride;
    DType lhs_type;
    Rhs rhs;
    Epilogue epilogue;
    std::byte* out;
    DType out_type;
};

class Candidates;

// One `moe`.
struct MoeGemm {
    std::int64_t tokens, top_k;
    DType type;
    const std::byte* x;
    std::int64_t x_stride;
    const float* choices;
    MoeShape layer;
    Rhs up, down;
    const Candidates &up_rows, &down_rows;  // of `linear`, for one expert
    const std::byte* residual;
    std::int64_t residual_stride;
    std::byte* y;
    std::int64_t y_stride;
};

constexpr bool is_in_module(const UkernelRow& row) {
    return (row.needs & ~FEATURES) == 0 && (row.without & FEATURES) == 0;
}

// What is known of a product before its m. `rhs` has the kinds of all its matrices. `lhs` is INT8 if tokens are quantised.
struct Problem {
    Op op;
    DType lhs;
    unsigned rhs;
    std::int64_t k;
    bool fixed_order;
};

// The rows that accept a problem, in the table's order. Made when arguments are read; m is known only in a replay.
class Candidates {
  public:
    explicit Candidates(const Problem& problem) {
        for (const UkernelRow& row : UKERNELS) {
            const bool is_accepted = is_in_module(row) && row.op == problem.op && (row.lhs >> problem.lhs & 1) != 0 &&
                                     (problem.rhs & ~row.rhs) == 0 && problem.k >= row.min_k &&
                                     problem.k <= row.max_k && problem.k % row.k_multiple == 0 &&
                                     (row.fixed_order || !problem.fixed_order);
            if (is_accepted) rows_[count_++] = static_cast<std::uint8_t>(&row - UKERNELS);
        }
    }

    bool empty() const { return count_ == 0; }

    // Return the index in UKERNELS of the first row that takes m, which `m_of` counts in the row's unit. The last row has no
    // bounds.
    template <typename MOf>
    int at(MOf&& m_of) const {
        for (int i = 0; i + 1 < count_; ++i) {
            const UkernelRow& row = UKERNELS[rows_[i]];
            const std::int64_t m = m_of(row.unit);
            if (row.min_m <= m && m <= row.max_m) return rows_[i];
        }
        return rows_[count_ - 1];
    }

  private:
    int count_ = 0;
    std::uint8_t rows_[std::size(UKERNELS)] = {};
};

template <typename T>
constexpr DType DTYPE = std::is_same_v<T, float> ? FLOAT32 : std::is_same_v<T, bf16> ? BFLOAT16 : FLOAT16;

// Kinds of weights that have the type W in memory, with tokens of type T.
template <typename T, typename W>
constexpr unsigned KINDS = std::is_same_v<W, T> ? 1u : std::is_same_v<W, std::int8_t> ? 2u | 4u : ~7u;

// Return whether a row of this module has the driver for these types; other pairs of types are not compiled.
template <Driver DRIVER, typename T, typename W>
constexpr bool is_used() {
    for (const UkernelRow& row : UKERNELS) {
        // Tokens of any type are quantised to int8.
        const bool has_types = ((row.lhs >> DTYPE<T> | row.lhs >> INT8) & 1) != 0 && (row.rhs & KINDS<T, W>) != 0;
        if (is_in_module(row) && row.driver == DRIVER && has_types) return true;
    }
    return false;
}

// Call `body(T{}, W{})` for the types of tokens and weights.
template <typename Body>
void with_types(DType type, DType weights, Body&& body) {
    with_dtype(type, [&](auto value) {
        using T = decltype(value);
        if (weights == INT8) {
            body(T{}, std::int8_t{});
        } else if (weights == UINT8) {
            body(T{}, BlockByte{});
        } else {
            body(T{}, T{});
        }
    });
}

template <typename Call>
using Run = void (*)(const ThreadGroup&, const Call&);

template <typename Call, Op OP, template <Driver> typename Function, std::size_t AT>
constexpr Run<Call> function_of_row() {
    if constexpr (UKERNELS[AT].op == OP && is_in_module(UKERNELS[AT])) {
        return Function<UKERNELS[AT].driver>::run;
    } else {
        return nullptr;
    }
}

template <typename Call>
using Functions = std::array<Run<Call>, std::size(UKERNELS)>;

// Return the functions of an operation's rows, and null for the others. `Function<DRIVER>::run` must compile for each
// row that this module has.
template <typename Call, Op OP, template <Driver> typename Function, std::size_t... AT>
constexpr Functions<Call> functions_of_rows(std::index_sequence<AT...>) {
    return {function_of_row<Call, OP, Function, AT>()...};
}

extern const Functions<Gemm> LINEAR_FUNCTIONS;    // gemm/table_linear.cpp
extern const Functions<MoeGemm> MOE_FUNCTIONS;  // gemm/table_moe.cpp

}  // namespace ostinato
