// Causal attention over paged keys and values, for rows of one token and of hundreds alike.
//
// A token's result depends on nothing but its query, its row's keys and values and its position: a softmax per tile of
// keys at absolute positions, the tiles' results added in order. So it makes no difference whether one thread adds them as
// it goes, or several threads keep theirs for one that adds them all.

#include "../attention_tile.h"
#include "../attention_work.h"
#include "../kernels.h"

namespace ostinato {
namespace attention {
namespace {

// Rows of weighted sums, as they are during the work.
struct Sums {
    Softmax* softmax;
    float* values;  // [rows, padded_dim]
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
            running.softmax[i] = {-std::numeric_limits<float>::infinity(), 0.0f};
        }
        std::memset(running.values, 0, sizeof(float) * unit.query_rows() * head.padded_dim());
    }

    // The first query row that sees anything of a tile.
    std::int64_t first_row(const Unit& unit, std::int64_t tile) const {
        const std::int64_t key = std::max(step.first_key, tile * TILE);
        return std::max<std::int64_t>(0, key - unit.position) * unit.group;
    }

    // What the tile gives to the unit's query rows goes to `sums`; those that see nothing of it are left out.
    void tile(const Unit& unit, std::int64_t tile, Sums sums) {
        const std::int64_t base = tile * TILE, rows = unit.query_rows(), dim = head.padded_dim();
        const std::int64_t count = std::min<std::int64_t>(TILE, unit.keys() - base);
        const std::int64_t first = std::max<std::int64_t>(0, step.first_key - base);
        // How many of the tile's keys query row i sees.
        const auto seen = [&](std::int64_t i) { return std::min(count, unit.position + i / unit.group + 1 - base); };
        const std::int64_t from = first_row(unit, tile);
        pack(unit, base, first, count);
        const std::int64_t words = head.padded_words();
        for (std::int64_t column = 0; column * LANES < count; column += BLOCK_COLUMNS) {
            for (std::int64_t i = from; i < rows; i += BLOCK_ROWS) {
                const std::int64_t block = std::min<std::int64_t>(BLOCK_ROWS, rows - i);
                const std::int64_t end = (seen(i + block - 1) + LANES - 1) / LANES;
                product<T>(block, column, std::min(column + BLOCK_COLUMNS, end), queries_ + i * words, words, keys_,
                           LANES, words * LANES, head.words(), scores_ + i * TILE, TILE);
            }
        }
        for (std::int64_t i = from; i < rows; ++i) {
            sums.softmax[i] = softmax<T>(scores_ + i * TILE, first, seen(i), scale);
        }
        constexpr int ELEMENTS = Words<T>::ELEMENTS;
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

    void add(const Unit& unit, std::int64_t tile, Sums sums) {
        const std::int64_t dim = head.padded_dim();
        for (std::int64_t i = first_row(unit, tile); i < unit.query_rows(); ++i) {
            merge(running.softmax[i], running.values + i * dim, sums.softmax[i], sums.values + i * dim, dim);
        }
    }

    void end(const Unit& unit) {
        for (std::int64_t i = 0; i < unit.query_rows(); ++i) {
            const std::int64_t token = unit.begin + i / unit.group, index = unit.kv_head * unit.group + i % unit.group;
            finish(running.softmax[i], running.values + i * head.padded_dim(), out + (token * step.heads + index) * head.dim,
                   head.dim);
        }
    }

  private:
    float *keys_, *values_, *queries_, *scores_;

    // Keys and values [first, count) of the tile that begins at position `base`; the others are 0, whatever is there.
    void pack(const Unit& unit, std::int64_t base, std::int64_t first, std::int64_t count) {
        constexpr int ELEMENTS = Words<T>::ELEMENTS;
        const T *keys[TILE], *values[TILE];
        const std::int32_t* blocks = step.block_tables + unit.row * step.max_blocks;
        for (std::int64_t i = 0; i < TILE; ++i) {
            keys[i] = values[i] = nullptr;
            if (i < first || i >= count) continue;
            const std::int64_t block = (base + i) / step.block_size, offset = (base + i) % step.block_size;
            const std::int64_t cell = (blocks[block] * step.block_size + offset) * step.kv_heads + unit.kv_head;
            keys[i] = k_cache + cell * head.dim;
            values[i] = v_cache + cell * head.dim;
        }
        for (std::int64_t i = 0; i < count; i += LANES) {
            for (std::int64_t j = i; j < std::min(i + LANES, count); ++j) fetch(values[j]);
            pack_keys(head, keys + i, keys_ + i * head.padded_words());
        }
        for (std::int64_t i = 0; i < count; i += ELEMENTS) {
            pack_values(head, values + i, values_ + i / ELEMENTS * head.padded_dim());
        }
    }

    void fetch(const T* values) const {
        const char* bytes = reinterpret_cast<const char*>(values);
        for (std::int64_t i = 0; i < static_cast<std::int64_t>(sizeof(T)) * head.dim; i += 64) __builtin_prefetch(bytes + i);
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
    std::int64_t kept_tiles = 0, before = 0;
    if (team.size > 1) {
        each_unit(step, [&](const Unit& unit) {
            if (shares.end_of_part(before, unit, unit.first_tile) < unit.end_tile) {
                kept_tiles = std::max(kept_tiles, unit.end_tile - unit.first_tile);
            }
            before += unit.cost();
        });
    }
    Worker<T> worker(team, step, head_dim, q, q_stride, k_cache, v_cache, out, scale, most_rows);
    const std::int64_t dim = worker.head.padded_dim();
    float* kept = kept_tiles > 0 ? team.shared<float>(team.size * kept_tiles * CUT_ROWS * (dim + 2)) : nullptr;
    const auto kept_sums = [&](int thread, std::int64_t index) {
        float* values = kept + (thread * kept_tiles + index) * CUT_ROWS * (dim + 2);
        return Sums{reinterpret_cast<Softmax*>(values + CUT_ROWS * dim), values};
    };

    Unit open{};
    std::int64_t open_before = -1, open_tile = 0;
    before = 0;
    each_unit(step, [&](const Unit& unit) {
        for (std::int64_t tile = unit.first_tile; tile < unit.end_tile;) {
            const std::int64_t begin = tile;
            tile = shares.end_of_part(before, unit, begin);
            if (shares.thread_of(before, unit, begin) != team.rank) continue;
            if (begin == unit.first_tile) {
                worker.begin(unit);
                for (std::int64_t i = begin; i < tile; ++i) {
                    worker.tile(unit, i, worker.tile_sums);
                    worker.add(unit, i, worker.tile_sums);
                }
                if (tile == unit.end_tile) {
                    worker.end(unit);
                } else {
                    open = unit, open_before = before, open_tile = tile;
                }
            } else {
                worker.begin(unit);
                for (std::int64_t i = begin; i < tile; ++i) worker.tile(unit, i, kept_sums(team.rank, i - begin));
            }
        }
        before += unit.cost();
    });
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

// `q` [tokens, heads, head_dim] with its token stride in elements, `k_cache` and `v_cache` [blocks, block_size, kv_heads,
// head_dim]; row_starts [rows + 1], start_positions, kv_lens [rows] and block_tables [rows, max_blocks] int32 -> `out`
// [tokens, heads, head_dim].
void attention(const Team& team, std::int64_t tokens, Address q, std::int64_t q_stride, Address k_cache, Address v_cache,
               Address row_starts, Address start_positions, Address kv_lens, Address block_tables,
               std::int64_t max_blocks, Address out, std::int64_t rows, std::int64_t heads, std::int64_t kv_heads,
               std::int64_t head_dim, std::int64_t block_size, float scale, std::int64_t first_key, int dtype) {
    const auto integers = [](Address address) { return at<const std::int32_t>(address); };
    const Step step{tokens,
                    rows,
                    integers(row_starts),
                    integers(start_positions),
                    integers(kv_lens),
                    integers(block_tables),
                    max_blocks,
                    block_size,
                    heads,
                    kv_heads,
                    first_key};
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        attend(team, step, head_dim, at<const T>(q), q_stride, at<const T>(k_cache), at<const T>(v_cache), at<T>(out),
               scale);
    });
}

}  // namespace
}  // namespace attention

void bind_attention(Module& module) { bind<attention::attention>(module, "attention"); }

}  // namespace ostinato
