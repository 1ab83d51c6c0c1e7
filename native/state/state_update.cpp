// The Mamba-2 recurrence for decode rows: 1 + k tokens each, from a read slot to write slots.

#include <algorithm>
#include <optional>

#include "bind/kernel_binding.h"
#include "core/denormals.h"
#include "state/packable.h"
#include "state/ssd_recurrence.h"

namespace ostinato {
namespace {

struct StateUpdate : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, heads, head_dim]
    FIELD(Strided<VALUES>, dt);  // [tokens, heads]
    FIELD(Array<FLOAT32>, A_log);  // [heads], as D and dt_bias
    FIELD(Strided<VALUES>, B);  // [tokens, groups, size], as C
    FIELD(Strided<VALUES>, C);
    FIELD(Array<FLOAT32>, D);
    FIELD(Array<FLOAT32>, dt_bias);
    FIELD(Limits, dt_limit);
    FIELD(Strided<FLOATS>, ssm_states);  // [slots, heads, head_dim, size]
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

// Update all rows. Row r has the tokens r * per_row to r * per_row + per_row - 1. Threads share the channels of all
// rows.
void state_update(const ThreadGroup& threads, std::int64_t tokens, const StateUpdate& in) {
    const std::int64_t heads = in.x.shape[1], head_dim = in.x.shape[2], groups = in.B.shape[1], size = in.B.shape[2];
    const std::int64_t per_row = in.write_slots.shape[1];
    const FlushDenormals flush;  // a state that nothing is added to decays forever
    const std::int64_t per_head = padded(heads), per_state = padded(size), per_channel = padded(head_dim);
    float* steps = threads.thread_scratch<float>(per_row * (2 * per_head + 3 * (per_state + per_channel)) + per_state);
    float* decays = steps + per_row * per_head;
    float* B_floats = decays + per_row * per_head;
    float* C_floats = B_floats + per_row * per_state;
    float* added = C_floats + per_row * per_state;
    float* sums = added + per_row * per_channel;
    Float* h = reinterpret_cast<Float*>(sums + per_row * per_channel);
    std::uint32_t* column_noise = reinterpret_cast<std::uint32_t*>(h) + per_state;
    std::uint32_t* channel_noise = column_noise + per_row * per_state;

    const std::int64_t channels = tokens / per_row * heads * head_dim;
    std::int64_t last_row = -1, last_group = -1;
    threads.each_part(channels, [&](const ThreadGroup& part) {
        const Range mine = part.split(channels);
        for (std::int64_t next, channel = mine.begin; channel < mine.end; channel = next) {
            const std::int64_t row = channel / (heads * head_dim), head = channel / head_dim % heads;
            const std::int64_t begin = channel % head_dim, end = std::min(head_dim, begin + mine.end - channel);
            next = channel + end - begin;
            const std::int64_t first = row * per_row, group = head / (heads / groups);
            const std::int32_t read = in.read_slots.at<const std::int32_t>()[row];
            const std::int32_t* writes = in.write_slots.row<const std::int32_t>(row);
            const bool is_padding = read == 0 && std::all_of(writes, writes + per_row, [](auto slot) { return slot == 0; });

            with_dtype(in.x.dtype, [&](auto type) {
                using T = decltype(type);
                for (std::int64_t i = 0; i < per_row; ++i) {
                    const std::int64_t token = first + i;
                    if (is_padding) {
                        T* out = in.out.at<T>() + (token * heads + head) * head_dim;
                        std::fill(out + begin, out + end, T{});
                        continue;
                    }
                    if (row != last_row) {
                        step_sizes(in.dt.row<const T>(token), in.dt_bias.at<const float>(), in.A_log.at<const float>(),
                                   heads, in.dt_limit, steps + i * per_head, decays + i * per_head);
                    }
                    if (row != last_row || group != last_group) {
                        to_floats(in.B.row<const T>(token) + group * size, B_floats + i * per_state, size);
                        to_floats(in.C.row<const T>(token) + group * size, C_floats + i * per_state, size);
                    }
                    scale_input(in.x.row<const T>(token) + head * head_dim, steps[i * per_head + head],
                                added + i * per_channel, head_dim);
                }
            });
            if (is_padding) continue;

            with_dtype(in.ssm_states.dtype, [&](auto type) {
                using S = decltype(type);
                const bool is_noisy = in.noise && sizeof(S) == 2;
                for (std::int64_t i = 0; is_noisy && i < per_row; ++i) {
                    const std::int64_t position = in.start_positions.at<const std::int32_t>()[row] + i;
                    if (row != last_row) put_noise<S>(position, *in.noise, 0, size, column_noise + i * per_state);
                    put_noise<S>(position, *in.noise, size + head * head_dim, head_dim, channel_noise + i * per_channel);
                }
                const HeadTokens inputs{per_row,     decays + head, per_head, B_floats,
                                        C_floats,    per_state,     added,    sums,
                                        per_channel, is_noisy ? column_noise : nullptr, channel_noise};
                const auto slot = [&](std::int64_t id) { return in.ssm_states.row<S>(id) + head * head_dim * size; };
                const S* from = read ? slot(read) : nullptr;
                const auto to = [&](std::int64_t i) { return writes[i] ? slot(writes[i]) : nullptr; };
                const std::int64_t position = in.packable ? in.start_positions.at<const std::int32_t>()[row] : 0;
                for (std::int64_t i = 0, stop; i < per_row; i = stop) {
                    stop = in.packable ? next_packed(i, position + i, per_row) : per_row;
                    const auto to_later = [&, i](std::int64_t j) { return to(i + j); };
                    update_head(inputs.part(i, stop), begin, end, size, from, to_later, h);
                    S* const last = to(stop - 1);
                    if (in.packable && last && is_packed_at(position + stop)) {
                        round_rows(last + begin * size, end - begin, size);
                    }
                    from = last;
                }
            });
            last_row = row;
            last_group = group;
            with_dtype(in.x.dtype, [&](auto type) {
                using T = decltype(type);
                for (std::int64_t i = 0; i < per_row; ++i) {
                    const T* head_x = in.x.row<const T>(first + i) + head * head_dim;
                    T* out = in.out.at<T>() + ((first + i) * heads + head) * head_dim;
                    add_skip(sums + i * per_channel + begin, in.D.at<const float>()[head], head_x + begin, out + begin,
                             end - begin);
                }
            });
        }
    });
    end_streams();
}

KERNEL(state_update);

}  // namespace
}  // namespace ostinato
