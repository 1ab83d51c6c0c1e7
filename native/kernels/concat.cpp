// Two vectors of each token, one behind the other.

#include <cstring>

#include "../bind.h"

namespace ostinato {
namespace {

struct Concat : Arguments {
    FIELD(Tensor, first);   // [tokens, a]
    FIELD(Tensor, second);  // [tokens, b]
    FIELD(Tensor, out);     // [tokens, a + b]
};

void concat(const Team& team, std::int64_t tokens, const Concat& in) {
    const std::int64_t bytes = in.out.element_bytes();
    const std::int64_t first_size = in.first.shape[1] * bytes, second_size = in.second.shape[1] * bytes;
    const auto row = [&](const Tensor& of, std::int64_t t) { return of.address + t * of.strides[0] * bytes; };
    const Range mine = team.split(tokens);
    for (std::int64_t t = mine.begin; t < mine.end; ++t) {
        std::byte* to = row(in.out, t);
        std::memcpy(to, row(in.first, t), first_size);
        std::memcpy(to + first_size, row(in.second, t), second_size);
    }
}

KERNEL(concat);

}  // namespace
}  // namespace ostinato
