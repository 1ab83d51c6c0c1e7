// Causal attention over paged keys and values, for rows of one token and of hundreds alike.
//
// A token's result depends only on its query, its row's keys and values, and its position. Keys are taken in tiles at
// absolute positions: each tile has a softmax, and the tiles' results are added in order. So it makes no difference
// whether one thread adds them as it goes, or several threads keep theirs for one that adds them all. Matrix units add
// in another order than vectors: with them a result also depends on whether the row has few or many tokens, unless a
// fixed order is asked for.

#include "attention/attention_amx.h"
#include "attention/packed.h"
#include "attention/schedule.h"
#include "attention/small_q.h"
#include "attention/softmax.h"
#include "bind/kernel_binding.h"

namespace ostinato {
namespace attention {
namespace {

constexpr int AHEAD = 2;  // pieces between the present one and the one whose keys and values are prefetched

// A tile of a unit, and where its result goes.
struct Piece {
    WorkUnit unit;
    std::int64_t tile;
    bool begins, ends;
    Sums kept;  // where the result goes if another thread began the unit
};

// Inputs and outputs of the kernel: values of T, keys and values stored as S.
template <typename T, typename S>
struct PagedOperands {
    Step step;
    Head<T> head;
    const T* q;
    std::int64_t q_stride;
    const S *k_cache, *v_cache;
    const float *k_scales, *v_scales;  // null unless S is int8
    const float* sinks;  // null if there are none
    T* out;
    float scale, softcap;  // `softcap` is 0 if there is none

    // Return query row i of a unit.
    const T* query(const WorkUnit& unit, std::int64_t i) const {
        return q + (unit.begin + i / unit.group) * q_stride + (unit.kv_head * unit.group + i % unit.group) * head.dim;
    }

    T* result(const WorkUnit& unit, std::int64_t i) const {
        const std::int64_t token = unit.begin + i / unit.group, index = unit.kv_head * unit.group + i % unit.group;
        return out + (token * step.heads + index) * head.dim;
    }

    // Return the sink of query row i's head, or null.
    const float* sink(const WorkUnit& unit, std::int64_t i) const {
        return sinks == nullptr ? nullptr : sinks + unit.kv_head * unit.group + i % unit.group;
    }

    // Return the query rows that see at least one key of a tile. Of a unit's first tile, rows whose windows begin
    // behind it are left out.
    Range rows(const WorkUnit& unit, std::int64_t tile) const {
        const std::int64_t key = std::max(step.first_key, tile * TILE);
        std::int64_t begin = std::max<std::int64_t>(0, key - unit.position);
        if (step.last_seen != nullptr) {
            for (begin = 0; step.end_of(unit.begin + begin, unit.position + begin) <= key;) ++begin;
        }
        const std::int64_t end = std::min(unit.end - unit.begin, (tile + 1) * TILE - unit.position + step.window - 1);
        return {begin * unit.group, end * unit.group};
    }

    // Return the elements from one key to the next within a block.
    std::int64_t key_stride() const { return step.kv_heads * head.dim; }

    ScalesOf<S> scales() const { return {k_scales, v_scales}; }

    // Call `body` with the scales, which may cap scores, and the factor from scores to powers of 2.
    template <typename Body>
    void with_scores(const ScalesOf<S>& scales, Body&& body) const {
        if (softcap == 0.0f) return body(scales, scale * LOG2_E);
        body(CappedScores<ScalesOf<S>>{scales, scale / softcap, softcap}, LOG2_E);
    }

    void locate(const Piece& piece, KeyOffsets& places) const {
        const std::int64_t base = piece.tile * TILE;
        places.first = std::max<std::int64_t>(0, step.first_of(piece.unit.position) - base);
        places.end = std::min<std::int64_t>(TILE, piece.unit.keys - base);
        const std::int32_t* block = step.block_tables + piece.unit.row * step.max_blocks;
        for (std::int64_t i = places.first; i < places.end;) {
            const std::int64_t number = (base + i) / step.block_size, begin = number * step.block_size - base;
            const std::int64_t end = std::min(places.end, begin + step.block_size);
            std::int64_t offset = (block[number] * step.block_size + i - begin) * key_stride();
            offset += piece.unit.kv_head * head.dim;
            if constexpr (ScalesOf<S>::ARE_THERE) {
                std::int64_t of = (block[number] * step.block_size + i - begin) * step.kv_heads + piece.unit.kv_head;
                scales().fetch(of, of + (end - i) * step.kv_heads);
                for (std::int64_t j = i; j < end; ++j, of += step.kv_heads) places.heads[j] = of;
            }
            for (; i < end; ++i, offset += key_stride()) places.offsets[i] = offset;
        }
        places.fill_up(places.offsets);
        if constexpr (ScalesOf<S>::ARE_THERE) places.fill_up(places.heads);
    }
};

// Keys of a tile that each query row of a unit sees: row i sees those from `first(i)` up to, but not including, `(i)`.
struct Seen {
    const WorkUnit& unit;
    const Step& step;
    std::int64_t base, begin, end;

    Seen(const WorkUnit& unit, std::int64_t tile, const KeyOffsets& places, const Step& step)
        : unit(unit), step(step), base(tile * TILE), begin(places.first), end(places.end) {}
    std::int64_t operator()(std::int64_t i) const {
        return std::min(end, step.end_of(unit.begin + i / unit.group, position(i)) - base);
    }
    std::int64_t first(std::int64_t i) const { return std::max(begin, position(i) - step.window + 1 - base); }

  private:
    std::int64_t position(std::int64_t i) const { return unit.position + i / unit.group; }
};

template <typename T, typename S>
class PagedWorker : TileScratch<T> {
  public:
    using TileScratch<T>::running, TileScratch<T>::tile_sums;

    PagedWorker(const ThreadGroup& threads, const PagedOperands<T, S>& operands, std::int64_t rows)
        : TileScratch<T>(threads, operands.head, rows), operands_(operands), head(operands.head), scales_(operands.scales()) {}

    void begin(const WorkUnit& unit) {
        const std::int64_t words = head.padded_words();
        for (std::int64_t i = 0; i < unit.query_rows(); ++i) {
            const T* from = operands_.query(unit, i);
            for (std::int64_t j = 0; j < words; j += LANES) store(queries + i * words + j, head.load_words(from, j));
        }
    }

    // Compute the tile's contribution to the unit's query rows into `sums`, for the rows that see at least one of its
    // keys.
    void tile(const WorkUnit& unit, std::int64_t tile, Sums sums, const KeyOffsets& places, const KeyOffsets* next) {
        const Range rows = operands_.rows(unit, tile);
        const Seen seen(unit, tile, places, operands_.step);
        scales_.take(places);
        const auto weigh = [&](std::int64_t i) {
            operands_.with_scores(scales_, [&](const auto& scales, float factor) {
                sums.softmax[i] = softmax<T>(scores + i * TILE, seen.first(i), seen(i), factor, scales);
            });
        };
        if (rows.end - rows.begin <= SMALL_Q_ROWS) {
            direct(rows.begin, rows.end - rows.begin,
                   (seen(rows.end - 1) + LaneOperand<T>::ELEMENTS - 1) / LaneOperand<T>::ELEMENTS, sums, places, next, weigh);
        } else {
            packed(rows.begin, rows.end, seen, sums, places, next, weigh);
        }
    }

    // Give the rows that see no key of a unit's first tile an empty softmax.
    void clear(const WorkUnit& unit) {
        const std::int64_t dim = head.padded_dim();
        for (std::int64_t i = operands_.rows(unit, unit.first_tile).end; i < unit.query_rows(); ++i) {
            running.softmax[i] = {-std::numeric_limits<float>::infinity(), 0.0f};
            std::memset(running.values + i * dim, 0, sizeof(float) * dim);
        }
    }

    void add(const WorkUnit& unit, std::int64_t tile, Sums sums) {
        const std::int64_t dim = head.padded_dim();
        const Range rows = operands_.rows(unit, tile);
        for (std::int64_t i = rows.begin; i < rows.end; ++i) {
            merge(running.softmax[i], running.values + i * dim, sums.softmax[i], sums.values + i * dim, dim);
        }
    }

    void end(const WorkUnit& unit) {
        for (std::int64_t i = 0; i < unit.query_rows(); ++i) {
            finish(running.softmax[i], running.values + i * head.padded_dim(), operands_.result(unit, i), head.dim,
                   operands_.sink(unit, i));
        }
    }

  private:
    const PagedOperands<T, S>& operands_;
    const Head<T>& head;
    ScalesOf<S> scales_;
    using TileScratch<T>::keys, TileScratch<T>::values, TileScratch<T>::queries, TileScratch<T>::scores;

    // Compute query rows [from, from + rows) of a tile with keys and values in place; each of their lines is read once.
    // `depth` is the number of words of weights that are not 0.
    template <typename Weigh>
    void direct(std::int64_t from, std::int64_t rows, std::int64_t depth, Sums sums, const KeyOffsets& places,
                const KeyOffsets* next, Weigh&& weigh) {
        const std::int64_t words = head.padded_words() / LANES, panels = (places.end + LANES - 1) / LANES;
        HeadPrefetch next_keys(operands_.k_cache, next, head.dim, panels * words * PREFETCHES);
        qk_scores<T>(rows, head, operands_.k_cache, places, queries + from * head.padded_words(),
                        scores + from * TILE, next_keys);
        for (std::int64_t i = from; i < from + rows; ++i) weigh(i);
        const std::int64_t steps = LINE_BY_LINE ? depth * value_passes<T>(rows, head.dim) : depth;
        HeadPrefetch next_values(operands_.v_cache, next, head.dim, steps);
        weighted_values<T>(rows, head, operands_.v_cache, places, depth, scores + from * TILE,
                        sums.values + from * head.padded_dim(), next_values);
    }

    template <typename Seen, typename Weigh>
    void packed(std::int64_t from, std::int64_t rows, Seen&& seen, Sums sums, const KeyOffsets& places, const KeyOffsets* next,
                Weigh&& weigh) {
        constexpr int ELEMENTS = LaneOperand<T>::ELEMENTS;
        const std::int64_t words = head.padded_words(), dim = head.padded_dim();
        pack(places, next);
        for (std::int64_t column = 0; column * LANES < places.end; column += BLOCK_COLUMNS) {
            for (std::int64_t i = from; i < rows; i += BLOCK_ROWS) {
                const std::int64_t block = std::min<std::int64_t>(BLOCK_ROWS, rows - i);
                const std::int64_t end = (seen(i + block - 1) + LANES - 1) / LANES;
                product<T>(block, column, std::min(column + BLOCK_COLUMNS, end), queries + i * words, words, keys,
                           LANES, words * LANES, head.words(), scores + i * TILE, TILE);
            }
        }
        for (std::int64_t i = from; i < rows; ++i) weigh(i);
        for (std::int64_t column = 0; column * LANES < dim; column += BLOCK_COLUMNS) {
            const std::int64_t end = std::min<std::int64_t>(column + BLOCK_COLUMNS, dim / LANES);
            for (std::int64_t i = from; i < rows; i += BLOCK_ROWS) {
                const std::int64_t block = std::min<std::int64_t>(BLOCK_ROWS, rows - i);
                const std::int64_t depth = (seen(i + block - 1) + ELEMENTS - 1) / ELEMENTS;
                product<T>(block, column, end, scores + i * TILE, TILE, values, dim, LANES, depth,
                           sums.values + i * dim, dim);
            }
        }
    }

    void pack(const KeyOffsets& places, const KeyOffsets* next) {
        constexpr int ELEMENTS = LaneOperand<T>::ELEMENTS;
        const std::int64_t panels = (places.end + LANES - 1) / LANES, words = head.padded_words() / LANES;
        const std::int64_t groups = (places.end + ELEMENTS - 1) / ELEMENTS;
        HeadPrefetch these_values(operands_.v_cache, &places, head.dim, panels * words);
        HeadPrefetch next_keys(operands_.k_cache, next, head.dim, groups);
        for (std::int64_t i = 0; i < places.end; i += LANES) {
            pack_keys(head, operands_.k_cache, places.offsets + i, keys + i * head.padded_words(), these_values);
        }
        for (std::int64_t i = 0; i < places.end; i += ELEMENTS) {
            next_keys.step();
            pack_values(head, operands_.v_cache, places.offsets + i, values + i / ELEMENTS * head.padded_dim());
        }
    }
};

#if defined(OSTINATO_ATTENTION_AMX)
// The same worker on matrix units.
template <typename S>
class PagedWorkerAmx {
  public:
    Sums running, tile_sums;

    PagedWorkerAmx(const ThreadGroup& threads, const PagedOperands<bf16, S>& operands, std::int64_t rows)
        : operands_(operands), scales_(operands.scales()), memory_(threads.thread_scratch<float>(size(operands.head, rows))),
          tile_(operands.head, memory_, rows) {
        float* next = memory_ + AmxTile::size(operands.head, rows);
        for (Sums* sums : {&running, &tile_sums}) {
            const std::int64_t padded_rows = blocks_of(rows) * SIDE;
            sums->values = next;
            sums->softmax = reinterpret_cast<Softmax*>(next + padded_rows * operands.head.padded_dim());
            next += padded_rows * (operands.head.padded_dim() + 2);
        }
    }

    void begin(const WorkUnit& unit) {
        tile_.take_queries(unit.query_rows(), [&](std::int64_t i) { return operands_.query(unit, i); });
    }

    void tile(const WorkUnit& unit, std::int64_t tile, Sums sums, const KeyOffsets& places, const KeyOffsets* next) {
        const std::int64_t apart = operands_.step.block_size % SIDE == 0 ? operands_.key_stride() : 0;
        const Range rows = operands_.rows(unit, tile);
        scales_.take(places);
        operands_.with_scores(scales_, [&](const auto& scales, float factor) {
            tile_.run(operands_.k_cache, operands_.v_cache, scales, places, next, apart, rows.begin, rows.end, factor,
                      Seen(unit, tile, places, operands_.step), blocks(sums));
        });
    }

    void clear(const WorkUnit& unit) {
        for (std::int64_t i = operands_.rows(unit, unit.first_tile).end; i < unit.query_rows(); ++i) {
            tile_.clear(blocks(running), i);
        }
    }

    void add(const WorkUnit& unit, std::int64_t tile, Sums sums) {
        const Range rows = operands_.rows(unit, tile);
        tile_.add(blocks(running), blocks(sums), rows.begin, rows.end);
    }

    void end(const WorkUnit& unit) {
        for (std::int64_t i = 0; i < unit.query_rows(); ++i) {
            tile_.end(blocks(running), i, operands_.result(unit, i), operands_.sink(unit, i));
        }
    }

  private:
    const PagedOperands<bf16, S>& operands_;
    ScalesOf<S> scales_;
    float* memory_;
    AmxTile tile_;
    const tiles::Scope scope_;

    static std::int64_t size(Head<bf16> head, std::int64_t rows) {
        return AmxTile::size(head, rows) + 2 * blocks_of(rows) * SIDE * (head.padded_dim() + 2);
    }

    static BlockSums blocks(Sums sums) { return {reinterpret_cast<float*>(sums.softmax), sums.values}; }
};
#endif

// Compute a piece. `next` has the keys to prefetch, or is null.
template <typename W>
void run_piece(W& worker, const Piece& piece, const KeyOffsets& places, const KeyOffsets* next) {
    if (piece.begins) worker.begin(piece.unit);
    const bool first = piece.tile == piece.unit.first_tile;
    const Sums to = piece.kept.values ? piece.kept : first ? worker.running : worker.tile_sums;
    worker.tile(piece.unit, piece.tile, to, places, next);
    if (piece.kept.values) return;
    if (first) worker.clear(piece.unit);
    if (!first) worker.add(piece.unit, piece.tile, worker.tile_sums);
    if (piece.ends) worker.end(piece.unit);
}

// Compute the rows whose number of queries lies within the step's limits. -> whether threads shared memory that some
// may still read
template <typename W, typename T, typename S>
bool attend(const ThreadGroup& threads, const PagedOperands<T, S>& operands) {
    const Step& step = operands.step;
    Shares shares{0, threads.size, threads.size > 1};
    std::int64_t most_rows = 0, largest = 0;
    each_unit(step, [&](const WorkUnit& unit) {
        shares.total += unit.cost();
        largest = std::max(largest, unit.cost());
        most_rows = std::max(most_rows, unit.query_rows());
    });
    if (shares.total == 0) return false;
    const int claimed = threads.size * static_cast<int>(PARTS_PER_THREAD);
    if (threads.size > 1 && largest * claimed <= shares.total) shares = {shares.total, claimed, false};
    // Matrix units take rows in whole blocks.
    const auto padded = [](std::int64_t rows) { return (rows + VECTOR - 1) / VECTOR * VECTOR; };
    // A thread keeps the tiles of at most one unit that another thread began.
    std::int64_t kept_tiles = 0, kept_rows = 0, before = 0;
    if (shares.cuts) {
        each_unit(step, [&](const WorkUnit& unit) {
            if (shares.end_of_part(before, unit, unit.first_tile) < unit.end_tile) {
                kept_tiles = std::max(kept_tiles, unit.end_tile - unit.first_tile);
                kept_rows = std::max(kept_rows, padded(unit.query_rows()));
            }
            before += unit.cost();
        });
    }
    W worker(threads, operands, most_rows);
    const std::int64_t dim = operands.head.padded_dim(), kept_size = kept_rows * (dim + 2);
    float* kept = kept_tiles > 0 ? threads.group_scratch<float>(threads.size * kept_tiles * kept_size) : nullptr;
    const auto kept_sums = [&](int thread, std::int64_t index) {
        float* values = kept + (thread * kept_tiles + index) * kept_size;
        return Sums{reinterpret_cast<Softmax*>(values + kept_rows * dim), values};
    };

    WorkUnit open{};
    std::int64_t open_before = -1, open_tile = 0;
    // A piece waits until the piece whose keys and values are prefetched meanwhile is known.
    Piece pieces[AHEAD + 1];
    KeyOffsets places[AHEAD + 1];
    std::int64_t known = 0, done = 0;
    const auto run_next = [&] {
        constexpr std::int64_t COUNT = AHEAD + 1;
        const KeyOffsets* ahead = done + AHEAD < known ? &places[(done + AHEAD) % COUNT] : nullptr;
        run_piece(worker, pieces[done % COUNT], places[done % COUNT], ahead);
        ++done;
    };
    const auto run_share = [&](std::int64_t share) {
        before = 0;
        each_unit(step, [&](const WorkUnit& unit) {
            for (std::int64_t tile = unit.first_tile; tile < unit.end_tile;) {
                const std::int64_t begin = tile;
                tile = shares.end_of_part(before, unit, begin);
                if (shares.share_of(before, unit, begin) != share) continue;
                const bool mine = begin == unit.first_tile;
                if (mine && tile < unit.end_tile) open = unit, open_before = before, open_tile = tile;
                for (std::int64_t i = begin; i < tile; ++i, ++known) {
                    if (known - done == AHEAD + 1) run_next();
                    const Sums kept_here = mine ? Sums{} : kept_sums(threads.rank, i - begin);
                    Piece& piece = pieces[known % (AHEAD + 1)];
                    piece = Piece{unit, i, i == begin, i + 1 == unit.end_tile, kept_here};
                    operands.locate(piece, places[known % (AHEAD + 1)]);
                }
            }
            before += unit.cost();
        });
    };
    if (shares.cuts) {
        run_share(threads.rank);
    } else {
        for (const std::int64_t share : threads.claims(shares.count)) run_share(share);
    }
    while (done < known) run_next();
    if (kept_tiles == 0) return false;
    threads.barrier();
    if (open_before < 0) return true;
    while (open_tile < open.end_tile) {
        const std::int64_t begin = open_tile;
        const int thread = shares.share_of(open_before, open, begin);
        open_tile = shares.end_of_part(open_before, open, begin);
        for (std::int64_t i = begin; i < open_tile; ++i) {
            worker.add(open, i, kept_sums(thread, i - begin));
        }
    }
    worker.end(open);
    return true;
}

struct Attention : Arguments {
    FIELD(Strided<VALUES>, q);  // [tokens, heads, head_dim]
    FIELD(Array<WEIGHTS>, k_cache);  // [blocks, block_size, kv_heads, head_dim], as v_cache; int8 with scales
    FIELD(Array<WEIGHTS>, v_cache);
    FIELD(Array<INT32>, row_starts);  // [rows + 1]
    FIELD(Array<INT32>, start_positions);  // [rows], as kv_lens
    FIELD(Array<INT32>, kv_lens);
    FIELD(Strided<INT32>, block_tables);  // [rows, max_blocks]
    FIELD(float, scale);
    FIELD(std::int64_t, first_key);
    FIELD(std::optional<std::int64_t>, window);
    FIELD(OptionalTensor<Array<FLOAT32>>, k_scales);  // [blocks, block_size, kv_heads], as v_scales
    FIELD(OptionalTensor<Array<FLOAT32>>, v_scales);
    FIELD(OptionalTensor<Array<FLOAT32>>, sinks);  // [heads]
    FIELD(std::optional<float>, softcap);
    FIELD(OptionalTensor<Array<INT32>>, last_seen);  // [tokens]
    FIELD(bool, fixed_order);
    FIELD(Array<VALUES>, out);  // [tokens, heads, head_dim]

    void check(const Reader& reader) const {
        check_cache(reader, k_cache, k_scales, q.dtype);
        check_cache(reader, v_cache, v_scales, q.dtype);
    }
};

constexpr std::int64_t NO_WINDOW = std::int64_t{1} << 40;  // more positions than any model has

// Run attention for one pair of types. In a fixed order a token's bits do not depend on how many tokens its row has;
// otherwise rows of many queries go to matrix units.
template <typename T, typename S>
void attend_to(const ThreadGroup& threads, const Step& step, const Attention& in) {
    PagedOperands<T, S> operands{step,
                            {in.q.shape[2]},
                            in.q.at<const T>(),
                            in.q.strides[0],
                            in.k_cache.at<const S>(),
                            in.v_cache.at<const S>(),
                            in.k_scales.at<const float>(),
                            in.v_scales.at<const float>(),
                            in.sinks.at<const float>(),
                            in.out.at<T>(),
                            in.scale,
                            in.softcap.value_or(0.0f)};
    clear_others(threads, step, operands.out, step.heads * operands.head.dim);
#if defined(OSTINATO_ATTENTION_AMX)
    if constexpr (std::is_same_v<T, bf16>) {
        if (!in.fixed_order) {
            operands.step.least = MIN_AMX_QUERIES;
            if (attend<PagedWorkerAmx<S>>(threads, operands)) threads.barrier();
            operands.step.least = 1;
            operands.step.most = MIN_AMX_QUERIES - 1;
        }
    }
#endif
    attend<PagedWorker<T, S>>(threads, operands);
}

void attention(const ThreadGroup& threads, std::int64_t tokens, const Attention& in) {
    const auto integers = [](const Tensor& tensor) { return tensor.at<const std::int32_t>(); };
    const Step step{tokens,
                    in.kv_lens.shape[0],
                    integers(in.row_starts),
                    integers(in.start_positions),
                    integers(in.kv_lens),
                    integers(in.block_tables),
                    in.block_tables.strides[0],
                    in.k_cache.shape[1],
                    in.q.shape[1],
                    in.k_cache.shape[2],
                    in.first_key,
                    in.window.value_or(NO_WINDOW),
                    1,
                    std::numeric_limits<std::int64_t>::max(),
                    in.last_seen.at<const std::int32_t>()};
    with_dtype(in.q.dtype, [&](auto type) {
        using T = decltype(type);
        if (in.k_scales) {
            attend_to<T, std::int8_t>(threads, step, in);
        } else {
            attend_to<T, T>(threads, step, in);
        }
    });
}

KERNEL(attention);

}  // namespace
}  // namespace attention
}  // namespace ostinato
