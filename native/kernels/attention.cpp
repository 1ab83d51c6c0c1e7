// Causal attention over paged keys and values, for rows of one token and of hundreds alike.
//
// A token's result depends on nothing but its query, its row's keys and values and its position: a softmax per tile of
// keys at absolute positions, the tiles' results added in order. So it makes no difference whether one thread adds them
// as it goes, or several threads keep theirs for one that adds them all.

#include "../attention_direct.h"
#include "../attention_softmax.h"
#include "../attention_tile.h"
#include "../attention_work.h"
#include "../bind.h"

namespace ostinato {
namespace attention {
namespace {

// Rows of weighted sums, as they are during the work.
struct Sums {
    Softmax* softmax;
    float* values;  // [rows, padded_dim]
};

// A tile of a unit, and what is to be done with what it gives.
struct Piece {
    Unit unit;
    std::int64_t tile;
    bool begins, ends;
    Sums kept;  // where it goes if another thread began the unit
};

template <typename T>
class Worker {
  public:
    const Step& step;
    const Head<T> head;
    const std::int64_t q_stride;
    const T *q, *k_cache, *v_cache;
    T* const out;
    const float scale;
    Sums running, tile_sums;

    Worker(const Team& team, const Step& step, std::int64_t head_dim, const T* q, std::int64_t q_stride,
           const T* k_cache, const T* v_cache, T* out, float scale, std::int64_t rows)
        : step(step), head{head_dim}, q_stride(q_stride), q(q), k_cache(k_cache), v_cache(v_cache), out(out),
          scale(scale) {
        const std::int64_t words = head.padded_words(), dim = head.padded_dim();
        const std::int64_t value_words = TILE / Words<T>::ELEMENTS * dim;
        float* next = team.own<float>(rows * (words + TILE + 2 * dim + 4) + TILE * words + value_words);
        const auto take = [&](std::int64_t count) {
            float* taken = next;
            next += count;
            return taken;
        };
        keys_ = take(TILE * words);
        values_ = take(value_words);
        queries_ = take(rows * words);
        scores_ = take(rows * TILE);
        running.values = take(rows * dim);
        tile_sums.values = take(rows * dim);
        running.softmax = reinterpret_cast<Softmax*>(take(rows * 2));
        tile_sums.softmax = reinterpret_cast<Softmax*>(take(rows * 2));
    }

    void begin(const Unit& unit) {
        const std::int64_t words = head.padded_words();
        for (std::int64_t i = 0; i < unit.query_rows(); ++i) {
            const T* from = q + (unit.begin + i / unit.group) * q_stride;
            from += (unit.kv_head * unit.group + i % unit.group) * head.dim;
            for (std::int64_t j = 0; j < words; j += LANES) store(queries_ + i * words + j, head.load_words(from, j));
        }
    }

    // The first query row that sees anything of a tile: of a unit's first tile, all do.
    std::int64_t first_row(const Unit& unit, std::int64_t tile) const {
        const std::int64_t key = std::max(step.first_key, tile * TILE);
        return std::max<std::int64_t>(0, key - unit.position) * unit.group;
    }

    // What the tile gives to the unit's query rows goes to `sums`; those that see nothing of it are left out.
    void tile(const Unit& unit, std::int64_t tile, Sums sums, const Places& places, const Places* next) {
        const std::int64_t base = tile * TILE, rows = unit.query_rows();
        // How many of the tile's keys query row i sees.
        const auto seen = [&](std::int64_t i) {
            return std::min(places.end, unit.position + i / unit.group + 1 - base);
        };
        const std::int64_t from = first_row(unit, tile);
        const auto weigh = [&](std::int64_t i) {
            sums.softmax[i] = softmax<T>(scores_ + i * TILE, places.first, seen(i), scale * LOG2_E);
        };
        if (rows - from <= DIRECT_ROWS) {
            direct(from, rows - from, (seen(rows - 1) + Words<T>::ELEMENTS - 1) / Words<T>::ELEMENTS, sums, places,
                   next, weigh);
        } else {
            packed(from, rows, seen, sums, places, next, weigh);
        }
    }

    void add(const Unit& unit, std::int64_t tile, Sums sums) {
        const std::int64_t dim = head.padded_dim();
        for (std::int64_t i = first_row(unit, tile); i < unit.query_rows(); ++i) {
            merge(running.softmax[i], running.values + i * dim, sums.softmax[i], sums.values + i * dim, dim);
        }
    }

    // Does a piece; `next`, if there is one, is where the piece after it lies.
    void run(const Piece& piece, const Places& places, const Places* next) {
        if (piece.begins) begin(piece.unit);
        const bool first = piece.tile == piece.unit.first_tile;
        const Sums to = piece.kept.values ? piece.kept : first ? running : tile_sums;
        tile(piece.unit, piece.tile, to, places, next);
        if (piece.kept.values) return;
        if (!first) add(piece.unit, piece.tile, tile_sums);
        if (piece.ends) end(piece.unit);
    }

    void end(const Unit& unit) {
        for (std::int64_t i = 0; i < unit.query_rows(); ++i) {
            const std::int64_t token = unit.begin + i / unit.group, index = unit.kv_head * unit.group + i % unit.group;
            T* to = out + (token * step.heads + index) * head.dim;
            finish(running.softmax[i], running.values + i * head.padded_dim(), to, head.dim);
        }
    }

    void locate(const Piece& piece, Places& places) const {
        const std::int64_t base = piece.tile * TILE, stride = step.kv_heads * head.dim;
        places.first = std::max<std::int64_t>(0, step.first_key - base);
        places.end = std::min<std::int64_t>(TILE, piece.unit.keys() - base);
        const std::int32_t* block = step.block_tables + piece.unit.row * step.max_blocks;
        for (std::int64_t i = places.first; i < places.end;) {
            const std::int64_t number = (base + i) / step.block_size, begin = number * step.block_size - base;
            const std::int64_t end = std::min(places.end, begin + step.block_size);
            std::int64_t offset = (block[number] * step.block_size + i - begin) * stride + piece.unit.kv_head * head.dim;
            for (; i < end; ++i, offset += stride) places.offsets[i] = offset;
        }
        for (std::int64_t i = 0; i < places.first; ++i) places.offsets[i] = places.offsets[places.first];
        for (std::int64_t i = places.end; i < TILE; ++i) places.offsets[i] = places.offsets[places.end - 1];
    }

  private:
    float *keys_, *values_, *queries_, *scores_;

    // Query rows [from, from + rows) of a tile, whose keys' and values' lines are read once; `depth` words of weights.
    template <typename Weigh>
    void direct(std::int64_t from, std::int64_t rows, std::int64_t depth, Sums sums, const Places& places,
                const Places* next, Weigh&& weigh) {
        const std::int64_t words = head.padded_words() / LANES, panels = (places.end + LANES - 1) / LANES;
        Fetch values(v_cache, &places, head.dim, panels * words * FETCHES);
        score_direct<T>(rows, head, k_cache, places, queries_ + from * head.padded_words(), scores_ + from * TILE,
                        values);
        for (std::int64_t i = from; i < from + rows; ++i) weigh(i);
        Fetch keys(k_cache, next, head.dim, depth);
        weigh_direct<T>(rows, head, v_cache, places, depth, scores_ + from * TILE,
                        sums.values + from * head.padded_dim(), keys);
    }

    template <typename Seen, typename Weigh>
    void packed(std::int64_t from, std::int64_t rows, Seen&& seen, Sums sums, const Places& places, const Places* next,
                Weigh&& weigh) {
        constexpr int ELEMENTS = Words<T>::ELEMENTS;
        const std::int64_t words = head.padded_words(), dim = head.padded_dim();
        pack(places, next);
        for (std::int64_t column = 0; column * LANES < places.end; column += BLOCK_COLUMNS) {
            for (std::int64_t i = from; i < rows; i += BLOCK_ROWS) {
                const std::int64_t block = std::min<std::int64_t>(BLOCK_ROWS, rows - i);
                const std::int64_t end = (seen(i + block - 1) + LANES - 1) / LANES;
                product<T>(block, column, std::min(column + BLOCK_COLUMNS, end), queries_ + i * words, words, keys_,
                           LANES, words * LANES, head.words(), scores_ + i * TILE, TILE);
            }
        }
        for (std::int64_t i = from; i < rows; ++i) weigh(i);
        for (std::int64_t column = 0; column * LANES < dim; column += BLOCK_COLUMNS) {
            const std::int64_t end = std::min<std::int64_t>(column + BLOCK_COLUMNS, dim / LANES);
            for (std::int64_t i = from; i < rows; i += BLOCK_ROWS) {
                const std::int64_t block = std::min<std::int64_t>(BLOCK_ROWS, rows - i);
                const std::int64_t depth = (seen(i + block - 1) + ELEMENTS - 1) / ELEMENTS;
                product<T>(block, column, end, scores_ + i * TILE, TILE, values_, dim, LANES, depth,
                           sums.values + i * dim, dim);
            }
        }
    }

    void pack(const Places& places, const Places* next) {
        constexpr int ELEMENTS = Words<T>::ELEMENTS;
        const std::int64_t panels = (places.end + LANES - 1) / LANES, words = head.padded_words() / LANES;
        const std::int64_t groups = (places.end + ELEMENTS - 1) / ELEMENTS;
        Fetch values(v_cache, &places, head.dim, panels * words), keys(k_cache, next, head.dim, groups);
        for (std::int64_t i = 0; i < places.end; i += LANES) {
            pack_keys(head, k_cache, places.offsets + i, keys_ + i * head.padded_words(), values);
        }
        for (std::int64_t i = 0; i < places.end; i += ELEMENTS) {
            keys.step();
            pack_values(head, v_cache, places.offsets + i, values_ + i / ELEMENTS * head.padded_dim());
        }
    }
};

// Zeros for the tokens that attend to nothing.
template <typename T>
void clear_others(const Team& team, const Step& step, T* out, std::int64_t size) {
    const Range mine = team.split(step.tokens);
    std::int64_t token = mine.begin;
    const auto clear_until = [&](std::int64_t end) {
        if (end > token) std::memset(out + token * size, 0, sizeof(T) * (end - token) * size);
    };
    for (std::int64_t row = 0; row < step.rows && token < mine.end; ++row) {
        const Range queries = step.attending(row);
        if (queries.begin >= queries.end) continue;
        clear_until(std::min(queries.begin, mine.end));
        token = std::max(token, queries.end);
    }
    clear_until(mine.end);
}

template <typename T>
void attend(const Team& team, const Step& step, std::int64_t head_dim, const T* q, std::int64_t q_stride,
            const T* k_cache, const T* v_cache, T* out, float scale) {
    clear_others(team, step, out, step.heads * head_dim);
    Shares shares{0, team.size};
    std::int64_t most_rows = 0;
    each_unit(step, [&](const Unit& unit) {
        shares.total += unit.cost();
        most_rows = std::max(most_rows, unit.query_rows());
    });
    // A thread keeps the tiles of at most one unit that another thread began.
    std::int64_t kept_tiles = 0, kept_rows = 0, before = 0;
    if (team.size > 1) {
        each_unit(step, [&](const Unit& unit) {
            if (shares.end_of_part(before, unit, unit.first_tile) < unit.end_tile) {
                kept_tiles = std::max(kept_tiles, unit.end_tile - unit.first_tile);
                kept_rows = std::max(kept_rows, unit.query_rows());
            }
            before += unit.cost();
        });
    }
    Worker<T> worker(team, step, head_dim, q, q_stride, k_cache, v_cache, out, scale, most_rows);
    const std::int64_t dim = worker.head.padded_dim(), kept_size = kept_rows * (dim + 2);
    float* kept = kept_tiles > 0 ? team.shared<float>(team.size * kept_tiles * kept_size) : nullptr;
    const auto kept_sums = [&](int thread, std::int64_t index) {
        float* values = kept + (thread * kept_tiles + index) * kept_size;
        return Sums{reinterpret_cast<Softmax*>(values + kept_rows * dim), values};
    };

    Unit open{};
    std::int64_t open_before = -1, open_tile = 0;
    Piece piece{};
    Places places[2];
    int pieces = 0;  // until now; each waits for the next, whose keys and values can then be fetched
    before = 0;
    each_unit(step, [&](const Unit& unit) {
        for (std::int64_t tile = unit.first_tile; tile < unit.end_tile;) {
            const std::int64_t begin = tile;
            tile = shares.end_of_part(before, unit, begin);
            if (shares.thread_of(before, unit, begin) != team.rank) continue;
            const bool mine = begin == unit.first_tile;
            if (mine && tile < unit.end_tile) open = unit, open_before = before, open_tile = tile;
            for (std::int64_t i = begin; i < tile; ++i) {
                const Sums kept_here = mine ? Sums{} : kept_sums(team.rank, i - begin);
                const Piece next{unit, i, i == begin, i + 1 == unit.end_tile, kept_here};
                worker.locate(next, places[pieces % 2]);
                if (pieces > 0) worker.run(piece, places[(pieces - 1) % 2], &places[pieces % 2]);
                piece = next;
                ++pieces;
            }
        }
        before += unit.cost();
    });
    if (pieces > 0) worker.run(piece, places[(pieces - 1) % 2], nullptr);
    if (kept_tiles == 0) return;
    team.barrier();
    if (open_before < 0) return;
    while (open_tile < open.end_tile) {
        const std::int64_t begin = open_tile;
        const int thread = shares.thread_of(open_before, open, begin);
        open_tile = shares.end_of_part(open_before, open, begin);
        for (std::int64_t i = begin; i < open_tile; ++i) {
            worker.add(open, i, kept_sums(thread, i - begin));
        }
    }
    worker.end(open);
}

struct Attention : Arguments {
    FIELD(Strided<VALUES>, q);  // [tokens, heads, head_dim]
    FIELD(Array<VALUES>, k_cache);  // [blocks, block_size, kv_heads, head_dim], as v_cache
    FIELD(Array<VALUES>, v_cache);
    FIELD(Array<INT32>, row_starts);  // [rows + 1]
    FIELD(Array<INT32>, start_positions);  // [rows], as kv_lens
    FIELD(Array<INT32>, kv_lens);
    FIELD(Strided<INT32>, block_tables);  // [rows, max_blocks]
    FIELD(float, scale);
    FIELD(std::int64_t, first_key);
    FIELD(Array<VALUES>, out);  // [tokens, heads, head_dim]
};

void attention(const Team& team, std::int64_t tokens, const Attention& in) {
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
                    in.first_key};
    with_dtype(in.q.dtype, [&](auto type) {
        using T = decltype(type);
        attend(team, step, in.q.shape[2], in.q.at<const T>(), in.q.strides[0], in.k_cache.at<const T>(),
               in.v_cache.at<const T>(), in.out.at<T>(), in.scale);
    });
}

KERNEL(attention);

}  // namespace
}  // namespace attention
}  // namespace ostinato
