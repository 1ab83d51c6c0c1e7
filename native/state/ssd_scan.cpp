// The Mamba-2 recurrence of prefill rows, in chunks or token by token: src/ostinato/ops/reference/ssd.py is the definition.
//
// A thread takes some heads of one group and one row at a time and processes the row's tokens in order, so that their
// states stay in its cache. All values are float32, or split for matrix units (state/ssd_chunk_scan_amx.h). A head's
// bits do not depend on other heads or rows.

#include <optional>

#include "bind/kernel_binding.h"
#include "core/denormals.h"
#include "state/ssd_chunk_scan.h"
#include "state/ssd_chunk_scan_amx.h"
#include "state/ssd_recurrence.h"
#include "state/step_rows.h"

namespace ostinato {
namespace {

struct SsdScan : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, heads, head_dim]
    FIELD(Strided<VALUES>, dt);  // [tokens, heads]
    FIELD(Array<FLOAT32>, A_log);  // [heads], as D and dt_bias
    FIELD(Strided<VALUES>, B);  // [tokens, groups, state], as C
    FIELD(Strided<VALUES>, C);
    FIELD(Array<FLOAT32>, D);
    FIELD(Array<FLOAT32>, dt_bias);
    FIELD(Limits, dt_limit);
    FIELD(std::int64_t, chunk_size);
    FIELD(Strided<FLOATS>, ssm_states);  // [slots, heads, head_dim, state]
    FIELD(RowStarts, row_starts);  // [rows + 1]
    FIELD(Array<INT32>, start_positions);  // [rows], as read_slots
    FIELD(Array<INT32>, read_slots);
    FIELD(Strided<INT32>, write_slots);  // [rows]
    FIELD(Checkpoints, checkpoints);
    FIELD(bool, recurrent);  // token by token, not in chunks
    FIELD(std::optional<std::int64_t>, noise);  // index of the layer, for stochastic rounding
    FIELD(bool, packable);  // round states at block boundaries
    FIELD(Array<VALUES>, out);  // [tokens, heads, head_dim]
};

// Prefetch rows of `size` elements into the L2 cache; they lie too far apart for the hardware to predict.
template <typename T>
void prefetch(const T* rows, std::int64_t stride, std::int64_t count, std::int64_t size) {
    constexpr std::int64_t LINE = 64 / sizeof(T);
    for (std::int64_t row = 0; row < count; ++row) {
        for (std::int64_t i = 0; i < size; i += LINE) __builtin_prefetch(rows + row * stride + i, 0, 2);
    }
}

// Scan heads `first` to `first + count - 1`, of one group, along a row in chunks.
template <typename T, typename S, typename Scan>
void scan_row(Scan& scan, const SsdScan& in, const Sizes& sizes, std::int64_t row, std::int64_t end,
              std::int64_t first, int count) {
    const std::int64_t begin = in.row_starts[row];
    const std::int64_t position = in.start_positions.at<const std::int32_t>()[row];
    const std::int32_t read = in.read_slots.at<const std::int32_t>()[row];
    const std::int32_t write = *in.write_slots.row<const std::int32_t>(row);
    const std::int64_t group = first / (sizes.heads / sizes.groups);
    const auto slot = [&](std::int64_t id, int i) {
        return in.ssm_states.row<S>(id) + (first + i) * sizes.head_dim * sizes.state;
    };
    bool has_state = read != 0;
    for (int i = 0; i < count && has_state; ++i) scan.load_state(i, slot(read, i));
    for (std::int64_t token = begin, stop; token < end; token = stop) {
        stop = std::min(end, token + sizes.chunk - (position + token - begin) % sizes.chunk);
        const T* const B = in.B.row<const T>(token) + group * sizes.state;
        const T* const C = in.C.row<const T>(token) + group * sizes.state;
        const T* const dt = in.dt.row<const T>(token);
        const std::int64_t next = stop - token, next_count = std::min(end - stop, sizes.chunk);
        scan.load_group(B, in.B.strides[0], C, in.C.strides[0], stop - token);
        prefetch(B + next * in.B.strides[0], in.B.strides[0], next_count, sizes.state);
        for (int i = 0; i < count; ++i) {
            const std::int64_t head = first + i;
            const T* const x = in.x.row<const T>(token) + head * sizes.head_dim;
            T* const y = in.out.at<T>() + (token * sizes.heads + head) * sizes.head_dim;
            scan.load_steps(dt + head, in.dt.strides[0], in.dt_bias.at<const float>()[head], in.dt_limit.first,
                            in.dt_limit.second, -std::exp(in.A_log.at<const float>()[head]));
            scan.load_x(x, in.x.strides[0]);
            prefetch(x + next * in.x.strides[0], in.x.strides[0], next_count, sizes.head_dim);
            if (i == 0) prefetch(C + next * in.C.strides[0], in.C.strides[0], next_count, sizes.state);
            if (i == count - 1) prefetch(dt + next * in.dt.strides[0] + first, in.dt.strides[0], next_count, count);
            for (const Checkpoint& taken : in.checkpoints) {
                const std::int64_t offset = begin + taken.offset - token;
                if (taken.row != row || offset <= 0 || offset >= stop - token) continue;
                scan.checkpoint_state(i, has_state, offset);
                scan.template load_noise<S>(position + taken.offset - 1, in.noise, head);
                scan.store_state(CHECKPOINT_STATE, slot(taken.slot, i));
            }
            scan.advance(i, has_state, in.D.at<const float>()[head], y, sizes.heads * sizes.head_dim);
            const std::int64_t after = position + stop - begin;
            scan.template load_noise<S>(after - 1, in.noise, head);
            if (sizeof(S) == 2 && after % sizes.chunk == 0) scan.template round_state<S>(i);
            if (in.packable && is_packed_at(after)) scan.round_to_int8(i);
            for (const Checkpoint& taken : in.checkpoints) {
                if (taken.row != row || begin + taken.offset != stop) continue;
                scan.store_state(i, slot(taken.slot, i));
            }
            if (stop == end) scan.store_state(i, slot(write, i));
        }
        has_state = true;
    }
}

// Scan heads `first` to `first + count - 1`, of one group, along a row, token by token with decoding's inner functions,
// hence with the same bits.
template <typename T, typename S>
void recur_row(const ThreadGroup& threads, const SsdScan& in, const Sizes& sizes, std::int64_t row, std::int64_t end,
               std::int64_t first, int count) {
    constexpr std::int64_t SPAN = 16;  // tokens per load of a state's channel into registers
    static_assert(INT8_STATE_TOKENS <= SPAN);
    const std::int64_t begin = in.row_starts[row];
    const std::int32_t read = in.read_slots.at<const std::int32_t>()[row];
    const std::int32_t write = *in.write_slots.row<const std::int32_t>(row);
    const std::int64_t group = first / (sizes.heads / sizes.groups), elements = sizes.head_dim * sizes.state;
    const std::int64_t per_head = padded(count), per_state = padded(sizes.state), per_channel = padded(sizes.head_dim);
    float* const steps = threads.thread_scratch<float>(SPAN * (2 * per_head + 3 * (per_state + per_channel)) + per_state);
    float* const decays = steps + SPAN * per_head;
    float* const B = decays + SPAN * per_head;
    float* const C = B + SPAN * per_state;
    float* const added = C + SPAN * per_state;
    float* const sums = added + SPAN * per_channel;
    Float* const h = reinterpret_cast<Float*>(sums + SPAN * per_channel);
    std::uint32_t* const column_noise = reinterpret_cast<std::uint32_t*>(h) + per_state;
    std::uint32_t* const channel_noise = column_noise + SPAN * per_state;
    const std::int64_t position = in.start_positions.at<const std::int32_t>()[row];
    const bool is_noisy = in.noise && sizeof(S) == 2;

    for (std::int64_t token = begin, stop; token < end; token = stop) {
        stop = in.packable ? next_packed(token, position + token - begin, end) : std::min(end, token + SPAN);
        for (std::int64_t t = token; t < stop; ++t) {
            const std::int64_t i = t - token;
            step_sizes(in.dt.row<const T>(t) + first, in.dt_bias.at<const float>() + first,
                       in.A_log.at<const float>() + first, count, in.dt_limit, steps + i * per_head,
                       decays + i * per_head);
            to_floats(in.B.row<const T>(t) + group * sizes.state, B + i * per_state, sizes.state);
            to_floats(in.C.row<const T>(t) + group * sizes.state, C + i * per_state, sizes.state);
            if (is_noisy) put_noise<S>(position + t - begin, *in.noise, 0, sizes.state, column_noise + i * per_state);
        }
        for (int j = 0; j < count; ++j) {
            const std::int64_t head = first + j;
            const auto x = [&](std::int64_t t) { return in.x.row<const T>(t) + head * sizes.head_dim; };
            const auto slot = [&](std::int64_t id) {
                return in.ssm_states.row<S>(id) + head * elements;
            };
            for (std::int64_t t = token; t < stop; ++t) {
                const std::int64_t i = t - token;
                scale_input(x(t), steps[i * per_head + j], added + i * per_channel, sizes.head_dim);
                if (!is_noisy) continue;
                put_noise<S>(position + t - begin, *in.noise, sizes.state + head * sizes.head_dim, sizes.head_dim,
                             channel_noise + i * per_channel);
            }
            // Between spans the state is in the write slot, where it is not rounded again.
            S* targets[SPAN] = {};
            for (const Checkpoint& taken : in.checkpoints) {
                const std::int64_t last = begin + taken.offset - 1;
                if (taken.row != row || last < token || last >= stop) continue;
                targets[last - token] = slot(taken.slot);
            }
            S* const at_stop = targets[stop - token - 1];
            targets[stop - token - 1] = slot(write);
            const S* const from = token > begin ? slot(write) : (read ? slot(read) : nullptr);
            const HeadTokens inputs{stop - token, decays + j, per_head,    B,
                                    C,            per_state,  added,       sums,
                                    per_channel,  is_noisy ? column_noise : nullptr, channel_noise};
            update_head(inputs, 0, sizes.head_dim, sizes.state, from, [&](std::int64_t i) { return targets[i]; }, h);
            if (in.packable && is_packed_at(position + stop - begin)) {
                round_rows(slot(write), sizes.head_dim, sizes.state);
            }
            if (at_stop) std::copy_n(slot(write), elements, at_stop);
            for (std::int64_t t = token; t < stop; ++t) {
                add_skip(sums + (t - token) * per_channel, in.D.at<const float>()[head], x(t),
                         in.out.at<T>() + (t * sizes.heads + head) * sizes.head_dim, sizes.head_dim);
            }
        }
    }
}

// Return the tokens per chunk: the largest divisor of the model's chunk size up to `most`.
std::int64_t chunk_length(std::int64_t chunk_size, std::int64_t most) {
    std::int64_t length = std::min(chunk_size, most);
    while (chunk_size % length) --length;
    return length;
}

// Call body(row, its end, first head, number of heads) for this thread's parts of the work: some heads of one group
// along a row. A head's bits do not depend on the others, so a thread takes fewer at once if there are few parts.
template <typename Body>
void each_part(const ThreadGroup& threads, std::int64_t tokens, const SsdScan& in, Body&& body) {
    const std::int64_t groups = in.B.shape[1], per_group = in.x.shape[1] / groups, rows = in.read_slots.shape[0];
    std::int64_t at_once = std::min<std::int64_t>(per_group, HEADS);
    while (at_once > 1 && rows * groups * ((per_group + at_once - 1) / at_once) < 4 * threads.size) --at_once;
    const std::int64_t in_group = (per_group + at_once - 1) / at_once, parts = groups * in_group;

    const RowStarts& starts = in.row_starts;
    const auto length_of = [&](std::int64_t row) { return std::min<std::int64_t>(tokens, starts[row + 1]) - starts[row]; };
    each_claimed_part(threads, rows, length_of, parts, [&](std::int64_t row, std::int64_t part) {
        const std::int64_t at = part % in_group * at_once;
        body(row, starts[row] + length_of(row), part / in_group * per_group + at,
             static_cast<int>(std::min(at_once, per_group - at)));
    });
}

void ssd_scan(const ThreadGroup& threads, std::int64_t tokens, const SsdScan& in) {
    Sizes sizes{in.x.shape[1], in.x.shape[2], in.B.shape[1], in.B.shape[2], chunk_length(in.chunk_size, SCAN_CHUNK)};
    if (in.packable) sizes.chunk = INT8_STATE_TOKENS;
    const FlushDenormals flush;
    with_dtype(in.x.dtype, [&](auto type) {
        with_dtype(in.ssm_states.dtype, [&](auto state_type) {
            using T = decltype(type);
            using S = decltype(state_type);
            if (in.recurrent) {
                each_part(threads, tokens, in, [&](std::int64_t row, std::int64_t end, std::int64_t first, int count) {
                    recur_row<T, S>(threads, in, sizes, row, end, first, count);
                });
                return;
            }
            const auto run = [&](auto&& scan) {
                each_part(threads, tokens, in, [&](std::int64_t row, std::int64_t end, std::int64_t first, int count) {
                    scan_row<T, S>(scan, in, sizes, row, end, first, count);
                });
            };
#if defined(OSTINATO_TILES)
            if constexpr (std::is_same_v<T, bf16>) {
                sizes.on_matrix_units = true;
                // States of 16 bits are rounded after each chunk, at the same tokens on every processor.
                if (sizeof(S) == 4 && !in.packable) sizes.chunk = chunk_length(in.chunk_size, TILED_SCAN_CHUNK);
                const tiles::Scope scope;
                run(TileScan(sizes, threads));
                return;
            }
#endif
            run(ChunkScan(sizes, threads));
        });
    });
    end_streams();
}

KERNEL(ssd_scan);

}  // namespace
}  // namespace ostinato
