#include "kernels/cpu/tile.hpp"

#include <utility>

namespace gyre::cpu {
namespace {

template <int... Index>
constexpr std::array<TileFunction, sizeof...(Index)> make_table(
    std::integer_sequence<int, Index...>) {
    return {&run_tile<Index / kTileCols + 1, Index % kTileCols + 1>...};
}

constexpr auto kTable = make_table(std::make_integer_sequence<int, kTileRows * kTileCols>());

}  // namespace

TileFunction tile_function(int rows, int cols) {
    return kTable[static_cast<std::size_t>((rows - 1) * kTileCols + cols - 1)];
}

}  // namespace gyre::cpu
