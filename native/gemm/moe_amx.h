// The experts of a mixture-of-experts layer on matrix units: gemm/moe.cpp for many tokens.
//
// The tokens of each expert are packed as right operands, and so are the intermediate values: sums [16 rows, 16 tokens]
// of the first product become tiles of the second in place. Threads share the rows of each expert, and add whole sums,
// expert after expert.
#pragma once

#include "gemm/large_m_amx.h"

#if defined(OSTINATO_TILES)
#include "gemm/expert_routing.h"

namespace ostinato {
namespace tiles {

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

// Return rows of an expert's weight: `half[i]` and the 15 behind it, up to `end[i]`.
template <typename W>
TileRows<W> expert_rows(const ExpertWeights<W>& stack, std::int64_t expert, const std::int64_t (&half)[2], const std::int64_t (&end)[2]) {
    const WeightView<W> all = stack.of(expert);
    const std::int64_t groups = all.scales ? (all.k + all.group - 1) / all.group : 0;
    TileRows<W> rows;
    rows.in = all.k;
    rows.group = all.scales ? all.group : 0;
    rows.format = all.format;
    for (int r = 0; r < ROWS; ++r) {
        const std::int64_t row = half[r / SIDE] + r % SIDE;
        if (row >= end[r / SIDE]) continue;
        rows.row[r] = all.at(row);
        if (all.scales) rows.scales[r] = all.scales + row * groups;
    }
    return rows;
}

// Store two rows of values [16 tokens] as the pairs of a tile's row.
inline void store_pairs(Float first, Float second, bf16* to) {
    bf16 low[SIDE], high[SIDE];
    ostinato::store(low, first);
    ostinato::store(high, second);
    for (int t = 0; t < SIDE; ++t) {
        to[2 * t] = low[t];
        to[2 * t + 1] = high[t];
    }
}

// Choices of each expert in blocks of 16, expert after expert, up to `most` blocks at a time.
struct ExpertBlocks {
    const ExpertAssignment& chosen;
    std::int64_t most;

    std::int64_t count() const {
        std::int64_t all = 0;
        for (std::int64_t e = 0; e < chosen.experts; ++e) all += blocks_of(chosen.count(e));
        return all;
    }

    // Call body(expert, next, first block, first choice, choices) for the chosen experts in ascending order; `next` is
    // the expert of the next call, or of this one if it is the last.
    template <typename Body>
    void each(Body&& body) const {
        std::int64_t block = 0, next = after(-1);
        while (next < chosen.experts) {
            const std::int64_t expert = next, end = chosen.starts[expert + 1];
            next = after(expert);
            for (std::int64_t from = chosen.starts[expert]; from < end; from += most * SIDE) {
                const std::int64_t choices = std::min(most * SIDE, end - from);
                body(expert, from + choices < end || next == chosen.experts ? expert : next, block, from, choices);
                block += blocks_of(choices);
            }
        }
    }

  private:
    // Return the next chosen expert, or the number of experts.
    std::int64_t after(std::int64_t expert) const {
        do ++expert;
        while (expert < chosen.experts && chosen.count(expert) == 0);
        return expert;
    }
};

template <typename T>
void store_with_residual(const float* sums, const T* residual, T* y, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += LANES) {
        Float value = ostinato::load(sums + i);
        if (residual) value += load_partial(residual + i, end - i);
        store_partial(y + i, value, end - i);
    }
}

// Call body(expert, first block, first choice, choices, row) for each panel of `mine`, `width` rows of an expert from
// `row` on, with their sums in `work`. `rows_of(expert, row)` returns the rows.
template <typename RowsOf, typename Body>
void each_panel(const ExpertBlocks& blocks, const Packed& packed, Range mine, std::int64_t width, const Work& work,
                RowsOf&& rows_of, Body&& body) {
    if (mine.begin == mine.end) return;
    blocks.each([&](std::int64_t expert, std::int64_t next, std::int64_t block, std::int64_t begin, std::int64_t choices) {
        const Packed tokens{packed.tile(block, 0), blocks_of(choices), packed.steps};
        auto rows = rows_of(expert, mine.begin);
        for (std::int64_t row = mine.begin; row < mine.end; row += width) {
            const auto then = row + width < mine.end ? rows_of(expert, row + width) : rows_of(next, mine.begin);
            multiply_rows(rows, then, tokens, work);
            body(expert, block, begin, choices, row);
            rows = then;
        }
    });
}

template <typename W>
void run_experts(const ThreadGroup& threads, std::int64_t tokens, const bf16* x, std::int64_t x_stride, const float* choices,
                 std::int64_t top_k, const MoeShape& layer, const ExpertWeights<W>& up, const ExpertWeights<W>& down, const bf16* residual,
                 std::int64_t residual_stride, bf16* y, std::int64_t y_stride) {
    const std::int64_t size = layer.size, inner = layer.inner, places = tokens * top_k;
    const std::int64_t size_stride = padded_stride(size), size_steps = steps_of(size), inner_steps = steps_of(inner);
    const bool gated = has_gates(layer.activation);

    // The order of the choices comes first, then the scratch memory of a product.
    const std::int64_t numbers = (places + layer.experts + 1 + LANES - 1) / LANES * LANES;
    const std::int64_t most = std::min(blocks_of(places), blocks_in_cache(std::max(size_steps, inner_steps)));
    float* own = threads.thread_scratch<float>(numbers + Work::size(most));
    auto* order = reinterpret_cast<std::int32_t*>(own);
    ExpertAssignment chosen{choices, tokens, top_k, layer.experts, order, order + places};
    chosen.sort();
    const Work work(own + numbers);
    const ExpertBlocks blocks{chosen, most};
    const std::int64_t count = blocks.count();

    const std::int64_t packed_bytes = count * (size_steps + inner_steps) * ELEMENTS * sizeof(bf16);
    std::byte* shared = threads.group_scratch<std::byte>(packed_bytes + tokens * size_stride * sizeof(float));
    const Packed inputs{reinterpret_cast<bf16*>(shared), count, size_steps};
    const Packed inners{inputs.tile(count, 0), count, inner_steps};
    float* totals = reinterpret_cast<float*>(shared + packed_bytes);

    const Range packed = threads.split(count);
    blocks.each([&](std::int64_t, std::int64_t, std::int64_t block, std::int64_t begin, std::int64_t of_expert) {
        for (std::int64_t i = 0; i < of_expert; i += SIDE, ++block) {
            if (block < packed.begin || block >= packed.end) continue;
            pack_block(inputs, block, std::min<std::int64_t>(SIDE, of_expert - i), size,
                       [&](std::int64_t t) { return x + chosen.token(begin + i + t) * x_stride; });
            // Elements that no row writes must be zero, as the second product's weights are there.
            std::memset(inners.tile(block, inner_steps - 1), 0, ELEMENTS * sizeof(bf16));
        }
    });
    threads.barrier();

    const Scope scope;
    const std::int64_t up_width = gated ? SIDE : ROWS;
    const auto up_rows = [&](std::int64_t expert, std::int64_t row) {
        return expert_rows(up, expert, {row, row + (gated ? inner : SIDE)}, {inner, gated ? 2 * inner : inner});
    };
    each_panel(blocks, inputs, threads.split(inner, up_width), up_width, work, up_rows,
               [&](std::int64_t expert, std::int64_t block, std::int64_t, std::int64_t of_choices, std::int64_t row) {
                   const float *scales = up.row_scales(expert), *biases = up.biases(expert);
                   const auto sum = [&](std::int64_t b, std::int64_t r, std::int64_t number) {
                       Float value = ostinato::load(work.row(b, static_cast<int>(r)));
                       if (scales) value *= scales[number];
                       return biases ? value + biases[number] : value;
                   };
                   const auto value = [&](std::int64_t b, std::int64_t r) {
                       if (row + r >= inner) return Float{};
                       const Float second = gated ? sum(b, SIDE + r, inner + row + r) : Float{};
                       return activated(layer.activation, layer.clamp, sum(b, r, row + r), second);
                   };
                   for (std::int64_t b = 0; b < blocks_of(of_choices); ++b) {
                       for (std::int64_t r = 0; r < up_width && row + r < inner; r += 2) {
                           bf16* tile = inners.tile(block + b, (row + r) / DEPTH);
                           store_pairs(value(b, r), value(b, r + 1), tile + (row + r) % DEPTH / 2 * DEPTH);
                       }
                   }
               });
    threads.barrier();

    const Range mine = threads.split(size, ROWS);
    for (std::int64_t t = 0; t < tokens; ++t) {
        std::fill(totals + t * size_stride + mine.begin, totals + t * size_stride + mine.end, 0.0f);
    }
    const auto down_rows = [&](std::int64_t expert, std::int64_t row) {
        return expert_rows(down, expert, {row, row + SIDE}, {size, size});
    };
    each_panel(blocks, inners, mine, ROWS, work, down_rows,
               [&](std::int64_t expert, std::int64_t, std::int64_t begin, std::int64_t of_choices, std::int64_t row) {
                   const float *scales = down.row_scales(expert), *biases = down.biases(expert);
                   for (std::int64_t b = 0; b < blocks_of(of_choices); ++b) {
                       for (std::int64_t half = 0; half < ROWS && row + half < size; half += SIDE) {
                           Float square[SIDE];
                           for (int r = 0; r < SIDE; ++r) {
                               square[r] = ostinato::load(work.row(b, static_cast<int>(half + r)));
                               const std::int64_t number = row + half + r;
                               if (scales) square[r] *= number < size ? scales[number] : 0.0f;
                               if (biases && number < size) square[r] += biases[number];
                           }
                           transpose(square);
                           for (std::int64_t t = 0; t < std::min<std::int64_t>(SIDE, of_choices - b * SIDE); ++t) {
                               const std::int64_t choice = begin + b * SIDE + t, token = chosen.token(choice);
                               const float weight = choices[token * top_k + chosen.order[choice] + top_k];
                               float* total = totals + token * size_stride + row + half;
                               ostinato::store(total, fma(splat(weight), square[t], ostinato::load(total)));
                           }
                       }
                   }
               });
    for (std::int64_t t = 0; t < tokens; ++t) {
        const bf16* added = residual ? residual + t * residual_stride : nullptr;
        store_with_residual(totals + t * size_stride, added, y + t * y_stride, mine.begin, mine.end);
    }
}

}  // namespace tiles
}  // namespace ostinato
#endif
