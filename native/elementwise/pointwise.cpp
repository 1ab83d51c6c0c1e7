// Pointwise operations: two vectors of each token concatenated, multiplied, or one half of a vector gated by the other.

#include <cstring>

#include "bind/kernel_binding.h"
#include "core/simd.h"
#include "gemm/epilogue.h"

namespace ostinato {
namespace {

struct Concat : Arguments {
    FIELD(Strided<ANY>, first);  // [tokens, a]
    FIELD(Strided<ANY>, second);  // [tokens, b]
    FIELD(Strided<ANY>, out);  // [tokens, a + b]

    void check(const Reader& reader) const {
        reader.expect(first.dtype == second.dtype && out.dtype == first.dtype, "one dtype");
    }
};

void concat(const ThreadGroup& threads, std::int64_t tokens, const Concat& in) {
    const std::int64_t bytes = in.out.element_bytes();
    const std::int64_t first_size = in.first.shape[1] * bytes, second_size = in.second.shape[1] * bytes;
    const auto row = [&](const Tensor& of, std::int64_t t) { return of.address + t * of.strides[0] * bytes; };
    const Range mine = threads.split(tokens);
    for (std::int64_t t = mine.begin; t < mine.end; ++t) {
        std::byte* to = row(in.out, t);
        std::memcpy(to, row(in.first, t), first_size);
        std::memcpy(to + first_size, row(in.second, t), second_size);
    }
}

struct Multiply : Arguments {
    FIELD(Strided<VALUES>, first);  // [tokens, size]
    FIELD(Strided<VALUES>, second);  // [tokens, size]
    FIELD(Array<VALUES>, out);  // [tokens, size]

    void check(const Reader& reader) const {
        reader.expect(first.dtype == second.dtype && out.dtype == first.dtype, "one dtype");
        reader.expect(first.shape[1] == second.shape[1] && first.shape[1] == out.shape[1], "vectors of one size");
    }
};

void multiply(const ThreadGroup& threads, std::int64_t tokens, const Multiply& in) {
    const std::int64_t size = in.out.shape[1], whole = size / LANES * LANES;
    const Range mine = threads.split(tokens);
    with_dtype(in.out.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t t = mine.begin; t < mine.end; ++t) {
            const T *first = in.first.row<const T>(t), *second = in.second.row<const T>(t);
            T* to = in.out.at<T>() + t * size;
            for (std::int64_t i = 0; i < whole; i += LANES) store(to + i, load(first + i) * load(second + i));
            const std::int64_t rest = size - whole;
            if (rest) store_partial(to + whole, load_partial(first + whole, rest) * load_partial(second + whole, rest), rest);
        }
    });
}

struct GatedActivation : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, 2 * size]
    FIELD(Activation, activation);
    FIELD(Array<VALUES>, out);  // [tokens, size]

    void check(const Reader& reader) const {
        reader.expect(!has_gates(activation), "an activation of one value");
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
                const Float gate = activated(in.activation, load_partial(gates + i, count), Float{});
                store_partial(to + i, gate * load_partial(values + i, count), count);
            }
        }
    });
}

KERNEL(concat);
KERNEL(gated_activation);
KERNEL(multiply);

}  // namespace
}  // namespace ostinato
