// Rotary position embedding in the half-split layout, its angles, and the write of keys and values into the cache.

#include "../kernels.h"
#include "../simd.h"

namespace ostinato {
namespace {

// `positions` [tokens] int64, `frequencies` [half] -> `angles` [2, captured tokens, half]: cosines, and `sines`
// elements behind them the sines, each times `scaling`.
//
// The C library's functions reduce their argument exactly, so a position of a million costs no accuracy.
void rotary_angles(const Team& team, std::int64_t tokens, Address positions, Address frequencies, Address angles,
                   std::int64_t sines, std::int64_t half_size, float scaling) {
    const Range mine = team.split(tokens * half_size);
    float* to = at<float>(angles);
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
        const float position = static_cast<float>(at<const std::int64_t>(positions)[i / half_size]);
        const float angle = position * at<const float>(frequencies)[i % half_size];
        to[i] = std::cos(angle) * scaling;
        to[sines + i] = std::sin(angle) * scaling;
    }
}

// As rotary_angles, where angle i is that of position `axes[i]` of the token's: `positions` [tokens, num_axes] int64.
void axial_angles(const Team& team, std::int64_t tokens, Address positions, std::int64_t num_axes, Address axes,
                  Address frequencies, Address angles, std::int64_t sines, std::int64_t half_size, float scaling) {
    const Range mine = team.split(tokens * half_size);
    float* to = at<float>(angles);
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
        const std::int64_t number = i % half_size, axis = at<const std::int64_t>(axes)[number];
        const auto position = static_cast<float>(at<const std::int64_t>(positions)[i / half_size * num_axes + axis]);
        const float angle = position * at<const float>(frequencies)[number];
        to[i] = std::cos(angle) * scaling;
        to[sines + i] = std::sin(angle) * scaling;
    }
}

// One head [head_dim]: what a product with `multiplier` gives in the storage type, as float.
template <typename T>
struct Scaled {
    const T* head;
    float multiplier;

    Float operator()(std::int64_t i, int count) const {
        const Float value = count == LANES ? load(head + i) : load_first(head + i, count);
        if (multiplier == 1.0f) return value;
        T rounded[LANES];
        store(rounded, value * multiplier);
        return load(rounded);
    }
};

// Rotates element i of `from` with element half + i by angle i; what lies behind the two halves passes through.
template <typename T>
void rotate_head(Scaled<T> from, T* to, const float* cosines, const float* sines, std::int64_t half_size,
                 std::int64_t head_dim) {
    for (std::int64_t i = 0; i < half_size; i += LANES) {
        const int count = static_cast<int>(std::min<std::int64_t>(LANES, half_size - i));
        const Float first = from(i, count), second = from(half_size + i, count);
        if (count == LANES) {
            const Float cosine = load(cosines + i), sine = load(sines + i);
            store(to + i, first * cosine - second * sine);
            store(to + half_size + i, second * cosine + first * sine);
        } else {
            const Float cosine = load_first(cosines + i, count), sine = load_first(sines + i, count);
            store_first(to + i, first * cosine - second * sine, count);
            store_first(to + half_size + i, second * cosine + first * sine, count);
        }
    }
    for (std::int64_t i = 2 * half_size; i < head_dim; i += LANES) {
        const int count = static_cast<int>(std::min<std::int64_t>(LANES, head_dim - i));
        store_first(to + i, from(i, count), count);
    }
}

// `q` [tokens, heads, head_dim], `k` and `v` [tokens, kv_heads, head_dim], each with its token stride in elements and
// contiguous otherwise; `angles` as above -> `out` [tokens, heads, head_dim] gets the rotated q; the cells
// `kv_cells` [tokens] int64 of `k_cache` and `v_cache` [cells, kv_heads, head_dim] get k, multiplied and rotated, and
// v. A `half_size` of 0 rotates nothing; then q may have no heads.
void rotary(const Team& team, std::int64_t tokens, Address q, std::int64_t q_stride, Address k, std::int64_t k_stride,
            Address v, std::int64_t v_stride, Address angles, std::int64_t sines, std::int64_t half_size,
            float key_multiplier, Address k_cache, Address v_cache, Address kv_cells, Address out, std::int64_t heads,
            std::int64_t kv_heads, std::int64_t head_dim, int dtype) {
    const std::int64_t parts = heads + 2 * kv_heads;
    const Range mine = team.split(tokens * parts);
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const std::int64_t token = i / parts, part = i % parts;
            const float* cosines = at<const float>(angles) + token * half_size;
            const std::int64_t cell = at<const std::int64_t>(kv_cells)[token] * kv_heads;
            if (part < heads) {
                const T* head = at<const T>(q) + token * q_stride + part * head_dim;
                T* to = at<T>(out) + (token * heads + part) * head_dim;
                rotate_head(Scaled<T>{head, 1.0f}, to, cosines, cosines + sines, half_size, head_dim);
            } else if (part < heads + kv_heads) {
                const T* head = at<const T>(k) + token * k_stride + (part - heads) * head_dim;
                T* to = at<T>(k_cache) + (cell + part - heads) * head_dim;
                rotate_head(Scaled<T>{head, key_multiplier}, to, cosines, cosines + sines, half_size, head_dim);
            } else {
                const std::int64_t head = part - heads - kv_heads;
                const T* from = at<const T>(v) + token * v_stride + head * head_dim;
                std::memcpy(at<T>(v_cache) + (cell + head) * head_dim, from, sizeof(T) * head_dim);
            }
        }
    });
}

// `x` [tokens, heads, head_dim] with its token stride in elements, `angles` as above -> `out`, contiguous.
void rotate(const Team& team, std::int64_t tokens, Address x, std::int64_t stride, Address angles, std::int64_t sines,
            std::int64_t half_size, Address out, std::int64_t heads, std::int64_t head_dim, int dtype) {
    const Range mine = team.split(tokens * heads);
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t i = mine.begin; i < mine.end; ++i) {
            const float* cosines = at<const float>(angles) + i / heads * half_size;
            const T* head = at<const T>(x) + i / heads * stride + i % heads * head_dim;
            rotate_head(Scaled<T>{head, 1.0f}, at<T>(out) + i * head_dim, cosines, cosines + sines, half_size,
                        head_dim);
        }
    });
}

}  // namespace

void bind_rotary(Module& module) {
    bind<axial_angles>(module, "axial_angles");
    bind<rotate>(module, "rotate");
    bind<rotary>(module, "rotary");
    bind<rotary_angles>(module, "rotary_angles");
}

}  // namespace ostinato
