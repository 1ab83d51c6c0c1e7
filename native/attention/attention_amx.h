// Attention of a tile of keys and values on matrix units, for one query row or hundreds alike.
//
// Sixteen query rows are a block. Scores are keys times queries, [keys, 16 query rows]. Keys are left operands in
// place, and a softmax goes down a column, for 16 columns at a time. The weights, transposed, are left operands of the
// values, whose keys are interleaved in pairs.
//
// A query row's result does not depend on the other rows: an element of a tile's product is a sum of its own, in one
// order. Keys that a row does not see have a weight of 0, and adding 0 times a finite value changes no sum.
#pragma once

#include "attention/softmax.h"
#include "core/amx.h"
#include "core/transpose.h"

#if defined(OSTINATO_TILES) && defined(OSTINATO_HAS_AVX512_BF16)
#define OSTINATO_ATTENTION_AMX

namespace ostinato {
namespace attention {

constexpr int SIDE = tiles::SIDE;
constexpr int DEPTH = tiles::DEPTH;
constexpr std::int64_t SQUARE = SIDE * SIDE;  // 32-bit words of a tile
static_assert(TILE % DEPTH == 0);

inline std::int64_t blocks_of(std::int64_t rows) { return (rows + SIDE - 1) / SIDE; }

inline std::int64_t steps_of(std::int64_t keys) { return (keys + DEPTH - 1) / DEPTH; }

// Weighted sums of some blocks. Each block has the maxima and totals of its 16 rows, and values [rows, padded_dim].
struct BlockSums {
    float *softmax, *values;

    static std::int64_t size(std::int64_t blocks, std::int64_t dim) { return blocks * SIDE * (dim + 2); }
    float* softmax_of(std::int64_t block) const { return softmax + block * 2 * SIDE; }
};

// Turn scores [TILE, 16] into weights as bf16 in tiles [TILE / 32][16 rows, 32 keys], which take half the memory. Row i
// sees the keys [first[i], seen[i]); `latest` is the maximum of `first`, `even` the minimum of `seen`. No row sees a
// key from `end` on, a multiple of 32. Write the maxima and the totals to `softmax`; totals are of the rounded weights.
// `scales` are as in `softmax`.
template <typename Scales>
__attribute__((noinline)) void softmax_tile(float* scores, const std::int32_t* first, const std::int32_t* seen,
                                      std::int64_t latest, std::int64_t even, std::int64_t end, float factor,
                                      const Scales& scales, float* softmax) {
    const Float none = splat(-std::numeric_limits<float>::infinity());
    Int begins, ends;
    std::memcpy(&begins, first, sizeof(begins));
    std::memcpy(&ends, seen, sizeof(ends));
    constexpr int APART = 4;  // independent maxima, so that none waits for the one before
    Float best[APART] = {none, none, none, none};
    for (std::int64_t step = 0; step < end; step += APART) {
        const bool whole = step >= latest && step + APART <= even;
        unrolled<APART>([&](auto i) __attribute__((always_inline)) {
            const auto key = static_cast<std::int32_t>(step + i);
            float* at = scores + key * SIDE;
            Float value = scales.score_of(load(at), key) * factor;
            if (!whole) value = (key >= begins) & (key < ends) ? value : none;
            store(at, value);
            best[i] = (Float)_mm512_max_ps((__m512)best[i], (__m512)value);
        });
    }
    const Float most = max(max(best[0], best[1]), max(best[2], best[3]));
    Float total = {};
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    Int order;
    for (int i = 0; i < SIDE; ++i) order[i] = (i + SIDE) << 16 | i;
    for (std::int64_t step = 0; step < end; step += DEPTH) {
        Float square[SIDE];
        for (int i = 0; i < SIDE; ++i) {
            const float* at = scores + (step + 2 * i) * SIDE;
            Float first_key = exp2(load(at) - most), second_key = exp2(load(at + SIDE) - most);
            if constexpr (Scales::ARE_THERE) {
                total += first_key + second_key;
                first_key = scales.weight_of(first_key, step + 2 * i);
                second_key = scales.weight_of(second_key, step + 2 * i + 1);
            }
            const auto rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)second_key, (__m512)first_key);
            square[i] = (Float)_mm512_permutexvar_epi16((__m512i)order, rounded);
            if constexpr (!Scales::ARE_THERE) {
                total = (Float)_mm512_dpbf16_ps((__m512)total, (__m512bh)(__m512)square[i], ones);
            }
        }
        transpose(square);
        for (int i = 0; i < SIDE; ++i) store(scores + (step / 2 + i) * SIDE, square[i]);
    }
    store(softmax, most);
    store(softmax + SIDE, total);
}

// Merge rows [from, end) of a block as `merge` does, and leave the others unchanged.
__attribute__((noinline)) inline void merge_block(float* softmax, float* sums, const float* tile_softmax,
                                                  const float* tile_sums, std::int64_t from, std::int64_t end,
                                                  std::int64_t dim) {
    const Float largest = load(softmax), added_largest = load(tile_softmax);
    const Float most = largest > added_largest ? largest : added_largest;
    float old[SIDE], added[SIDE], total[SIDE], largest_of[SIDE];
    store(old, exp2(largest - most));
    store(added, exp2(added_largest - most));
    store(largest_of, most);
    store(total, fma(load(softmax + SIDE), load(old), load(tile_softmax + SIDE) * load(added)));
    for (std::int64_t i = from; i < end; ++i) {
        softmax[i] = largest_of[i];
        softmax[SIDE + i] = total[i];
        for (std::int64_t j = i * dim; j < (i + 1) * dim; j += LANES) {
            store(sums + j, fma(load(sums + j), splat(old[i]), load(tile_sums + j) * added[i]));
        }
    }
}

// Keys of a tile as left operands: each 16 of them in steps of 32 dimensions.
struct KeyTiles {
    const bf16* first[TILE / SIDE];
    std::int64_t row_bytes, step;  // bytes from key to key, elements from step to step
};

// Compute the scores of KEYS times 16 keys with QUERIES blocks of query rows, TILE * SIDE floats apart.
template <int KEYS, int QUERIES>
inline void score_tiles(const KeyTiles& keys, std::int64_t key, const bf16* queries, std::int64_t steps, float* scores,
                        HeadPrefetch& fetch) {
    const bf16 *low = keys.first[key], *high = KEYS == 2 ? keys.first[key + 1] : nullptr;
    tiles::zero<0>();
    if constexpr (KEYS == 2) tiles::zero<2>();
    if constexpr (QUERIES == 2) tiles::zero<1>();
    if constexpr (KEYS == 2 && QUERIES == 2) tiles::zero<3>();
    for (std::int64_t step = 0; step < steps; ++step) {
        fetch.step();
        tiles::load<6>(queries + step * tiles::ELEMENTS, tiles::ROW_BYTES);
        tiles::load<4>(low + step * keys.step, keys.row_bytes);
        tiles::multiply_add<0, 0>();
        if constexpr (QUERIES == 2) {
            tiles::load<7>(queries + (steps + step) * tiles::ELEMENTS, tiles::ROW_BYTES);
            tiles::multiply_add<0, 1>();
        }
        if constexpr (KEYS == 2) {
            fetch.step();
            tiles::load<5>(high + step * keys.step, keys.row_bytes);
            tiles::multiply_add<1, 0>();
            if constexpr (QUERIES == 2) tiles::multiply_add<1, 1>();
        }
    }
    float *to = scores + key * SQUARE, *next = to + TILE * SIDE;
    tiles::store<0>(to, tiles::ROW_BYTES);
    if constexpr (KEYS == 2) tiles::store<2>(to + SQUARE, tiles::ROW_BYTES);
    if constexpr (QUERIES == 2) tiles::store<1>(next, tiles::ROW_BYTES);
    if constexpr (KEYS == 2 && QUERIES == 2) tiles::store<3>(next + SQUARE, tiles::ROW_BYTES);
}

// Compute sums [16 rows of each block, dim] = weights x values [steps][dim / 16 tiles].
template <int QUERIES>
inline void weighted_values_tile(const float* weights, const float* values, std::int64_t steps, float* sums, std::int64_t dim) {
    const std::int64_t columns = dim / SIDE, row_bytes = dim * std::int64_t{sizeof(float)};
    for (std::int64_t column = 0; column < columns; column += 2) {
        tiles::zero<0>();
        tiles::zero<1>();
        if constexpr (QUERIES == 2) tiles::zero<2>(), tiles::zero<3>();
        for (std::int64_t step = 0; step < steps; ++step) {
            const float* of_step = values + (step * columns + column) * SQUARE;
            tiles::load<4>(weights + step * SQUARE, tiles::ROW_BYTES);
            tiles::load<6>(of_step, tiles::ROW_BYTES);
            tiles::multiply_add<0, 0>();
            tiles::load<7>(of_step + SQUARE, tiles::ROW_BYTES);
            tiles::multiply_add<0, 1>();
            if constexpr (QUERIES == 2) {
                tiles::load<5>(weights + TILE * SIDE + step * SQUARE, tiles::ROW_BYTES);
                tiles::multiply_add<1, 0>();
                tiles::multiply_add<1, 1>();
            }
        }
        float* to = sums + column * SIDE;
        tiles::store<0>(to, row_bytes);
        tiles::store<1>(to + SIDE, row_bytes);
        if constexpr (QUERIES == 2) {
            tiles::store<2>(to + SIDE * dim, row_bytes);
            tiles::store<3>(to + SIDE * dim + SIDE, row_bytes);
        }
    }
}

// One thread's query rows, for one tile of keys and values after the other.
class AmxTile {
  public:
    // Return the floats that `rows` query rows take.
    static std::int64_t size(Head<bf16> head, std::int64_t rows) {
        return blocks_of(rows) * SIDE * (head.padded_words() + TILE) + 2 * TILE * head.padded_words();
    }

    AmxTile(Head<bf16> head, float* memory, std::int64_t rows)
        : head_(head), steps_(head.padded_words() / SIDE), keys_(memory),
          values_(keys_ + TILE * head.padded_words()), queries_(values_ + TILE * head.padded_words()),
          scores_(queries_ + blocks_of(rows) * SIDE * head.padded_words()) {}

    // Pack the queries; `query(i)` returns row i.
    template <typename Query>
    void take_queries(std::int64_t rows, Query&& query) {
        for (std::int64_t block = 0; block < blocks_of(rows); ++block) {
            for (std::int64_t step = 0; step < steps_; ++step) {
                Float square[SIDE] = {};
                for (std::int64_t i = 0; i < std::min<std::int64_t>(SIDE, rows - block * SIDE); ++i) {
                    square[i] = head_.load_words(query(block * SIDE + i), step * SIDE);
                }
                transpose(square);
                std::memcpy(queries_ + (block * steps_ + step) * SQUARE, square, sizeof(square));
            }
        }
    }

    // Compute the tile's contribution to rows [from, rows) into `sums`. Row i sees the keys from `seen.first(i)` up to
    // `seen(i)`. If every 16 keys lie `apart` elements from each other, they are read in place for few rows; 0: they do
    // not.
    template <typename S, typename Scales, typename Seen>
    void run(const S* k, const S* v, const Scales& scales, const KeyOffsets& places, const KeyOffsets* next, std::int64_t apart,
             std::int64_t from, std::int64_t rows, float factor, Seen&& seen, BlockSums sums) {
        const std::int64_t begin = from / SIDE, end = blocks_of(rows), dim = head_.padded_dim();
        // The end of the keys that a block's row i sees. Behind the last row, the last one counts.
        const auto end_of = [&](std::int64_t block, int i) { return seen(std::min(rows - 1, block * SIDE + i)); };
        const auto first_of = [&](std::int64_t block, int i) {
            return seen.first(std::min(rows - 1, block * SIDE + i));
        };
        const KeyTiles keys = tiles_of(k, places, end - begin <= 2 ? apart : 0);
        HeadPrefetch next_keys(k, next, head_.dim, blocks_of(places.end) * steps_ * ((end - begin + 1) / 2));
        each_pair(begin, end, [&](auto blocks, std::int64_t block) {
            constexpr int BLOCKS = blocks.value;
            const auto* queries = reinterpret_cast<const bf16*>(queries_ + block * steps_ * SQUARE);
            const std::int64_t most = end_of(block, BLOCKS * SIDE - 1);
            std::int64_t key = 0;
            for (; key + 2 <= blocks_of(most); key += 2) {
                score_tiles<2, BLOCKS>(keys, key, queries, steps_, scores_of(block), next_keys);
            }
            if (key < blocks_of(most)) {
                score_tiles<1, BLOCKS>(keys, key, queries, steps_, scores_of(block), next_keys);
            }
            for (std::int64_t each = block; each < block + BLOCKS; ++each) {
                const std::int64_t least = end_of(each, 0), latest = first_of(each, SIDE - 1);
                std::int32_t begins[SIDE], ends[SIDE];
                for (int i = 0; i < SIDE; ++i) {
                    begins[i] = static_cast<std::int32_t>(latest == places.first ? latest : first_of(each, i));
                    ends[i] = static_cast<std::int32_t>(least == places.end ? least : end_of(each, i));
                }
                softmax_tile(scores_of(each), begins, ends, latest, least, steps_of(most) * DEPTH, factor,
                       scales, sums.softmax_of(each));
            }
        });
        const std::int64_t pairs = steps_of(places.end) * SIDE;
        HeadPrefetch next_values(v, next, head_.dim, pairs);
        for (std::int64_t pair = 0; pair < pairs; ++pair) {
            next_values.step();
            pack_pair(v, places.offsets + 2 * pair, pair);
        }
        each_pair(begin, end, [&](auto blocks, std::int64_t block) {
            constexpr int BLOCKS = blocks.value;
            const std::int64_t steps = steps_of(end_of(block, BLOCKS * SIDE - 1));
            weighted_values_tile<BLOCKS>(scores_of(block), values_, steps, sums.values + block * SIDE * dim, dim);
        });
    }

    // Add a tile's result to the sums of rows [from, rows).
    void add(BlockSums sums, BlockSums of_tile, std::int64_t from, std::int64_t rows) const {
        const std::int64_t dim = head_.padded_dim();
        for (std::int64_t block = from / SIDE; block < blocks_of(rows); ++block) {
            const std::int64_t row = block * SIDE;
            merge_block(sums.softmax_of(block), sums.values + row * dim, of_tile.softmax_of(block),
                        of_tile.values + row * dim, std::max<std::int64_t>(0, from - row),
                        std::min<std::int64_t>(SIDE, rows - row), dim);
        }
    }

    // Give row i an empty softmax.
    void clear(BlockSums sums, std::int64_t i) const {
        float* softmax = sums.softmax_of(i / SIDE) + i % SIDE;
        softmax[0] = -std::numeric_limits<float>::infinity();
        softmax[SIDE] = 0.0f;
        std::memset(sums.values + i * head_.padded_dim(), 0, sizeof(float) * head_.padded_dim());
    }

    // Write the result of row i.
    void end(BlockSums sums, std::int64_t i, bf16* out, const float* sink) const {
        const float* softmax = sums.softmax_of(i / SIDE) + i % SIDE;
        finish(Softmax{softmax[0], softmax[SIDE]}, sums.values + i * head_.padded_dim(), out, head_.dim, sink);
    }

  private:
    const Head<bf16> head_;
    const std::int64_t steps_;
    float *keys_, *values_, *queries_, *scores_;

    float* scores_of(std::int64_t block) const { return scores_ + block * TILE * SIDE; }

    // Call `body` for pairs of blocks, and for the last block alone if their number is odd.
    template <typename Body>
    static void each_pair(std::int64_t begin, std::int64_t end, Body&& body) {
        for (; begin + 2 <= end; begin += 2) body(std::integral_constant<int, 2>{}, begin);
        if (begin < end) body(std::integral_constant<int, 1>{}, begin);
    }

    // Return the keys as operands: in place, or copied if they are not bfloat16 or not `apart` from each other.
    template <typename S>
    KeyTiles tiles_of(const S* k, const KeyOffsets& places, std::int64_t apart) {
        if constexpr (std::is_same_v<S, bf16>) {
            if (apart > 0 && head_.dim % DEPTH == 0 && places.first == 0) return where_they_lie(k, places, apart);
        }
        return copied(k, places);
    }

    KeyTiles where_they_lie(const bf16* k, const KeyOffsets& places, std::int64_t apart) const {
        KeyTiles keys{{}, apart * std::int64_t{sizeof(bf16)}, DEPTH};
        for (int i = 0; i < TILE / SIDE; ++i) keys.first[i] = k + places.offsets[i * SIDE];
        return keys;
    }

    template <typename S>
    KeyTiles copied(const S* k, const KeyOffsets& places) {
        KeyTiles keys{{}, tiles::ROW_BYTES, tiles::ELEMENTS};
        for (std::int64_t i = 0; i < TILE / SIDE; ++i) {
            keys.first[i] = reinterpret_cast<const bf16*>(keys_ + i * steps_ * SQUARE);
        }
        for (std::int64_t key = 0; key < blocks_of(places.end) * SIDE; ++key) {
            float* to = keys_ + key / SIDE * steps_ * SQUARE + key % SIDE * SIDE;
            for (std::int64_t step = 0; step < steps_; ++step) {
                store(to + step * SQUARE, head_.load_words(k + places.offsets[key], step * SIDE));
            }
        }
        return keys;
    }

    // Pack the values of two keys into a row of each tile of their step.
    template <typename S>
    void pack_pair(const S* v, const std::int64_t* offsets, std::int64_t pair) {
        float* to = values_ + pair / SIDE * 2 * steps_ * SQUARE + pair % SIDE * SIDE;
        for (std::int64_t step = 0; step < steps_; ++step, to += 2 * SQUARE) {
            Float words[2];
            for (int e = 0; e < 2; ++e) words[e] = head_.load_words(v + offsets[e], step * SIDE);
            LaneOperand<bf16>::across_keys(words);
            store(to, words[0]);
            store(to + SQUARE, words[1]);
        }
    }
};

}  // namespace attention
}  // namespace ostinato
#endif
