// Block formats by name, and the operations of those with 4 bits.

#include "gemm/make_block_format.h"

namespace ostinato {

const BlockFormat* float8_block_format(const std::string& name);  // block_ops_float8.cpp
const BlockFormat* large_block_format(const std::string& name);   // block_ops_5_to_8bit.cpp

const BlockFormat* block_format(const std::string& name) {
    static const BlockFormat FORMATS[] = {
        make_block_format<Q4_0>(block_sizes::Q4_0),          make_block_format<Q4_1>(block_sizes::Q4_1),
        make_block_format<Q4_K>(block_sizes::Q4_K),          make_block_format<IQ4_NL>(block_sizes::IQ4_NL),
        make_block_format<Int4<32>>(block_sizes::int4_g32),  make_block_format<Int4<64>>(block_sizes::int4_g64),
        make_block_format<Int4<128>>(block_sizes::int4_g128), make_block_format<MXFP4>(block_sizes::MXFP4),
    };
    for (const BlockFormat& format : FORMATS) {
        if (name == format.name) return &format;
    }
    const BlockFormat* large = large_block_format(name);
    return large ? large : float8_block_format(name);
}

}  // namespace ostinato
