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

// work<count>(first) for blocks of `most` rows from `first` on, and one of those that are left.
template <int most, typename Work>
inline void in_blocks(int first, int rows, const Work& work) {
  for (; first + most <= rows; first += most) work.template operator()<most>(first);
  if constexpr (most > 1) in_blocks<most - 1>(first, rows, work);
}

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
// A register's own sums; those that were loaded are fetched first.
inline Tile& with_sums(int t) {
  Tile& own = registers[t];
  for (int row = 0; own.from != nullptr && row < shapes.rows[t]; ++row) {
    memcpy(own.sums[row], own.from + row * own.stride, sizeof(own.sums[row]));
  }
  own.from = nullptr;
  return own;
}
inline void tile_store(int t, void* to, size_t stride) {
  const Tile& own = with_sums(t);
  for (int row = 0; row < shapes.rows[t]; ++row) {
    memcpy(static_cast<uint8_t*>(to) + row * stride, own.sums[row], sizeof(own.sums[row]));
  }
}

// sums[rows][16] += a[rows][pairs] * b[pairs][16], of pairs of bfloat16. `stride`: bytes between rows of a.
template <int rows>
inline void dot_rows(float (*sums)[kTile], const uint8_t* a, size_t stride, const Tile& b, int pairs) {
  Floats own[rows];
  for (int row = 0; row < rows; ++row) own[row] = load(sums[row]);
  for (int pair = 0; pair < pairs; ++pair) {
    const Ints right = load_ints(b.from + pair * b.stride);
    for (int row = 0; row < rows; ++row) {
      int left;
      memcpy(&left, a + row * stride + 4 * pair, 4);
      own[row] = dot_pairs(own[row], all_ints(left), right);
    }
  }
  for (int row = 0; row < rows; ++row) store(sums[row], own[row]);
}

inline void tile_dot(int c, int a, int b) {
  Tile& own = with_sums(c);
  const Tile &left = registers[a], &right = registers[b];
  in_blocks<4>(0, shapes.rows[c], [&]<int count>(int row) {
    dot_rows<count>(own.sums + row, left.from + row * left.stride, left.stride, right, shapes.rows[b]);
  });
}

#define TILE_ZERO(t) tile_zero(t)
#define TILE_LOAD(t, from, stride) tile_load(t, from, stride)
#define TILE_LOAD_PASSING(t, from, stride) tile_load(t, from, stride)
#define TILE_STORE(t, to, stride) tile_store(t, to, stride)
#define TILE_DOT(c, a, b) tile_dot(c, a, b)
constexpr bool kHasTiles = false;

#endif

}  // namespace stepwire
