// Matrices in the order the tiles read them, and the product with them.
//
// A matrix [columns, depth] (out, in) is cut into panels of 32 columns; a panel is a sequence of pieces, 32 deep, so
// that a product reads memory from one end to the other. A piece is two tiles:
//   kDense  2 tiles of bfloat16                                           2048 bytes
//   kInt8   2 x 512 int8 in tile order, 32 float16 scales                 1088 bytes
//   kInt4   2 x 256 bytes of two 4-bit numbers, 32 scales, 32 minima       640 bytes: w = scale * number + minimum
// One scale for each column and 32 of its weights: the groups of GGUF's Q8_0, Q4_0 and Q4_1.
#pragma once

#include "tiles.h"

namespace stepwire {

enum Format : int32_t { kDense = 0, kInt8 = 1, kInt4 = 2 };

constexpr int kPanel = 32;
constexpr size_t kPieceBytes[] = {2048, 1088, 640};

struct Matrix {
  const uint8_t* data;
  const float* bias;  // by column, in the panels' order; null: none
  int32_t format;
  int32_t columns;
  int32_t depth;
  int32_t reserved;

  int num_panels() const { return (columns + kPanel - 1) / kPanel; }
  int num_pieces() const { return depth / kTileDepth; }
  const uint8_t* panel(int index) const { return data + index * num_pieces() * kPieceBytes[format]; }
};

// Each of 16 values twice, the first and the second 8: what the 16 lanes of half a tile row belong to.
inline __m512 twice_low(__m512 x) {
  return _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), x);
}
inline __m512 twice_high(__m512 x) {
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8), x);
}
inline __m512 load_halves(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

// Two tiles of bfloat16 from one piece of an 8-bit matrix.
inline void widen_int8(const uint8_t* piece, uint8_t* tiles) {
  for (int tile = 0; tile < 2; ++tile) {
    const __m512 scale = load_halves(piece + 1024 + 32 * tile);
    const __m512 low = twice_low(scale), high = twice_high(scale);
    const uint8_t* from = piece + 512 * tile;
    uint8_t* to = tiles + kTileBytes * tile;
    for (int row = 0; row < kTile; ++row) {
      const __m512i first = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + 32 * row)));
      const __m512i second = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + 32 * row + 16)));
      const __m512 a = _mm512_mul_ps(_mm512_cvtepi32_ps(first), low);
      const __m512 b = _mm512_mul_ps(_mm512_cvtepi32_ps(second), high);
      _mm512_store_si512(to + 64 * row, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
  }
}

// The same from a 4-bit piece. A byte holds one number of the first 8 columns (low) and one of the last 8 (high).
inline void widen_int4(const uint8_t* piece, uint8_t* tiles) {
  const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int tile = 0; tile < 2; ++tile) {
    const __m512 scale = load_halves(piece + 512 + 32 * tile), least = load_halves(piece + 576 + 32 * tile);
    const __m512 scale_low = twice_low(scale), scale_high = twice_high(scale);
    const __m512 least_low = twice_low(least), least_high = twice_high(least);
    const uint8_t* from = piece + 256 * tile;
    uint8_t* to = tiles + kTileBytes * tile;
    for (int row = 0; row < kTile; ++row) {
      const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from + 16 * row)));
      // The permutation looks at the low four bits of its index alone.
      const __m512 first = _mm512_permutexvar_ps(both, numbers);
      const __m512 second = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers);
      const __m512 a = _mm512_fmadd_ps(first, scale_low, least_low);
      const __m512 b = _mm512_fmadd_ps(second, scale_high, least_high);
      _mm512_store_si512(to + 64 * row, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
  }
}

template <Format format>
inline const uint8_t* as_tiles(const uint8_t* piece, uint8_t* space) {
  if constexpr (format == kDense) return piece;
  if constexpr (format == kInt8) widen_int8(piece, space);
  if constexpr (format == kInt4) widen_int4(piece, space);
  return space;
}

// out[32][32] float = 16 or 32 rows of x, times one panel. `stride`: bytes between rows of x. A row's result does not
// depend on the number of rows: each is summed over the depth in the same order.
template <Format format, bool wide>
void multiply_block(const bf16* x, size_t stride, const uint8_t* panel, int pieces, float* out) {
  alignas(64) uint8_t space[2][2 * kTileBytes];
  const auto* rows = reinterpret_cast<const uint8_t*>(x);
  TILE_ZERO(0);
  TILE_ZERO(1);
  if constexpr (wide) {
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  const uint8_t* tiles = as_tiles<format>(panel, space[0]);
  for (int k = 0; k < pieces; ++k) {
    // The next piece is widened while this one is multiplied.
    const uint8_t* following = tiles;
    if (k + 1 < pieces) following = as_tiles<format>(panel + (k + 1) * kPieceBytes[format], space[(k + 1) & 1]);
    TILE_LOAD(4, rows + 64 * k, stride);
    TILE_LOAD(6, tiles, 64);
    TILE_LOAD(7, tiles + kTileBytes, 64);
    TILE_DOT(0, 4, 6);
    TILE_DOT(1, 4, 7);
    if constexpr (wide) {
      TILE_LOAD(5, rows + 64 * k + kTile * stride, stride);
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
    tiles = following;
  }
  TILE_STORE(0, out, 4 * kPanel);
  TILE_STORE(1, out + kTile, 4 * kPanel);
  if constexpr (wide) {
    TILE_STORE(2, out + kTile * kPanel, 4 * kPanel);
    TILE_STORE(3, out + kTile * kPanel + kTile, 4 * kPanel);
  }
}

// One panel times all rows of x (readable up to a multiple of 32), `use(first_row, num_rows, out)` for each 32 of them.
// `space`: room for the panel as bfloat16.
template <Format format, typename Use>
void multiply_panel(const Matrix& matrix, int index, const bf16* x, int rows, uint8_t* space, const Use& use) {
  alignas(64) float out[2 * kTile * kPanel];
  const size_t stride = sizeof(bf16) * matrix.depth;
  const int pieces = matrix.num_pieces();
  const uint8_t* panel = matrix.panel(index);
  if (rows <= kTile) {
    multiply_block<format, false>(x, stride, panel, pieces, out);
    use(0, rows, out);
    return;
  }
  if (rows <= 2 * kTile) {
    multiply_block<format, true>(x, stride, panel, pieces, out);
    use(0, rows, out);
    return;
  }
  if constexpr (format != kDense) {
    for (int k = 0; k < pieces; ++k) {
      as_tiles<format>(panel + k * kPieceBytes[format], space + k * kPieceBytes[kDense]);
    }
    panel = space;
  }
  for (int first = 0; first < rows; first += 2 * kTile) {
    const int left = rows - first < 2 * kTile ? rows - first : 2 * kTile;
    const bf16* block = x + static_cast<size_t>(first) * matrix.depth;
    if (left <= kTile) {
      multiply_block<kDense, false>(block, stride, panel, pieces, out);
    } else {
      multiply_block<kDense, true>(block, stride, panel, pieces, out);
    }
    use(first, left, out);
  }
}

template <typename Use>
void multiply_panel(const Matrix& matrix, int index, const bf16* x, int rows, uint8_t* space, const Use& use) {
  switch (matrix.format) {
    case kDense: return multiply_panel<kDense>(matrix, index, x, rows, space, use);
    case kInt8: return multiply_panel<kInt8>(matrix, index, x, rows, space, use);
    default: return multiply_panel<kInt4>(matrix, index, x, rows, space, use);
  }
}

}  // namespace stepwire
