// Products in floats and whole numbers: for processors with AVX2 alone.
#pragma once

#include "weights.h"

namespace stepwire {

// The weights of 16 columns of one piece, one row of 32 floats for each of 32 deep.
template <Format format>
inline void as_floats(Piece piece, int half, float* to) {
  to += half * kTile;
  const auto put = [&](int i, Floats first, Floats second) {
    store(to + 2 * i * kPanel, first);
    store(to + (2 * i + 1) * kPanel, second);
  };
  if constexpr (format == kDense) {
    for (int i = 0; i < kTile; ++i) {
      const Ints pairs = load_ints(piece.data + half * kTileBytes + 64 * i);
      put(i, first_of_pairs(pairs), second_of_pairs(pairs));
    }
  } else {
    each_pair<format>(piece, half, put);
  }
}

// out[rows][32] += x[rows][32 deep] * weights[32 deep][32]: as many sums as the registers hold. Inlined, one of them may
// end in memory, which halves the speed.
template <int rows>
[[gnu::noinline]] void add_products(const float* x, const float* weights, float* out) {
  constexpr int kEights = kPanel / 8;
  __m256 sums[rows][kEights];
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < kEights; ++i) sums[row][i] = _mm256_loadu_ps(out + row * kPanel + 8 * i);
  }
#pragma GCC unroll 2
  for (int deep = 0; deep < kTileDepth; ++deep) {
    __m256 own[rows];
    for (int row = 0; row < rows; ++row) own[row] = _mm256_broadcast_ss(x + row * kTileDepth + deep);
    for (int i = 0; i < kEights; ++i) {
      const __m256 eight = _mm256_load_ps(weights + deep * kPanel + 8 * i);
      for (int row = 0; row < rows; ++row) sums[row][i] = _mm256_fmadd_ps(own[row], eight, sums[row][i]);
    }
  }
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < kEights; ++i) _mm256_storeu_ps(out + row * kPanel + 8 * i, sums[row][i]);
  }
}

// out[rows][32] = up to 32 rows of x times a panel; weights_of(k): its piece k as floats. Each row is summed over the depth
// in the same order, however many there are.
template <typename WeightsOf, typename Meanwhile>
inline void multiply_floats(const bf16* x, int depth, int rows, float* out, const WeightsOf& weights_of,
                            const Meanwhile& meanwhile) {
  alignas(32) float own[2 * kTile * kTileDepth];
  memset(out, 0, sizeof(float) * rows * kPanel);
  for (int k = 0; k < depth / kTileDepth; ++k) {
    const float* weights = weights_of(k);
    for (int row = 0; row < rows; ++row) {
      const bf16* from = x + static_cast<size_t>(row) * depth + k * kTileDepth;
      store(own + row * kTileDepth, widen(load_halves(from)));
      store(own + row * kTileDepth + kTile, widen(load_halves(from + kTile)));
    }
    in_blocks<3>(0, rows, [&]<int count>(int row) {
      add_products<count>(own + row * kTileDepth, weights, out + row * kPanel);
    });
    meanwhile();
  }
}

struct ScalesOfEight {
  __m256 scale, least;
};

// See scales_of; of 8 of the 32 columns.
template <Format format>
inline ScalesOfEight scales_of_eight(Piece piece, int eight, int group) {
  const auto factors = [&](const uint8_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 16 * eight)));
  };
  const auto multiples = [&](size_t at) { return _mm256_cvtepi32_ps(load_eight_bytes(piece.data + at + 8 * eight)); };
  if constexpr (format == kInt4) return {factors(piece.data + 512), factors(piece.data + 576)};
  if constexpr (format == kInt4K || format == kInt5K) {
    constexpr size_t kAt = format == kInt4K ? 512 : 640;
    return {_mm256_mul_ps(factors(piece.factors), multiples(kAt)),
            _mm256_mul_ps(factors(piece.factors + 64), multiples(kAt + 32))};
  }
  const __m256 scale = format == kInt6K ? _mm256_mul_ps(factors(piece.factors), multiples(768 + 32 * group))
                                        : factors(piece.data + (format == kInt8 ? 1024 : 512));
  return {scale, _mm256_mul_ps(scale, _mm256_set1_ps(-kMiddle<format>))};
}

// out[rows][32] = rows [first, first + rows) of those that `groups` knows times a panel of quantised weights, in whole
// numbers, 8 columns at a time.
template <Format format, int rows>
void multiply_few(const Groups& groups, int first, const uint8_t* panel, int pieces, float* out) {
  const __m256i ones = _mm256_set1_epi16(1);
  memset(out, 0, sizeof(float) * rows * kPanel);
  for (int k = 0; k < pieces; ++k) {
    const Piece piece = piece_of<format>(panel, k);
    prefetch<format>(piece);
    const int8_t* parts = groups.parts.get() + (k * Groups::kFew + first) * 64;
    for (int eight = 0; eight < kPanel / 8; ++eight) {
      const int half = eight / 2, at = eight % 2;
      for (int group = 0; group < kGroupsOf<format>; ++group) {
        __m256i upper[rows], lower[rows];
        for (int row = 0; row < rows; ++row) upper[row] = lower[row] = _mm256_setzero_si256();
        const auto times = [&](__m256i numbers, int row, int part, int fours) {
          int four;
          memcpy(&four, parts + row * 64 + part * 32 + 4 * fours, 4);
          return _mm256_maddubs_epi16(numbers, _mm256_set1_epi32(four));
        };
        if constexpr (format == kInt8) {
          for (int i = 0; i < 8; ++i) {
            const __m256i numbers = load_halves(piece.data + 512 * half + 64 * i + 32 * at);
            for (int row = 0; row < rows; ++row) {
              upper[row] = _mm256_add_epi32(upper[row], _mm256_madd_epi16(times(numbers, row, 0, i), ones));
              lower[row] = _mm256_add_epi32(lower[row], _mm256_madd_epi16(times(numbers, row, 1, i), ones));
            }
          }
        } else {
          // Sixteen products of 64 and 31, or eight of 64 and 63, stay within 16 bits.
          const auto dot = [&](__m256i numbers, int set) {
            for (int row = 0; row < rows; ++row) {
              upper[row] = _mm256_add_epi16(upper[row], times(numbers, row, 0, set));
              lower[row] = _mm256_add_epi16(lower[row], times(numbers, row, 1, set));
            }
          };
          const __m256i low = _mm256_set1_epi8(15), fifth = _mm256_set1_epi8(16), top = _mm256_set1_epi8(48);
          __m256i bits = low;
          if constexpr (format == kInt5K) bits = load_halves(piece.data + 512 + 64 * half + 32 * at);
          if constexpr (format == kInt6K) bits = load_halves(piece.data + 512 + 128 * half + 64 * group + 32 * at);
          constexpr int kWords = 4 / kGroupsOf<format>;
          for (int i = 0; i < kWords; ++i) {
            const __m256i both = load_halves(piece.data + 256 * half + 64 * (kWords * group + i) + 32 * at);
            __m256i even = _mm256_and_si256(both, low), odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            if constexpr (format == kInt5K) {
              even = _mm256_or_si256(even, _mm256_and_si256(_mm256_slli_epi16(bits, 4), fifth));
              odd = _mm256_or_si256(odd, _mm256_and_si256(_mm256_slli_epi16(bits, 3), fifth));
              bits = _mm256_srli_epi16(bits, 2);
            }
            if constexpr (format == kInt6K) {
              even = _mm256_or_si256(even, _mm256_and_si256(_mm256_slli_epi16(bits, 4), top));
              odd = _mm256_or_si256(odd, _mm256_and_si256(_mm256_slli_epi16(bits, 2), top));
              bits = _mm256_srli_epi16(bits, 4);
            }
            dot(even, 2 * (kWords * group + i));
            dot(odd, 2 * (kWords * group + i) + 1);
          }
          for (int row = 0; row < rows; ++row) {
            upper[row] = _mm256_madd_epi16(upper[row], ones);
            lower[row] = _mm256_madd_epi16(lower[row], ones);
          }
        }
        const auto [scale, least] = scales_of_eight<format>(piece, eight, group);
        for (int row = 0; row < rows; ++row) {
          float* to = out + row * kPanel + 8 * eight;
          const __m256i whole = _mm256_add_epi32(_mm256_slli_epi32(upper[row], 7), lower[row]);
          const __m256 own = _mm256_mul_ps(scale, _mm256_set1_ps(groups.scales.get()[k * Groups::kFew + first + row]));
          const float* sums = groups.sums.get() + (k * kGroupsOf<format> + group) * Groups::kRows;
          const __m256 sum = _mm256_set1_ps(sums[first + row]);
          const __m256 scaled = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), own, _mm256_loadu_ps(to));
          _mm256_storeu_ps(to, _mm256_fmadd_ps(sum, least, scaled));
        }
      }
    }
  }
}

// One panel times up to 32 rows of x; `use(0, rows, out)`.
template <Format format, typename Use>
void multiply_panel(const Matrix& matrix, int index, const bf16* x, const Groups& groups, int rows, const Use& use) {
  alignas(32) float out[2 * kTile * kPanel];
  const uint8_t* panel = matrix.panel(index);
  if constexpr (format == kDense) {
    alignas(32) float weights[kTileDepth * kPanel];
    const auto piece = [&](int k) {
      const Piece from = piece_of<kDense>(panel, k);
      prefetch<kDense>(from);
      for (int half : {0, 1}) as_floats<kDense>(from, half, weights);
      return weights;
    };
    multiply_floats(x, matrix.depth, rows, out, piece, [] {});
  } else {
    in_blocks<4>(0, rows, [&]<int count>(int first) {
      multiply_few<format, count>(groups, first, panel, matrix.num_pieces(), out + first * kPanel);
    });
  }
  use(0, rows, out);
}

// What a panel is made before many rows go by: floats.
constexpr size_t kReadyBytes = sizeof(float) * kTileDepth * kPanel;
template <Format format>
constexpr bool kIsReady = false;

// out[rows][32] = up to 32 rows of x times a panel that is ready.
template <typename Meanwhile>
void multiply_ready(const bf16* x, int depth, int rows, const uint8_t* panel, float* out, const Meanwhile& meanwhile) {
  const auto* weights = reinterpret_cast<const float*>(panel);
  multiply_floats(x, depth, rows, out, [&](int k) { return weights + k * kTileDepth * kPanel; }, meanwhile);
}

// One half of a piece made ready, where all of it shall be.
template <Format format>
inline void prepare(Piece piece, int half, uint8_t* ready) {
  if (half == 0) prefetch<format>(piece);
  as_floats<format>(piece, half, reinterpret_cast<float*>(ready));
}

}  // namespace stepwire
