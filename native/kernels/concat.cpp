// Two vectors of each token, one behind the other.

#include <cstring>

#include "../kernels.h"

namespace ostinato {
namespace {

// `first` [tokens, first_size], `second` [tokens, second_size] -> `y` [tokens, first_size + second_size]. Sizes and
// strides are in bytes.
void concat(const Team& team, std::int64_t tokens, Address first, std::int64_t first_stride, std::int64_t first_size,
            Address second, std::int64_t second_stride, std::int64_t second_size, Address y, std::int64_t y_stride) {
    const Range mine = team.split(tokens);
    for (std::int64_t t = mine.begin; t < mine.end; ++t) {
        std::byte* to = at<std::byte>(y) + t * y_stride;
        std::memcpy(to, at<const std::byte>(first) + t * first_stride, first_size);
        std::memcpy(to + first_size, at<const std::byte>(second) + t * second_stride, second_size);
    }
}

}  // namespace

void bind_concat(Module& module) { bind<concat>(module, "concat"); }

}  // namespace ostinato
