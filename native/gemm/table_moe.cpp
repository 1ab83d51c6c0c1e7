// Functions of the rows of `moe` in ops/ukernels.py.

#include "gemm/moe_amx.h"
#include "gemm/moe_small_m.h"
#include "gemm/select.h"

namespace ostinato {
namespace {

template <Driver DRIVER>
struct Of {};

// A driver's function for tokens of storage type T and weights of W.
#define DRIVER(NAME, ...)                                  \
    template <typename T, typename W, typename... Args>    \
    void run_driver(Of<Driver::NAME>, const Args&... args) { \
        __VA_ARGS__(args...);                              \
    }

DRIVER(MOE_SMALL_M, run_experts<InPlaceLhsType<T, W>>)
#if defined(OSTINATO_I16)
DRIVER(MOE_I16, run_experts<i16>)
#endif
#if defined(OSTINATO_TILES)
DRIVER(MOE_AMX, tiles::run_experts)
#endif

template <Driver DRIVER>
struct MoeFunction {
    static void run(const ThreadGroup& threads, const MoeGemm& g) {
        with_types(g.type, g.up.dtype, [&](auto token, auto weight) {
            using T = decltype(token);
            using W = decltype(weight);
            if constexpr (is_used<DRIVER, T, W>()) {
                const auto of = [&](const Rhs& rhs) {
                    return ExpertWeights<W>{reinterpret_cast<const W*>(rhs.first), rhs.scales, rhs.group, rhs.n, rhs.k,
                                            rhs.format, g.fixed_order, rhs.bias};
                };
                run_driver<T, W>(Of<DRIVER>{}, threads, g.tokens, reinterpret_cast<const T*>(g.x), g.x_stride,
                              g.choices, g.top_k, g.layer, of(g.up), of(g.down), reinterpret_cast<const T*>(g.residual),
                              g.residual_stride, reinterpret_cast<T*>(g.y), g.y_stride);
            }
        });
    }
};

}  // namespace

const Functions<MoeGemm> MOE_FUNCTIONS =
    functions_of_rows<MoeGemm, Op::MOE, MoeFunction>(std::make_index_sequence<std::size(UKERNELS)>{});

}  // namespace ostinato
