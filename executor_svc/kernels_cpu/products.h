// Products with matrices: x, of any number of rows, times all panels, shared among a team.
#pragma once

#include <algorithm>

#include "weights.h"
#if defined(STEPWIRE_AVX512)
#include "products_tiles.h"
#else
#include "products_floats.h"
#endif

namespace stepwire {

// A panel made ready bit by bit beside other work.
template <Format format>
class Preparation {
 public:
  // `panel`: null where there is nothing to do.
  Preparation(const uint8_t* panel, int pieces, uint8_t* to) : panel_(panel), to_(to), halves_(panel ? 2 * pieces : 0) {}

  void step() {
    if (done_ == halves_) return;
    const int k = done_ / 2;
    prepare<format>(piece_of<format>(panel_, k), done_ % 2, to_ + k * kReadyBytes);
    ++done_;
  }
  void finish() {
    while (done_ < halves_) step();
  }

 private:
  const uint8_t* panel_;
  uint8_t* to_;
  int halves_, done_ = 0;
};

// One panel that is ready times all rows of x (readable up to a multiple of 32), `use(first_row, num_rows, out)` for each
// 32 of them; `next` is prepared meanwhile.
template <Format format, typename Use>
void multiply_rows(const uint8_t* panel, const Matrix& matrix, const bf16* x, int rows, Preparation<format>& next,
                   const Use& use) {
  alignas(64) float out[2 * kTile * kPanel];
  const int blocks = (rows + 2 * kTile - 1) / (2 * kTile);
  int due = 0;  // of 2 for each piece, over all blocks
  const auto meanwhile = [&] {
    for (due += 2; due >= blocks; due -= blocks) next.step();
  };
  for (int first = 0; first < rows; first += 2 * kTile) {
    const int left = std::min(rows - first, 2 * kTile);
    multiply_ready(x + static_cast<size_t>(first) * matrix.depth, matrix.depth, left, panel, out, meanwhile);
    use(first, left, out);
  }
  next.finish();
}

// How many rows of x go by all panels before the next: as many as stay in the second cache (2 MB; 512 KB where there is AVX2
// alone) beside panels and sums.
inline int rows_together(const Matrix& matrix, int rows) {
  constexpr size_t kMost = kHasAvx512 ? 1 << 20 : 1 << 18;
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
// x is readable up to a multiple of 32 rows; `groups`: of x, where it has few enough; `space`: twice a panel made ready.
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
  const size_t size = kIsReady<format> ? 0 : pieces * kReadyBytes;
  const auto prepare = [&](int turn, int which) {
    return Preparation<format>(turn < 0 ? nullptr : matrix.panel(turn % panels), pieces, space + which * size);
  };
  int turn = take();
  prepare(turn, 0).finish();
  for (int which = 0; turn >= 0; which ^= 1) {
    const int following = take();
    auto next = prepare(following, which ^ 1);
    const int index = turn % panels, begin = turn / panels * together;
    const uint8_t* panel = kIsReady<format> ? matrix.panel(index) : space + which * size;
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
    case kInt4: return multiply_panels<kInt4>(matrix, x, groups, rows, space, take, use);
    case kInt40: return multiply_panels<kInt40>(matrix, x, groups, rows, space, take, use);
    case kInt5K: return multiply_panels<kInt5K>(matrix, x, groups, rows, space, take, use);
    case kInt4K: return multiply_panels<kInt4K>(matrix, x, groups, rows, space, take, use);
    default: return multiply_panels<kInt6K>(matrix, x, groups, rows, space, take, use);
  }
}

}  // namespace stepwire
