// Each token's predecessor in its row, the last one of a row being kept in slots.

#include <nanobind/stl/vector.h>

#include "../kernels.h"
#include "../rows.h"
#include "../simd.h"

namespace ostinato {
namespace {

// `x` [tokens, channels] with a stride, `states` [slots, 1, channels], of one dtype -> `y` [tokens, channels],
// contiguous. Threads share the channels.
void token_shift(const Team& team, std::int64_t tokens, Address x, std::int64_t x_stride, Address states,
                 std::int64_t slot_stride, Address row_starts, Address read_slots, Address write_slots,
                 std::int64_t write_stride, std::int64_t num_rows, std::int64_t per_row, std::int64_t decode_rows,
                 const Checkpoints& checkpoints, Address y, std::int64_t channels, int dtype) {
    const StepRows rows{at<const std::int32_t>(row_starts), at<const std::int32_t>(read_slots),
                        at<const std::int32_t>(write_slots), write_stride, num_rows, per_row, decode_rows, checkpoints};
    const Range mine = team.split(channels, 64);
    const std::int64_t count = mine.end - mine.begin;
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        const auto input = [&](std::int64_t token) { return at<const T>(x) + token * x_stride + mine.begin; };
        const auto state = [&](std::int64_t slot) { return at<T>(states) + slot * slot_stride + mine.begin; };
        rows.each(tokens, [&](const StepRow& row) {
            for (std::int64_t t = row.begin; t < row.end; ++t) {
                T* to = at<T>(y) + t * channels + mine.begin;
                if (t > row.begin) {
                    std::copy_n(input(t - 1), count, to);
                } else if (row.read_slot) {
                    std::copy_n(state(row.read_slot), count, to);
                } else {
                    std::fill_n(to, count, T{});
                }
            }
            rows.each_written(row, [&](std::int64_t done, std::int64_t slot) {
                std::copy_n(input(row.begin + done - 1), count, state(slot));
            });
        });
    });
}

}  // namespace

void bind_token_shift(Module& module) { bind<token_shift>(module, "token_shift"); }

}  // namespace ostinato
