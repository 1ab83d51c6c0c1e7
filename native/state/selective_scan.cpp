// The Mamba-1 recurrence of prefill rows, token by token as decoding does it: with the same inner functions, so with the
// same bits. src/ostinato/ops/reference/selective.py is the definition.
//
// A thread takes a block of channels of one row at a time and processes the row's tokens in order, so that their states
// stay in its cache.

#include <algorithm>
#include <optional>

#include "bind/kernel_binding.h"
#include "core/denormals.h"
#include "state/packable.h"
#include "state/selective_recurrence.h"
#include "state/step_rows.h"

namespace ostinato {
namespace {

struct SelectiveScan : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, channels], as dt
    FIELD(Strided<VALUES>, dt);
    FIELD(Array<FLOAT32>, A_log);  // [channels, size]
    FIELD(Strided<VALUES>, B);  // [tokens, size], as C
    FIELD(Strided<VALUES>, C);
    FIELD(Array<FLOAT32>, D);  // [channels], as dt_bias
    FIELD(Array<FLOAT32>, dt_bias);
    FIELD(Strided<FLOATS>, states);  // [slots, channels, size]
    FIELD(RowStarts, row_starts);  // [rows + 1]
    FIELD(Array<INT32>, start_positions);  // [rows], as read_slots
    FIELD(Array<INT32>, read_slots);
    FIELD(Strided<INT32>, write_slots);  // [rows]
    FIELD(Checkpoints, checkpoints);
    FIELD(std::optional<std::int64_t>, noise);  // index of the layer, for stochastic rounding
    FIELD(bool, packable);  // round states at block boundaries
    FIELD(Array<VALUES>, out);  // as x
};

constexpr std::int64_t SPAN = 16;  // at least INT8_STATE_TOKENS: tokens whose inputs are prepared at a time: with the states, they fill an L1 cache

// Scan channels `first` to `first + count - 1` along a row up to token `end`.
template <typename T, typename S>
void scan_block(const ThreadGroup& threads, const SelectiveScan& in, std::int64_t row, std::int64_t end, std::int64_t first,
                std::int64_t count) {
    const std::int64_t size = in.B.shape[1], channels = in.x.shape[1], stride = padded(size);
    const std::int64_t begin = in.row_starts[row];
    const std::int64_t before = in.start_positions.at<const std::int32_t>()[row] - begin;  // position minus token
    const std::int32_t read = in.read_slots.at<const std::int32_t>()[row];
    const std::int32_t write = *in.write_slots.row<const std::int32_t>(row);
    const std::int64_t floats = (2 * CHANNEL_BLOCK + LANES) * stride + SelectiveTokens::floats(SPAN, size);
    float* const rates = threads.thread_scratch<float>(floats);
    S* const own = reinterpret_cast<S*>(rates + CHANNEL_BLOCK * stride);
    S* const between = own + LANES * stride;  // the states between spans
    SelectiveTokens tokens(rates + (2 * CHANNEL_BLOCK + LANES) * stride, SPAN, size);
    tokens.is_noisy = in.noise && sizeof(S) == 2;
    put_rates(in.A_log.at<const float>() + first * size, count, size, rates);

    const auto slot = [&](std::int64_t id) { return in.states.row<S>(id) + first * size; };
    const S* from = read ? slot(read) : nullptr;
    for (std::int64_t token = begin, stop; token < end; token = stop) {
        stop = in.packable ? next_packed(token, before + token, end) : std::min(end, token + SPAN);
        tokens.count = stop - token;
        for (std::int64_t t = token; t < stop; ++t) {
            tokens.load_token(t - token, in.x.row<const T>(t) + first, in.dt.row<const T>(t) + first,
                              in.dt_bias.at<const float>() + first, count, in.B.row<const T>(t), in.C.row<const T>(t));
            if constexpr (sizeof(S) == 2) {
                if (tokens.is_noisy) tokens.template load_noise<S>(t - token, before + t, *in.noise, first, count);
            }
        }
        S* targets[SPAN] = {};
        for (const Checkpoint& taken : in.checkpoints) {
            const std::int64_t last = begin + taken.offset - 1;
            if (taken.row == row && token <= last && last < stop) targets[last - token] = slot(taken.slot);
        }
        S* const at_stop = targets[stop - token - 1];
        S* const after = stop == end ? slot(write) : between;
        targets[stop - token - 1] = after;
        const auto to = [&](std::int64_t i) { return targets[i]; };
        advance_block<S>(tokens, count, size, rates, from, nullptr, to, false, own);
        if (in.packable && is_packed_at(before + stop)) round_rows(after, count, size);
        if (at_stop) std::copy_n(after, count * size, at_stop);
        from = between;
        for (std::int64_t t = token; t < stop; ++t) {
            tokens.store_token(t - token, in.x.row<const T>(t) + first, in.D.at<const float>() + first, count,
                               in.out.at<T>() + t * channels + first);
        }
    }
}

void selective_scan(const ThreadGroup& threads, std::int64_t tokens, const SelectiveScan& in) {
    const std::int64_t channels = in.x.shape[1], rows = in.read_slots.shape[0];
    // Channels are independent, so a thread takes fewer at once if there are few parts.
    std::int64_t block = CHANNEL_BLOCK;
    while (block > LANES && rows * ((channels + block - 1) / block) < 4 * threads.size) block /= 2;
    const RowStarts& starts = in.row_starts;
    const auto length_of = [&](std::int64_t row) { return std::min<std::int64_t>(tokens, starts[row + 1]) - starts[row]; };
    const FlushDenormals flush;
    with_dtype(in.x.dtype, [&](auto type) {
        with_dtype(in.states.dtype, [&](auto state_type) {
            using T = decltype(type);
            using S = decltype(state_type);
            each_claimed_part(threads, rows, length_of, (channels + block - 1) / block, [&](std::int64_t row, std::int64_t part) {
                const std::int64_t first = part * block, count = std::min(block, channels - first);
                scan_block<T, S>(threads, in, row, starts[row] + length_of(row), first, count);
            });
        });
    });
}

KERNEL(selective_scan);

}  // namespace
}  // namespace ostinato
