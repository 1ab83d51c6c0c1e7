// Functions of the rows of `linear` in ops/ukernels.py.

#include "gemm/int8_tokens.h"
#include "gemm/int8_tokens_amx.h"
#include "gemm/large_m.h"
#include "gemm/large_m_amx.h"
#include "gemm/large_m_avx2.h"
#include "gemm/large_m_i16.h"
#include "gemm/mid_m_dequant_bf16.h"
#include "gemm/select.h"
#include "gemm/small_m.h"

namespace ostinato {
namespace {

template <Driver DRIVER>
struct Of {};

// A driver's function; its arguments are threads, m, tokens and their stride, weights, epilogue and outputs.
#define DRIVER(NAME, FUNCTION)                             \
    template <typename... Args>                            \
    void run_driver(Of<Driver::NAME>, const Args&... args) { \
        FUNCTION(args...);                                 \
    }

DRIVER(SMALL_M, gemm_small_m)
DRIVER(SMALL_M_DEQUANT, gemm_small_m)
#if defined(OSTINATO_GEMM_AVX2)
DRIVER(LARGE_M_AVX2, avx2::gemm_large_m)
DRIVER(LARGE_M_I16_AVX2, gemm_large_m_i16)
#else
DRIVER(LARGE_M, gemm_large_m)
#endif
#if defined(OSTINATO_I16)
DRIVER(GEMV_I16, gemv_i16)
#endif
#if defined(OSTINATO_HAS_AVX512_BF16)
DRIVER(SMALL_M_ROUNDED, gemm_small_m_rounded)
#endif
#if defined(OSTINATO_DEQUANT_BF16)
DRIVER(MID_M_DEQUANT_BF16, gemm_mid_m_dequant_bf16)
#endif
#if defined(OSTINATO_TILES)
DRIVER(LARGE_M_AMX, tiles::gemm_large_m)
DRIVER(INT8_AMX, tiles::gemm_int8)
#endif
#if defined(OSTINATO_HAS_AVX512_VNNI)
DRIVER(INT8_VNNI, gemm_int8_vnni)
#if defined(OSTINATO_I16_PANELS)
DRIVER(LARGE_M_I16_VNNI, gemm_large_m_i16)
#endif
#endif

// Return whether all rows with this driver take from `least` to `most` tokens.
constexpr bool takes(Driver driver, std::int64_t least, std::int64_t most) {
    for (const UkernelRow& row : UKERNELS) {
        if (row.driver == driver && (row.min_m < least || row.max_m > most)) return false;
    }
    return true;
}
static_assert(takes(Driver::SMALL_M_ROUNDED, 3, MAX_BF16_TOKENS), "dot_bf16 takes these, in one block");
static_assert(takes(Driver::LARGE_M, 20, std::int64_t{1} << 62), "blocks have 5 or 6 tokens");
static_assert(takes(Driver::MID_M_DEQUANT_BF16, 3, 1 << 20), "dequant_dot takes 3 tokens or more");

template <Driver DRIVER>
struct LinearFunction {
    static void run(const ThreadGroup& threads, const Gemm& g) {
        with_types(g.lhs_type, g.rhs.dtype, [&](auto token, auto weight) {
            using T = decltype(token);
            using W = decltype(weight);
            if constexpr (is_used<DRIVER, T, W>()) {
                Epilogue o = g.epilogue;
                const float* scales = g.rhs.scales;
                if (scales && g.rhs.group == 0) o.row_scale = std::exchange(scales, nullptr);
                const WeightView<W> w{reinterpret_cast<const W*>(g.rhs.first), g.rhs.n, g.rhs.k, scales, g.rhs.group,
                                      g.rhs.format, DRIVER == Driver::SMALL_M};
                const auto* x = reinterpret_cast<const T*>(g.lhs);
                if (g.out_type == FLOAT32) {
                    run_driver(Of<DRIVER>{}, threads, g.m, x, g.lhs_stride, w, o, reinterpret_cast<float*>(g.out));
                } else if constexpr (!std::is_same_v<T, float>) {
                    run_driver(Of<DRIVER>{}, threads, g.m, x, g.lhs_stride, w, o, reinterpret_cast<T*>(g.out));
                }
            }
        });
    }
};

}  // namespace

const Functions<Gemm> LINEAR_FUNCTIONS = functions_of_rows<Gemm, Op::LINEAR, LinearFunction>(std::make_index_sequence<std::size(UKERNELS)>{});

}  // namespace ostinato
