// Pointwise operations: two vectors of each token, or of each of its heads, concatenated; two multiplied; one half of a
// vector gated by the other; vectors clipped.

#include <cstring>

#include "bind/kernel_binding.h"
#include "core/simd.h"
#include "gemm/epilogue.h"

namespace ostinato {
namespace {

struct Concat : Arguments {
    FIELD(Vectors<ANY>, first);  // [tokens, a] or [tokens, heads, a]
    FIELD(Vectors<ANY>, second);  // [tokens, b] or [tokens, heads, b]
    FIELD(Array<ANY>, out);  // [tokens, a + b] or [tokens, heads, a + b]

    void check(const Reader& reader) const {
        reader.expect(first.dtype == second.dtype && out.dtype == first.dtype, "one dtype");
        reader.expect(first.dims == second.dims && (first.dims == 2 || first.shape[1] == second.shape[1]), "as many heads");
    }
};

void concat(const ThreadGroup& threads, std::int64_t tokens, const Concat& in) {
    const std::int64_t bytes = in.out.element_bytes(), last = in.out.dims - 1, heads = last == 2 ? in.out.shape[1] : 1;
    const std::int64_t first_size = in.first.shape[last] * bytes, second_size = in.second.shape[last] * bytes;
    const std::int64_t size = first_size + second_size;
    const auto row = [&](const Tensor& of, std::int64_t i) {
        const std::int64_t head = last == 2 ? i % heads * of.strides[1] : 0;
        return of.address + (i / heads * of.strides[0] + head) * bytes;
    };
    // Threads share the bytes, not the tokens: what two parts of a step computed is joined as one long vector.
    const Range mine = threads.split(tokens * heads * size);
    for (std::int64_t at = mine.begin; at < mine.end;) {
        const std::int64_t i = at / size, within = at % size;
        const bool is_first = within < first_size;
        const std::int64_t count = std::min((is_first ? first_size : size) - within, mine.end - at);
        const std::byte* from = is_first ? row(in.first, i) + within : row(in.second, i) + within - first_size;
        std::memcpy(in.out.address + at, from, count);
        at += count;
    }
}

// Two arrays to combine element by element.
struct Pair : Arguments {
    FIELD(Strided<VALUES>, first);  // [tokens, size]
    FIELD(Strided<FLOATS>, second);  // [tokens or 1, size], or [tokens or 1, 1] in the dtype of `first` or float32
    FIELD(Array<VALUES>, out);  // [tokens, size]

    void check(const Reader& reader) const {
        const bool is_one = second.shape[1] == 1;
        reader.expect(first.dtype == second.dtype || (is_one && second.dtype == FLOAT32), "one dtype");
        reader.expect(first.shape[1] == second.shape[1] || is_one, "vectors of one size");
    }
};

template <typename T, typename Second, typename Operator>
void combine_row(const T* first, Second&& second, T* to, std::int64_t size, Operator&& combine) {
    const std::int64_t whole = size / LANES * LANES, rest = size - whole;
    for (std::int64_t i = 0; i < whole; i += LANES) store(to + i, combine(load(first + i), second(i, LANES)));
    if (rest) store_partial(to + whole, combine(load_partial(first + whole, rest), second(whole, rest)), rest);
}

template <typename Operator>
void combine(const ThreadGroup& threads, std::int64_t tokens, const Pair& in, Operator&& combined) {
    const std::int64_t size = in.out.shape[1];
    const bool is_one = in.second.shape[1] == 1, is_shared = in.second.shape[0] == 1;
    const Range mine = threads.split(tokens);
    with_dtype(in.out.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t t = mine.begin; t < mine.end; ++t) {
            const T* first = in.first.row<const T>(t);
            T* to = in.out.at<T>() + t * size;
            const std::int64_t of = is_shared ? 0 : t;
            if (is_one) {
                const float factor = in.second.dtype == FLOAT32 ? *in.second.row<const float>(of)
                                                                : load_masked(in.second.row<const T>(of), 1)[0];
                combine_row(first, [=](std::int64_t, std::int64_t) { return Float{} + factor; }, to, size, combined);
            } else {
                const T* second = in.second.row<const T>(of);
                combine_row(
                    first, [=](std::int64_t i, std::int64_t n) { return load_partial(second + i, n); }, to, size, combined);
            }
        }
    });
}

void add(const ThreadGroup& threads, std::int64_t tokens, const Pair& in) {
    combine(threads, tokens, in, [](Float first, Float second) { return first + second; });
}

void multiply(const ThreadGroup& threads, std::int64_t tokens, const Pair& in) {
    combine(threads, tokens, in, [](Float first, Float second) { return first * second; });
}

struct GatedActivation : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, 2 * size]
    FIELD(Activation, activation);
    FIELD(Clamp, clamp);
    FIELD(Array<VALUES>, out);  // [tokens, size]

    void check(const Reader& reader) const {
        reader.expect(!has_gates(activation), "an activation of one value");
        reader.expect(!clamp || activation == SILU, "a clamp of silu");
        reader.expect(x.shape[1] == 2 * out.shape[1], "as many gates as values");
    }
};

void gated_activation(const ThreadGroup& threads, std::int64_t tokens, const GatedActivation& in) {
    const std::int64_t size = in.out.shape[1];
    const Range mine = threads.split(tokens);
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t t = mine.begin; t < mine.end; ++t) {
            const T *gates = in.x.row<const T>(t), *values = gates + size;
            T* to = in.out.at<T>() + t * size;
            for (std::int64_t i = 0; i < size; i += LANES) {
                const std::int64_t count = std::min<std::int64_t>(LANES, size - i);
                const Float gate = load_partial(gates + i, count), value = load_partial(values + i, count);
                const Float gated = in.clamp ? activated(in.activation, in.clamp, gate, value)
                                             : activated(in.activation, gate, Float{}) * value;
                store_partial(to + i, gated, count);
            }
        }
    });
}

struct Clip : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, size]
    FIELD(Array<FLOAT32>, bounds);  // [2]
    FIELD(Array<VALUES>, out);  // as x

    void check(const Reader& reader) const {
        reader.expect(bounds.shape[0] == 2, "a least and a most value");
    }
};

void clip(const ThreadGroup& threads, std::int64_t tokens, const Clip& in) {
    const std::int64_t size = in.out.shape[1];
    const Float least = splat(in.bounds.at<float>()[0]), most = splat(in.bounds.at<float>()[1]);
    const Range mine = threads.split(tokens);
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t t = mine.begin; t < mine.end; ++t) {
            const T* from = in.x.row<const T>(t);
            T* to = in.out.at<T>() + t * size;
            for (std::int64_t i = 0; i < size; i += LANES) {
                const std::int64_t count = std::min<std::int64_t>(LANES, size - i);
                const Float value = load_partial(from + i, count), raised = value < least ? least : value;
                store_partial(to + i, raised > most ? most : raised, count);
            }
        }
    });
}

KERNEL(add);
KERNEL(clip);
KERNEL(concat);
KERNEL(gated_activation);
KERNEL(multiply);

}  // namespace
}  // namespace ostinato
