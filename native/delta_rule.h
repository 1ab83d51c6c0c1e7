// The gated delta rule, token by token, for whoever must get the same bits from it: src/ostinato/ops/state/delta_update.py has
// the formulas.
//
// With S the state before a token and a its decay, the change is d = beta (v - S^T a k), the output
// o = S^T a q + d (k . q), and the state becomes a S + k d^T: one pass over the state finds both sums, another updates
// it. The columns of a state, its value channels, do not depend on each other. The order of all sums is fixed, and every
// sum is fused explicitly, so that a token's bits depend on nothing but its inputs and the state before it.
#pragma once

#include <cmath>

#include "arguments.h"
#include "recurrence.h"
#include "simd.h"

namespace ostinato {

// One token of one head, ready to be applied.
struct DeltaToken {
    const float *k, *decayed_k, *decayed_q;  // [key_dim]; q is scaled
    const float* decay;                      // [key_dim], or one number
    const float* v;                          // [padded value_dim]
    float beta, k_q;                         // k . q
};

// `to` [padded(size)] = x scaled to the length `scale`.
template <typename T>
void put_unit(const T* x, std::int64_t size, float scale, float* to) {
    constexpr float EPS = 1e-6f;
    to_floats(x, to, size);
    Float squares = {};
    for (std::int64_t i = 0; i < size; i += LANES) squares = fma(load(to + i), load(to + i), squares);
    const float factor = scale / std::sqrt(sum(squares) + EPS);
    for (std::int64_t i = 0; i < size; i += LANES) store(to + i, load(to + i) * factor);
}

// `decays` [padded(count)] = exp(-rate softplus(a + dt_bias)).
template <typename T>
void put_decays(const T* a, const float* dt_bias, float A_log, std::int64_t count, float* decays) {
    const Float rate = exp(splat(A_log));
    for (std::int64_t i = 0; i < count; i += LANES) {
        const Float step = softplus(load_some(a + i, count - i) + load_some(dt_bias + i, count - i));
        store(decays + i, exp(-(step * rate)));
    }
}

// What both kernels have in common: the tokens' inputs.
struct DeltaInputs : Arguments {
    FIELD(Strided<VALUES>, q);  // [tokens, key_heads, key_dim], as k
    FIELD(Strided<VALUES>, k);
    FIELD(Strided<VALUES>, v);  // [tokens, heads, value_dim]
    FIELD(Strided<VALUES>, a);  // [tokens, heads], or [tokens, heads, key_dim]
    FIELD(Strided<VALUES>, b);  // [tokens, heads]
    FIELD(Array<FLOAT32>, A_log);  // [heads]
    FIELD(Array<FLOAT32>, dt_bias);  // as a token of `a`
    FIELD(double, beta_scale);
    FIELD(bool, keys_take_turns);  // head i has key head i % key_heads; else adjacent heads share one
    FIELD(Strided<FLOAT32>, states);  // [slots, heads, key_dim, value_dim]
    FIELD(Array<VALUES>, out);  // as v

    std::int64_t heads() const { return v.shape[1]; }
    std::int64_t key_dim() const { return k.shape[2]; }
    std::int64_t value_dim() const { return v.shape[2]; }
    bool has_decay_per_channel() const { return a.dims == 3; }

    std::int64_t key_head_of(std::int64_t head) const {
        return keys_take_turns ? head % k.shape[1] : head / (heads() / k.shape[1]);
    }

    // Floats that a prepared token takes.
    std::int64_t token_floats() const {
        return 4 * padded(key_dim()) + (value_dim() + DELTA_COLUMNS - 1) / DELTA_COLUMNS * DELTA_COLUMNS + VECTOR;
    }

    // Where a head's state lies in a slot.
    float* head_state(std::int64_t slot, std::int64_t head) const {
        return states.row<float>(slot) + head * key_dim() * value_dim();
    }

    // Prepares a token for a head, in `token_floats()` floats of `memory`.
    template <typename T>
    DeltaToken prepare(std::int64_t token, std::int64_t head, float* memory) const {
        const std::int64_t size = key_dim(), apart = padded(size), key_head = key_head_of(head);
        float *const key = memory, *const decayed_key = key + apart, *const query = decayed_key + apart;
        float *const decays = query + apart, *const value = decays + apart;
        put_unit(k.row<const T>(token) + key_head * size, size, 1.0f, key);
        put_unit(q.row<const T>(token) + key_head * size, size, 1.0f / std::sqrt(static_cast<float>(size)), query);
        to_floats(v.row<const T>(token) + head * value_dim(), value, value_dim());
        Float products = {};
        for (std::int64_t i = 0; i < size; i += LANES) products = fma(load(key + i), load(query + i), products);

        const std::int64_t count = has_decay_per_channel() ? size : 1;
        put_decays(a.row<const T>(token) + head * count, dt_bias.at<const float>() + head * count,
                   A_log.at<const float>()[head], count, decays);
        for (std::int64_t i = 0; i < size; i += LANES) {
            const Float decay = count == 1 ? splat(decays[0]) : load(decays + i);
            store(decayed_key + i, decay * load(key + i));
            store(query + i, decay * load(query + i));
        }
        const float raw = to_float(b.row<const T>(token)[head]);
        const float beta = static_cast<float>(beta_scale) / (1.0f + exp(-raw));
        return {key, decayed_key, query, decays, value, beta, sum(products)};
    }
};

// V vectors of a state's columns. `width` is the number of elements in the last vector, if that is not whole.
template <int V>
struct Columns {
    std::int64_t width = LANES;

    Float at(const float* row, int v) const {
        return v < V - 1 || width == LANES ? load(row + v * LANES) : load_first(row + v * LANES, width);
    }
    void put(float* row, int v, Float value) const {
        v < V - 1 || width == LANES ? store(row + v * LANES, value) : store_first(row + v * LANES, value, width);
    }
};

// What a token's key and query find in a state.
template <int V>
struct Found {
    Float at_key[V], at_query[V];

    // Adds what they find in one row of it.
    void add(const DeltaToken& token, std::int64_t i, const Float* row) {
        const Float k = splat(token.decayed_k[i]), q = splat(token.decayed_q[i]);
        for (int v = 0; v < V; ++v) at_key[v] = fma(row[v], k, at_key[v]);
        for (int v = 0; v < V; ++v) at_query[v] = fma(row[v], q, at_query[v]);
    }

    // Turns what was found into the token's change and output, for its values from `v` on.
    void finish(const DeltaToken& token, std::int64_t first) {
        for (int v = 0; v < V; ++v) {
            at_key[v] = (load(token.v + first + v * LANES) - at_key[v]) * token.beta;
            at_query[v] = fma(at_key[v], splat(token.k_q), at_query[v]);
        }
    }
};

// Row `i` of a state after a token, given that before it. `change` is the token's.
template <int V, bool PER_CHANNEL>
void apply(const DeltaToken& token, const Float* change, std::int64_t i, Float* row) {
    const Float k = splat(token.k[i]), decay = splat(token.decay[PER_CHANNEL ? i : 0]);
    for (int v = 0; v < V; ++v) row[v] = fma(k, change[v], row[v] * decay);
}

// What is found in some columns of a state, whose rows lie `stride` floats apart; null: zeros.
template <int V>
Found<V> look_up(const DeltaToken& token, std::int64_t key_dim, const float* from, std::int64_t stride,
                 Columns<V> columns) {
    Found<V> found = {};
    if (!from) return found;
    for (std::int64_t i = 0; i < key_dim; ++i) {
        Float row[V];
        for (int v = 0; v < V; ++v) row[v] = columns.at(from + i * stride, v);
        found.add(token, i, row);
    }
    return found;
}

}  // namespace ostinato
