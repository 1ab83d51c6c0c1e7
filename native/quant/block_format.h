// Units of weights in blocks, and the layouts of token integers that they are multiplied with. ops/quant/block_formats.py
// has the names and sizes of the formats.
#pragma once

#include <cstdint>

namespace ostinato {

// Modules that multiply many i16 tokens in panels (gemm/large_m_i16.h).
#if defined(OSTINATO_HAS_AVX2) && !defined(OSTINATO_HAS_AVX512_BF16) && (!defined(OSTINATO_HAS_AVX512) || defined(OSTINATO_HAS_AVX512_VNNI))
#define OSTINATO_I16_PANELS
#endif

// One byte of a block-quantised row: the element type of such weights.
struct BlockByte {
    std::uint8_t byte;
};

constexpr int SUBBLOCK = 32;    // elements dequantized at a time; a block has a multiple of it
constexpr int SUPERBLOCK = 256;  // elements whose scales are prepared together: a large block, or several small ones
constexpr int SUBBLOCKS = SUPERBLOCK / SUBBLOCK;

// Layout of a token's integers. In order; in panels, with the second and the third of each 4 exchanged.
// With AVX2: with the second and the third 8 of each 32 exchanged. With AVX-512: by how a format's integers lie
// (quant/unpack_i16_avx512.h).
enum class I16Order { LINEAR, PAIRS_02_13, INTERLEAVED_8, BLOCKS, HALVES, BYTES };

}  // namespace ostinato
