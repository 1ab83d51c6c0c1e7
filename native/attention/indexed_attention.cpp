// Attention of each token to the blocks of keys that an indexer selects, and to what follows its last complete block.
//
// Tokens are taken in slabs. Threads share the blocks that a slab's rows have, and score them for all tokens of the
// row; then they share the tokens, which select; then the tokens' heads. A token's result depends only on its queries,
// its row's keys and values, and its position: a score is a sum in the order of the heads, of products in the order of
// their elements, and the keys of the selected blocks are taken in order, in tiles that begin at the first of them.

#include <functional>

#include "attention/packed.h"
#include "attention/schedule.h"
#include "attention/small_q.h"
#include "attention/softmax.h"
#include "bind/kernel_binding.h"
#include "core/sincos.h"
#include "elementwise/norm_row.h"
#include "elementwise/rotate_head.h"

namespace ostinato {
namespace attention {
namespace {

struct IndexedAttention : Arguments {
    FIELD(Strided<VALUES>, q);  // [tokens, heads, head_dim]
    FIELD(Array<WEIGHTS>, k_cache);  // [blocks, block_size, kv_heads, head_dim], as v_cache; int8 with scales
    FIELD(Array<WEIGHTS>, v_cache);
    FIELD(Strided<VALUES>, index_q);  // [tokens, index_heads, index_dim]
    FIELD(Array<WEIGHTS>, index_cache);  // [blocks, block_size, 1, index_dim]; int8 with scales
    FIELD(Array<VALUES>, index_norm);  // [index_dim]
    FIELD(float, eps);
    FIELD(Array<FLOAT32>, frequencies);  // [half]
    FIELD(float, scaling);
    FIELD(Array<INT32>, row_starts);  // [rows + 1]
    FIELD(Array<INT32>, start_positions);  // [rows], as kv_lens
    FIELD(Array<INT32>, kv_lens);
    FIELD(Strided<INT32>, block_tables);  // [rows, max_blocks]
    FIELD(float, scale);
    FIELD(std::int64_t, budget);
    FIELD(std::int64_t, ratio);
    FIELD(OptionalTensor<Array<FLOAT32>>, k_scales);  // [blocks, block_size, kv_heads], as v_scales
    FIELD(OptionalTensor<Array<FLOAT32>>, v_scales);
    FIELD(OptionalTensor<Array<FLOAT32>>, index_scales);  // [blocks, block_size, 1]
    FIELD(Array<VALUES>, out);  // [tokens, heads, head_dim]

    void check(const Reader& reader) const {
        check_cache(reader, k_cache, k_scales, q.dtype);
        check_cache(reader, v_cache, v_scales, q.dtype);
        check_cache(reader, index_cache, index_scales, q.dtype);
        reader.expect(bool(k_scales) == bool(index_scales), "all caches have scales, or none");
        reader.expect(budget % ratio == 0, "a budget of whole blocks");
    }
};

// A token of a slab. `row` is -1 if it attends to nothing.
struct Token {
    std::int64_t row = -1, position = 0;
};

// Tokens of a slab that belong to one row: [begin, end) of the batch, the first at `position`.
struct Part {
    std::int64_t row, begin, end, position;
};

template <typename Body>
void each_part(const Step& step, Range slab, Body&& body) {
    for (std::int64_t row = 0; row < step.rows; ++row) {
        const Range queries = step.attending(row);
        const std::int64_t begin = std::max(queries.begin, slab.begin), end = std::min(queries.end, slab.end);
        if (begin < end) body(Part{row, begin, end, step.start_positions[row] - step.row_starts[row] + begin});
    }
}

// Selection of blocks for the tokens of a slab.
template <typename T, typename S>
class Selection {
  public:
    Selection(const ThreadGroup& threads, const Step& step, const IndexedAttention& in)
        : threads_(threads), step_(step), in_(in), most_(in.budget / in.ratio), size_(in.index_cache.shape[3]) {
        each_part(step, {0, step.tokens}, [&](const Part& part) { blocks_ = std::max(blocks_, last_complete(part)); });
        if (blocks_ <= most_) return;
        stride_ = (blocks_ + VECTOR - 1) / VECTOR * VECTOR;
        words_ = threads.group_scratch<float>(stride_ * std::min<std::int64_t>(INDEX_GROUP_TOKENS, step.tokens));
    }

    // Return the complete blocks of a token at `position`.
    std::int64_t complete(std::int64_t position) const { return (position + 1) / in_.ratio; }
    bool selects(std::int64_t position) const { return complete(position) > most_; }
    std::int64_t most() const { return most_; }

    // Select for the tokens of a slab. All threads call it, and wait for each other if any token selects.
    void run(Range slab, const Token* tokens) {
        std::int64_t panels = 0;
        each_part(step_, slab, [&](const Part& part) { panels += panels_of(part); });
        if (panels == 0) return;
        threads_.barrier();  // the slab before is no longer read
        const Range mine = threads_.split(panels);
        std::int64_t before = 0;
        each_part(step_, slab, [&](const Part& part) {
            const std::int64_t count = panels_of(part);
            const std::int64_t begin = std::max<std::int64_t>(0, mine.begin - before), end = std::min(count, mine.end - before);
            for (std::int64_t panel = begin; panel < end; ++panel) score(slab, part, panel);
            before += count;
        });
        threads_.barrier();
        for (const std::int64_t i : threads_.claims(slab.end - slab.begin)) {
            if (tokens[i].row >= 0 && selects(tokens[i].position)) select(words_ + i * stride_, complete(tokens[i].position));
        }
        threads_.barrier();
    }

    // Return the blocks that token i of the slab selected, in order, as words.
    const float* selected(std::int64_t i) const { return words_ + i * stride_; }

  private:
    const ThreadGroup& threads_;
    const Step& step_;
    const IndexedAttention& in_;
    const std::int64_t most_, size_;
    std::int64_t blocks_ = 0, stride_ = 0;
    float* words_ = nullptr;  // [tokens of a slab, stride]: scores of blocks, then the selected ones

    std::int64_t last_complete(const Part& part) const { return complete(part.position + part.end - part.begin - 1); }

    std::int64_t panels_of(const Part& part) const {
        const std::int64_t blocks = last_complete(part);
        return blocks <= most_ ? 0 : (blocks + LANES - 1) / LANES;
    }

    // Compute the scores of LANES blocks for the tokens of a part that select and have the first of them.
    void score(Range slab, const Part& part, std::int64_t panel) {
        const std::int64_t padded = (size_ + LANES - 1) / LANES * LANES, heads = in_.index_q.shape[1];
        float* keys = threads_.thread_scratch<float>((LANES + INDEX_HEADS_AT_ONCE + INDEX_KEY_VECTORS) * padded);  // [size, LANES]
        float *queries = keys + LANES * padded, *rest = queries + INDEX_HEADS_AT_ONCE * padded;
        for (int i = 0; i < LANES; ++i) {
            const std::int64_t block = panel * LANES + i;
            if (block < last_complete(part)) {
                const T* key = key_of(part.row, block, rest, padded);
                for (std::int64_t j = 0; j < size_; ++j) keys[j * LANES + i] = to_float(key[j]);
            } else {
                for (std::int64_t j = 0; j < size_; ++j) keys[j * LANES + i] = 0.0f;
            }
        }
        for (std::int64_t token = part.begin; token < part.end; ++token) {
            const std::int64_t blocks = complete(part.position + token - part.begin);
            if (blocks <= most_ || blocks <= panel * LANES) continue;
            Float total = {};
            std::int64_t head = 0;
            const auto add = [&](auto count) {
                constexpr int COUNT = count.value;
                const T* from = in_.index_q.row<const T>(token) + head * size_;
                for (int h = 0; h < COUNT; ++h) {
                    for (std::int64_t j = 0; j < size_; j += LANES) {
                        store(queries + h * padded + j, load_partial(from + h * size_ + j, size_ - j));
                    }
                }
                Float sums[COUNT] = {};
                for (std::int64_t j = 0; j < size_; ++j) {
                    const Float key = load(keys + j * LANES);
                    for (int h = 0; h < COUNT; ++h) sums[h] = fma(key, splat(queries[h * padded + j]), sums[h]);
                }
                for (int h = 0; h < COUNT; ++h) total += sums[h] < 0.0f ? Float{} : sums[h];  // NaN stays NaN
                head += COUNT;
            };
            while (head + INDEX_HEADS_AT_ONCE <= heads) add(std::integral_constant<int, INDEX_HEADS_AT_ONCE>{});
            while (head < heads) add(std::integral_constant<int, 1>{});
            store(words_ + (token - slab.begin) * stride_ + panel * LANES, total);
        }
    }

    // Return the key of a block [size]: the mean of its positions', normed and rotated. `memory` has INDEX_KEY_VECTORS *
    // `padded` floats.
    const T* key_of(std::int64_t row, std::int64_t block, float* memory, std::int64_t padded) const {
        float *sums = memory, *cosines = memory + padded, *sines = memory + 2 * padded;
        T *mean = reinterpret_cast<T*>(memory + 3 * padded), *normed = reinterpret_cast<T*>(memory + 4 * padded);
        T* rotated = reinterpret_cast<T*>(memory + 5 * padded);
        const std::int64_t first = block * in_.ratio;
        std::fill_n(sums, padded, 0.0f);
        for (std::int64_t position = first; position < first + in_.ratio; ++position) {
            const std::int64_t number = position / step_.block_size;
            const std::int64_t cell = step_.block_tables[row * step_.max_blocks + number] * step_.block_size;
            const std::int64_t index = cell + position % step_.block_size;
            const S* from = in_.index_cache.at<const S>() + index * size_;
            const Float scale = splat(in_.index_scales ? in_.index_scales.at<const float>()[index] : 1.0f);
            for (std::int64_t j = 0; j < size_; j += LANES) {
                store(sums + j, fma(load_partial(from + j, size_ - j), scale, load(sums + j)));
            }
        }
        const auto count = static_cast<float>(in_.ratio);
        for (std::int64_t j = 0; j < size_; j += LANES) store_partial(mean + j, load(sums + j) / count, size_ - j);
        norm_row<T>(mean, in_.index_norm.at<const T>(), nullptr, normed, size_, in_.eps, 1.0f);
        const std::int64_t half_size = in_.frequencies.shape[0];
        for (std::int64_t j = 0; j < half_size; j += LANES) {
            const Float frequency = load_partial(in_.frequencies.at<const float>() + j, half_size - j);
            Float sine, cosine;
            sincos(static_cast<float>(first) * frequency, sine, cosine);
            store(cosines + j, cosine * in_.scaling);
            store(sines + j, sine * in_.scaling);
        }
        rotate_head(Scaled<T>{normed, 1.0f}, rotated, cosines, sines, half_size, size_);
        return rotated;
    }

    // Replace the scores of `blocks` blocks by the numbers, in order, of those that are selected.
    void select(float* words, std::int64_t blocks) const {
        // No score is negative, so its bits have its order; of equal ones, the first block is the largest.
        auto* keys = threads_.thread_scratch<std::uint64_t>(blocks);
        for (std::int64_t i = 0; i < blocks; ++i) {
            const std::uint64_t bits = bits_as<std::uint32_t>(words[i]) & 0x7FFFFFFF;
            keys[i] = bits << 32 | (0xFFFFFFFF - static_cast<std::uint64_t>(i));
        }
        std::nth_element(keys, keys + most_ - 1, keys + blocks, std::greater<>());
        for (std::int64_t i = 0; i < most_; ++i) keys[i] = 0xFFFFFFFF - (keys[i] & 0xFFFFFFFF);
        std::sort(keys, keys + most_);
        for (std::int64_t i = 0; i < most_; ++i) words[i] = bits_as<float>(static_cast<std::int32_t>(keys[i]));
    }
};

// Keys that a token attends to, tile by tile: those of the selected blocks, and those behind the last complete one.
template <typename S>
class SelectedKeys {
  public:
    // `selected` is null if the token attends to all keys up to `position`.
    SelectedKeys(const Step& step, const Token& token, std::int64_t kv_head, std::int64_t dim, const float* selected,
                 std::int64_t count, std::int64_t ratio)
        : step_(step), table_(step.block_tables + token.row * step.max_blocks), kv_head_(kv_head), dim_(dim),
          selected_(selected), count_(selected == nullptr ? 0 : count), ratio_(ratio), last_(token.position + 1) {
        rest_ = selected == nullptr ? 0 : last_ / ratio * ratio;
        left_ = count_ * ratio + last_ - rest_;
    }

    // Locate the keys of the next tile. -> false if there are none
    bool next(KeyOffsets& places, const ScalesOf<S>& scales) {
        if (left_ == 0) return false;
        places.first = 0;
        places.end = std::min<std::int64_t>(TILE, left_);
        left_ -= places.end;
        for (std::int64_t i = 0; i < places.end;) {
            if (at_ == end_) begin_run();
            const std::int64_t number = at_ / step_.block_size, within = at_ % step_.block_size;
            const std::int64_t count = std::min({places.end - i, end_ - at_, step_.block_size - within});
            std::int64_t head = (table_[number] * step_.block_size + within) * step_.kv_heads + kv_head_;
            if constexpr (ScalesOf<S>::ARE_THERE) scales.fetch(head, head + count * step_.kv_heads);
            for (std::int64_t j = i; j < i + count; ++j, head += step_.kv_heads) {
                places.offsets[j] = head * dim_;
                places.heads[j] = head;
            }
            i += count;
            at_ += count;
        }
        places.fill_up(places.offsets);
        if constexpr (ScalesOf<S>::ARE_THERE) places.fill_up(places.heads);
        return true;
    }

  private:
    const Step& step_;
    const std::int32_t* table_;
    const std::int64_t kv_head_, dim_;
    const float* selected_;
    const std::int64_t count_, ratio_, last_;
    std::int64_t rest_, left_, run_ = 0, at_ = 0, end_ = 0;

    void begin_run() {
        if (run_ < count_) {
            at_ = bits_as<std::int32_t>(selected_[run_++]) * ratio_;
            end_ = at_ + ratio_;
        } else {
            at_ = rest_;
            end_ = last_;
        }
    }
};

// Attention of the queries of one token that share a head of keys.
template <typename T, typename S>
class TokenWorker {
  public:
    TokenWorker(const ThreadGroup& threads, const Step& step, const IndexedAttention& in)
        : step_(step), in_(in), head_{in.q.shape[2]}, scales_(in.k_scales.at<const float>(), in.v_scales.at<const float>()) {
        const std::int64_t rows = step.group(), words = head_.padded_words(), dim = head_.padded_dim();
        queries_ = threads.thread_scratch<float>(rows * (words + TILE + 2 * dim + 4));
        scores_ = queries_ + rows * words;
        float* next = scores_ + rows * TILE;
        for (Sums* sums : {&running_, &tile_sums_}) {
            sums->values = next;
            sums->softmax = reinterpret_cast<Softmax*>(next + rows * dim);
            next += rows * (dim + 2);
        }
    }

    void run(std::int64_t token, std::int64_t kv_head, SelectedKeys<S> keys) {
        const std::int64_t rows = step_.group(), words = head_.padded_words(), dim = head_.padded_dim();
        const std::int64_t first = kv_head * rows;
        for (std::int64_t i = 0; i < rows; ++i) {
            const T* from = in_.q.row<const T>(token) + (first + i) * head_.dim;
            for (std::int64_t j = 0; j < words; j += LANES) store(queries_ + i * words + j, head_.load_words(from, j));
        }
        KeyOffsets places[2];
        bool is_there = keys.next(places[0], scales_);
        for (int tile = 0; is_there; ++tile) {
            const KeyOffsets &here = places[tile % 2], &next = places[(tile + 1) % 2];
            is_there = keys.next(places[(tile + 1) % 2], scales_);
            compute(here, is_there ? &next : nullptr, tile == 0 ? running_ : tile_sums_);
            for (std::int64_t i = 0; tile > 0 && i < rows; ++i) {
                merge(running_.softmax[i], running_.values + i * dim, tile_sums_.softmax[i], tile_sums_.values + i * dim, dim);
            }
        }
        for (std::int64_t i = 0; i < rows; ++i) {
            T* to = in_.out.at<T>() + (token * step_.heads + first + i) * head_.dim;
            finish(running_.softmax[i], running_.values + i * dim, to, head_.dim);
        }
    }

  private:
    const Step& step_;
    const IndexedAttention& in_;
    const Head<T> head_;
    ScalesOf<S> scales_;
    float *queries_, *scores_;  // [rows, padded words], [rows, TILE]
    Sums running_, tile_sums_;

    void compute(const KeyOffsets& places, const KeyOffsets* next, Sums sums) {
        const std::int64_t words = head_.padded_words(), vectors = words / LANES;
        const std::int64_t panels = (places.end + LANES - 1) / LANES;
        const std::int64_t depth = (places.end + LaneOperand<T>::ELEMENTS - 1) / LaneOperand<T>::ELEMENTS;
        scales_.take(places);
        for (std::int64_t begin = 0; begin < step_.group(); begin += SMALL_Q_ROWS) {
            const std::int64_t rows = std::min<std::int64_t>(SMALL_Q_ROWS, step_.group() - begin);
            float* scores = scores_ + begin * TILE;
            const KeyOffsets* fetched = begin == 0 ? next : nullptr;
            HeadPrefetch next_keys(in_.k_cache.at<const S>(), fetched, head_.dim, panels * vectors * PREFETCHES);
            qk_scores<T>(rows, head_, in_.k_cache.at<const S>(), places, queries_ + begin * words, scores, next_keys);
            for (std::int64_t i = 0; i < rows; ++i) {
                sums.softmax[begin + i] = softmax<T>(scores + i * TILE, 0, places.end, in_.scale * LOG2_E, scales_);
            }
            const std::int64_t steps = LINE_BY_LINE ? depth * value_passes<T>(rows, head_.dim) : depth;
            HeadPrefetch next_values(in_.v_cache.at<const S>(), fetched, head_.dim, steps);
            float* values = sums.values + begin * head_.padded_dim();
            weighted_values<T>(rows, head_, in_.v_cache.at<const S>(), places, depth, scores, values, next_values);
        }
    }
};

template <typename T, typename S>
void attend_to_selected(const ThreadGroup& threads, const Step& step, const IndexedAttention& in) {
    clear_others(threads, step, in.out.at<T>(), step.heads * in.q.shape[2]);
    Selection<T, S> selection(threads, step, in);
    Token tokens[INDEX_GROUP_TOKENS];
    for (std::int64_t begin = 0; begin < step.tokens; begin += INDEX_GROUP_TOKENS) {
        const Range slab{begin, std::min(begin + INDEX_GROUP_TOKENS, step.tokens)};
        std::fill_n(tokens, INDEX_GROUP_TOKENS, Token{});
        each_part(step, slab, [&](const Part& part) {
            for (std::int64_t i = part.begin; i < part.end; ++i) {
                tokens[i - begin] = {part.row, part.position + i - part.begin};
            }
        });
        selection.run(slab, tokens);
        TokenWorker<T, S> worker(threads, step, in);
        for (const std::int64_t i : threads.claims((slab.end - slab.begin) * step.kv_heads)) {
            const std::int64_t index = i / step.kv_heads, kv_head = i % step.kv_heads;
            const Token& token = tokens[index];
            if (token.row < 0) continue;
            const float* selected = selection.selects(token.position) ? selection.selected(index) : nullptr;
            worker.run(begin + index, kv_head,
                       SelectedKeys<S>(step, token, kv_head, in.q.shape[2], selected, selection.most(), in.ratio));
        }
    }
}

void indexed_attention(const ThreadGroup& threads, std::int64_t tokens, const IndexedAttention& in) {
    const auto integers = [](const Tensor& tensor) { return tensor.at<const std::int32_t>(); };
    Step step{};
    step.tokens = tokens;
    step.rows = in.kv_lens.shape[0];
    step.row_starts = integers(in.row_starts);
    step.start_positions = integers(in.start_positions);
    step.kv_lens = integers(in.kv_lens);
    step.block_tables = integers(in.block_tables);
    step.max_blocks = in.block_tables.strides[0];
    step.block_size = in.k_cache.shape[1];
    step.heads = in.q.shape[1];
    step.kv_heads = in.k_cache.shape[2];
    with_dtype(in.q.dtype, [&](auto type) {
        using T = decltype(type);
        if (in.k_scales) {
            attend_to_selected<T, std::int8_t>(threads, step, in);
        } else {
            attend_to_selected<T, T>(threads, step, in);
        }
    });
}

KERNEL(indexed_attention);

}  // namespace
}  // namespace attention
}  // namespace ostinato
