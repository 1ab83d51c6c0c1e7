// Functions of the rows of `linear` in ops/ukernels.py.

#include "gemm/large_m.h"
#include "gemm/large_m_amx.h"
#include "gemm/large_m_avx2.h"
#include "gemm/large_m_i16_avx2.h"
#include "gemm/mid_m_dequant_bf16.h"
#include "gemm/select.h"
#include "gemm/small_m.h"

namespace ostinato {

namespace {

template <Driver DRIVER>
struct Of {};

// The arguments are threads, m, tokens and their stride, weights, epilogue and outputs.
template <typename... Args>
void run_driver(Of<Driver::SMALL_M>, const Args&... args) {
    gemm_small_m(args...);
}

template <typename... Args>
void run_driver(Of<Driver::SMALL_M_DEQUANT>, const Args&... args) {
    gemm_small_m(args...);
}

#if defined(OSTINATO_GEMM_AVX2)
template <typename... Args>
void run_driver(Of<Driver::LARGE_M_AVX2>, const Args&... args) {
    avx2::gemm_large_m(args...);
}

template <typename... Args>
void run_driver(Of<Driver::LARGE_M_I16_AVX2>, const Args&... args) {
    avx2::gemm_large_m_i16(args...);
}
#else
template <typename... Args>
void run_driver(Of<Driver::LARGE_M>, const Args&... args) {
    gemm_large_m(args...);
}
#endif

#if defined(OSTINATO_I16)
template <typename... Args>
void run_driver(Of<Driver::GEMV_I16>, const Args&... args) {
    gemv_i16(args...);
}
#endif

#if defined(OSTINATO_HAS_AVX512_BF16)
template <typename... Args>
void run_driver(Of<Driver::SMALL_M_ROUNDED>, const Args&... args) {
    gemm_small_m_rounded(args...);
}
#endif

#if defined(OSTINATO_DEQUANT_BF16)
template <typename... Args>
void run_driver(Of<Driver::MID_M_DEQUANT_BF16>, const Args&... args) {
    gemm_mid_m_dequant_bf16(args...);
}
#endif

#if defined(OSTINATO_TILES)
template <typename... Args>
void run_driver(Of<Driver::LARGE_M_AMX>, const Args&... args) {
    tiles::gemm_large_m(args...);
}
#endif

// Return whether all rows with this driver take from `least` to `most` tokens.
constexpr bool takes(Driver driver, std::int64_t least, std::int64_t most) {
    for (const UkernelRow& row : UKERNELS) {
        if (row.driver == driver && (row.min_m < least || row.max_m > most)) return false;
    }
    return true;
}
static_assert(takes(Driver::SMALL_M_ROUNDED, 3, MAX_BF16_TOKENS), "dot_bf16 takes these, in one block");
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
