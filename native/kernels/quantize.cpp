// 8-bit weights of others, row by row: once when a model is loaded. ops/int8.py defines the numbers.

#include "../bind.h"
#include "../quantize.h"

namespace ostinato {
namespace {

struct Quantize : Arguments {
    FIELD(Strided<VALUES>, values);  // [rows, in]
    FIELD(Array<INT8>, weight);  // [rows, in]
    FIELD(Array<FLOAT32>, scale);  // [rows], or [rows, in / group_size] if that is given
    FIELD(std::optional<std::int64_t>, group_size);
};

void quantize(const ThreadGroup& threads, std::int64_t rows, const Quantize& in) {
    const std::int64_t size = in.weight.shape[1], group = in.group_size.value_or(std::max<std::int64_t>(1, size));
    const std::int64_t groups = (size + group - 1) / group;
    const Range mine = threads.split(rows);
    with_dtype(in.values.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t row = mine.begin; row < mine.end; ++row) {
            for (std::int64_t i = 0; i < groups; ++i) {
                const std::int64_t begin = i * group, count = std::min(group, size - begin);
                in.scale.at<float>()[row * groups + i] = quantize_group(
                    in.values.row<const T>(row) + begin, count, in.weight.at<std::int8_t>() + row * size + begin);
            }
        }
    });
}

KERNEL(quantize);

}  // namespace
}  // namespace ostinato
