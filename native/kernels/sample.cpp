// The next token of each row: the best logit, or a draw by Gumbel noise among the tokens that top-k, top-p and min-p keep.
//
// The rows' logits are read once for the maxima of their blocks. These say where the best token is, which blocks can
// hold tokens that are kept, and which tokens of a block the noise can still make win.

#include "../draw.h"
#include "../kernels.h"

namespace ostinato {
namespace {

using namespace draw;

// A row's token, -1 if its best logit is not finite. `tops` [blocks] are the maxima of its blocks; `settings` is null for
// the best token.
std::int32_t choose(const Team& team, const float* logits, std::int64_t vocab, float* tops, const Settings* settings) {
    const std::int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
    std::int64_t best = 0;
    for (std::int64_t b = 0; b < blocks; ++b) {
        if (tops[b] != tops[b]) return -1;
        if (tops[b] > tops[best]) best = b;
    }
    if (std::isinf(tops[best])) return -1;
    if (!settings) return first_equal(logits, best * BLOCK, vocab, tops[best]);
    return Row(logits, vocab, tops[best], tops, *settings, team.own<float>(3 * vocab)).draw();
}

// `logits` [rows, vocab], `settings` [rows, 4] double and `keys` [rows, 2], both null if all rows take their best token
// -> `tokens` [rows].
void sample(const Team& team, std::int64_t rows, Address logits, std::int64_t row_stride, std::int64_t vocab,
            Address settings, Address keys, Address tokens) {
    const std::int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
    float* tops = team.shared<float>(rows * blocks);
    const Range mine = team.split(rows * blocks);
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
        const std::int64_t begin = i % blocks * BLOCK;
        const float* row = at<const float>(logits) + i / blocks * row_stride;
        tops[i] = block_top(row, begin, std::min(vocab, begin + BLOCK));
    }
    team.barrier();
    const Range own = team.split(rows);
    for (std::int64_t r = own.begin; r < own.end; ++r) {
        const float* row = at<const float>(logits) + r * row_stride;
        const double* asked = settings ? at<const double>(settings) + 4 * r : nullptr;
        if (!asked || asked[0] == 0) {
            at<std::int32_t>(tokens)[r] = choose(team, row, vocab, tops + r * blocks, nullptr);
            continue;
        }
        const std::uint32_t* key = at<const std::uint32_t>(keys) + 2 * r;
        const Settings drawn{static_cast<float>(std::min(std::max(asked[0], 1e-30), 1e30)),
                             static_cast<std::int64_t>(asked[1]), asked[2], asked[3], {key[0], key[1]}};
        at<std::int32_t>(tokens)[r] = choose(team, row, vocab, tops + r * blocks, &drawn);
    }
}

}  // namespace

void bind_sample(Module& module) { bind<sample>(module, "sample"); }

}  // namespace ostinato
