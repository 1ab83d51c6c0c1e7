// Matrix units (AMX): tile registers of 16 rows of 64 bytes, and the two product instructions that kernels use.
//
// There are two implementations: the processor's, and one in plain C++ that gives the same bits, for tests on
// processors without matrix units.
#pragma once

#if defined(OSTINATO_HAS_AMX)
#define OSTINATO_TILES "amx"
#elif defined(OSTINATO_HAS_EMULATED_AMX)
#define OSTINATO_TILES "emulated"
#endif

#if defined(OSTINATO_TILES)
#include <cstdint>

#include "core/simd.h"
#if defined(OSTINATO_HAS_EMULATED_AMX)
#include "core/amx_emulated.h"
#endif

namespace ostinato {
namespace tiles {

constexpr int SIDE = 16;              // rows of a tile, and its columns of 32 bits
constexpr int DEPTH = 2 * SIDE;       // bfloat16 of a row
constexpr int ELEMENTS = SIDE * DEPTH;  // bfloat16 of a tile
constexpr int ROW_BYTES = 64;
static_assert(LANES == SIDE, "a row of a tile is a vector");

// Tile shapes, as the processor reads them (Intel's manual, LDTILECFG).
struct alignas(64) Shapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    Shapes() {
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = ROW_BYTES;
            rows[tile] = SIDE;
        }
    }
};

#if defined(OSTINATO_HAS_AMX)
// The compiler's macros paste a tile's number into an instruction, so it must be a literal. They also do not tell the
// compiler that memory is read, so earlier writes must be complete.
#define OSTINATO_WITH_TILE(CALL)                  \
    if constexpr (TILE == 0) { CALL(0); }         \
    else if constexpr (TILE == 1) { CALL(1); }    \
    else if constexpr (TILE == 2) { CALL(2); }    \
    else if constexpr (TILE == 3) { CALL(3); }    \
    else if constexpr (TILE == 4) { CALL(4); }    \
    else if constexpr (TILE == 5) { CALL(5); }    \
    else if constexpr (TILE == 6) { CALL(6); }    \
    else { CALL(7); }

template <int TILE>
inline void zero() {
#define OSTINATO_ZERO(T) _tile_zero(T)
    OSTINATO_WITH_TILE(OSTINATO_ZERO)
#undef OSTINATO_ZERO
}

// Load a tile from rows that lie `stride` bytes apart.
template <int TILE>
inline void load(const void* from, std::int64_t stride) {
    asm volatile("" ::: "memory");
#define OSTINATO_LOAD(T) _tile_loadd(T, from, stride)
    OSTINATO_WITH_TILE(OSTINATO_LOAD)
#undef OSTINATO_LOAD
}

template <int TILE>
inline void store(void* to, std::int64_t stride) {
#define OSTINATO_STORE(T) _tile_stored(T, to, stride)
    OSTINATO_WITH_TILE(OSTINATO_STORE)
#undef OSTINATO_STORE
}
#undef OSTINATO_WITH_TILE

// Multiply: tile 2 i + j += tile 4 + i times tile 6 + j. Tiles 0 to 3 are sums, 4 and 5 left operands, 6 and 7 right
// operands, of elements E: pairs of bfloat16 with sums in float32, or fours of int8 with sums in 32-bit integers.
template <int I, int J, typename E = bf16>
inline void multiply_add() {
    constexpr bool BYTES = sizeof(E) == 1;
    if constexpr (I == 0 && J == 0) {
        if constexpr (BYTES) { _tile_dpbssd(0, 4, 6); } else { _tile_dpbf16ps(0, 4, 6); }
    } else if constexpr (I == 0) {
        if constexpr (BYTES) { _tile_dpbssd(1, 4, 7); } else { _tile_dpbf16ps(1, 4, 7); }
    } else if constexpr (J == 0) {
        if constexpr (BYTES) { _tile_dpbssd(2, 5, 6); } else { _tile_dpbf16ps(2, 5, 6); }
    } else {
        if constexpr (BYTES) { _tile_dpbssd(3, 5, 7); } else { _tile_dpbf16ps(3, 5, 7); }
    }
}

// Configure the tiles. The compiler's function names only the first bytes of the shapes, and all of them must be in
// memory.
inline void configure(const Shapes& shapes) {
    asm volatile("" ::"r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

inline void release() { _tile_release(); }

// Return the palette in use, 0 if tiles are released.
inline int palette() {
    Shapes shapes;
    _tile_storeconfig(&shapes);
    asm volatile("" ::"r"(&shapes) : "memory");
    return shapes.palette;
}
#else
template <int TILE>
inline void zero() {
    emulated::state().zero(TILE);
}

template <int TILE>
inline void load(const void* from, std::int64_t stride) {
    emulated::state().load(TILE, from, stride);
}

template <int TILE>
inline void store(void* to, std::int64_t stride) {
    emulated::state().store(TILE, to, stride);
}

template <int I, int J, typename E = bf16>
inline void multiply_add() {
    if constexpr (sizeof(E) == 1) {
        emulated::state().multiply_add_int8(2 * I + J, 4 + I, 6 + J);
    } else {
        emulated::state().multiply_add(2 * I + J, 4 + I, 6 + J);
    }
}

inline void configure(const Shapes& shapes) {
    emulated::state().configure(shapes.palette, shapes.rows, shapes.row_bytes);
}

inline void release() { emulated::state().release(); }

inline int palette() { return emulated::state().palette(); }
#endif

// Guard that configures tiles for this thread and releases them at its end: context switches are slower for a thread
// that holds tiles.
class Scope {
  public:
    Scope() { configure(Shapes{}); }
    ~Scope() { release(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
};

}  // namespace tiles
}  // namespace ostinato
#endif
