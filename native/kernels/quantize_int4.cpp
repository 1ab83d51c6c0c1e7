// 4-bit weights of others, group by group: once when a model is loaded. ops/int4.py defines what is looked for.

#include <vector>

#include "../bind.h"
#include "../simd.h"

namespace ostinato {
namespace {

typedef std::int8_t Bytes __attribute__((vector_size(LANES)));

constexpr float LARGEST = 15.0f;
constexpr float ROUND = 12582912.0f;  // adding 1.5 * 2^23 rounds to the nearest integer, which stands in the lowest bits

struct QuantizeInt4 : Arguments {
    FIELD(Strided<VALUES>, values);  // [rows, in]
    FIELD(Array<INT8>, weight);  // [rows, in]
    FIELD(Array<FLOAT32>, scale);  // [rows, groups]
    FIELD(Array<INT8>, zero);  // [rows, groups]
    FIELD(std::int64_t, group_size);
};

struct Group {
    float scale, zero;
};

inline Float min(Float a, Float b) { return a < b ? a : b; }

// Integers less the zero point: `low` is the least, `high` the greatest. NaN becomes `high`.
inline Float rounded(Float value, Float scale, Float low, Float high) {
    const Float whole = value / scale;
    return max(min(whole, high), low) + ROUND - ROUND;
}

// `values` are `count` vectors of a group, zeros behind the last. Zeros change no sum.
Group best_group(const Float* values, std::int64_t count) {
    Float least{}, most{}, odd{};
    for (std::int64_t i = 0; i < count; ++i) {
        least = min(values[i], least);
        most = max(values[i], most);
        odd += values[i] - values[i];  // NaN where a value is not finite
    }
    float low = 0.0f, high = 0.0f;
    for (int i = 0; i < LANES; ++i) {
        low = std::min(low, least[i]);
        high = std::max(high, most[i]);
    }
    if (sum(odd) != 0.0f) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    const float span = (high - low) / LARGEST;
    if (!(span > 0.0f)) return {0.0f, 0.0f};
    const float zero = std::nearbyint(-low / span);
    float best = 0.0f, scale = span;
    for (int step = 0; step < INT4_STEPS; ++step) {
        const float part = static_cast<float>(100 - INT4_SHRINK * step) / 100.0f;
        const Float tried = splat(span * part);
        const Float first = splat(-zero), last = splat(LARGEST - zero);
        Float fits{}, sizes{};
        for (std::int64_t i = 0; i < count; ++i) {
            const Float whole = rounded(values[i], tried, first, last);
            fits += values[i] * whole;
            sizes += whole * whole;
        }
        const float fit = sum(fits), size = sum(sizes);
        if (size > 0.0f && fit * fit / size > best) {
            best = fit * fit / size;
            scale = fit / size;
        }
    }
    return {to_float(from_float<half>(scale)), zero};
}

void write(const Float* values, std::int64_t count, const Group& group, std::int8_t* to) {
    const Float scale = splat(group.scale > 0.0f ? group.scale : 1.0f);
    const Float zero = splat(group.zero), first = -zero, last = splat(LARGEST) - zero;
    for (std::int64_t i = 0; i < count; i += LANES) {
        const Float whole = group.scale == group.scale ? rounded(values[i / LANES], scale, first, last) + zero : Float{};
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(whole, Int), Bytes);
        std::memcpy(to + i, &bytes, std::min<std::int64_t>(LANES, count - i));
    }
}

void quantize_int4(const Team& team, std::int64_t rows, const QuantizeInt4& in) {
    const std::int64_t size = in.weight.shape[1], group = in.group_size, groups = (size + group - 1) / group;
    const Range mine = team.split(rows);
    std::vector<Float> values((group + LANES - 1) / LANES);
    with_dtype(in.values.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t row = mine.begin; row < mine.end; ++row) {
            for (std::int64_t i = 0; i < groups; ++i) {
                const std::int64_t begin = i * group, count = std::min(group, size - begin);
                const T* from = in.values.row<const T>(row) + begin;
                const std::int64_t vectors = (count + LANES - 1) / LANES;
                for (std::int64_t v = 0; v < vectors; ++v) {
                    values[v] = load_some(from + v * LANES, count - v * LANES);
                }
                const Group found = best_group(values.data(), vectors);
                in.scale.at<float>()[row * groups + i] = found.scale;
                in.zero.at<std::int8_t>()[row * groups + i] = static_cast<std::int8_t>(found.zero);
                write(values.data(), count, found, in.weight.at<std::int8_t>() + row * size + begin);
            }
        }
    });
}

KERNEL(quantize_int4);

}  // namespace
}  // namespace ostinato
