// The gated delta rule of prefill rows, token by token, with the bits of delta_update.
//
// A thread takes some columns of one head along a row and processes its tokens in order, so that their states stay in
// the L1 cache. One pass over a state applies a token and computes the next one's reads.

#include <algorithm>

#include "bind/kernel_binding.h"
#include "core/denormals.h"
#include "state/delta_rule.h"
#include "state/packable.h"
#include "state/step_rows.h"

namespace ostinato {
namespace {

struct DeltaScan : DeltaInputs {
    FIELD(RowStarts, row_starts);  // [rows + 1]
    FIELD(Array<INT32>, start_positions);  // [rows]; no order of sums depends on them, only rounding
    FIELD(Array<INT32>, read_slots);  // [rows]
    FIELD(Strided<INT32>, write_slots);  // [rows]
    FIELD(Checkpoints, checkpoints);
    FIELD(bool, packable);  // round states at block boundaries
};

static_assert(INT8_STATE_BLOCK == DELTA_COLUMNS, "a block's columns belong to one thread");

constexpr int V = DELTA_COLUMNS / LANES;

// Apply tokens to `state` [key_dim, DELTA_COLUMNS], the columns from `first` on. `width` outputs of token i go to `out`
// + i * `apart`. Call `before(i)` before each token.
template <bool PER_CHANNEL, typename T, typename Before>
void scan_columns(const DeltaToken* tokens, std::int64_t count, std::int64_t key_dim, std::int64_t first, float* state,
                  T* out, std::int64_t apart, std::int64_t width, Before&& before) {
    StateReads<V> reads = read_state<V>(tokens[0], key_dim, state, DELTA_COLUMNS, Columns<V>{});
    for (std::int64_t t = 0; t < count; ++t) {
        before(t);
        reads.finish(tokens[t], first);
        for (int v = 0; v * LANES < width; ++v) {
            store_partial(out + t * apart + v * LANES, reads.at_query[v], width - v * LANES);
        }
        const Change<V, PER_CHANNEL> change(tokens[t], reads.at_key);
        const auto apply_to_rows = [&](auto&& use) {
            for (std::int64_t i = 0; i < key_dim; ++i) {
                Float row[V];
                for (int v = 0; v < V; ++v) row[v] = load(state + i * DELTA_COLUMNS + v * LANES);
                change.apply(i, row);
                for (int v = 0; v < V; ++v) store(state + i * DELTA_COLUMNS + v * LANES, row[v]);
                use(i, row);
            }
        };
        StateReads<V> next = {};
        if (t + 1 < count) {
            apply_to_rows([&](std::int64_t i, const Float* row) { next.add(tokens[t + 1], i, row); });
        } else {
            apply_to_rows([](std::int64_t, const Float*) {});
        }
        reads = next;
    }
}

// Columns of a head, from `first` to `end`, whose states are in blocks of [key_dim, DELTA_COLUMNS].
struct HeadColumns {
    std::int64_t head, first, end, key_dim, value_dim;
    float* state;

    // Call body(block, its first column, its number of columns) for all blocks.
    template <typename Body>
    void each_block(Body&& body) const {
        float* block = state;
        for (std::int64_t column = first; column < end; column += DELTA_COLUMNS, block += key_dim * DELTA_COLUMNS) {
            body(block, column, std::min<std::int64_t>(DELTA_COLUMNS, end - column));
        }
    }

    // Call body(row of a block, its offset in the head's state, its number of columns) for all rows of all blocks.
    template <typename Body>
    void each_row(Body&& body) const {
        each_block([&](float* block, std::int64_t column, std::int64_t width) {
            for (std::int64_t i = 0; i < key_dim; ++i) body(block + i * DELTA_COLUMNS, i * value_dim + column, width);
        });
    }

    // Load states from `from` [key_dim, value_dim]; null: zeros. Columns of a block beyond those of the head are zero.
    void load_from(const float* from) const {
        each_row([&](float* at, std::int64_t place, std::int64_t width) {
            std::fill(at, at + DELTA_COLUMNS, 0.0f);
            if (from) std::copy_n(from + place, width, at);
        });
    }

    void store_to(float* to) const {
        each_row([&](const float* at, std::int64_t place, std::int64_t width) { std::copy_n(at, width, to + place); });
    }
};

// Scan columns of a head along a row, whose tokens are `begin` to `end - 1`.
template <bool PER_CHANNEL, typename T>
void scan_row(const DeltaScan& in, std::int64_t row, std::int64_t begin, std::int64_t end, const HeadColumns& columns,
              float* memory) {
    const std::int64_t heads = in.heads(), head = columns.head;
    const std::int32_t read = in.read_slots.at<const std::int32_t>()[row];
    const std::int32_t write = *in.write_slots.row<const std::int32_t>(row);
    const std::int64_t position = in.start_positions.at<const std::int32_t>()[row];
    columns.load_from(read ? in.head_state(read, head) : nullptr);
    DeltaToken tokens[DELTA_SPAN];
    for (std::int64_t token = begin, stop; token < end; token = stop) {
        stop = in.packable ? next_packed(token, position + token - begin, end) : std::min<std::int64_t>(end, token + DELTA_SPAN);
        for (const Checkpoint& taken : in.checkpoints) {
            const std::int64_t at = begin + taken.offset;
            if (taken.row == row && at > token) stop = std::min(stop, at);
        }
        const std::int64_t count = stop - token;
        in.prepare<T>(token, count, head, memory, tokens);
        const std::int64_t stride = heads * columns.value_dim;
        T* const out = in.out.at<T>() + token * stride + head * columns.value_dim;
        columns.each_block([&](float* state, std::int64_t column, std::int64_t width) {
            const auto prefetch_later = [&](std::int64_t i) {
                if (column == columns.first && stop + i < end) in.prefetch<T>(stop + i, head);
            };
            scan_columns<PER_CHANNEL>(tokens, count, columns.key_dim, column, state, out + column, stride, width,
                                      prefetch_later);
        });
        if (in.packable && is_packed_at(position + stop - begin)) {
            columns.each_row([](float* at, std::int64_t, std::int64_t width) { round_block(at, width); });
        }
        for (const Checkpoint& taken : in.checkpoints) {
            if (taken.row == row && begin + taken.offset == stop) columns.store_to(in.head_state(taken.slot, head));
        }
    }
    if (write) columns.store_to(in.head_state(write, head));
}

void delta_scan(const ThreadGroup& threads, std::int64_t tokens, const DeltaScan& in) {
    const std::int64_t heads = in.heads(), key_dim = in.key_dim(), value_dim = in.value_dim();
    const std::int64_t rows = in.read_slots.shape[0], blocks = (value_dim + DELTA_COLUMNS - 1) / DELTA_COLUMNS;
    const FlushDenormals flush;
    // A column's bits do not depend on the others, so a thread takes fewer at once if there are few parts.
    std::int64_t at_once = blocks;
    while (at_once > 1 && rows * heads * ((blocks + at_once - 1) / at_once) < 4 * threads.size) --at_once;
    const std::int64_t in_head = (blocks + at_once - 1) / at_once;
    const std::int64_t of_tokens = DELTA_SPAN * in.token_floats();
    float* const memory = threads.thread_scratch<float>(of_tokens + blocks * key_dim * DELTA_COLUMNS);

    const RowStarts& starts = in.row_starts;
    const auto length_of = [&](std::int64_t row) { return std::min<std::int64_t>(tokens, starts[row + 1]) - starts[row]; };
    each_claimed_part(threads, rows, length_of, heads * in_head, [&](std::int64_t row, std::int64_t part) {
        const std::int64_t first = part % in_head * at_once * DELTA_COLUMNS, begin = starts[row];
        const std::int64_t end = std::min(value_dim, first + at_once * DELTA_COLUMNS);
        const HeadColumns columns{part / in_head, first, end, key_dim, value_dim, memory + of_tokens};
        with_dtype(in.v.dtype, [&](auto type) {
            using T = decltype(type);
            const auto scan = in.has_decay_per_channel() ? scan_row<true, T> : scan_row<false, T>;
            scan(in, row, begin, begin + length_of(row), columns, memory);
        });
    });
}

KERNEL(delta_scan);

}  // namespace
}  // namespace ostinato
