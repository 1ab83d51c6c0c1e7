// Rotary position embedding in the half-split layout, its angles, and the write of keys and values into the cache.

#include "bind/kernel_binding.h"
#include "elementwise/rotate_head.h"
#include "quant/int8.h"

namespace ostinato {
namespace {

struct RotaryAngles : Arguments {
    FIELD(Array<INT64>, positions);  // [tokens]
    FIELD(Array<FLOAT32>, frequencies);  // [half]
    FIELD(float, scaling);
    FIELD(Strided<FLOAT32>, out);  // [2, captured tokens, half]
};

// Write the cosine and sine of angle `i`, times `scaling`, to `out`.
//
// The C library's functions reduce their argument exactly, so a position of a million costs no accuracy.
inline void put_angle(float angle, float scaling, const Tensor& out, std::int64_t i) {
    out.row<float>(0)[i] = std::cos(angle) * scaling;
    out.row<float>(1)[i] = std::sin(angle) * scaling;
}

void rotary_angles(const ThreadGroup& threads, std::int64_t tokens, const RotaryAngles& in) {
    const std::int64_t half_size = in.frequencies.shape[0];
    const Range mine = threads.split(tokens * half_size);
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
        const float position = static_cast<float>(in.positions.at<const std::int64_t>()[i / half_size]);
        put_angle(position * in.frequencies.at<const float>()[i % half_size], in.scaling, in.out, i);
    }
}

struct AxialAngles : Arguments {
    FIELD(Array<INT64>, positions);  // [tokens, axes]
    FIELD(Array<INT64>, axes);  // [half]
    FIELD(Array<FLOAT32>, frequencies);  // [half]
    FIELD(float, scaling);
    FIELD(Strided<FLOAT32>, out);  // [2, captured tokens, half]
};

// Compute the same as rotary_angles, with position `axes[i]` of the token for angle i.
void axial_angles(const ThreadGroup& threads, std::int64_t tokens, const AxialAngles& in) {
    const std::int64_t half_size = in.frequencies.shape[0];
    const Range mine = threads.split(tokens * half_size);
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
        const std::int64_t number = i % half_size, axis = in.axes.at<const std::int64_t>()[number];
        const auto position = static_cast<float>(in.positions.row<const std::int64_t>(i / half_size)[axis]);
        put_angle(position * in.frequencies.at<const float>()[number], in.scaling, in.out, i);
    }
}

// Cosines and sines of a token's angles.
struct Angles {
    const float *cosines, *sines;

    Angles(const Tensor& angles, std::int64_t token)
        : cosines(angles.row<const float>(0) + token * angles.shape[2]),
          sines(angles.row<const float>(1) + token * angles.shape[2]) {}
};

struct Rotary : Arguments {
    FIELD(Strided<VALUES>, q);  // [tokens, heads, head_dim]
    FIELD(Strided<VALUES>, k);  // [tokens, kv_heads, head_dim], as v
    FIELD(OptionalTensor<Strided<VALUES>>, v);  // without it, as without v_cache, only keys are written
    FIELD(OptionalTensor<Strided<FLOAT32>>, angles);  // [2, tokens, half]; without it nothing is rotated
    FIELD(float, key_multiplier);
    FIELD(Array<WEIGHTS>, k_cache);  // [blocks, block_size, kv_heads, head_dim], as v_cache; int8 with scales
    FIELD(OptionalTensor<Array<WEIGHTS>>, v_cache);
    FIELD(Array<INT64>, kv_cells);  // [tokens]
    FIELD(OptionalTensor<Array<FLOAT32>>, k_scales);  // [blocks, block_size, kv_heads], as v_scales
    FIELD(OptionalTensor<Array<FLOAT32>>, v_scales);
    FIELD(Strided<VALUES>, out);  // as q; q itself where nothing is rotated

    void check(const Reader& reader) const {
        reader.expect(!v || v_cache, "values have a cache of theirs");
        check_cache(reader, k_cache, k_scales, k.dtype);
        if (v) check_cache(reader, v_cache, v_scales, k.dtype);
    }
};

// Store `size` values of head `head` of a cache: unchanged, or quantised to int8 if the cache has scales.
template <typename T>
void keep(const T* from, const Tensor& cache, const Tensor& scales, std::int64_t head, std::int64_t size) {
    if (scales.address != nullptr) {
        scales.at<float>()[head] = quantize_group(from, size, cache.at<std::int8_t>() + head * size);
    } else {
        std::memcpy(cache.at<T>() + head * size, from, sizeof(T) * size);
    }
}

// Write the rotated q to `out`, and to the tokens' cells of the caches k, multiplied and rotated, and v.
void rotary(const ThreadGroup& threads, std::int64_t tokens, const Rotary& in) {
    const std::int64_t heads = in.angles ? in.q.shape[1] : 0, kv_heads = in.k.shape[1], head_dim = in.k.shape[2];
    const std::int64_t half_size = in.angles.shape[2], parts = heads + (in.v ? 2 : 1) * kv_heads;
    const Range mine = threads.split(tokens * parts);
    with_dtype(in.k.dtype, [&](auto type) {
        using T = decltype(type);
        T* rotated = in.k_scales ? threads.thread_scratch<T>(head_dim) : nullptr;
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t token = i / parts, part = i % parts;
            const Angles angles(in.angles, token);
            const std::int64_t cell = in.kv_cells.at<const std::int64_t>()[token] * kv_heads;
            if (part < heads) {
                const Scaled<T> head{in.q.row<const T>(token) + part * head_dim, 1.0f};
                T* to = in.out.at<T>() + (token * heads + part) * head_dim;
                rotate_head(head, to, angles.cosines, angles.sines, half_size, head_dim);
            } else if (part < heads + kv_heads) {
                const Scaled<T> head{in.k.row<const T>(token) + (part - heads) * head_dim, in.key_multiplier};
                const std::int64_t index = cell + part - heads;
                T* to = in.k_scales ? rotated : in.k_cache.at<T>() + index * head_dim;
                rotate_head(head, to, angles.cosines, angles.sines, half_size, head_dim);
                if (in.k_scales) keep(rotated, in.k_cache, in.k_scales, index, head_dim);
            } else {
                const std::int64_t head = part - heads - kv_heads;
                const T* from = in.v.row<const T>(token) + head * head_dim;
                keep(from, in.v_cache, in.v_scales, cell + head, head_dim);
            }
        }
    });
}

struct Rotate : Arguments {
    FIELD(Strided<VALUES>, x);  // [tokens, heads, head_dim]
    FIELD(Strided<FLOAT32>, angles);  // [2, tokens, half]
    FIELD(Array<VALUES>, out);  // as x
};

void rotate(const ThreadGroup& threads, std::int64_t tokens, const Rotate& in) {
    const std::int64_t heads = in.x.shape[1], head_dim = in.x.shape[2];
    const Range mine = threads.split(tokens * heads);
    with_dtype(in.x.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const Angles angles(in.angles, i / heads);
            const Scaled<T> head{in.x.row<const T>(i / heads) + i % heads * head_dim, 1.0f};
            rotate_head(head, in.out.at<T>() + i * head_dim, angles.cosines, angles.sines, in.angles.shape[2], head_dim);
        }
    });
}

KERNEL(axial_angles);
KERNEL(rotate);
KERNEL(rotary);
KERNEL(rotary_angles);

}  // namespace
}  // namespace ostinato
