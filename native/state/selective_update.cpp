// The Mamba-1 recurrence for decode rows: 1 + k tokens each, from a read slot to write slots.

#include <algorithm>
#include <optional>

#include "bind/kernel_binding.h"
#include "core/denormals.h"
#include "state/packable.h"
#include "state/selective_recurrence.h"

namespace ostinato {
namespace {

struct SelectiveUpdate : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, channels], as dt
    FIELD(Strided<VALUES>, dt);
    FIELD(Array<FLOAT32>, A_log);  // [channels, size]
    FIELD(Strided<VALUES>, B);  // [tokens, size], as C
    FIELD(Strided<VALUES>, C);
    FIELD(Array<FLOAT32>, D);  // [channels], as dt_bias
    FIELD(Array<FLOAT32>, dt_bias);
    FIELD(Strided<FLOATS>, states);  // [slots, channels, size]
    FIELD(Array<INT32>, read_slots);  // [rows]
    FIELD(Strided<INT32>, write_slots);  // [rows, per_row]
    FIELD(OptionalTensor<Array<INT32>>, start_positions);  // [rows]; required with noise or packable
    FIELD(std::optional<std::int64_t>, noise);  // index of the layer, for stochastic rounding
    FIELD(bool, packable);  // round states at block boundaries
    FIELD(Array<VALUES>, out);  // as x

    void check(const Reader& given) const {
        given.expect(start_positions || (!noise && !packable), "rounding needs start_positions");
    }
};

// Update all rows. Row r has the tokens r * per_row to r * per_row + per_row - 1. Threads share blocks of channels of
// all rows. A thread takes a block through all rows before the next, so that it computes the block's rates once.
template <typename T, typename S>
void update(const ThreadGroup& threads, std::int64_t rows, const SelectiveUpdate& in) {
    const std::int64_t channels = in.x.shape[1], size = in.B.shape[1], per_row = in.write_slots.shape[1];
    const std::int64_t blocks = (channels + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK, stride = padded(size);
    float* const rates = threads.thread_scratch<float>((CHANNEL_BLOCK + LANES) * stride + SelectiveTokens::floats(per_row, size));
    S* const own = reinterpret_cast<S*>(rates + CHANNEL_BLOCK * stride);
    SelectiveTokens tokens(rates + (CHANNEL_BLOCK + LANES) * stride, per_row, size);
    tokens.count = per_row;
    tokens.is_noisy = in.noise && sizeof(S) == 2;

    const auto read_slot = [&](std::int64_t row) { return in.read_slots.at<const std::int32_t>()[row]; };
    threads.each_part(blocks * rows, [&](const ThreadGroup& part) {
        const Range mine = part.split(blocks * rows);
        for (std::int64_t unit = mine.begin; unit < mine.end; ++unit) {
            const std::int64_t row = unit % rows, first = unit / rows * CHANNEL_BLOCK;
            const std::int64_t count = std::min(CHANNEL_BLOCK, channels - first);
            const auto block_of = [&](const Tensor& values, std::int64_t i) {
                return values.row<const T>(row * per_row + i) + first;
            };
            const auto out = [&](std::int64_t i) { return in.out.at<T>() + (row * per_row + i) * channels + first; };
            if (unit == mine.begin || row == 0) put_rates(in.A_log.at<const float>() + first * size, count, size, rates);

            const std::int32_t read = read_slot(row);
            const std::int32_t* const writes = in.write_slots.row<const std::int32_t>(row);
            if (read == 0 && std::all_of(writes, writes + per_row, [](auto slot) { return slot == 0; })) {
                for (std::int64_t i = 0; i < per_row; ++i) std::fill_n(out(i), count, T{});
                continue;
            }
            for (std::int64_t i = 0; i < per_row; ++i) {
                const std::int64_t token = row * per_row + i;
                tokens.load_token(i, block_of(in.x, i), block_of(in.dt, i), in.dt_bias.at<const float>() + first, count,
                                  in.B.row<const T>(token), in.C.row<const T>(token));
                if constexpr (sizeof(S) == 2) {
                    if (!tokens.is_noisy) continue;
                    const std::int64_t position = in.start_positions.at<const std::int32_t>()[row] + i;
                    tokens.template load_noise<S>(i, position, *in.noise, first, count);
                }
            }
            const auto slot = [&](std::int64_t id, std::int64_t channel) {
                return in.states.row<S>(id) + channel * size;
            };
            const S* from = read ? slot(read, first) : nullptr;
            const S* ahead = nullptr;  // the next state, whose address the processor cannot predict
            if (unit + 1 < mine.end) {
                const std::int32_t next = read_slot((unit + 1) % rows);
                const std::int64_t at = (unit + 1) / rows * CHANNEL_BLOCK;
                if (next && at + count <= channels) ahead = slot(next, at);
            }
            const auto to = [&](std::int64_t i) { return writes[i] ? slot(writes[i], first) : nullptr; };
            const std::int64_t position = in.packable ? in.start_positions.at<const std::int32_t>()[row] : 0;
            for (std::int64_t i = 0, stop; i < per_row; i = stop) {
                stop = in.packable ? next_packed(i, position + i, per_row) : per_row;
                const auto to_later = [&, i](std::int64_t j) { return to(i + j); };
                advance_block(tokens.part(i, stop), count, size, rates, from, ahead, to_later, true, own);
                S* const last = to(stop - 1);
                if (in.packable && last && is_packed_at(position + stop)) round_rows(last, count, size);
                from = last;
            }
            for (std::int64_t i = 0; i < per_row; ++i) {
                tokens.store_token(i, block_of(in.x, i), in.D.at<const float>() + first, count, out(i));
            }
        }
    }, 1);
}

void selective_update(const ThreadGroup& threads, std::int64_t tokens, const SelectiveUpdate& in) {
    const FlushDenormals flush;  // a state that nothing is added to decays forever
    with_dtype(in.x.dtype, [&](auto type) {
        with_dtype(in.states.dtype, [&](auto state_type) {
            update<decltype(type), decltype(state_type)>(threads, tokens / in.write_slots.shape[1], in);
        });
    });
    end_streams();
}

KERNEL(selective_update);

}  // namespace
}  // namespace ostinato
