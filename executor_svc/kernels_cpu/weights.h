// Matrices in the order the tiles read them, and the product with them.
//
// A matrix [columns, depth] (out, in) is cut into panels of 32 columns; a panel is a sequence of pieces, 32 deep, so
// that a product reads memory from one end to the other. A piece is two tiles:
//   kDense  2 tiles of bfloat16                                           2048 bytes
//   kInt8   2 x 512 int8 in tile order, 32 float16 scales                 1088 bytes
//   kInt4   2 x 256 bytes of two 4-bit numbers, 32 scales, 32 minima       640 bytes: w = scale * number + minimum
// Of 32 bytes of 4-bit numbers the low halves are one row of a tile, the high halves the next.
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

// The same from a 4-bit piece.
inline void widen_int4(const uint8_t* piece, uint8_t* tiles) {
  const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int tile = 0; tile < 2; ++tile) {
    const __m512 scale = load_halves(piece + 512 + 32 * tile), least = load_halves(piece + 576 + 32 * tile);
    const __m512 scale_low = twice_low(scale), scale_high = twice_high(scale);
    const __m512 least_low = twice_low(least), least_high = twice_high(least);
    const uint8_t* from = piece + 256 * tile;
    uint8_t* to = tiles + kTileBytes * tile;
    for (int pair = 0; pair < kTile / 2; ++pair) {
      const auto* bytes = (const __m128i*)(from + 32 * pair);
      const __m512i left = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes));
      const __m512i right = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes + 1));
      // The permutation looks at the low four bits of its index alone.
      const auto row = [&](__m512i low, __m512i high) {
        const __m512 a = _mm512_fmadd_ps(_mm512_permutexvar_ps(low, numbers), scale_low, least_low);
        const __m512 b = _mm512_fmadd_ps(_mm512_permutexvar_ps(high, numbers), scale_high, least_high);
        return (__m512i)_mm512_cvtne2ps_pbh(b, a);
      };
      _mm512_store_si512(to + 128 * pair, row(left, right));
      _mm512_store_si512(to + 128 * pair + 64, row(_mm512_srli_epi32(left, 4), _mm512_srli_epi32(right, 4)));
    }
  }
}

// Numbers alone, as bfloat16, which holds each exactly; scales and minima are left to the sums of a group.
inline void widen_numbers_int8(const uint8_t* piece, uint8_t* tiles) {
  for (int row = 0; row < 2 * kTile; ++row) {
    const __m512i first = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(piece + 32 * row)));
    const __m512i second = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(piece + 32 * row + 16)));
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(second), _mm512_cvtepi32_ps(first));
    _mm512_store_si512(tiles + 64 * row, both);
  }
}

inline void widen_numbers_int4(const uint8_t* piece, uint8_t* tiles) {
  alignas(64) static constexpr uint16_t kNumbers[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  // Twice the 16, as the permutation looks at five bits of its index.
  const __m512i numbers = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)kNumbers));
  for (int pair = 0; pair < kTile; ++pair) {
    const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(piece + 32 * pair)));
    _mm512_store_si512(tiles + 128 * pair, _mm512_permutexvar_epi16(both, numbers));
    _mm512_store_si512(tiles + 128 * pair + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), numbers));
  }
}

// Memory is read ahead of its use by about what a core can have under way.
template <Format format>
inline void prefetch(const uint8_t* piece) {
  constexpr size_t kAhead = 4096;
  for (size_t line = 0; line < kPieceBytes[format]; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(piece + kAhead + line), _MM_HINT_T0);
  }
}

template <Format format>
inline const uint8_t* as_tiles(const uint8_t* piece, uint8_t* space) {
  if constexpr (format == kDense) return piece;
  if constexpr (format == kInt8) widen_int8(piece, space);
  if constexpr (format == kInt4) widen_int4(piece, space);
  return space;
}

// out[32][32] float = 16 or 32 rows of x, times one panel. `stride`: bytes between rows of x. Each row is summed over the
// depth in the same order, however many there are.
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
    prefetch<format>(panel + k * kPieceBytes[format]);
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

// sums[pieces][16] = of each row of x, its 32 numbers of each piece, added up.
inline void sum_groups(const bf16* x, int depth, int rows, float* sums) {
  for (int row = 0; row < rows; ++row) {
    for (int piece = 0; piece < depth / kTileDepth; ++piece) {
      const bf16* from = x + row * depth + piece * kTileDepth;
      const __m512 low = widen(_mm256_loadu_si256((const __m256i*)from));
      const __m512 high = widen(_mm256_loadu_si256((const __m256i*)(from + kTile)));
      sums[piece * kTile + row] = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
    }
  }
}

// multiply_block for up to 16 rows of x and quantised weights: the numbers are multiplied as they are, and each group's
// sum is scaled, which for few rows is much less than scaling each weight. sums: sum_groups of x.
template <Format format>
void multiply_groups(const bf16* x, size_t stride, const float* sums, int rows, const uint8_t* panel, int pieces,
                     float* out) {
  alignas(64) uint8_t space[2][2 * kTileBytes];
  alignas(64) float part[2][kTile][kTile];
  const auto* from = reinterpret_cast<const uint8_t*>(x);
  const auto widen_piece = [&](int k) {
    const uint8_t* piece = panel + k * kPieceBytes[format];
    prefetch<format>(piece);
    if constexpr (format == kInt8) {
      widen_numbers_int8(piece, space[k & 1]);
    } else {
      widen_numbers_int4(piece, space[k & 1]);
    }
  };
  memset(out, 0, sizeof(float) * rows * kPanel);
  widen_piece(0);
  for (int k = 0; k < pieces; ++k) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_LOAD(4, from + 64 * k, stride);
    TILE_LOAD(6, space[k & 1], 64);
    TILE_LOAD(7, space[k & 1] + kTileBytes, 64);
    TILE_DOT(0, 4, 6);
    TILE_DOT(1, 4, 7);
    if (k + 1 < pieces) widen_piece(k + 1);
    TILE_STORE(0, part[0], 64);
    TILE_STORE(1, part[1], 64);
    const uint8_t* scales = panel + k * kPieceBytes[format] + (format == kInt8 ? 1024 : 512);
    for (int tile = 0; tile < 2; ++tile) {
      const __m512 scale = load_halves(scales + 32 * tile);
      const __m512 least = format == kInt4 ? load_halves(scales + 64 + 32 * tile) : _mm512_setzero_ps();
      for (int row = 0; row < rows; ++row) {
        float* to = out + row * kPanel + tile * kTile;
        __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(part[tile][row]), scale, _mm512_load_ps(to));
        if constexpr (format == kInt4) sum = _mm512_fmadd_ps(_mm512_set1_ps(sums[k * kTile + row]), least, sum);
        _mm512_store_ps(to, sum);
      }
    }
  }
}

// One panel times all rows of x (readable up to a multiple of 32), `use(first_row, num_rows, out)` for each 32 of them.
// `space`: room for the panel as bfloat16.
template <Format format, typename Use>
void multiply_panel(const Matrix& matrix, int index, const bf16* x, const float* sums, int rows, uint8_t* space,
                    const Use& use) {
  alignas(64) float out[2 * kTile * kPanel];
  const size_t stride = sizeof(bf16) * matrix.depth;
  const int pieces = matrix.num_pieces();
  const uint8_t* panel = matrix.panel(index);
  if (rows <= kTile) {
    if constexpr (format == kDense) {
      multiply_block<format, false>(x, stride, panel, pieces, out);
    } else {
      multiply_groups<format>(x, stride, sums, rows, panel, pieces, out);
    }
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
      prefetch<format>(panel + k * kPieceBytes[format]);
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
void multiply_panel(const Matrix& matrix, int index, const bf16* x, const float* sums, int rows, uint8_t* space,
                    const Use& use) {
  switch (matrix.format) {
    case kDense: return multiply_panel<kDense>(matrix, index, x, sums, rows, space, use);
    case kInt8: return multiply_panel<kInt8>(matrix, index, x, sums, rows, space, use);
    default: return multiply_panel<kInt4>(matrix, index, x, sums, rows, space, use);
  }
}

}  // namespace stepwire
