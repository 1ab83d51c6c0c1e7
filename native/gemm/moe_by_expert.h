// The experts of a mixture-of-experts layer as products of `linear`: the two matrices of each expert are multiplied by the
// row of ops/ukernels.py that `linear` takes for as many tokens as chose the expert.
//
// Choices are sorted by expert. Threads claim experts, or parts of an expert's outputs, and compute each alone. The
// results of a token's choices are added in ascending order of experts: neither the threads nor, in a fixed order, other
// tokens change a bit.
#pragma once

#include "gemm/select.h"

namespace ostinato {

constexpr std::int64_t TOKENS_OF_READING = 8;  // reading an expert's weights takes as long as multiplying these

// Parts of the outputs of each expert that has tokens, more of those that many tokens chose, for threads to claim.
class ExpertParts {
  public:
    // Divide `outputs` of each expert among threads; `ends` [experts] is room for the parts up to each expert's last.
    ExpertParts(const ThreadGroup& threads, const ExpertAssignment& chosen, std::int64_t outputs, std::int32_t* ends)
        : ends_(ends), experts_(chosen.experts) {
        std::int64_t total = 0, count = 0;
        const auto work = [&](std::int64_t e) { return chosen.count(e) == 0 ? 0 : chosen.count(e) + TOKENS_OF_READING; };
        for (std::int64_t e = 0; e < experts_; ++e) total += work(e);
        const std::int64_t wanted = threads.size == 1 ? 1 : threads.size * PARTS_PER_THREAD;
        const std::int64_t most = std::max<std::int64_t>(outputs / MIN_PART, 1);
        for (std::int64_t e = 0; e < experts_; ++e) {
            if (work(e) > 0) count += std::clamp<std::int64_t>(work(e) * wanted / total, 1, most);
            ends[e] = static_cast<std::int32_t>(count);
        }
    }

    // Call body(expert, view), in which this thread is alone with a part, for the parts that it claims.
    template <typename Body>
    void each(const ThreadGroup& threads, Body&& body) const {
        for (const std::int64_t number : threads.claims(ends_[experts_ - 1])) {
            const std::int64_t expert = std::upper_bound(ends_, ends_ + experts_, number) - ends_;
            const std::int32_t first = expert > 0 ? ends_[expert - 1] : 0;
            body(expert, threads.alone(static_cast<int>(number - first), ends_[expert] - first));
        }
    }

  private:
    std::int32_t* ends_;
    std::int64_t experts_;
};

// Compute y[t] = residual[t] + the sum of weight * result over the choices of each token, whose places among the sorted
// choices are by_token[t * top_k], in ascending order. `results` are `stride` apart.
template <typename T>
void add_results(const ThreadGroup& threads, const MoeGemm& g, const ExpertAssignment& chosen, const std::int32_t* by_token,
                 const float* results, std::int64_t stride) {
    constexpr int VECTORS = 4, WIDTH = VECTORS * LANES;
    const std::int64_t size = g.layer.size, widths = (size + WIDTH - 1) / WIDTH;
    const Range mine = threads.split(g.tokens * widths);
    for (std::int64_t number = mine.begin; number < mine.end; ++number) {
        const std::int64_t t = number / widths, begin = number % widths * WIDTH;
        Float total[VECTORS] = {};
        for (std::int64_t i = t * g.top_k; i < (t + 1) * g.top_k; ++i) {
            const std::int64_t at = by_token[i], place = chosen.order[at];
            const Float weight = splat(g.choices[t * g.top_k + place + g.top_k]);
            const float* result = results + at * stride + begin;
            for (int v = 0; v < VECTORS; ++v) total[v] = fma(weight, load(result + v * LANES), total[v]);
        }
        const T* residual = g.residual ? reinterpret_cast<const T*>(g.residual) + t * g.residual_stride : nullptr;
        T* y = reinterpret_cast<T*>(g.y) + t * g.y_stride;
        for (std::int64_t i = begin, v = 0; i < std::min(size, begin + WIDTH); i += LANES, ++v) {
            if (residual) total[v] += load_partial(residual + i, size - i);
            store_partial(y + i, total[v], size - i);
        }
    }
}

inline void run_by_expert(const ThreadGroup& threads, const MoeGemm& g) {
    const std::int64_t experts = g.layer.experts, places = g.tokens * g.top_k, bytes = DTYPE_BYTES[g.type];
    const std::int64_t stride = padded_stride(g.layer.size), inner_stride = padded_stride(g.layer.inner);

    auto* order = threads.thread_scratch<std::int32_t>(2 * places + g.tokens + 2 * experts + 1);
    std::int32_t *by_token = order + places, *counts = by_token + places, *starts = counts + g.tokens, *ends = starts + experts + 1;
    ExpertAssignment chosen{g.choices, g.tokens, g.top_k, experts, order, starts};
    chosen.sort();
    std::fill(counts, counts + g.tokens, 0);
    for (std::int64_t at = 0; at < places; ++at) {
        const std::int64_t t = chosen.token(at);
        by_token[t * g.top_k + counts[t]++] = static_cast<std::int32_t>(at);
    }

    // Results take the place of the tokens, which are copied for each expert that has several.
    std::byte* shared = threads.group_scratch<std::byte>(places * (inner_stride * bytes + stride * sizeof(float)));
    std::byte *copies = shared, *inners = shared + places * stride * sizeof(float);
    const auto token_at = [&](std::int64_t at) { return g.x + chosen.token(at) * g.x_stride * bytes; };
    const Range mine = threads.split(places);
    for (std::int64_t at = mine.begin; at < mine.end; ++at) {
        if (chosen.count(chosen.expert(order[at])) == 1) continue;
        std::memcpy(copies + at * stride * bytes, token_at(at), g.layer.size * bytes);
    }
    // Even one token has copies if it chose an expert twice, as with infinite scores.
    bool has_copies = false;
    for (std::int64_t e = 0; e < experts; ++e) has_copies |= chosen.count(e) > 1;
    if (has_copies) threads.barrier();

    const auto multiply = [&](std::int64_t expert, const ThreadGroup& alone, const std::byte* lhs, std::int64_t lhs_stride,
                              const Rhs& rhs, const Candidates& rows, Epilogue o, std::byte* out, DType out_type) {
        const std::int64_t m = chosen.count(expert);
        const Rhs weights = rhs.of_expert(expert);
        o.expert_bias = weights.bias;
        LINEAR_FUNCTIONS[rows.at([=](Unit) { return m; })](alone, {m, lhs, lhs_stride, g.type, weights, o, out, out_type});
    };
    const Epilogue of_up{nullptr, nullptr, nullptr, nullptr, 0, inner_stride, g.layer.inner, g.layer.activation, nullptr, g.layer.clamp};
    ExpertParts(threads, chosen, g.layer.inner, ends).each(threads, [&](std::int64_t expert, const ThreadGroup& alone) {
        const std::int64_t begin = starts[expert];
        const std::byte* lhs = chosen.count(expert) == 1 ? token_at(begin) : copies + begin * stride * bytes;
        multiply(expert, alone, lhs, stride, g.up, g.up_rows, of_up, inners + begin * inner_stride * bytes, g.type);
    });
    threads.barrier();
    const Epilogue of_down{nullptr, nullptr, nullptr, nullptr, 0, stride, g.layer.size, NONE};
    ExpertParts(threads, chosen, g.layer.size, ends).each(threads, [&](std::int64_t expert, const ThreadGroup& alone) {
        const std::int64_t begin = starts[expert];
        multiply(expert, alone, inners + begin * inner_stride * bytes, inner_stride, g.down, g.down_rows, of_down,
                 shared + begin * stride * sizeof(float), FLOAT32);
    });
    threads.barrier();
    with_dtype(g.type, [&](auto type) {
        add_results<decltype(type)>(threads, g, chosen, by_token, reinterpret_cast<const float*>(shared), stride);
    });
}

}  // namespace ostinato
