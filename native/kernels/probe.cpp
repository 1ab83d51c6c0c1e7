// What the memory gives: a kernel that only reads, for benchmarks.

#include "../bind.h"
#include "../simd.h"

namespace ostinato {
namespace {

struct ReadMemory : Arguments {
    FIELD(Array<ANY>, from);
    FIELD(Array<INT32>, sums);  // [parts * LANES]
};

// Of all of `from` as integers, one [LANES] of sums for each of `parts` parts. Parts are shared by the threads, and read in
// several streams each, as one does not keep a core's line buffers busy.
void read_memory(const ThreadGroup& threads, std::int64_t parts, const ReadMemory& in) {
    constexpr std::int64_t STREAMS = 4, STEP = 4 * LANES;
    const std::int64_t bytes = in.from.shape[0] * in.from.element_bytes();
    const std::int64_t words = bytes / 4 / parts / STREAMS / STEP * STEP;  // of one stream
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

}  // namespace
}  // namespace ostinato
