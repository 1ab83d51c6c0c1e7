// The hash behind all noise: ops/noise.py is the definition.
#pragma once

#include "simd.h"

namespace ostinato {

// A bijection of the 32-bit integers that spreads every input bit.
inline UInt mix(UInt x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

}  // namespace ostinato
