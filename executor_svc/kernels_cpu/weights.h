// Matrices in the order the tiles read them; how the numbers in them become floats, and what a product wants of x.
//
// A matrix [columns, depth] (out, in) is cut into panels of 32 columns; a panel is a sequence of pieces, 32 deep, so
// that a product reads memory from one end to the other. A piece is two halves of 16 columns:
//   kDense  2 tiles of bfloat16                                            2048 bytes
//   kInt8   2 x [8][16 columns][4 deep] numbers + 128, 32 float16 scales   1088 bytes
//   kInt4   2 x [4][16 columns] of 8 numbers, 32 scales, 32 minima          640 bytes: w = scale * number + minimum
//   kInt40  2 x [4][16 columns] of 8 numbers, 32 scales                     576 bytes: w = scale * (number - 8)
//   kInt4K  2 x [4][16 columns] of 8 numbers, 32 bytes s, 32 bytes m        576 bytes: w = scale * s * number + least * m
//   kInt5K  the same; before s, 2 x [16 columns] of 32 numbers' fifth bit   704 bytes
//   kInt6K  2 x [4][16 columns] of 8 numbers' lower 4 bits, 2 x [2][16 columns] of 16 numbers' upper 2,
//           [2][32] bytes s, of 16 deep each                                832 bytes: w = scale * s * (number - 32)
// Before 8 pieces of the last three stand their columns' factors: 32 scales, 32 leasts (which kInt6K has not), float16.
// A column's 8 numbers of 4 bits are 32 bits: from the low end those 0, 2, 4, 6 deep, then those 1, 3, 5, 7 deep. Lower
// or upper halves of their bytes are a set of 4 numbers, a piece has 8 sets. Bits over the fourth are in the bytes of the
// same place: of kInt5K bit i is set i's; of kInt6K the first 32 bits have sets 0 to 3, two bits each, the next the rest.
// These are the groups of GGUF's Q8_0, Q4_1, Q4_0, Q4_K, Q5_K and Q6_K.
#pragma once

#include "tiles.h"

namespace stepwire {

enum Format : int32_t { kDense = 0, kInt8 = 1, kInt4 = 2, kInt40 = 3, kInt4K = 4, kInt5K = 5, kInt6K = 6 };

constexpr int kPanel = 32;
constexpr size_t kPieceBytes[] = {2048, 1088, 640, 576, 576, 704, 832};
constexpr int kTogether = 8;  // pieces with common factors
constexpr size_t kFactorBytes[] = {0, 0, 0, 0, 128, 128, 64};

// Groups of one scale in a piece's depth.
template <Format format>
constexpr int kGroupsOf = format == kInt6K ? 2 : 1;

// What its numbers are too large by where a weight is scale * number and no more.
template <Format format>
constexpr float kMiddle = format == kInt8 ? 128 : format == kInt6K ? 32 : 8;

struct Matrix {
  const uint8_t* data;
  const float* bias;  // by column, in the panels' order; null: none
  int32_t format;
  int32_t columns;
  int32_t depth;
  int32_t reserved;

  int num_panels() const { return (columns + kPanel - 1) / kPanel; }
  int num_pieces() const { return depth / kTileDepth; }
  size_t panel_bytes() const {
    return num_pieces() * kPieceBytes[format] + num_pieces() / kTogether * kFactorBytes[format];
  }
  const uint8_t* panel(int index) const { return data + index * panel_bytes(); }
};

struct Piece {
  const uint8_t* data;
  const uint8_t* factors;
};

// A panel's piece k.
template <Format format>
inline Piece piece_of(const uint8_t* panel, int k) {
  if constexpr (kFactorBytes[format] == 0) return {panel + k * kPieceBytes[format], nullptr};
  constexpr size_t kBytes = kFactorBytes[format] + kTogether * kPieceBytes[format];
  const uint8_t* factors = panel + k / kTogether * kBytes;
  return {factors + kFactorBytes[format] + k % kTogether * kPieceBytes[format], factors};
}

struct Scales {
  Floats scale, least;
};

// Of 16 columns and one group of a piece: a weight is scale * number + least.
template <Format format>
inline Scales scales_of(Piece piece, int half, int group = 0) {
  const auto factors = [&](const uint8_t* at) { return from_float16(load_halves(at + 32 * half)); };
  const auto multiples = [&](size_t at) { return to_floats(load_bytes(piece.data + at + 16 * half)); };
  if constexpr (format == kInt4) return {factors(piece.data + 512), factors(piece.data + 576)};
  if constexpr (format == kInt4K || format == kInt5K) {
    constexpr size_t kAt = format == kInt4K ? 512 : 640;
    return {mul(factors(piece.factors), multiples(kAt)), mul(factors(piece.factors + 64), multiples(kAt + 32))};
  }
  const Floats scale = format == kInt6K ? mul(factors(piece.factors), multiples(768 + 32 * group))
                                        : factors(piece.data + (format == kInt8 ? 1024 : 512));
  return {scale, mul(scale, all(-kMiddle<format>))};
}

// What a set has of its numbers, a byte each, 16 columns.
template <Format format>
inline Ints numbers_of(Piece piece, int half, int set) {
  const Ints eight = load_ints(piece.data + 256 * half + 64 * (set / 2));
  const Ints lower = set % 2 == 0 ? eight : shift_right(eight, 4);
  Ints top = all_ints(0);
  const auto cut = [&](Ints bits, int left, int mask) {  // bits moved, of each byte those of the mask
    top = cut_and_set(left >= 0 ? shift_left(bits, left) : shift_right(bits, -left), all_ints(mask), top);
  };
  if constexpr (format == kInt5K) cut(load_ints(piece.data + 512 + 64 * half), 4 - set, 0x10101010);
  if constexpr (format == kInt6K) {
    cut(load_ints(piece.data + 512 + 128 * half + 64 * (set / 4)), 4 - 2 * (set % 4), 0x30303030);
  }
  return cut_and_set(lower, all_ints(0x0f0f0f0f), top);
}

// A number of `bits` bits where the last of them is 2^at of a float's fraction, as 2^(23 - at) + number: cut out and made
// a float in one step.
template <int bits, int at>
inline Floats number_at(Ints word) {
  static_assert(at + bits <= 23);
  const Ints cut = all_ints(((1 << bits) - 1) << at);
  const Ints base = all_ints((127 + 23 - at) << 23);
  return same_bits(cut_and_set(word, cut, base));
}

// put(i, a, b) for all 16 pairs of neighbours in one piece's depth: weights of 16 columns at 2i and at 2i + 1. What
// number_at() adds is taken from the least weight: exact where that is not much smaller than the scale, else rounded by a
// thousandth of the scale at most.
template <Format format, typename Put>
inline void each_pair(Piece piece, int half, const Put& put) {
  Scales scales = scales_of<format>(piece, half);
  const auto without = [&](float base) { return fnma(all(base), scales.scale, scales.least); };
  if constexpr (format == kInt8 || format == kInt5K || format == kInt6K) {
    Floats least8 = without(1 << 15);
    const auto weight = [&](Ints word) { return fma(number_at<8, 8>(word), scales.scale, least8); };
    // take(a, b, c, d): what the four bytes of a word are, from the low end.
    const auto each_byte = [&](Ints four, const auto& take) {
      take(weight(shift_left(four, 8)), weight(four), weight(shift_right(four, 8)), weight(shift_right(four, 16)));
    };
    if constexpr (format == kInt8) {
      for (int i = 0; i < kTile / 2; ++i) {
        each_byte(load_ints(piece.data + 512 * half + 64 * i), [&](Floats a, Floats b, Floats c, Floats d) {
          put(2 * i, a, b);
          put(2 * i + 1, c, d);
        });
      }
    } else {
      for (int set = 0; set < 8; ++set) {
        if (kGroupsOf<format> == 2 && set == 4) {
          scales = scales_of<format>(piece, half, 1);
          least8 = without(1 << 15);
        }
        each_byte(numbers_of<format>(piece, half, set), [&](Floats a, Floats b, Floats c, Floats d) {
          const int i = 4 * (set / 2) + set % 2;
          put(i, a, c);
          put(i + 2, b, d);
        });
      }
    }
  } else {
    const Floats scale = scales.scale;
    const Floats least8 = without(1 << 15), least12 = without(1 << 11), least16 = without(1 << 7);
    const auto at8 = [&](Ints word) { return fma(number_at<4, 8>(word), scale, least8); };
    const auto at12 = [&](Ints word) { return fma(number_at<4, 12>(word), scale, least12); };
    const auto at16 = [&](Ints word) { return fma(number_at<4, 16>(word), scale, least16); };
    for (int i = 0; i < kTile / 4; ++i) {
      const Ints eight = load_ints(piece.data + 256 * half + 64 * i);
      const Ints low = shift_left(eight, 12), high = shift_right(eight, 12);
      put(4 * i, at12(low), at16(eight));
      put(4 * i + 1, at16(low), at8(high));
      put(4 * i + 2, at8(eight), at12(high));
      put(4 * i + 3, at12(eight), at16(high));
    }
  }
}

// Memory is read ahead of its use by about what a core can have under way.
template <Format format>
inline void prefetch(Piece piece) {
  constexpr size_t kAhead = 4096, kBytes = kPieceBytes[format] + kFactorBytes[format] / kTogether;
  for (size_t line = 0; line < kBytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(piece.data + kAhead + line), _MM_HINT_T0);
  }
}

// Of up to kRows rows of x, what products with quantised weights need of each 32 of its numbers.
struct Groups {
  explicit Groups(size_t depth) : sums(depth / 16 * kRows), scales(depth / 32 * kFew), parts(depth * 2 * kFew) {}
  Buffer<float> sums;     // [depth / 32][kGroupsOf][rows]: those of a group added up
  Buffer<float> scales;   // [depth / 32][few rows]
  Buffer<int8_t> parts;   // [depth / 32][few rows][2][32]: x = scale * (128 * first + second), to within 14 or 15 bits

  // Of what products of `rows` rows with weights of `format` read.
  void find(const bf16* x, int depth, int rows, Format format) {
    if (format == kDense || rows > kRows) return;
    if (rows > kFew) {
      if (format != kInt6K) sum(x, depth, rows);
    } else {
      split(x, depth, rows, format);
    }
  }

  // AVX2 multiplies whole numbers no slower than floats.
  static constexpr int kRows = kHasAvx512 ? kTile : 2 * kTile, kFew = kHasAvx512 ? 4 : kRows;

 private:
  void sum(const bf16* x, int depth, int rows) {
    for (int row = 0; row < rows; ++row) {
      for (int group = 0; group < depth / 32; ++group) {
        const bf16* from = x + row * depth + group * 32;
        const Floats low = stepwire::widen(load_halves(from));
        const Floats high = stepwire::widen(load_halves(from + kTile));
        sums.get()[group * kRows + row] = sum_of(add(low, high));
      }
    }
  }

  // The parts' order is that in which multiply_few reads numbers of `format`.
  void split(const bf16* x, int depth, int rows, Format format) {
    const __m256i eights = _mm256_set_epi8(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0, 15, 11, 14, 10, 13, 9,
                                           12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    for (int row = 0; row < rows; ++row) {
      for (int group = 0; group < depth / 32; ++group) {
        const bf16* from = x + row * depth + group * 32;
        const Floats low = stepwire::widen(load_halves(from));
        const Floats high = stepwire::widen(load_halves(from + kTile));
        const float largest = greatest_of(max(absolute(low), absolute(high)));
        const Floats factor = all(largest > 0.0f ? kMost / largest : 0.0f);
        const Ints whole[2] = {to_ints(mul(low, factor)), to_ints(mul(high, factor))};
        __m128i first[2], second[2];
        for (int i = 0; i < 2; ++i) {
          const Ints upper = shift_right_signed(add(whole[i], all_ints(64)), 7);
          first[i] = to_bytes(upper);
          second[i] = to_bytes(sub(whole[i], shift_left(upper, 7)));
        }
        const auto put = [&](const __m128i* part, int which) {
          const __m256i both = _mm256_set_m128i(part[1], part[0]);
          int8_t* to = parts.get() + ((group * kFew + row) * 2 + which) * 32;
          store_halves(to, format == kInt8 ? both : _mm256_shuffle_epi8(both, eights));
        };
        put(first, 0);
        put(second, 1);
        // What is not finite stays so.
        const float scale = largest / kMost + 0.0f * sum_of(add(low, high));
        scales.get()[group * kFew + row] = scale;
        // Of what the parts say: of x itself, the error of rounding would meet the minima unbalanced.
        const auto scaled = [&](Ints numbers) { return scale * static_cast<float>(sum_of(numbers)); };
        if (format == kInt6K) {
          for (int i : {0, 1}) sums.get()[(2 * group + i) * kRows + row] = scaled(whole[i]);
        } else {
          sums.get()[group * kRows + row] = scaled(add(whole[0], whole[1]));
        }
      }
    }
  }

  // AVX2 adds up two products of a part and a number of 8 bits within 16: no part may be over 64.
  static constexpr float kMost = (kHasAvx512 ? 127 : 64) * 128;
};

}  // namespace stepwire
