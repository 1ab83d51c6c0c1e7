// The gated delta rule for decode rows: 1 + k tokens each, from a read slot to write slots.

#include <algorithm>
#include <type_traits>

#include "bind/kernel_binding.h"
#include "core/denormals.h"
#include "state/delta_rule.h"
#include "state/packable.h"

namespace ostinato {
namespace {

struct DeltaUpdate : DeltaInputs {
    FIELD(Array<INT32>, read_slots);  // [rows]
    FIELD(Strided<INT32>, write_slots);  // [rows, per_row]
    FIELD(OptionalTensor<Array<INT32>>, start_positions);  // [rows]; required with packable
    FIELD(bool, packable);  // round states at block boundaries

    void check(const Reader& given) const {
        given.expect(start_positions || !packable, "packable needs start_positions");
    }
};

// Vectors of columns updated together: a whole row of common heads if there are registers for its sums, so that memory
// is read in order.
#if defined(OSTINATO_HAS_AVX512)
constexpr int WIDE = 8;
#else
constexpr int WIDE = DELTA_COLUMNS / LANES;
#endif

// Apply one token to V vectors of a head's columns from `first` on: the state [key_dim, value_dim] at `from` (null:
// zeros) goes to `to`, unless that is null, and the outputs to `out`. With `streams`, `to` is other memory than `from`
// and not read soon. `next`, if not null, is the state that is read next: it is prefetched meanwhile.
template <int V, bool PER_CHANNEL>
void update_columns(const DeltaToken& token, std::int64_t key_dim, std::int64_t value_dim, std::int64_t first,
                    Columns<V> columns, const float* from, float* to, bool streams, const float* next, float* out) {
    if (from) from += first;
    StateReads<V> reads = read_state<V>(token, key_dim, from, value_dim, columns);
    reads.finish(token, first);
    for (int v = 0; v < V; ++v) store(out + first + v * LANES, reads.at_query[v]);
    if (!to) return;
    to += first;
    const Change<V, PER_CHANNEL> change(token, reads.at_key);
    const bool is_aligned = columns.width == LANES && value_dim % LANES == 0 &&
                            reinterpret_cast<std::uintptr_t>(to) % sizeof(Float) == 0;
    for (std::int64_t i = 0; i < key_dim; ++i) {
        if (next) {
            const char* ahead = reinterpret_cast<const char*>(next + i * value_dim + first);
            for (std::size_t at = 0; at < V * sizeof(Float); at += 64) __builtin_prefetch(ahead + at, 0, 2);
        }
        Float row[V];
        for (int v = 0; v < V; ++v) row[v] = from ? columns.at(from + i * value_dim, v) : Float{};
        change.apply(i, row);
        for (int v = 0; v < V; ++v) {
            if (streams && is_aligned) {
                stream(to + i * value_dim + v * LANES, row[v]);
            } else {
                columns.put(to + i * value_dim, v, row[v]);
            }
        }
    }
}

template <bool PER_CHANNEL>
void update_head(const DeltaToken& token, std::int64_t key_dim, std::int64_t value_dim, const float* from, float* to,
                 bool streams, const float* next, float* out) {
    const auto update = [&](auto vectors, std::int64_t first, std::int64_t width) {
        constexpr int V = decltype(vectors)::value;
        const Columns<V> columns{width};
        update_columns<V, PER_CHANNEL>(token, key_dim, value_dim, first, columns, from, to, streams, next, out);
    };
    std::int64_t at = 0;
    for (; at + WIDE * LANES <= value_dim; at += WIDE * LANES) update(std::integral_constant<int, WIDE>{}, at, LANES);
    for (; at < value_dim; at += LANES) {
        update(std::integral_constant<int, 1>{}, at, std::min<std::int64_t>(LANES, value_dim - at));
    }
}

// Update all rows. Row r has the tokens r * per_row to r * per_row + per_row - 1. Threads share the heads of all rows.
void delta_update(const ThreadGroup& threads, std::int64_t tokens, const DeltaUpdate& in) {
    const std::int64_t heads = in.heads(), key_dim = in.key_dim(), value_dim = in.value_dim();
    const std::int64_t per_row = in.write_slots.shape[1], elements = key_dim * value_dim;
    const FlushDenormals flush;  // a state that nothing is added to decays forever
    float* const memory = threads.thread_scratch<float>(in.token_floats() + value_dim + LANES + elements);
    float* const sums = memory + in.token_floats();
    float* const unkept = sums + value_dim + LANES;  // a state that only the next token reads

    const auto state_before = [&](std::int64_t unit) -> const float* {
        const std::int32_t slot = in.read_slots.at<const std::int32_t>()[unit / heads];
        return slot ? in.head_state(slot, unit % heads) : nullptr;
    };

    const std::int64_t units = tokens / per_row * heads;
    threads.each_part(units, [&](const ThreadGroup& part) {
        const Range mine = part.split(units);
        for (std::int64_t unit = mine.begin; unit < mine.end; ++unit) {
            const std::int64_t row = unit / heads, head = unit % heads, first = row * per_row;
            const float* from = state_before(unit);
            const std::int32_t* writes = in.write_slots.row<const std::int32_t>(row);
            const bool is_padding = !from && std::all_of(writes, writes + per_row, [](auto slot) { return slot == 0; });
            with_dtype(in.v.dtype, [&](auto type) {
                using T = decltype(type);
                for (std::int64_t i = 0; i < per_row; ++i) {
                    T* out = in.out.at<T>() + ((first + i) * heads + head) * value_dim;
                    if (is_padding) {
                        std::fill(out, out + value_dim, T{});
                        continue;
                    }
                    DeltaToken token;
                    in.prepare<T>(first + i, 1, head, memory, &token);
                    const bool goes_on = i + 1 < per_row;
                    float* const to = writes[i] ? in.head_state(writes[i], head) : (goes_on ? unkept : nullptr);
                    const bool streams = to != from && !goes_on;
                    const float* const next = goes_on || unit + 1 == mine.end ? nullptr : state_before(unit + 1);
                    if (in.has_decay_per_channel()) {
                        update_head<true>(token, key_dim, value_dim, from, to, streams, next, sums);
                    } else {
                        update_head<false>(token, key_dim, value_dim, from, to, streams, next, sums);
                    }
                    if (in.packable && to && is_packed_at(in.start_positions.at<const std::int32_t>()[row] + i + 1)) {
                        round_rows(to, key_dim, value_dim);
                    }
                    for (std::int64_t at = 0; at < value_dim; at += LANES) {
                        store_partial(out + at, load(sums + at), value_dim - at);
                    }
                    from = to;
                }
            });
        }
    }, 1);
    end_streams();
}

KERNEL(delta_update);

}  // namespace
}  // namespace ostinato
