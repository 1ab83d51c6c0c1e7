// The next token of each row: the best logit, or a draw with Gumbel noise among the tokens that top-k, top-p and min-p
// keep.
//
// The logits are read once for the maxima of their blocks. These tell where the best token is, which blocks can hold
// tokens that are kept, and which tokens of a block can still win with their noise.

#include "bind/kernel_binding.h"
#include "sampling/gumbel_draw.h"

namespace ostinato {
namespace {

using namespace draw;

// Return a row's token, or -1 if its best logit is not finite. `tops` [blocks] are the maxima of its blocks; without
// `settings` it is the best token.
std::int32_t choose(const ThreadGroup& threads, const float* logits, std::int64_t vocab, float* tops, const Settings* settings) {
    const std::int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
    std::int64_t best = 0;
    for (std::int64_t b = 0; b < blocks; ++b) {
        if (tops[b] != tops[b]) return -1;
        if (tops[b] > tops[best]) best = b;
    }
    if (std::isinf(tops[best])) return -1;
    if (!settings) return first_equal(logits, best * BLOCK, vocab, tops[best]);
    return Row(logits, vocab, tops[best], tops, *settings, threads.thread_scratch<float>(3 * vocab)).draw();
}

struct Sample : Arguments {
    FIELD(Strided<FLOAT32>, logits);  // [rows, vocab]
    FIELD(OptionalTensor<Array<FLOAT64>>, settings);  // [rows, 4]; without it, all rows take their best token
    FIELD(OptionalTensor<Array<INT32>>, keys);  // [rows, 2]
    FIELD(Array<INT32>, out);  // [rows]
};

void sample(const ThreadGroup& threads, std::int64_t rows, const Sample& in) {
    const std::int64_t vocab = in.logits.shape[1];
    const std::int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
    float* tops = threads.group_scratch<float>(rows * blocks);
    const Range mine = threads.split(rows * blocks);
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
        const std::int64_t begin = i % blocks * BLOCK;
        const float* row = in.logits.row<const float>(i / blocks);
        tops[i] = block_top(row, begin, std::min(vocab, begin + BLOCK));
    }
    threads.barrier();
    const Range own = threads.split(rows);
    for (std::int64_t r = own.begin; r < own.end; ++r) {
        const float* row = in.logits.row<const float>(r);
        const double* asked = in.settings && in.keys ? in.settings.row<const double>(r) : nullptr;
        if (!asked || asked[0] == 0) {
            in.out.at<std::int32_t>()[r] = choose(threads, row, vocab, tops + r * blocks, nullptr);
            continue;
        }
        const std::uint32_t* key = in.keys.row<const std::uint32_t>(r);
        const Settings drawn{static_cast<float>(std::min(std::max(asked[0], 1e-30), 1e30)),
                             static_cast<std::int64_t>(asked[1]), asked[2], asked[3], {key[0], key[1]}};
        in.out.at<std::int32_t>()[r] = choose(threads, row, vocab, tops + r * blocks, &drawn);
    }
}

KERNEL(sample);

}  // namespace
}  // namespace ostinato
