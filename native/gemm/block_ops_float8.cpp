// Operations of block formats of float8.

#include "gemm/make_block_format.h"

namespace ostinato {

const BlockFormat* float8_block_format(const std::string& name) {
    static const BlockFormat FORMATS[] = {
        make_block_format<Fp8<32>>(block_sizes::fp8_g32), make_block_format<Fp8<64>>(block_sizes::fp8_g64),
        make_block_format<Fp8<128>>(block_sizes::fp8_g128),
    };
    for (const BlockFormat& format : FORMATS) {
        if (name == format.name) return &format;
    }
    return nullptr;
}

}  // namespace ostinato
