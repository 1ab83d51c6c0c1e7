// Tiles one instruction at a time, for tests of the matrix units themselves and of what stands in for them.

#include "../tiles.h"

#if defined(OSTINATO_TILES)
#include "../bind.h"

namespace ostinato {
namespace {

struct TileProduct : Arguments {
    FIELD(Array<BFLOAT16>, left);  // [16, 32]
    FIELD(Array<BFLOAT16>, right);  // [16 pairs, 16 columns, 2]
    FIELD(Array<FLOAT32>, out);  // [16, 16]
};

// out += left x right, by one instruction.
void tile_product(const ThreadGroup& threads, std::int64_t, const TileProduct& in) {
    if (threads.rank != 0) return;
    const tiles::Scope scope;
    tiles::load<0>(in.out.at<const float>(), tiles::ROW_BYTES);
    tiles::load<4>(in.left.at<const bf16>(), tiles::ROW_BYTES);
    tiles::load<6>(in.right.at<const bf16>(), tiles::ROW_BYTES);
    tiles::multiply_add<0, 0>();
    tiles::store<0>(in.out.at<float>(), tiles::ROW_BYTES);
}

KERNEL(tile_product);

struct TilePalettes : Arguments {
    FIELD(Array<INT32>, out);  // [threads]
};

// The palette that each thread has configured, 0 where it has released its tiles.
void tile_palettes(const ThreadGroup& threads, std::int64_t, const TilePalettes& in) {
    if (threads.rank < in.out.shape[0]) in.out.at<std::int32_t>()[threads.rank] = tiles::palette();
}

KERNEL(tile_palettes);

}  // namespace
}  // namespace ostinato
#endif
