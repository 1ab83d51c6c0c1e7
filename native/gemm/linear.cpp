// linear: y = x W^T + b, with scale, activation and residual in the epilogue. The rows of ops/ukernels.py say which driver
// computes a product.
//
// Rows in blocks of different formats are one product each, into their parts of the outputs. If the weights' inputs
// are in another order, tokens are permuted first, MAX_GROUP_TOKENS at a time. Heads are one product each, too.

#include "bind/kernel_binding.h"
#include "gemm/select.h"

namespace ostinato {
namespace {

// Rows of one kind, and the micro-kernels that may multiply them.
struct Product {
    Rhs rhs;
    Candidates candidates;
};

struct Linear : Arguments {
    FIELD(Vectors<VALUES>, x);  // [tokens, in], or [tokens, heads, in]
    FIELD(Array<WEIGHTS>, weight);  // [out, in], or bytes; each head has an equal number of rows
    FIELD(OptionalTensor<Array<VALUES>>, bias);  // [out]
    FIELD(OptionalTensor<Strided<FLOATS>>, residual);  // as `out`
    FIELD(Activation, activation);
    FIELD(OptionalTensor<Array<FLOAT32>>, scale);  // [out]
    FIELD(IgnoredArgument, out_dtype);
    FIELD(OptionalTensor<Array<FLOAT32>>, weight_scale);  // of int8 weights: [out], or [out, in / group_size]
    FIELD(std::optional<std::int64_t>, group_size);
    FIELD(BlockParts, blocks);  // if weights are bytes
    // [in], the input that each element of a row belongs to; without it, in order.
    FIELD(OptionalTensor<Array<INT32>>, order);
    FIELD(bool, int8_activations);  // quantise each token to int8 first
    FIELD(bool, fixed_order);
    FIELD(Strided<FLOATS>, out);  // [tokens, out], or [tokens, out / 2] if gated, or [tokens, heads, out / heads]
    std::int64_t heads = x.dims == 3 ? x.shape[1] : 1, in_size = x.shape[x.dims - 1];
    std::vector<Product> products = make_products();

    std::vector<Product> make_products() const {
        std::vector<Product> made;
        const auto add = [&](const std::byte* first, std::int64_t rows, const BlockFormat* format) {
            const Rhs rhs{first, weight.dtype, rows, in_size, weight_scale.at<const float>(), group_size.value_or(0), format};
            made.push_back({rhs, Candidates({Op::LINEAR, int8_activations ? INT8 : x.dtype, rhs.kind(), rhs.k, fixed_order})});
        };
        const std::int64_t of_head = weight.shape[0] / heads;
        for (std::int64_t h = 0; blocks.empty() && h < heads; ++h) {
            add(weight.address + h * of_head * in_size * weight.element_bytes(), of_head, nullptr);
        }
        const std::byte* first = weight.address;
        for (const BlockPart& part : blocks) {
            add(first, part.rows, part.format);
            first += part.rows * part.format->row_bytes(in_size);
        }
        return made;
    }

    void check(const Reader& reader) const {
        reader.expect((weight.dtype == INT8) == bool(weight_scale), "8-bit weights have scales, and no others");
        reader.expect((weight.dtype == UINT8) == !blocks.empty(), "weights in blocks have formats, and no others");
        reader.expect(blocks.size() < 2 || activation != SWIGLU, "gates and what they gate have one format");
        for (const BlockPart& part : blocks) {
            reader.expect(in_size % part.format->elements == 0, "rows are whole blocks");
        }
        for (const Product& product : products) {
            reader.expect(!product.candidates.empty(), "this module has no kernel for such tokens in int8");
        }
        const bool is_plain = blocks.empty() && !weight_scale && !order && !residual && activation == NONE;
        reader.expect(heads == 1 || (is_plain && weight.shape[0] % heads == 0), "products of heads are plain");
        reader.expect(x.shape[0] < 2 || x.strides[0] != 0, "tokens lie apart");
        reader.expect(!order || order.shape[0] == in_size, "each input has its place in the order");
        reader.expect(out.dtype == FLOAT32 || out.dtype == x.dtype, "the result is in float32 or in the dtype of x");
        reader.expect(!residual || residual.dtype == out.dtype, "the residual has another dtype than the result");
    }
};

// Return the address `count` elements further, or null if there is no tensor.
inline const void* behind(const Tensor& tensor, std::int64_t count) {
    return tensor.address ? tensor.address + count * tensor.element_bytes() : nullptr;
}

template <typename T>
struct Ordered {
    T value;
};

// Permute the inputs of tokens by `order`. Each thread does so for itself, which is faster than waiting for others.
template <typename T>
const T* in_order(const ThreadGroup& threads, std::int64_t tokens, const T* x, std::int64_t stride, const Tensor& order) {
    const std::int64_t size = order.shape[0];
    const auto* from = order.at<const std::int32_t>();
    T* ordered = &threads.thread_scratch<Ordered<T>>(tokens * size)->value;
    for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t i = 0; i < size; ++i) ordered[t * size + i] = x[t * stride + from[i]];
    }
    return ordered;
}

// Compute the outputs of the tokens `begin` to `begin + tokens`.
void multiply_some(const ThreadGroup& threads, std::int64_t begin, std::int64_t tokens, const Linear& in) {
    const auto* lhs = static_cast<const std::byte*>(behind(in.x, begin * in.x.strides[0]));
    std::int64_t lhs_stride = in.x.strides[0];
    if (in.order) {
        with_dtype(in.x.dtype, [&](auto type) {
            const auto* x = reinterpret_cast<const decltype(type)*>(lhs);
            lhs = reinterpret_cast<const std::byte*>(in_order(threads, tokens, x, lhs_stride, in.order));
        });
        lhs_stride = in.in_size;
    }
    std::int64_t first = 0;
    for (const Product& product : in.products) {
        const std::int64_t rows = product.rhs.n;
        const Epilogue o{behind(in.bias, first), static_cast<const float*>(behind(in.scale, first)), nullptr,
                         behind(in.residual, begin * in.residual.strides[0] + first), in.residual.strides[0],
                         in.out.strides[0], has_gates(in.activation) ? rows / 2 : rows, in.activation};
        const int row = product.candidates.at([=](Unit) { return tokens; });
        auto* out = in.out.address + (begin * in.out.strides[0] + first) * in.out.element_bytes();
        LINEAR_FUNCTIONS[row](threads, {tokens, lhs, lhs_stride, in.x.dtype, product.rhs, o, out, in.out.dtype});
        first += rows;
        if (in.heads > 1) lhs += in.x.strides[1] * in.x.element_bytes();
    }
}

// Compute all outputs. In `fixed_order` a token's bits do not depend on how many tokens are computed with it.
void linear(const ThreadGroup& threads, std::int64_t tokens, const Linear& in) {
    const std::int64_t at_once = in.order ? MAX_GROUP_TOKENS : tokens;
    for (std::int64_t t = 0; t < tokens; t += at_once) multiply_some(threads, t, std::min(at_once, tokens - t), in);
}

KERNEL(linear);

}  // namespace
}  // namespace ostinato
