// Functions of the rows of `moe` in ops/ukernels.py.

#include "gemm/moe_amx.h"
#include "gemm/moe_by_expert.h"
#include "gemm/select.h"

namespace ostinato {
namespace {

template <Driver DRIVER>
struct MoeFunction;

template <>
struct MoeFunction<Driver::MOE_BY_EXPERT> {
    static void run(const ThreadGroup& threads, const MoeGemm& g) { run_by_expert(threads, g); }
};

#if defined(OSTINATO_TILES)
template <>
struct MoeFunction<Driver::MOE_AMX> {
    static void run(const ThreadGroup& threads, const MoeGemm& g) {
        with_types(g.type, g.up.dtype, [&](auto token, auto weight) {
            using T = decltype(token);
            using W = decltype(weight);
            if constexpr (is_used<Driver::MOE_AMX, T, W>()) {
                const auto of = [&](const Rhs& rhs) {
                    return tiles::ExpertWeights<W>{reinterpret_cast<const W*>(rhs.first), rhs.scales, rhs.group, rhs.n,
                                                   rhs.k, rhs.format, rhs.bias};
                };
                tiles::run_experts(threads, g.tokens, reinterpret_cast<const T*>(g.x), g.x_stride,
                              g.choices, g.top_k, g.layer, of(g.up), of(g.down), reinterpret_cast<const T*>(g.residual),
                              g.residual_stride, reinterpret_cast<T*>(g.y), g.y_stride);
            }
        });
    }
};
#endif

}  // namespace

const Functions<MoeGemm> MOE_FUNCTIONS =
    functions_of_rows<MoeGemm, Op::MOE, MoeFunction>(std::make_index_sequence<std::size(UKERNELS)>{});

}  // namespace ostinato
