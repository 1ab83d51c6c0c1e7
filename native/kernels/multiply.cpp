// Two vectors of each token, element by element.

#include "../bind.h"
#include "../product.h"
#include "../simd.h"

namespace ostinato {
namespace {

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

KERNEL(multiply);

}  // namespace
}  // namespace ostinato
