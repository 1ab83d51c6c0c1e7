// N-gram embeddings: hashed n-grams of each row, whose last tokens are kept in slots, their rows of a table in parts,
// and the gate of each stream.

#include <cmath>

#include "bind/kernel_binding.h"
#include "core/simd.h"
#include "state/step_rows.h"

namespace ostinato {

// Tensors of a table, below each other.
using TableParts = std::vector<Tensor>;

inline bool from_python(PyObject* value, TableParts& to) {
    if (!PyList_Check(value) && !PyTuple_Check(value)) return false;
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    to.resize(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
        if (!read_tensor(PySequence_Fast_GET_ITEM(value, i), to[i])) return false;
    }
    return true;
}

namespace {

struct NgramIds : StepRows {
    FIELD(Array<INT64>, token_ids);  // [tokens]
    FIELD(Array<INT64>, multipliers);  // [n]
    FIELD(Array<INT64>, sizes);  // [heads of all n], as starts
    FIELD(Array<INT64>, starts);
    FIELD(std::int64_t, end_id);
    FIELD(Strided<FLOATS>, states);  // [slots, n - 1, TOKEN_DIGITS]
    FIELD(Array<INT64>, out);  // [tokens, heads of all n]
};

// The last tokens that a slot keeps: digits in base 256, of any storage type.
class KeptTokens {
  public:
    KeptTokens(const NgramIds& in) : in_(in), count_(in.multipliers.shape[0] - 1) {}

    // Return token i of a slot, of which 0 stands for `end_id` alone. What is no digit, in a spoiled slot, counts as 0.
    std::int64_t read(std::int64_t slot, std::int64_t i) const {
        if (slot == 0) return in_.end_id;
        std::int64_t id = 0;
        with_dtype(in_.states.dtype, [&](auto type) {
            const auto* digits = in_.states.row<const decltype(type)>(slot) + i * TOKEN_DIGITS;
            for (int place = 0; place < TOKEN_DIGITS; ++place) {
                const float digit = to_float(digits[place]);
                if (digit >= 0.0f && digit < 256.0f) id += static_cast<std::int64_t>(digit) << 8 * place;
            }
        });
        return id;
    }

    void write(std::int64_t slot, std::int64_t i, std::int64_t id) const {
        with_dtype(in_.states.dtype, [&](auto type) {
            using T = decltype(type);
            T* digits = in_.states.row<T>(slot) + i * TOKEN_DIGITS;
            for (int place = 0; place < TOKEN_DIGITS; ++place) {
                digits[place] = from_float<T>(static_cast<float>(id >> 8 * place & 255));
            }
        });
    }

    // Return the token at an offset from the row's first; negative offsets are tokens of earlier steps.
    std::int64_t at(const StepRow& row, std::int64_t offset) const {
        return offset < 0 ? read(row.read_slot, count_ + offset) : in_.token_ids.at<const std::int64_t>()[row.begin + offset];
    }

  private:
    const NgramIds& in_;
    const std::int64_t count_;
};

// Write the table rows of the n-grams that end with the token at `offset` of a row. Whatever the ids are, the rows are
// within the table: products wrap, and the remainder is not negative.
void hash_token(const NgramIds& in, const KeptTokens& tokens, const StepRow& row, std::int64_t offset) {
    const std::int64_t kept = in.multipliers.shape[0] - 1, heads = in.sizes.shape[0] / kept;
    const auto *multipliers = in.multipliers.at<const std::int64_t>(), *sizes = in.sizes.at<const std::int64_t>();
    const auto* starts = in.starts.at<const std::int64_t>();
    std::int64_t* to = in.out.at<std::int64_t>() + (row.begin + offset) * in.sizes.shape[0];
    const auto product = [&](std::int64_t id, std::int64_t distance) {
        return static_cast<std::uint64_t>(id) * static_cast<std::uint64_t>(multipliers[distance]);
    };
    std::uint64_t mixed = product(tokens.at(row, offset), 0);
    std::int64_t earlier = 0;
    for (std::int64_t distance = 1; distance <= kept; ++distance) {
        const bool is_over = distance > 1 && earlier == in.end_id;
        earlier = is_over ? in.end_id : tokens.at(row, offset - distance);
        mixed ^= product(earlier, distance);
        for (std::int64_t head = (distance - 1) * heads; head < distance * heads; ++head) {
            const std::int64_t rest = static_cast<std::int64_t>(mixed) % sizes[head];
            to[head] = (rest < 0 ? rest + sizes[head] : rest) + starts[head];
        }
    }
}

// Threads share the tokens, and then the rows, whose slots none of them reads any more.
void ngram_ids(const ThreadGroup& threads, std::int64_t tokens, const NgramIds& in) {
    const std::int64_t heads = in.sizes.shape[0], kept = in.multipliers.shape[0] - 1;
    const KeptTokens of_slots(in);
    const Range mine = threads.split(tokens);
    // Padding has a row of the table too.
    std::fill(in.out.at<std::int64_t>() + mine.begin * heads, in.out.at<std::int64_t>() + mine.end * heads, 0);
    in.each_row(tokens, [&](const StepRow& row) {
        const std::int64_t end = std::min(row.end, mine.end);
        for (std::int64_t token = std::max(row.begin, mine.begin); token < end; ++token) {
            hash_token(in, of_slots, row, token - row.begin);
        }
    });
    threads.barrier();
    in.each_row(tokens, [&](const StepRow& row) {
        if (row.index % threads.size != threads.rank) return;
        // A copy, since the row's first token may overwrite the slot that the others read.
        std::vector<std::int64_t> before(kept);
        for (std::int64_t i = 0; i < kept; ++i) before[i] = of_slots.read(row.read_slot, i);
        in.each_written(row, [&](std::int64_t done, std::int64_t slot) {
            for (std::int64_t i = 0; i < kept; ++i) {
                const std::int64_t offset = done - kept + i;
                of_slots.write(slot, i, offset < 0 ? before[kept + offset] : of_slots.at(row, offset));
            }
        });
    });
}

struct NgramEmbedding : Arguments {
    FIELD(Array<VALUES>, out);  // [tokens, heads * size]
    FIELD(Array<INT64>, ids);  // [tokens, heads]
    FIELD(TableParts, parts);  // [rows, size] each, of any float type; all but the last have equally many rows
    FIELD(IgnoredArgument, dtype);

    void check(const Reader& reader) const {
        reader.expect(!parts.empty(), "a table has parts");
        for (const Tensor& part : parts) {
            const bool lies = part.dims == 2 && part.strides[1] == 1 && part.shape[1] == parts[0].shape[1];
            reader.expect(lies && part.dtype <= FLOAT16 && part.dtype == parts[0].dtype, "parts of one kind");
        }
    }
};

// Copy rows of the table. Threads share them: a row that is not in memory is read from the disk.
void ngram_embedding(const ThreadGroup& threads, std::int64_t tokens, const NgramEmbedding& in) {
    const std::int64_t heads = in.ids.shape[1], size = in.parts[0].shape[1], part_rows = in.parts[0].shape[0];
    with_dtype(in.out.dtype, [&](auto type) {
        using T = decltype(type);
        with_dtype(in.parts[0].dtype, [&](auto of_table) {
            using S = decltype(of_table);
            for (const std::int64_t i : threads.claims(tokens * heads)) {
                const std::int64_t id = in.ids.at<const std::int64_t>()[i];
                const S* from = in.parts[id / part_rows].row<const S>(id % part_rows);
                T* to = in.out.at<T>() + i * size;
                if constexpr (std::is_same_v<S, T>) {
                    std::memcpy(to, from, sizeof(T) * size);
                } else {
                    for (std::int64_t j = 0; j < size; j += LANES) {
                        store_partial(to + j, load_partial(from + j, size - j), size - j);
                    }
                }
            }
        });
    });
}

struct NgramGate : Arguments {
    FIELD(Strided<VALUES>, keys);  // [tokens, streams * size], as queries
    FIELD(Strided<VALUES>, queries);
    FIELD(Strided<VALUES>, values);  // [tokens, size]
    FIELD(Array<VALUES>, out);  // [tokens, streams * size]
};

void ngram_gate(const ThreadGroup& threads, std::int64_t tokens, const NgramGate& in) {
    const std::int64_t size = in.values.shape[1], streams = in.keys.shape[1] / size;
    const Range mine = threads.split(tokens * streams);
    with_dtype(in.values.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t token = i / streams, first = i % streams * size;
            const T *key = in.keys.row<const T>(token) + first, *query = in.queries.row<const T>(token) + first;
            Float sums[4] = {};
            for (std::int64_t j = 0; j < size; j += LANES) {
                Float& sum_of = sums[j / LANES % 4];
                sum_of = fma(load_partial(key + j, size - j), load_partial(query + j, size - j), sum_of);
            }
            const float score = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / std::sqrt(static_cast<float>(size));
            const float magnitude = std::abs(score), root = std::sqrt(magnitude < 1e-6f ? 1e-6f : magnitude);
            const float sign = score > 0.0f ? 1.0f : score < 0.0f ? -1.0f : 0.0f;
            const float gate = 1.0f / (1.0f + std::exp(-root * sign));
            const T* value = in.values.row<const T>(token);
            T* to = in.out.at<T>() + i * size;
            for (std::int64_t j = 0; j < size; j += LANES) {
                store_partial(to + j, load_partial(value + j, size - j) * gate, size - j);
            }
        }
    });
}

KERNEL(ngram_embedding);
KERNEL(ngram_gate);
KERNEL(ngram_ids);

}  // namespace
}  // namespace ostinato
