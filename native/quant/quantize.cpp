// 4-bit weights of others, group by group: once when a model is loaded. ops/quant/quantize.py defines what is looked for.

#include <vector>

#include "bind/kernel_binding.h"
#include "core/simd.h"
#include "quant/block_layouts.h"
#include "quant/int8.h"

namespace ostinato {
namespace {

struct Quantize : Arguments {
    FIELD(Strided<VALUES>, values);  // [rows, in]
    FIELD(Array<INT8>, weight);  // [rows, in]
    FIELD(Array<FLOAT32>, scale);  // [rows], or [rows, in / group_size]
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

constexpr std::int64_t HALF = SUBBLOCK / 2;

struct QuantizeInt4 : Arguments {
    FIELD(Strided<VALUES>, values);  // [rows, in]
    FIELD(Array<INT8>, weight);  // [rows, bytes]: in / group_size blocks of int4_bytes(group_size)
    FIELD(std::int64_t, group_size);  // a multiple of 32
};

struct Group {
    float scale, zero;
};

inline Float min(Float a, Float b) { return a < b ? a : b; }

// Return the rounded integers minus the zero point, clamped to `low` and `high`. NaN becomes `high`.
inline Float rounded(Float value, Float scale, Float low, Float high) {
    const Float whole = value / scale;
    return max(min(whole, high), low) + ROUND - ROUND;
}

// Return the best scale and zero point for a group of `count` vectors.
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
    const float span = (high - low) / MAX_INT4;
    if (!(span > 0.0f)) return {0.0f, 0.0f};
    const float zero = std::nearbyint(-low / span);
    float best = 0.0f, scale = span;
    for (int step = 0; step < INT4_STEPS; ++step) {
        const float part = static_cast<float>(100 - INT4_SHRINK * step) / 100.0f;
        const Float tried = splat(span * part);
        const Float first = splat(-zero), last = splat(MAX_INT4 - zero);
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
    return {rounded_int4_scale(scale), zero};
}

// Write a block: 32 bits with the scale and the zero point, then 16 bytes per subblock, whose first half is in the
// lower bits.
void write(const Float* values, std::int64_t count, const Group& group, std::int8_t* to) {
    const std::uint32_t head = int4_head(group.scale, group.zero);
    std::memcpy(to, &head, sizeof(head));
    to += sizeof(head);
    const Float scale = splat(group.scale > 0.0f ? group.scale : 1.0f);
    const Float zero = splat(group.zero), first = -zero, last = splat(MAX_INT4) - zero;
    const auto integers = [&](std::int64_t i) {
        const Float whole = rounded(values[i / LANES], scale, first, last) + zero;
        return __builtin_convertvector(group.scale == group.scale ? whole : Float{}, Int);
    };
    for (std::int64_t part = 0; part < count; part += 2 * HALF) {
        for (std::int64_t i = part; i < part + HALF; i += LANES, to += LANES) {
            const LaneBytes bytes = __builtin_convertvector(integers(i) | integers(i + HALF) << 4, LaneBytes);
            std::memcpy(to, &bytes, LANES);
        }
    }
}

void quantize_int4(const ThreadGroup& threads, std::int64_t rows, const QuantizeInt4& in) {
    const std::int64_t size = in.values.shape[1], group = in.group_size;
    const Range mine = threads.split(rows);
    std::vector<Float> values(group / LANES);
    with_dtype(in.values.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t row = mine.begin; row < mine.end; ++row) {
            const T* from = in.values.row<const T>(row);
            std::int8_t* to = in.weight.row<std::int8_t>(row);
            for (std::int64_t i = 0; i < size; i += group, to += int4_bytes(group)) {
                for (std::int64_t j = 0; j < group; j += LANES) values[j / LANES] = load(from + i + j);
                write(values.data(), group, best_group(values.data(), group / LANES), to);
            }
        }
    });
}

KERNEL(quantize);
KERNEL(quantize_int4);

}  // namespace
}  // namespace ostinato
