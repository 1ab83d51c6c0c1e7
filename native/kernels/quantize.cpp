// 8-bit weights of others, row by row: once when a model is loaded. ops/int8.py defines the numbers.

#include "../bind.h"
#include "../simd.h"

namespace ostinato {
namespace {

typedef std::int8_t Bytes __attribute__((vector_size(LANES)));

struct Quantize : Arguments {
    FIELD(Strided<VALUES>, values);  // [rows, in]
    FIELD(Array<INT8>, weight);  // [rows, in]
    FIELD(Array<FLOAT32>, scale);  // [rows], or [rows, in / group_size] if that is given
    FIELD(std::optional<std::int64_t>, group_size);
};

// The largest magnitude; NaN where there is one, whose bits are above infinity's.
template <typename T>
float largest_magnitude(const T* values, std::int64_t count) {
    Int most{};
    for (std::int64_t i = 0; i < count; i += LANES) {
        const Int bits = bits_as<Int>(load_some(values + i, count - i)) & 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    std::int32_t best = 0;
    for (int i = 0; i < LANES; ++i) best = std::max(best, static_cast<std::int32_t>(most[i]));
    return bits_as<float>(best);
}

template <typename T>
float quantize_group(const T* values, std::int64_t count, std::int8_t* to) {
    constexpr float LARGEST = 127.0f, ROUND = 12582912.0f;  // adding 1.5 * 2^23 rounds to the nearest integer
    const float scale = largest_magnitude(values, count) / LARGEST;
    const Float divisor = splat(scale > 0.0f ? scale : 1.0f), most = splat(LARGEST);
    for (std::int64_t i = 0; i < count; i += LANES) {
        Float whole = load_some(values + i, count - i) / divisor;
        whole = max(whole < most ? whole : most, -most) + ROUND;
        // The integer stands in the lowest bits.
        const Bytes bytes = __builtin_convertvector(bits_as<Int>(whole), Bytes);
        if (count - i >= LANES) {
            std::memcpy(to + i, &bytes, LANES);
        } else {
            std::memcpy(to + i, &bytes, count - i);
        }
    }
    return scale;
}

void quantize(const Team& team, std::int64_t rows, const Quantize& in) {
    const std::int64_t size = in.weight.shape[1], group = in.group_size.value_or(std::max<std::int64_t>(1, size));
    const std::int64_t groups = (size + group - 1) / group;
    const Range mine = team.split(rows);
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
