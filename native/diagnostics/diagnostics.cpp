// Kernels for benchmarks and tests: a kernel that only reads memory, threads that meet, and single instructions on tiles;
// and what tests ask of the others: the row of ops/ukernels.py that computes a product, and the scratch memory of a
// thread.

#include <algorithm>
#include <stdexcept>
#include <string>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <time.h>

#include "bind/kernel_binding.h"
#include "core/amx.h"
#include "core/team.h"
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

// Return the name of the row that computes a product of weights of `kinds`, at m in each unit; "" if there is none.
const char* ukernel_name(const std::string& op, int lhs, const std::vector<std::string>& kinds, std::int64_t k,
                         bool fixed_order, const std::vector<std::int64_t>& m) {
    unsigned rhs = 0;
    for (std::size_t i = 0; i < std::size(RHS_KINDS); ++i) {
        rhs |= unsigned{std::count(kinds.begin(), kinds.end(), RHS_KINDS[i]) > 0} << i;
    }
    const Candidates candidates({op == "linear" ? Op::LINEAR : Op::MOE, static_cast<DType>(lhs), rhs, k, fixed_order});
    if (candidates.empty()) return "";
    return UKERNELS[candidates.at([&](Unit unit) { return m.at(static_cast<int>(unit)); })].name;
}

[[maybe_unused]] const bool questions_are_bound = [] {
    bindings().push_back([](Module& module) {
        module.functions.def("ukernel_name", &ukernel_name);
        module.functions.def("scratch_bytes", [] { return Scratch::held(); });
        module.functions.def("free_idle_scratch", &free_idle_scratch);
    });
    return true;
}();
struct MeetOften : Arguments {
    FIELD(Array<INT32>, rounds);  // [threads], the round in which each is
    FIELD(Array<INT32>, wrong);  // [threads], rounds in which a thread saw another elsewhere
    FIELD(std::int64_t, seed);
};

// Meet `count` times at two barriers, after delays of no time, of some turns, or rarely asleep.
void meet_often(const ThreadGroup& threads, std::int64_t count, const MeetOften& in) {
    auto* rounds = in.rounds.at<std::int32_t>();
    std::uint64_t random = in.seed * 2654435761u + threads.rank + 1;
    for (std::int64_t round = 1; round <= count; ++round) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const auto delay = static_cast<unsigned>(random >> 40);
        if (delay % 2 == 0) {
            for (volatile unsigned turn = 0; turn < delay % 1024; turn = turn + 1) {}
        }
        if (delay % 4096 == 1) {
            const timespec asleep{0, static_cast<long>(delay % 100'000)};
            nanosleep(&asleep, nullptr);
        }
        rounds[threads.rank] = static_cast<std::int32_t>(round);
        threads.barrier();
        const bool together = std::all_of(rounds, rounds + threads.size, [&](auto each) { return each == round; });
        in.wrong.at<std::int32_t>()[threads.rank] += !together;
        threads.barrier();
    }
}

KERNEL(meet_often);

struct ClaimItems : Arguments {
    FIELD(Array<INT32>, claimed);  // [items], how often each was
};

// Claim all items `count` times, without a barrier between.
void claim_items(const ThreadGroup& threads, std::int64_t count, const ClaimItems& in) {
    for (std::int64_t loop = 0; loop < count; ++loop) {
        for (const std::int64_t i : threads.claims(in.claimed.shape[0])) {
            __atomic_fetch_add(in.claimed.at<std::int32_t>() + i, 1, __ATOMIC_RELAXED);
        }
    }
}

KERNEL(claim_items);

struct FailInThread : Arguments {
    FIELD(std::int64_t, rank);
};

// Throw in one thread while the others wait for it.
void fail_in_thread(const ThreadGroup& threads, std::int64_t, const FailInThread& in) {
    if (threads.rank == in.rank) throw std::runtime_error("thread " + std::to_string(in.rank) + " fails as asked");
    threads.barrier();
}

KERNEL(fail_in_thread);

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
