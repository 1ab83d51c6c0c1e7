// The second half of each token's values, gated by the first.

#include "../bind.h"
#include "../product.h"
#include "../simd.h"

namespace ostinato {
namespace {

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

KERNEL(gated_activation);

}  // namespace
}  // namespace ostinato
