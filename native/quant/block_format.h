// Weights in blocks: the units in which they lie in memory, and the orders of token integers that they are multiplied with.
// ops/blocks/formats.py has the names and sizes of the formats.
#pragma once

#include <cstdint>

namespace ostinato {

// What stands for the type of such weights: rows are so many of these.
struct BlockByte {
    std::uint8_t byte;
};

constexpr int SUBBLOCK = 32;    // elements that are made numbers at a time; every format has a multiple of it in a block
constexpr int SUPERBLOCK = 256;  // elements whose scales are made ready together: all of a block, or those of several
constexpr int SUBBLOCKS = SUPERBLOCK / SUBBLOCK;

// How the integers of a token lie (fixed.h). With AVX2 alone: in order; the second and the third 8 of each 32 have changed
// places; or the second and the third of each 4. With AVX-512, as fixed_words.h has them.
enum class I16Order { LINEAR, INTERLEAVED_8, PAIRS_02_13, BLOCKS, HALVES, BYTES };

}  // namespace ostinato
