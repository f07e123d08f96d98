// Eight tile registers of 16 rows x 64 bytes: AMX where the processor has it, else the same in AVX-512 or AVX2.
//
// TILE_DOT(c, a, b): c[16][16] float += a[16][32] * b, b holding 32 x 16 bfloat16 with neighbours of its longer side
// together: row p is b[2p][0], b[2p + 1][0], b[2p][1], b[2p + 1][1], ...
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "lanes.h"

namespace stepwire {

constexpr int kTile = 16;            // rows of a tile, and floats in one of its rows
constexpr int kTileDepth = 32;       // bfloat16 in a row
constexpr int kTileBytes = 1024;

constexpr size_t kHugePage = 2 << 20;

// Memory that only grows, aligned for whole cache lines. What it held is lost when it grows.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t size = 0) { grow(size); }
  ~Buffer() { free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* get() const { return data_; }

  // Zeroed when it is new: rows behind the last are read by tiles, and must be finite.
  void grow(size_t size) {
    if (size <= size_) return;
    size_t alignment = 64;
    if (size * sizeof(T) >= kHugePage / 2) alignment = kHugePage;
    const size_t bytes = (size * sizeof(T) + alignment - 1) / alignment * alignment;
    void* data = aligned_alloc(alignment, bytes);
    if (data == nullptr) throw std::bad_alloc();
    if (alignment == kHugePage) madvise(data, bytes, MADV_HUGEPAGE);  // refused: small pages do as well
    free(data_);
    data_ = static_cast<T*>(memset(data, 0, bytes));
    size_ = size;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

// The registers' shapes, as the processor reads them. What a register has less than the most takes less time.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if defined(__AMX_BF16__) && !defined(STEPWIRE_PORTABLE_TILES)

// Before a thread's first tile operation of a run, and wherever it needs other shapes; what registers held is lost.
inline void tiles_begin(const TileConfig& config = {}) {
  // GCC 12 takes the instruction to read 8 of the 64 bytes, and would not write the others.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}
// After a thread's last tile operation of a run.
inline void tiles_end() { _tile_release(); }

#define TILE_ZERO(t) _tile_zero(t)
// The compiler must not move stores past a load it does not see.
#define TILE_LOAD(t, from, stride)   \
  do {                               \
    asm volatile("" ::: "memory");   \
    _tile_loadd(t, from, stride);    \
  } while (0)
// The same past the nearest cache, which keeps what it holds.
#define TILE_LOAD_PASSING(t, from, stride) \
  do {                                     \
    asm volatile("" ::: "memory");         \
    _tile_stream_loadd(t, from, stride);   \
  } while (0)
#define TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
constexpr bool kHasTiles = true;

#else

// A register either holds sums, or names the memory that was loaded, which must not change while it is used.
struct Tile {
  alignas(64) float sums[kTile][kTile];
  const uint8_t* from;
  size_t stride;
};
inline thread_local Tile registers[8];
inline thread_local TileConfig shapes;

inline void tiles_begin(const TileConfig& config = {}) { shapes = config; }
inline void tiles_end() {}
inline void tile_zero(int t) {
  memset(registers[t].sums, 0, sizeof(registers[t].sums));
  registers[t].from = nullptr;
}
inline void tile_load(int t, const void* from, size_t stride) {
  registers[t].from = static_cast<const uint8_t*>(from);
  registers[t].stride = stride;
}
inline void tile_store(int t, void* to, size_t stride) {
  for (int row = 0; row < shapes.rows[t]; ++row) {
    memcpy(static_cast<uint8_t*>(to) + row * stride, registers[t].sums[row], sizeof(registers[t].sums[row]));
  }
}

// sums[rows][16] += a[rows][pairs] * b[pairs][16], of pairs of bfloat16.
template <int rows>
inline void dot_rows(float (*sums)[kTile], const uint8_t* a, size_t stride, const Tile& b, int pairs) {
#if defined(STEPWIRE_AVX512)
  for (int row = 0; row < rows; ++row) {
    __m512 sum = _mm512_load_ps(sums[row]);
    for (int pair = 0; pair < pairs; ++pair) {
      int both;
      memcpy(&both, a + row * stride + 4 * pair, 4);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both),
                             (__m512bh)_mm512_loadu_si512(b.from + pair * b.stride));
    }
    _mm512_store_ps(sums[row], sum);
  }
#else
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const auto first = [](__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); };
  const auto second = [&](__m256i pair) { return _mm256_castsi256_ps(_mm256_and_si256(pair, odd)); };
  __m256 low[rows], high[rows];
  for (int row = 0; row < rows; ++row) {
    low[row] = _mm256_load_ps(sums[row]);
    high[row] = _mm256_load_ps(sums[row] + 8);
  }
  for (int pair = 0; pair < pairs; ++pair) {
    const __m256i left = load_halves(b.from + pair * b.stride), right = load_halves(b.from + pair * b.stride + 32);
    const __m256 left_first = first(left), left_second = second(left);
    const __m256 right_first = first(right), right_second = second(right);
    for (int row = 0; row < rows; ++row) {
      int both;
      memcpy(&both, a + row * stride + 4 * pair, 4);
      const __m256i own = _mm256_set1_epi32(both);
      low[row] = _mm256_fmadd_ps(first(own), left_first, low[row]);
      high[row] = _mm256_fmadd_ps(first(own), right_first, high[row]);
      low[row] = _mm256_fmadd_ps(second(own), left_second, low[row]);
      high[row] = _mm256_fmadd_ps(second(own), right_second, high[row]);
    }
  }
  for (int row = 0; row < rows; ++row) {
    _mm256_store_ps(sums[row], low[row]);
    _mm256_store_ps(sums[row] + 8, high[row]);
  }
#endif
}

inline void tile_dot(int c, int a, int b) {
  Tile& own = registers[c];
  const Tile &left = registers[a], &right = registers[b];
  const int rows = shapes.rows[c], pairs = shapes.rows[b];
  if (own.from != nullptr) {  // sums that were loaded
    for (int row = 0; row < rows; ++row) memcpy(own.sums[row], own.from + row * own.stride, sizeof(own.sums[row]));
    own.from = nullptr;
  }
  for (int row = 0; row < rows; row += 4) {
    const uint8_t* from = left.from + row * left.stride;
    switch (rows - row) {
      case 1: dot_rows<1>(own.sums + row, from, left.stride, right, pairs); break;
      case 2: dot_rows<2>(own.sums + row, from, left.stride, right, pairs); break;
      case 3: dot_rows<3>(own.sums + row, from, left.stride, right, pairs); break;
      default: dot_rows<4>(own.sums + row, from, left.stride, right, pairs);
    }
  }
}

#define TILE_ZERO(t) tile_zero(t)
#define TILE_LOAD(t, from, stride) tile_load(t, from, stride)
#define TILE_LOAD_PASSING(t, from, stride) tile_load(t, from, stride)
#define TILE_STORE(t, to, stride) tile_store(t, to, stride)
#define TILE_DOT(c, a, b) tile_dot(c, a, b)
constexpr bool kHasTiles = false;

#endif

}  // namespace stepwire
