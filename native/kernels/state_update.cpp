// The Mamba-2 recurrence for decode rows: 1 + k tokens each, from a read slot to write slots.

#include <algorithm>

#include "../denormals.h"
#include "../kernels.h"
#include "../recurrence.h"

namespace ostinato {
namespace {

// `x` [tokens, heads, head_dim], `dt` [tokens, heads], `B`, `C` [tokens, groups, size], all with a stride in elements
// from token to token; `A_log`, `D`, `dt_bias` [heads] float32; `states` [slots, heads, head_dim, size]; row r has the
// tokens r * per_row to r * per_row + per_row - 1, `read_slots` [rows] and `write_slots` [rows, per_row], int32.
// -> `y` [tokens, heads, head_dim], contiguous. Threads share the channels of all rows.
void state_update(const Team& team, std::int64_t tokens, std::int64_t per_row, Address x, std::int64_t x_stride,
                  Address dt, std::int64_t dt_stride, Address A_log, Address B, std::int64_t B_stride, Address C,
                  std::int64_t C_stride, Address D, Address dt_bias, float least, float most, Address states,
                  std::int64_t slot_stride, Address read_slots, Address write_slots, std::int64_t write_stride,
                  Address y, std::int64_t heads, std::int64_t head_dim, std::int64_t groups, std::int64_t size,
                  int dtype, int state_dtype) {
    const FlushDenormals flush;  // a state that nothing is added to decays for ever
    const std::int64_t per_head = padded(heads), per_state = padded(size), per_channel = padded(head_dim);
    float* steps = team.own<float>(per_row * 2 * (per_head + per_state + per_channel) + per_state);
    float* decays = steps + per_row * per_head;
    float* B_floats = decays + per_row * per_head;
    float* C_floats = B_floats + per_row * per_state;
    float* added = C_floats + per_row * per_state;
    float* sums = added + per_row * per_channel;
    Float* h = reinterpret_cast<Float*>(sums + per_row * per_channel);

    const Range mine = team.split(tokens / per_row * heads * head_dim);
    std::int64_t last_row = -1, last_group = -1;
    for (std::int64_t next, channel = mine.begin; channel < mine.end; channel = next) {
        const std::int64_t row = channel / (heads * head_dim), head = channel / head_dim % heads;
        const std::int64_t begin = channel % head_dim, end = std::min(head_dim, begin + mine.end - channel);
        next = channel + end - begin;
        const std::int64_t first = row * per_row, group = head / (heads / groups);
        const std::int32_t read = at<const std::int32_t>(read_slots)[row];
        const std::int32_t* writes = at<const std::int32_t>(write_slots) + row * write_stride;
        const bool is_padding = read == 0 && std::all_of(writes, writes + per_row, [](auto slot) { return slot == 0; });

        with_dtype(dtype, [&](auto type) {
            using T = decltype(type);
            for (std::int64_t i = 0; i < per_row; ++i) {
                const std::int64_t token = first + i;
                if (is_padding) {
                    T* out = at<T>(y) + (token * heads + head) * head_dim;
                    std::fill(out + begin, out + end, T{});
                    continue;
                }
                if (row != last_row) {
                    step_sizes(at<const T>(dt) + token * dt_stride, at<const float>(dt_bias), at<const float>(A_log),
                               heads, least, most, steps + i * per_head, decays + i * per_head);
                }
                if (row != last_row || group != last_group) {
                    to_floats(at<const T>(B) + token * B_stride + group * size, B_floats + i * per_state, size);
                    to_floats(at<const T>(C) + token * C_stride + group * size, C_floats + i * per_state, size);
                }
                scale_input(at<const T>(x) + token * x_stride + head * head_dim, steps[i * per_head + head],
                            added + i * per_channel, head_dim);
            }
        });
        if (is_padding) continue;
        last_row = row;
        last_group = group;

        const HeadTokens inputs{per_row, decays + head, per_head, B_floats, C_floats,
                                per_state, added, sums, per_channel};
        with_dtype(state_dtype, [&](auto type) {
            using S = decltype(type);
            S* of_head = at<S>(states) + head * head_dim * size;
            const S* from = read ? of_head + read * slot_stride : nullptr;
            const auto to = [&](std::int64_t i) { return writes[i] ? of_head + writes[i] * slot_stride : nullptr; };
            with_vectors(size, [&](auto vectors) {
                update_channels<decltype(vectors)::value>(inputs, begin, end, size, from, to, h);
            });
        });
        with_dtype(dtype, [&](auto type) {
            using T = decltype(type);
            for (std::int64_t i = 0; i < per_row; ++i) {
                const T* head_x = at<const T>(x) + (first + i) * x_stride + head * head_dim;
                T* out = at<T>(y) + ((first + i) * heads + head) * head_dim;
                add_skip(sums + i * per_channel + begin, at<const float>(D)[head], head_x + begin, out + begin,
                         end - begin);
            }
        });
    }
    end_streams();
}

}  // namespace

void bind_state_update(Module& module) { bind<state_update>(module, "state_update"); }

}  // namespace ostinato
