// Matrices in the order the tiles read them, and the product with them.
//
// A matrix [columns, depth] (out, in) is cut into panels of 32 columns; a panel is a sequence of pieces, 32 deep, so
// that a product reads memory from one end to the other. A piece is two halves of 16 columns:
//   kDense  2 tiles of bfloat16                                            2048 bytes
//   kInt8   2 x [8][16 columns][4 deep] numbers + 128, 32 float16 scales   1088 bytes
//   kInt4   2 x [4][16 columns] of 8 numbers, 32 scales, 32 minima          640 bytes: w = scale * number + minimum
// A column's 8 numbers of 4 bits are 32 bits: from the low end those 0, 2, 4, 6 deep, then those 1, 3, 5, 7 deep.
// One scale for each column and 32 of its weights: the groups of GGUF's Q8_0, Q4_0 and Q4_1.
#pragma once

#include <algorithm>

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

inline __m512 load_halves(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

struct Scales {
  __m512 scale, least;
};

// Of 16 columns of one piece: a weight is scale * number + least.
template <Format format>
inline Scales scales_of(const uint8_t* piece, int half) {
  if constexpr (format == kInt4) return {load_halves(piece + 512 + 32 * half), load_halves(piece + 576 + 32 * half)};
  const __m512 scale = load_halves(piece + 1024 + 32 * half);
  return {scale, _mm512_mul_ps(scale, _mm512_set1_ps(-128.0f))};
}

// A row of a tile: bfloat16 of 16 columns, `even` of them from one depth and `odd` from the next, by turns.
inline __m512i round_pairs(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, low, high);
}

// A number of `bits` bits where the last of them is 2^at of a float's fraction, as 2^(23 - at) + number: cut out and made
// a float in one step.
template <int bits, int at>
inline __m512 number_at(__m512i word) {
  static_assert(at + bits <= 23);
  const __m512i cut = _mm512_set1_epi32(((1 << bits) - 1) << at);
  const __m512i base = _mm512_set1_epi32((127 + 23 - at) << 23);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(word, cut, base, 0xea));  // (word & cut) | base
}

// The weights of 16 columns of one piece as a tile of bfloat16. half: 0 or 1. What number_at() adds is taken from the least
// weight: exact where that is not much smaller than the scale, else rounded by a thousandth of the scale at most.
template <Format format>
inline void widen(const uint8_t* piece, int half, uint8_t* tile) {
  const auto [scale, least] = scales_of<format>(piece, half);
  const auto without = [&](float base) { return _mm512_fnmadd_ps(_mm512_set1_ps(base), scale, least); };
  if constexpr (format == kInt8) {
    const __m512 least8 = without(1 << 15);
    const auto weight = [&](__m512i word) { return _mm512_fmadd_ps(number_at<8, 8>(word), scale, least8); };
    for (int i = 0; i < kTile / 2; ++i) {
      const __m512i four = _mm512_loadu_si512(piece + 512 * half + 64 * i);
      const __m512 first = weight(_mm512_slli_epi32(four, 8)), second = weight(four);
      const __m512 third = weight(_mm512_srli_epi32(four, 8)), fourth = weight(_mm512_srli_epi32(four, 16));
      _mm512_store_si512(tile + 128 * i, round_pairs(first, second));
      _mm512_store_si512(tile + 128 * i + 64, round_pairs(third, fourth));
    }
  }
  if constexpr (format == kInt4) {
    const __m512 least8 = without(1 << 15), least12 = without(1 << 11), least16 = without(1 << 7);
    const auto at8 = [&](__m512i word) { return _mm512_fmadd_ps(number_at<4, 8>(word), scale, least8); };
    const auto at12 = [&](__m512i word) { return _mm512_fmadd_ps(number_at<4, 12>(word), scale, least12); };
    const auto at16 = [&](__m512i word) { return _mm512_fmadd_ps(number_at<4, 16>(word), scale, least16); };
    for (int i = 0; i < kTile / 4; ++i) {
      const __m512i eight = _mm512_loadu_si512(piece + 256 * half + 64 * i);
      const __m512i low = _mm512_slli_epi32(eight, 12), high = _mm512_srli_epi32(eight, 12);
      _mm512_store_si512(tile + 256 * i, round_pairs(at12(low), at16(eight)));
      _mm512_store_si512(tile + 256 * i + 64, round_pairs(at16(low), at8(high)));
      _mm512_store_si512(tile + 256 * i + 128, round_pairs(at8(eight), at12(high)));
      _mm512_store_si512(tile + 256 * i + 192, round_pairs(at12(eight), at16(high)));
    }
  }
}

// Numbers alone, as bfloat16, which holds each exactly; scales and minima are left to the sums of a group. Those of 8
// bits are 128 too large.
template <Format format>
inline void widen_numbers(const uint8_t* piece, uint8_t* tiles) {
  if constexpr (format == kInt8) {
    const __m512i low_byte = _mm512_set1_epi32(255);
    for (int i = 0; i < kTile; ++i) {
      const __m512i four = _mm512_loadu_si512(piece + 64 * i);
      const auto number = [&](int at) {
        return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(four, 8 * at), low_byte));
      };
      _mm512_store_si512(tiles + 128 * i, round_pairs(number(0), number(1)));
      _mm512_store_si512(tiles + 128 * i + 64, round_pairs(number(2), number(3)));
    }
  } else {
    alignas(64) static constexpr uint16_t kNumbers[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                                          0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130,
                                                          0x4140, 0x4150, 0x4160, 0x4170};
    // Twice the 16, as the permutation looks at five bits of its index.
    const __m512i numbers = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)kNumbers));
    for (int i = 0; i < kTile / 2; ++i) {
      const __m512i eight = _mm512_loadu_si512(piece + 64 * i);
      for (int pair = 0; pair < 4; ++pair) {
        const __m512i index = _mm512_srli_epi16(eight, 4 * pair);
        _mm512_store_si512(tiles + 256 * i + 64 * pair, _mm512_permutexvar_epi16(index, numbers));
      }
    }
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
  widen<format>(piece, 0, space);
  widen<format>(piece, 1, space + kTileBytes);
  return space;
}

// out[32][32] float = 16 or 32 rows of x, times one panel. `stride`: bytes between rows of x. Each row is summed over the
// depth in the same order, however many there are. `meanwhile`: called for each piece, while tiles are multiplied.
// passing: whether the panel, not x, is what shall stay in the nearest cache, for it is multiplied again first.
template <Format format, bool wide, bool passing, typename Meanwhile>
void multiply_block(const bf16* x, size_t stride, const uint8_t* panel, int pieces, float* out,
                    const Meanwhile& meanwhile) {
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
    if constexpr (!passing) prefetch<format>(panel + k * kPieceBytes[format]);
    if (k + 1 < pieces) following = as_tiles<format>(panel + (k + 1) * kPieceBytes[format], space[(k + 1) & 1]);
    if constexpr (passing) {
      TILE_LOAD_PASSING(4, rows + 64 * k, stride);
    } else {
      TILE_LOAD(4, rows + 64 * k, stride);
    }
    TILE_LOAD(6, tiles, 64);
    TILE_LOAD(7, tiles + kTileBytes, 64);
    TILE_DOT(0, 4, 6);
    TILE_DOT(1, 4, 7);
    if constexpr (wide) {
      const uint8_t* second = rows + 64 * k + kTile * stride;
      if constexpr (passing) {
        TILE_LOAD_PASSING(5, second, stride);
      } else {
        TILE_LOAD(5, second, stride);
      }
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
    meanwhile();
    tiles = following;
  }
  TILE_STORE(0, out, 4 * kPanel);
  TILE_STORE(1, out + kTile, 4 * kPanel);
  if constexpr (wide) {
    TILE_STORE(2, out + kTile * kPanel, 4 * kPanel);
    TILE_STORE(3, out + kTile * kPanel + kTile, 4 * kPanel);
  }
}

// Of up to 16 rows of x, what products with quantised weights need of each 32 of its numbers.
struct Groups {
  explicit Groups(size_t depth) : sums(depth / 32 * kTile), scales(depth / 32 * kFew), parts(depth * 2 * kFew) {}
  Buffer<float> sums;     // [depth / 32][16 rows]: the 32 added up
  Buffer<float> scales;   // [depth / 32][few rows]
  Buffer<int8_t> parts;   // [depth / 32][few rows][2][32]: x = scale * (128 * first + second), to within 15 bits

  // Of what products of `rows` rows with weights of `format` read.
  void find(const bf16* x, int depth, int rows, Format format) {
    if (format == kDense || rows > kTile) return;
    if (rows > kFew) {
      sum(x, depth, rows);
    } else {
      split(x, depth, rows, format);
    }
  }

  static constexpr int kFew = 4;

 private:
  void sum(const bf16* x, int depth, int rows) {
    for (int row = 0; row < rows; ++row) {
      for (int group = 0; group < depth / 32; ++group) {
        const bf16* from = x + row * depth + group * 32;
        const __m512 low = stepwire::widen(_mm256_loadu_si256((const __m256i*)from));
        const __m512 high = stepwire::widen(_mm256_loadu_si256((const __m256i*)(from + kTile)));
        sums.get()[group * kTile + row] = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
      }
    }
  }

  // For up to kFew rows. The parts' order is that in which multiply_few reads numbers of `format`.
  void split(const bf16* x, int depth, int rows, Format format) {
    const __m256i eights = _mm256_set_epi8(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0, 15, 11, 14, 10, 13, 9,
                                           12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    for (int row = 0; row < rows; ++row) {
      for (int group = 0; group < depth / 32; ++group) {
        const bf16* from = x + row * depth + group * 32;
        const __m512 low = stepwire::widen(_mm256_loadu_si256((const __m256i*)from));
        const __m512 high = stepwire::widen(_mm256_loadu_si256((const __m256i*)(from + kTile)));
        const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
        const __m512 factor = _mm512_set1_ps(largest > 0.0f ? kMost / largest : 0.0f);
        const __m512i whole[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(low, factor)),
                                  _mm512_cvtps_epi32(_mm512_mul_ps(high, factor))};
        __m128i first[2], second[2];
        for (int i = 0; i < 2; ++i) {
          const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole[i], _mm512_set1_epi32(64)), 7);
          first[i] = _mm512_cvtepi32_epi8(upper);
          second[i] = _mm512_cvtepi32_epi8(_mm512_sub_epi32(whole[i], _mm512_slli_epi32(upper, 7)));
        }
        const auto put = [&](const __m128i* part, int which) {
          const __m256i both = _mm256_set_m128i(part[1], part[0]);
          int8_t* to = parts.get() + ((group * kFew + row) * 2 + which) * 32;
          _mm256_store_si256((__m256i*)to, format == kInt4 ? _mm256_shuffle_epi8(both, eights) : both);
        };
        put(first, 0);
        put(second, 1);
        // What is not finite stays so.
        const float scale = largest / kMost + 0.0f * _mm512_reduce_add_ps(_mm512_add_ps(low, high));
        scales.get()[group * kFew + row] = scale;
        // Of what the parts say: of x itself, the error of rounding would meet the minima unbalanced.
        const int all = _mm512_reduce_add_epi32(_mm512_add_epi32(whole[0], whole[1]));
        sums.get()[group * kTile + row] = scale * static_cast<float>(all);
      }
    }
  }

  static constexpr float kMost = 127 * 128;
};

// out[rows][32] = up to 16 rows of x times a panel of quantised weights: the numbers are multiplied as they are, and each
// group's sum is scaled, which for few rows is much less than scaling each weight.
template <Format format>
void multiply_groups(const bf16* x, size_t stride, const Groups& groups, int rows, const uint8_t* panel, int pieces,
                     float* out) {
  alignas(64) uint8_t space[2][2 * kTileBytes];
  alignas(64) float part[2][kTile][kTile];
  const auto* from = reinterpret_cast<const uint8_t*>(x);
  const auto widen_piece = [&](int k) {
    const uint8_t* piece = panel + k * kPieceBytes[format];
    prefetch<format>(piece);
    widen_numbers<format>(piece, space[k & 1]);
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
    const uint8_t* piece = panel + k * kPieceBytes[format];
    for (int half = 0; half < 2; ++half) {
      const auto [scale, least] = scales_of<format>(piece, half);
      for (int row = 0; row < rows; ++row) {
        float* to = out + row * kPanel + half * kTile;
        const __m512 sum = _mm512_set1_ps(groups.sums.get()[k * kTile + row]);
        const __m512 scaled = _mm512_fmadd_ps(_mm512_load_ps(part[half][row]), scale, _mm512_load_ps(to));
        _mm512_store_ps(to, _mm512_fmadd_ps(sum, least, scaled));
      }
    }
  }
}

// The same for up to kFew rows, in whole numbers: no slower than the weights come from memory.
template <Format format, int rows>
void multiply_few(const Groups& groups, const uint8_t* panel, int pieces, float* out) {
  __m512 sums[rows][2];
  for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
  for (int k = 0; k < pieces; ++k) {
    const uint8_t* piece = panel + k * kPieceBytes[format];
    prefetch<format>(piece);
    const int8_t* parts = groups.parts.get() + k * 64 * Groups::kFew;
    for (int half = 0; half < 2; ++half) {
      __m512i first[rows], second[rows];
      for (int row = 0; row < rows; ++row) first[row] = second[row] = _mm512_setzero_si512();
      const auto dot = [&](__m512i numbers, int at) {
        for (int row = 0; row < rows; ++row) {
          int upper, lower;
          memcpy(&upper, parts + row * 64 + 4 * at, 4);
          memcpy(&lower, parts + row * 64 + 32 + 4 * at, 4);
          first[row] = _mm512_dpbusd_epi32(first[row], numbers, _mm512_set1_epi32(upper));
          second[row] = _mm512_dpbusd_epi32(second[row], numbers, _mm512_set1_epi32(lower));
        }
      };
      if constexpr (format == kInt8) {
        for (int i = 0; i < 8; ++i) dot(_mm512_loadu_si512(piece + 512 * half + 64 * i), i);
      } else {
        const __m512i low = _mm512_set1_epi8(15);
        for (int i = 0; i < 4; ++i) {
          const __m512i eight = _mm512_loadu_si512(piece + 256 * half + 64 * i);
          dot(_mm512_and_si512(eight, low), 2 * i);
          dot(_mm512_and_si512(_mm512_srli_epi16(eight, 4), low), 2 * i + 1);
        }
      }
      const auto [scale, least] = scales_of<format>(piece, half);
      for (int row = 0; row < rows; ++row) {
        const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(first[row], 7), second[row]);
        const __m512 own = _mm512_mul_ps(scale, _mm512_set1_ps(groups.scales.get()[k * Groups::kFew + row]));
        const __m512 sum = _mm512_set1_ps(groups.sums.get()[k * kTile + row]);
        const __m512 scaled = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), own, sums[row][half]);
        sums[row][half] = _mm512_fmadd_ps(sum, least, scaled);
      }
    }
  }
  for (int row = 0; row < rows; ++row) {
    for (int half = 0; half < 2; ++half) _mm512_store_ps(out + row * kPanel + half * kTile, sums[row][half]);
  }
}

// One panel times up to 32 rows of x (readable up to 16 or 32); `use(0, rows, out)`.
template <Format format, typename Use>
void multiply_panel(const Matrix& matrix, int index, const bf16* x, const Groups& groups, int rows, const Use& use) {
  alignas(64) float out[2 * kTile * kPanel];
  const size_t stride = sizeof(bf16) * matrix.depth;
  const int pieces = matrix.num_pieces();
  const uint8_t* panel = matrix.panel(index);
  if (rows > kTile) {
    multiply_block<format, true, false>(x, stride, panel, pieces, out, [] {});
  } else if constexpr (format == kDense) {
    multiply_block<format, false, false>(x, stride, panel, pieces, out, [] {});
  } else {
    switch (rows) {
      case 1: multiply_few<format, 1>(groups, panel, pieces, out); break;
      case 2: multiply_few<format, 2>(groups, panel, pieces, out); break;
      case 3: multiply_few<format, 3>(groups, panel, pieces, out); break;
      case 4: multiply_few<format, 4>(groups, panel, pieces, out); break;
      default: multiply_groups<format>(x, stride, groups, rows, panel, pieces, out);
    }
  }
  use(0, rows, out);
}

// A panel made ready bit by bit beside other work: as bfloat16, or where it is that, brought nearer.
template <Format format>
class Preparation {
 public:
  // `panel`: null where there is nothing to do.
  Preparation(const uint8_t* panel, int pieces, uint8_t* to) : panel_(panel), to_(to), left_(panel ? 2 * pieces : 0) {}

  void step() {
    if (left_ == 0) return;
    if constexpr (format == kDense) {
      for (int line = 0; line < kTileBytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(panel_ + line), _MM_HINT_T1);
      }
      panel_ += kTileBytes;
    } else {
      prefetch<format>(panel_);
      widen<format>(panel_, half_, to_);
      to_ += kTileBytes;
      panel_ += half_ * kPieceBytes[format];
      half_ ^= 1;
    }
    --left_;
  }
  void finish() {
    while (left_ > 0) step();
  }

 private:
  const uint8_t* panel_;
  uint8_t* to_;
  int left_, half_ = 0;
};

// A panel of bfloat16 this deep stays in the nearest cache (48 KB) while x goes by. Of a deeper one and 32 rows of x,
// neither does.
constexpr int kNearPieces = 20;

// One panel of bfloat16 times all rows of x (readable up to a multiple of 32), `use(first_row, num_rows, out)` for each
// 32 of them; `next` is prepared meanwhile.
template <Format format, typename Use>
void multiply_rows(const uint8_t* panel, const Matrix& matrix, const bf16* x, int rows, Preparation<format>& next,
                   const Use& use) {
  alignas(64) float out[2 * kTile * kPanel];
  const size_t stride = sizeof(bf16) * matrix.depth;
  const int pieces = matrix.num_pieces(), blocks = (rows + 2 * kTile - 1) / (2 * kTile);
  int due = 0;  // of 2 for each piece, over all blocks
  const auto meanwhile = [&] {
    for (due += 2; due >= blocks; due -= blocks) next.step();
  };
  for (int first = 0; first < rows; first += 2 * kTile) {
    const int left = std::min(rows - first, 2 * kTile);
    const bf16* block = x + static_cast<size_t>(first) * matrix.depth;
    const auto multiply = [&]<bool passing> {
      if (left <= kTile) {
        multiply_block<kDense, false, passing>(block, stride, panel, pieces, out, meanwhile);
      } else {
        multiply_block<kDense, true, passing>(block, stride, panel, pieces, out, meanwhile);
      }
    };
    if (pieces <= kNearPieces) {
      multiply.template operator()<true>();
    } else {
      multiply.template operator()<false>();
    }
    use(first, left, out);
  }
  next.finish();
}

// How many rows of x go by all panels before the next: as many as stay in the second cache (2 MB) beside panels and sums.
inline int rows_together(const Matrix& matrix, int rows) {
  constexpr size_t kMost = 1 << 20;
  const size_t bytes = sizeof(bf16) * matrix.depth * rows, parts = (bytes + kMost - 1) / kMost;
  const int share = static_cast<int>((rows + parts - 1) / parts);
  return (share + 2 * kTile - 1) / (2 * kTile) * (2 * kTile);
}

// Pieces of work of a product: each panel with each part of the rows.
inline int num_turns(const Matrix& matrix, int rows) {
  const int together = rows_together(matrix, rows);
  return matrix.num_panels() * ((rows + together - 1) / together);
}

// use(panel, first row, number of rows, values[rows][32]) for each of the turns that `take()` gives, until it is -1.
// x is readable up to a multiple of 32 rows; `groups`: of x, where it has few enough; `space`: twice a panel as bfloat16.
template <Format format, typename Take, typename Use>
void multiply_panels(const Matrix& matrix, const bf16* x, const Groups& groups, int rows, uint8_t* space,
                     Take& take, const Use& use) {
  if (rows <= 2 * kTile) {
    for (int index = take(); index >= 0; index = take()) {
      multiply_panel<format>(matrix, index, x, groups, rows,
                             [&](int first, int count, const float* values) { use(index, first, count, values); });
    }
    return;
  }
  const int pieces = matrix.num_pieces(), panels = matrix.num_panels(), together = rows_together(matrix, rows);
  const size_t size = format == kDense ? 0 : pieces * kPieceBytes[kDense];
  const auto prepare = [&](int turn, int which) {
    return Preparation<format>(turn < 0 ? nullptr : matrix.panel(turn % panels), pieces, space + which * size);
  };
  int turn = take();
  prepare(turn, 0).finish();
  for (int which = 0; turn >= 0; which ^= 1) {
    const int following = take();
    auto next = prepare(following, which ^ 1);
    const int index = turn % panels, begin = turn / panels * together;
    const uint8_t* panel = format == kDense ? matrix.panel(index) : space + which * size;
    multiply_rows(panel, matrix, x + static_cast<size_t>(begin) * matrix.depth, std::min(rows - begin, together), next,
                  [&](int first, int count, const float* values) { use(index, begin + first, count, values); });
    turn = following;
  }
}

template <typename Take, typename Use>
void multiply_panels(const Matrix& matrix, const bf16* x, const Groups& groups, int rows, uint8_t* space,
                     Take& take, const Use& use) {
  switch (matrix.format) {
    case kDense: return multiply_panels<kDense>(matrix, x, groups, rows, space, take, use);
    case kInt8: return multiply_panels<kInt8>(matrix, x, groups, rows, space, take, use);
    default: return multiply_panels<kInt4>(matrix, x, groups, rows, space, take, use);
  }
}

}  // namespace stepwire
