// The Mamba-2 recurrence of prefill rows, in chunks or token by token: src/ostinato/ops/ssd_scan.py is the definition.
//
// A thread takes some heads of one group and one row at a time and goes through the row's tokens in order, so that their
// states stay in its cache. Everything is in float32, and a head's bits do not depend on what else there is to do.

#include <optional>

#include <nanobind/stl/vector.h>

#include "../chunk_scan.h"
#include "../denormals.h"
#include "../kernels.h"
#include "../recurrence.h"
#include "../rows.h"

namespace ostinato {
namespace {

// The kernel's arguments.
struct Inputs {
    Address x;
    std::int64_t x_stride;
    Address dt;
    std::int64_t dt_stride;
    Address B;
    std::int64_t B_stride;
    Address C;
    std::int64_t C_stride;
    Address A_log, D, dt_bias;
    float least_step, most_step;
    Address states;
    std::int64_t slot_stride;
    Address row_starts, start_positions, read_slots, write_slots;
    std::int64_t write_stride;
    const Checkpoints& checkpoints;
    Address out;
};

// Asks for rows of `size` elements that lie too far apart for the processor to foresee, into the cache behind the
// nearest.
template <typename T>
void prefetch(const T* rows, std::int64_t stride, std::int64_t count, std::int64_t size) {
    constexpr std::int64_t LINE = 64 / sizeof(T);
    for (std::int64_t row = 0; row < count; ++row) {
        for (std::int64_t i = 0; i < size; i += LINE) __builtin_prefetch(rows + row * stride + i, 0, 2);
    }
}

// Heads `first` to `first + count - 1`, of one group, along a row in chunks.
template <typename T, typename S>
void scan_row(ChunkScan& scan, const Inputs& in, const Sizes& sizes, std::int64_t row, std::int64_t end,
              std::int64_t first, int count) {
    const std::int64_t begin = at<const std::int32_t>(in.row_starts)[row];
    const std::int64_t position = at<const std::int32_t>(in.start_positions)[row];
    const std::int32_t read = at<const std::int32_t>(in.read_slots)[row];
    const std::int32_t write = at<const std::int32_t>(in.write_slots)[row * in.write_stride];
    const std::int64_t group = first / (sizes.heads / sizes.groups);
    const auto slot = [&](std::int64_t id, int i) {
        return at<S>(in.states) + id * in.slot_stride + (first + i) * sizes.head_dim * sizes.state;
    };
    bool has_state = read != 0;
    for (int i = 0; i < count && has_state; ++i) scan.load_state(i, slot(read, i));
    for (std::int64_t token = begin, stop; token < end; token = stop) {
        stop = std::min(end, token + sizes.chunk - (position + token - begin) % sizes.chunk);
        const T* const B = at<const T>(in.B) + token * in.B_stride + group * sizes.state;
        const T* const C = at<const T>(in.C) + token * in.C_stride + group * sizes.state;
        const T* const dt = at<const T>(in.dt) + token * in.dt_stride;
        const std::int64_t next = stop - token, next_count = std::min(end - stop, sizes.chunk);
        scan.load_group(B, in.B_stride, C, in.C_stride, stop - token);
        prefetch(B + next * in.B_stride, in.B_stride, next_count, sizes.state);
        for (int i = 0; i < count; ++i) {
            const std::int64_t head = first + i;
            const T* const x = at<const T>(in.x) + token * in.x_stride + head * sizes.head_dim;
            T* const y = at<T>(in.out) + (token * sizes.heads + head) * sizes.head_dim;
            scan.load_steps(dt + head, in.dt_stride, at<const float>(in.dt_bias)[head], in.least_step, in.most_step,
                            -std::exp(at<const float>(in.A_log)[head]));
            scan.load_x(x, in.x_stride);
            prefetch(x + next * in.x_stride, in.x_stride, next_count, sizes.head_dim);
            if (i == 0) prefetch(C + next * in.C_stride, in.C_stride, next_count, sizes.state);
            if (i == count - 1) prefetch(dt + next * in.dt_stride + first, in.dt_stride, next_count, count);
            for (std::size_t c = 0; c < in.checkpoints.size(); c += 3) {
                const std::int64_t offset = begin + in.checkpoints[c + 1] - token;
                if (in.checkpoints[c] != row || offset <= 0 || offset >= stop - token) continue;
                scan.look_ahead(i, has_state, offset);
                scan.store_state(SPARE, slot(in.checkpoints[c + 2], i));
            }
            scan.advance(i, has_state, at<const float>(in.D)[head], y, sizes.heads * sizes.head_dim);
            for (std::size_t c = 0; c < in.checkpoints.size(); c += 3) {
                if (in.checkpoints[c] != row || begin + in.checkpoints[c + 1] != stop) continue;
                scan.store_state(i, slot(in.checkpoints[c + 2], i));
            }
            if (stop == end) scan.store_state(i, slot(write, i));
        }
        has_state = true;
    }
}

// Heads `first` to `first + count - 1`, of one group, along a row, token by token as decoding does it: with the same
// inner functions, so with the same bits.
template <typename T, typename S>
void recur_row(const Team& team, const Inputs& in, const Sizes& sizes, std::int64_t row, std::int64_t end,
               std::int64_t first, int count) {
    constexpr std::int64_t SPAN = 16;  // tokens that a state's channel takes while it is in registers
    const std::int64_t begin = at<const std::int32_t>(in.row_starts)[row];
    const std::int32_t read = at<const std::int32_t>(in.read_slots)[row];
    const std::int32_t write = at<const std::int32_t>(in.write_slots)[row * in.write_stride];
    const std::int64_t group = first / (sizes.heads / sizes.groups), elements = sizes.head_dim * sizes.state;
    const std::int64_t per_head = padded(count), per_state = padded(sizes.state), per_channel = padded(sizes.head_dim);
    float* const steps = team.own<float>(SPAN * 2 * (per_head + per_state + per_channel) + per_state);
    float* const decays = steps + SPAN * per_head;
    float* const B = decays + SPAN * per_head;
    float* const C = B + SPAN * per_state;
    float* const added = C + SPAN * per_state;
    float* const sums = added + SPAN * per_channel;
    Float* const h = reinterpret_cast<Float*>(sums + SPAN * per_channel);

    for (std::int64_t token = begin, stop; token < end; token = stop) {
        stop = std::min(end, token + SPAN);
        for (std::int64_t t = token; t < stop; ++t) {
            const std::int64_t i = t - token;
            step_sizes(at<const T>(in.dt) + t * in.dt_stride + first, at<const float>(in.dt_bias) + first,
                       at<const float>(in.A_log) + first, count, in.least_step, in.most_step, steps + i * per_head,
                       decays + i * per_head);
            to_floats(at<const T>(in.B) + t * in.B_stride + group * sizes.state, B + i * per_state, sizes.state);
            to_floats(at<const T>(in.C) + t * in.C_stride + group * sizes.state, C + i * per_state, sizes.state);
        }
        for (int j = 0; j < count; ++j) {
            const std::int64_t head = first + j;
            const T* const x = at<const T>(in.x) + head * sizes.head_dim;
            const auto slot = [&](std::int64_t id) {
                return at<S>(in.states) + id * in.slot_stride + head * elements;
            };
            for (std::int64_t t = token; t < stop; ++t) {
                scale_input(x + t * in.x_stride, steps[(t - token) * per_head + j], added + (t - token) * per_channel,
                            sizes.head_dim);
            }
            // Between spans the state lies in the write slot, where nothing more is rounded.
            S* targets[SPAN] = {};
            for (std::size_t c = 0; c < in.checkpoints.size(); c += 3) {
                const std::int64_t last = begin + in.checkpoints[c + 1] - 1;
                if (in.checkpoints[c] != row || last < token || last >= stop) continue;
                targets[last - token] = slot(in.checkpoints[c + 2]);
            }
            S* const at_stop = targets[stop - token - 1];
            targets[stop - token - 1] = slot(write);
            const S* const from = token > begin ? slot(write) : (read ? slot(read) : nullptr);
            const HeadTokens inputs{stop - token, decays + j, per_head, B, C, per_state, added, sums, per_channel};
            with_vectors(sizes.state, [&](auto vectors) {
                update_channels<decltype(vectors)::value>(
                    inputs, 0, sizes.head_dim, sizes.state, from, [&](std::int64_t i) { return targets[i]; }, h);
            });
            if (at_stop) std::copy_n(slot(write), elements, at_stop);
            for (std::int64_t t = token; t < stop; ++t) {
                add_skip(sums + (t - token) * per_channel, at<const float>(in.D)[head], x + t * in.x_stride,
                         at<T>(in.out) + (t * sizes.heads + head) * sizes.head_dim, sizes.head_dim);
            }
        }
    }
}

// `x` [tokens, heads, head_dim], `dt` [tokens, heads], `B`, `C` [tokens, groups, state], all with a stride in elements
// from token to token; `A_log`, `D`, `dt_bias` [heads] float32; `states` [slots, heads, head_dim, state]; `row_starts`
// [rows + 1] and per row its first position, read slot and, strided, write slot, int32. -> `out` [tokens, heads,
// head_dim], contiguous. `recurrent`: token by token instead of in chunks.
void ssd_scan(const Team& team, std::int64_t tokens, Address x, std::int64_t x_stride, Address dt,
              std::int64_t dt_stride, Address B, std::int64_t B_stride, Address C, std::int64_t C_stride,
              Address A_log, Address D, Address dt_bias, float least_step, float most_step, Address states,
              std::int64_t slot_stride, Address row_starts, Address start_positions, Address read_slots,
              Address write_slots, std::int64_t write_stride, const Checkpoints& checkpoints, Address out,
              std::int64_t rows, std::int64_t heads, std::int64_t head_dim, std::int64_t groups, std::int64_t state,
              std::int64_t chunk, int dtype, int state_dtype, bool recurrent) {
    const Inputs in{x, x_stride, dt, dt_stride, B, B_stride, C, C_stride, A_log, D, dt_bias, least_step, most_step,
                    states, slot_stride, row_starts, start_positions, read_slots, write_slots, write_stride,
                    checkpoints, out};
    const Sizes sizes{heads, head_dim, groups, state, chunk};
    const FlushDenormals flush;
    std::optional<ChunkScan> scan;
    if (!recurrent) scan.emplace(sizes, team);

    // Fewer heads at once if there would be too few parts to share out. A head's bits do not depend on the others.
    const std::int64_t per_group = heads / groups;
    std::int64_t at_once = std::min<std::int64_t>(per_group, HEADS);
    while (at_once > 1 && rows * groups * ((per_group + at_once - 1) / at_once) < 4 * team.size) --at_once;
    const std::int64_t parts = groups * ((per_group + at_once - 1) / at_once);

    const auto starts = at<const std::int32_t>(row_starts);
    const auto row_end = [&](std::int64_t row) { return std::min<std::int64_t>(tokens, starts[row + 1]); };
    std::int64_t work = 0, before = 0;
    for (std::int64_t row = 0; row < rows; ++row) work += std::max<std::int64_t>(0, row_end(row) - starts[row]) * parts;
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t length = row_end(row) - starts[row];
        if (length <= 0) continue;
        for (std::int64_t part = 0; part < parts; ++part, before += length) {
            // A part belongs to the thread in whose share of all work its middle lies.
            if ((2 * before + length) * team.size / (2 * work) != team.rank) continue;
            const std::int64_t in_group = part % (parts / groups) * at_once;
            const std::int64_t first = part / (parts / groups) * per_group + in_group;
            const int count = static_cast<int>(std::min(at_once, per_group - in_group));
            with_dtype(dtype, [&](auto type) {
                with_dtype(state_dtype, [&](auto state_type) {
                    using T = decltype(type);
                    using S = decltype(state_type);
                    if (recurrent) {
                        recur_row<T, S>(team, in, sizes, row, row_end(row), first, count);
                    } else {
                        scan_row<T, S>(*scan, in, sizes, row, row_end(row), first, count);
                    }
                });
            });
        }
    }
    end_streams();
}

}  // namespace

void bind_ssd_scan(Module& module) { bind<ssd_scan>(module, "ssd_scan"); }

}  // namespace ostinato
