// Kernels for benchmarks and tests: a kernel that only reads memory, and single instructions on tiles; and what tests ask
// of the others: the row of ops/ukernels.py that computes a product, and the scratch memory of a thread.

#include <algorithm>
#include <string>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/kernel_binding.h"
#include "core/amx.h"
#include "core/simd.h"
#include "gemm/select.h"

namespace ostinato {
namespace {

struct ReadMemory : Arguments {
    FIELD(Array<ANY>, from);
    FIELD(Array<INT32>, sums);  // [parts * LANES]
};

// Sum all of `from` as integers, into [LANES] sums for each of `parts` parts. Threads share the parts, and read each in
// several streams: one stream does not keep a core's line buffers busy.
void read_memory(const ThreadGroup& threads, std::int64_t parts, const ReadMemory& in) {
    constexpr std::int64_t STREAMS = 4, STEP = 4 * LANES;
    const std::int64_t bytes = in.from.shape[0] * in.from.element_bytes();
    const std::int64_t words = bytes / 4 / parts / STREAMS / STEP * STEP;  // per stream
    const Range mine = threads.split(parts);
    for (std::int64_t part = mine.begin; part < mine.end; ++part) {
        const std::int32_t* begin = in.from.at<const std::int32_t>() + part * STREAMS * words;
        Int sums[STREAMS][4] = {};
        for (std::int64_t i = 0; i < words; i += STEP) {
            for (std::int64_t s = 0; s < STREAMS; ++s) {
                for (std::int64_t j = 0; j < 4; ++j) {
                    Int value;
                    std::memcpy(&value, begin + s * words + i + j * LANES, sizeof(value));
                    sums[s][j] += value;
                }
            }
        }
        Int sum = {};
        for (const auto& stream : sums) {
            for (const Int& each : stream) sum += each;
        }
        std::memcpy(in.sums.at<std::int32_t>() + part * LANES, &sum, sizeof(sum));
    }
}

KERNEL(read_memory);

// Return the name of the row that computes a product of weights of `kinds`, at m in each unit.
const char* ukernel_name(const std::string& op, int lhs, const std::vector<std::string>& kinds, std::int64_t k,
                         bool fixed_order, const std::vector<std::int64_t>& m) {
    unsigned rhs = 0;
    for (std::size_t i = 0; i < std::size(RHS_KINDS); ++i) {
        rhs |= unsigned{std::count(kinds.begin(), kinds.end(), RHS_KINDS[i]) > 0} << i;
    }
    const Candidates candidates({op == "linear" ? Op::LINEAR : Op::MOE, static_cast<DType>(lhs), rhs, k, fixed_order});
    return UKERNELS[candidates.at([&](Unit unit) { return m.at(static_cast<int>(unit)); })].name;
}

[[maybe_unused]] const bool questions_are_bound = [] {
    bindings().push_back([](Module& module) {
        module.functions.def("ukernel_name", &ukernel_name);
        module.functions.def("scratch_bytes", [] { return Scratch::held(); });
    });
    return true;
}();

#if defined(OSTINATO_TILES)
struct TileProduct : Arguments {
    FIELD(Array<BFLOAT16>, left);  // [16, 32]
    FIELD(Array<BFLOAT16>, right);  // [16 pairs, 16 columns, 2]
    FIELD(Array<FLOAT32>, out);  // [16, 16]
};

// Compute out += left x right, with one instruction.
void tile_product(const ThreadGroup& threads, std::int64_t, const TileProduct& in) {
    if (threads.rank != 0) return;
    const tiles::Scope scope;
    tiles::load<0>(in.out.at<const float>(), tiles::ROW_BYTES);
    tiles::load<4>(in.left.at<const bf16>(), tiles::ROW_BYTES);
    tiles::load<6>(in.right.at<const bf16>(), tiles::ROW_BYTES);
    tiles::multiply_add<0, 0>();
    tiles::store<0>(in.out.at<float>(), tiles::ROW_BYTES);
}

KERNEL(tile_product);

struct TilePalettes : Arguments {
    FIELD(Array<INT32>, out);  // [threads]
};

// Write the palette that each thread has configured, 0 if its tiles are released.
void tile_palettes(const ThreadGroup& threads, std::int64_t, const TilePalettes& in) {
    if (threads.rank < in.out.shape[0]) in.out.at<std::int32_t>()[threads.rank] = tiles::palette();
}

KERNEL(tile_palettes);
#endif

}  // namespace
}  // namespace ostinato
