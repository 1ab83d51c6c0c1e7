// Operations of block formats with 5 to 8 bits, and of IQ4_XS: a file of its own, since they take long to compile.

#include "gemm/make_block_format.h"

namespace ostinato {

const BlockFormat* large_block_format(const std::string& name) {
    static const BlockFormat FORMATS[] = {
        make_block_format<Q5_0>(block_sizes::Q5_0), make_block_format<Q5_1>(block_sizes::Q5_1), make_block_format<Q8_0>(block_sizes::Q8_0),
        make_block_format<Q5_K>(block_sizes::Q5_K), make_block_format<Q6_K>(block_sizes::Q6_K), make_block_format<IQ4_XS>(block_sizes::IQ4_XS),
    };
    for (const BlockFormat& format : FORMATS) {
        if (name == format.name) return &format;
    }
    return nullptr;
}

}  // namespace ostinato
