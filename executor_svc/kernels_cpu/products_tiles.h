// Products in tiles of bfloat16: for processors with AVX-512.
#pragma once

#include "weights.h"

namespace stepwire {

// A row of a tile: bfloat16 of 16 columns, `even` of them from one depth and `odd` from the next, by turns.
inline Ints round_pairs(Floats even, Floats odd) {
  const Ints half = all_ints(0x8000);
  const Ints low = shift_right(add(same_bits(even), half), 16);
  const Ints high = add(same_bits(odd), half);
  return mixed(low, high);
}

// The weights of 16 columns of one piece as a tile of bfloat16. half: 0 or 1.
template <Format format>
inline void widen(Piece piece, int half, uint8_t* tile) {
  const auto put = [&](int i, Floats even, Floats odd) { store_ints(tile + 64 * i, round_pairs(even, odd)); };
  each_pair<format>(piece, half, put);
}

// Numbers alone, as bfloat16, which holds each exactly; scales and minima are left to the sums of a group. Those of 8
// bits are 128 too large.
template <Format format>
inline void widen_numbers(Piece piece, uint8_t* tiles) {
  if constexpr (format == kInt8) {
    const Ints low_byte = all_ints(255);
    for (int i = 0; i < kTile; ++i) {
      const Ints four = load_ints(piece.data + 64 * i);
      const auto number = [&](int at) { return to_floats(_mm512_and_si512(shift_right(four, 8 * at), low_byte)); };
      store_ints(tiles + 128 * i, round_pairs(number(0), number(1)));
      store_ints(tiles + 128 * i + 64, round_pairs(number(2), number(3)));
    }
  } else {
    alignas(64) static constexpr uint16_t kNumbers[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                                          0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130,
                                                          0x4140, 0x4150, 0x4160, 0x4170};
    // Twice the 16, as the permutation looks at five bits of its index.
    const Ints numbers = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)kNumbers));
    for (int i = 0; i < kTile / 2; ++i) {
      const Ints eight = load_ints(piece.data + 64 * i);
      for (int pair = 0; pair < 4; ++pair) {
        const Ints index = _mm512_srli_epi16(eight, 4 * pair);
        store_ints(tiles + 256 * i + 64 * pair, _mm512_permutexvar_epi16(index, numbers));
      }
    }
  }
}

template <Format format>
inline const uint8_t* as_tiles(Piece piece, uint8_t* space) {
  if constexpr (format == kDense) {
    return piece.data;
  } else {
    widen<format>(piece, 0, space);
    widen<format>(piece, 1, space + kTileBytes);
    return space;
  }
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
  const uint8_t* tiles = as_tiles<format>(piece_of<format>(panel, 0), space[0]);
  for (int k = 0; k < pieces; ++k) {
    // The next piece is widened while this one is multiplied.
    const uint8_t* following = tiles;
    if constexpr (!passing) prefetch<format>(piece_of<format>(panel, k));
    if (k + 1 < pieces) following = as_tiles<format>(piece_of<format>(panel, k + 1), space[(k + 1) & 1]);
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

// out[rows][32] = up to 16 rows of x times a panel of quantised weights: the numbers are multiplied as they are, and each
// group's sum is scaled, which for few rows is much less than scaling each weight.
template <Format format>
void multiply_groups(const bf16* x, size_t stride, const Groups& groups, int rows, const uint8_t* panel, int pieces,
                     float* out) {
  alignas(64) uint8_t space[2][2 * kTileBytes];
  alignas(64) float part[2][kTile][kTile];
  const auto* from = reinterpret_cast<const uint8_t*>(x);
  const auto widen_piece = [&](int k) {
    const Piece piece = piece_of<format>(panel, k);
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
    const Piece piece = piece_of<format>(panel, k);
    for (int half = 0; half < 2; ++half) {
      const auto [scale, least] = scales_of<format>(piece, half);
      for (int row = 0; row < rows; ++row) {
        float* to = out + row * kPanel + half * kTile;
        const Floats sum = all(groups.sums.get()[k * Groups::kRows + row]);
        const Floats scaled = fma(load(part[half][row]), scale, load(to));
        store(to, fma(sum, least, scaled));
      }
    }
  }
}

// The same for up to kFew rows, in whole numbers: no slower than the weights come from memory.
template <Format format, int rows>
void multiply_few(const Groups& groups, const uint8_t* panel, int pieces, float* out) {
  Floats sums[rows][2];
  for (auto& sum : sums) sum[0] = sum[1] = all(0.0f);
  for (int k = 0; k < pieces; ++k) {
    const Piece piece = piece_of<format>(panel, k);
    prefetch<format>(piece);
    const int8_t* parts = groups.parts.get() + k * 64 * Groups::kFew;
    for (int half = 0; half < 2; ++half) {
      for (int group = 0; group < kGroupsOf<format>; ++group) {
        Ints first[rows], second[rows];
        for (int row = 0; row < rows; ++row) first[row] = second[row] = _mm512_setzero_si512();
        const auto dot = [&](Ints numbers, int at) {
          for (int row = 0; row < rows; ++row) {
            int upper, lower;
            memcpy(&upper, parts + row * 64 + 4 * at, 4);
            memcpy(&lower, parts + row * 64 + 32 + 4 * at, 4);
            first[row] = _mm512_dpbusd_epi32(first[row], numbers, all_ints(upper));
            second[row] = _mm512_dpbusd_epi32(second[row], numbers, all_ints(lower));
          }
        };
        if constexpr (format == kInt8) {
          for (int i = 0; i < 8; ++i) dot(load_ints(piece.data + 512 * half + 64 * i), i);
        } else {
          constexpr int kSets = 8 / kGroupsOf<format>;
          for (int set = kSets * group; set < kSets * (group + 1); ++set) dot(numbers_of<format>(piece, half, set), set);
        }
        const auto [scale, least] = scales_of<format>(piece, half, group);
        for (int row = 0; row < rows; ++row) {
          const Ints whole = add(shift_left(first[row], 7), second[row]);
          const Floats own = mul(scale, all(groups.scales.get()[k * Groups::kFew + row]));
          const Floats sum = all(groups.sums.get()[(k * kGroupsOf<format> + group) * Groups::kRows + row]);
          const Floats scaled = fma(to_floats(whole), own, sums[row][half]);
          sums[row][half] = fma(sum, least, scaled);
        }
      }
    }
  }
  for (int row = 0; row < rows; ++row) {
    for (int half = 0; half < 2; ++half) store(out + row * kPanel + half * kTile, sums[row][half]);
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
      default:
        if constexpr (format != kInt5K && format != kInt6K) {
          multiply_groups<format>(x, stride, groups, rows, panel, pieces, out);
        } else {
          multiply_block<format, false, false>(x, stride, panel, pieces, out, [] {});
        }
    }
  }
  use(0, rows, out);
}

// What a panel is made before many rows go by: tiles of bfloat16, as those of kDense are.
constexpr size_t kReadyBytes = kPieceBytes[kDense];
template <Format format>
constexpr bool kIsReady = format == kDense;

// A panel of bfloat16 this deep stays in the nearest cache (48 KB) while x goes by. Of a deeper one and 32 rows of x,
// neither does.
constexpr int kNearPieces = 20;

// out[32][32] float = up to 32 rows of x (readable up to 16 or 32), times a panel that is ready.
template <typename Meanwhile>
void multiply_ready(const bf16* x, int depth, int rows, const uint8_t* panel, float* out, const Meanwhile& meanwhile) {
  const int pieces = depth / kTileDepth;
  const auto multiply = [&]<bool passing> {
    const size_t stride = sizeof(bf16) * depth;
    if (rows <= kTile) {
      multiply_block<kDense, false, passing>(x, stride, panel, pieces, out, meanwhile);
    } else {
      multiply_block<kDense, true, passing>(x, stride, panel, pieces, out, meanwhile);
    }
  };
  if (pieces <= kNearPieces) {
    multiply.template operator()<true>();
  } else {
    multiply.template operator()<false>();
  }
}

// One half of a piece made ready, where all of it shall be; of one that is, brought nearer.
template <Format format>
inline void prepare(Piece piece, int half, uint8_t* ready) {
  if constexpr (format == kDense) {
    for (int line = 0; line < kTileBytes; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(piece.data + half * kTileBytes + line), _MM_HINT_T1);
    }
  } else {
    prefetch<format>(piece);
    widen<format>(piece, half, ready + half * kTileBytes);
  }
}

}  // namespace stepwire
