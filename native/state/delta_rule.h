// The gated delta rule, token by token, for whoever must get the same bits from it: src/ostinato/ops/reference/delta.py has
// the formulas.
//
// With S the state before a token and a its decay, the change is d = beta (v - S^T a k), the output o = S^T a q + d (k
// . q), and the state becomes a S + k d^T: one pass over the state computes both sums, another updates it. The columns
// of a state, its value channels, do not depend on each other. The order of all sums is fixed, and every sum is fused
// explicitly, so that a token's bits depend on nothing but its inputs and the state before it.
#pragma once

#include <cmath>

#include "bind/arguments.h"
#include "core/simd.h"
#include "state/ssd_recurrence.h"

namespace ostinato {

// Prepared inputs of one token of one head.
struct DeltaToken {
    const float *k, *decayed_k, *decayed_q;  // [key_dim]; q is scaled
    const float* decay;                      // [key_dim], or one number
    const float* v;                          // [padded value_dim]
    float beta, k_q;                         // k . q
};

// Return a . b, both [padded(size)], in four independent sums.
inline float product_of(const float* a, const float* b, std::int64_t size) {
    Float sums[4] = {};
    std::int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        for (int n = 0; n < 4; ++n) sums[n] = fma(load(a + i + n * LANES), load(b + i + n * LANES), sums[n]);
    }
    for (; i < size; i += LANES) sums[0] = fma(load(a + i), load(b + i), sums[0]);
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Compute `to` [padded(size)] = x scaled to the length `scale`.
template <typename T>
void l2_normalize(const T* x, std::int64_t size, float scale, float* to) {
    constexpr float EPS = 1e-6f;
    to_floats(x, to, size);
    const float factor = scale / std::sqrt(product_of(to, to, size) + EPS);
    for (std::int64_t i = 0; i < size; i += LANES) store(to + i, load(to + i) * factor);
}

// Return exp(-rate softplus(a + bias)), or exp(bound sigmoid(rate (a + bias))) if `bound` is below 0.
inline Float decay_of(Float a, Float bias, Float rate, float bound) {
    if (bound < 0.0f) return exp(bound / (1.0f + exp(-((a + bias) * rate))));
    return exp(-(softplus(a + bias) * rate));
}

// Arguments of both kernels: the tokens' inputs.
struct DeltaInputs : Arguments {
    FIELD(Strided<VALUES>, q);  // [tokens, key_heads, key_dim], as k
    FIELD(Strided<VALUES>, k);
    FIELD(Strided<VALUES>, v);  // [tokens, heads, value_dim]
    FIELD(Strided<VALUES>, a);  // [tokens, heads], or [tokens, heads, key_dim]
    FIELD(Strided<VALUES>, b);  // [tokens, heads]
    FIELD(Array<FLOAT32>, A_log);  // [heads]
    FIELD(Array<FLOAT32>, dt_bias);  // as a token of `a`
    FIELD(double, decay_bound);  // as decay_of has it
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

    // Return the floats that a prepared token takes.
    std::int64_t token_floats() const {
        return 4 * padded(key_dim()) + (value_dim() + DELTA_COLUMNS - 1) / DELTA_COLUMNS * DELTA_COLUMNS + VECTOR;
    }

    // Return the address of a head's state in a slot.
    float* head_state(std::int64_t slot, std::int64_t head) const {
        return states.row<float>(slot) + head * key_dim() * value_dim();
    }

    // Prepare up to DELTA_SPAN tokens for a head, each in `token_floats()` floats of `memory`.
    template <typename T>
    void prepare(std::int64_t first, std::int64_t count, std::int64_t head, float* memory, DeltaToken* tokens) const {
        float decays[DELTA_SPAN], betas[DELTA_SPAN];
        put_gates<T>(first, count, head, decays, betas);
        for (std::int64_t i = 0; i < count; ++i) {
            tokens[i] = prepare_one<T>(first + i, head, decays[i], betas[i], memory + i * token_floats());
        }
    }

    // Prefetch what `prepare` reads of a token, and where its output goes: tokens lie too far apart for the hardware to
    // predict. Inlined, since GCC drops calls of a function that only prefetches.
    template <typename T>
    [[gnu::always_inline]] void prefetch(std::int64_t token, std::int64_t head) const {
        const auto ahead = [](const T* from, std::int64_t size) __attribute__((always_inline)) {
            for (std::int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
        };
        const std::int64_t of_key = key_head_of(head) * key_dim();
        ahead(k.row<const T>(token) + of_key, key_dim());
        ahead(q.row<const T>(token) + of_key, key_dim());
        ahead(v.row<const T>(token) + head * value_dim(), value_dim());
        ahead(out.at<const T>() + (token * heads() + head) * value_dim(), value_dim());
        if (has_decay_per_channel()) ahead(a.row<const T>(token) + head * key_dim(), key_dim());
    }

  private:
    float bound() const { return static_cast<float>(decay_bound); }
    Float decay_rate(std::int64_t head) const { return exp(splat(A_log.at<const float>()[head])); }

    // Compute the tokens' betas, and their decays if a head has one, for a vector of tokens at a time.
    template <typename T>
    void put_gates(std::int64_t first, std::int64_t count, std::int64_t head, float* decays, float* betas) const {
        for (std::int64_t i = 0; i < count; ++i) betas[i] = to_float(b.row<const T>(first + i)[head]);
        for (std::int64_t i = 0; i < count; i += LANES) {
            const Float raw = load_partial(betas + i, count - i);
            store_partial(betas + i, static_cast<float>(beta_scale) / (1.0f + exp(-raw)), count - i);
        }
        if (has_decay_per_channel()) return;
        const Float rate = decay_rate(head), bias = splat(dt_bias.at<const float>()[head]);
        for (std::int64_t i = 0; i < count; ++i) decays[i] = to_float(a.row<const T>(first + i)[head]);
        for (std::int64_t i = 0; i < count; i += LANES) {
            store_partial(decays + i, decay_of(load_partial(decays + i, count - i), bias, rate, bound()), count - i);
        }
    }

    template <typename T>
    DeltaToken prepare_one(std::int64_t token, std::int64_t head, float of_head, float beta, float* memory) const {
        const std::int64_t size = key_dim(), apart = padded(size), key_head = key_head_of(head);
        float *const key = memory, *const decayed_key = key + apart, *const query = decayed_key + apart;
        float *const decay = query + apart, *const value = decay + apart;
        l2_normalize(k.row<const T>(token) + key_head * size, size, 1.0f, key);
        l2_normalize(q.row<const T>(token) + key_head * size, size, 1.0f / std::sqrt(static_cast<float>(size)), query);
        to_floats(v.row<const T>(token) + head * value_dim(), value, value_dim());
        const float k_q = product_of(key, query, size);
        if (has_decay_per_channel()) {
            const Float rate = decay_rate(head);
            const T* const raw = a.row<const T>(token) + head * size;
            const float* const bias = dt_bias.at<const float>() + head * size;
            for (std::int64_t i = 0; i < size; i += LANES) {
                const Float of_token = load_partial(raw + i, size - i), of_channel = load_partial(bias + i, size - i);
                store(decay + i, decay_of(of_token, of_channel, rate, bound()));
            }
        } else {
            decay[0] = of_head;
        }
        for (std::int64_t i = 0; i < size; i += LANES) {
            const Float by = has_decay_per_channel() ? load(decay + i) : splat(of_head);
            store(decayed_key + i, by * load(key + i));
            store(query + i, by * load(query + i));
        }
        return {key, decayed_key, query, decay, value, beta, k_q};
    }
};

// V vectors of a state's columns. `width` is the number of elements in the last vector, if it is not whole.
template <int V>
struct Columns {
    std::int64_t width = LANES;

    Float at(const float* row, int v) const {
        return v < V - 1 || width == LANES ? load(row + v * LANES) : load_masked(row + v * LANES, width);
    }
    void put(float* row, int v, Float value) const {
        v < V - 1 || width == LANES ? store(row + v * LANES, value) : store_masked(row + v * LANES, value, width);
    }
};

// Reads of a state by a token: S^T k and S^T q.
template <int V>
struct StateReads {
    Float at_key[V], at_query[V];

    // Add the products with one row of the state.
    void add(const DeltaToken& token, std::int64_t i, const Float* row) {
        const Float k = splat(token.decayed_k[i]), q = splat(token.decayed_q[i]);
        for (int v = 0; v < V; ++v) at_key[v] = fma(row[v], k, at_key[v]);
        for (int v = 0; v < V; ++v) at_query[v] = fma(row[v], q, at_query[v]);
    }

    // Turn the reads into the token's change and output, for its values from `first` on.
    void finish(const DeltaToken& token, std::int64_t first) {
        for (int v = 0; v < V; ++v) {
            at_key[v] = (load(token.v + first + v * LANES) - at_key[v]) * token.beta;
            at_query[v] = fma(at_key[v], splat(token.k_q), at_query[v]);
        }
    }
};

// A token's change to a state. It is copied here because stores to the state might alias the token, which would then be
// read again for each row.
template <int V, bool PER_CHANNEL>
struct Change {
    const float *k, *decays;
    Float decay, values[V];

    Change(const DeltaToken& token, const Float* of_token) : k(token.k), decays(token.decay), decay(splat(*token.decay)) {
        for (int v = 0; v < V; ++v) values[v] = of_token[v];
    }

    // Apply the token to row `i`.
    void apply(std::int64_t i, Float* row) const {
        const Float by = PER_CHANNEL ? splat(decays[i]) : decay, key = splat(k[i]);
        for (int v = 0; v < V; ++v) row[v] = fma(key, values[v], row[v] * by);
    }
};

// Return the reads of some columns of a state, whose rows lie `stride` floats apart; null: zeros.
template <int V>
StateReads<V> read_state(const DeltaToken& token, std::int64_t key_dim, const float* from, std::int64_t stride,
                 Columns<V> columns) {
    StateReads<V> reads = {};
    if (!from) return reads;
    for (std::int64_t i = 0; i < key_dim; ++i) {
        Float row[V];
        for (int v = 0; v < V; ++v) row[v] = columns.at(from + i * stride, v);
        reads.add(token, i, row);
    }
    return reads;
}

}  // namespace ostinato
