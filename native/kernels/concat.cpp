// Two vectors of each token, one behind the other.

#include <cstring>

#include "../bind.h"

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

KERNEL(concat);

}  // namespace
}  // namespace ostinato
