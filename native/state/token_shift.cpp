// Each token's predecessor in its row; the last token of a row is kept in slots.

#include "bind/kernel_binding.h"
#include "core/simd.h"
#include "state/step_rows.h"

namespace ostinato {
namespace {

struct TokenShift : StepRows {
    FIELD(Strided<VALUES>, x);  // [tokens, channels]
    FIELD(Strided<VALUES>, states);  // [slots, 1, channels]
    FIELD(Array<VALUES>, out);  // [tokens, channels]
};

// Shift tokens; threads share the channels.
void token_shift(const ThreadGroup& threads, std::int64_t tokens, const TokenShift& in) {
    const std::int64_t channels = in.x.shape[1];
    const Range mine = threads.split(channels, 64);
    const std::int64_t count = mine.end - mine.begin;
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        const auto input = [&](std::int64_t token) { return in.x.row<const T>(token) + mine.begin; };
        const auto state = [&](std::int64_t slot) { return in.states.row<T>(slot) + mine.begin; };
        in.each_row(tokens, [&](const StepRow& row) {
            for (std::int64_t t = row.begin; t < row.end; ++t) {
                T* to = in.out.at<T>() + t * channels + mine.begin;
                if (t > row.begin) {
                    std::copy_n(input(t - 1), count, to);
                } else if (row.read_slot) {
                    std::copy_n(state(row.read_slot), count, to);
                } else {
                    std::fill_n(to, count, T{});
                }
            }
            in.each_written(row, [&](std::int64_t done, std::int64_t slot) {
                std::copy_n(input(row.begin + done - 1), count, state(slot));
            });
        });
    });
}

KERNEL(token_shift);

}  // namespace
}  // namespace ostinato
