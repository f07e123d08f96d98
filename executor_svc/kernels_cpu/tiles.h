// Eight tile registers of 16 rows x 64 bytes: AMX where the processor has it, else the same in AVX-512.
//
// TILE_DOT(c, a, b): c[16][16] float += a[16][32] * b, b holding 32 x 16 bfloat16 with neighbours of its longer side
// together: row p is b[2p][0], b[2p + 1][0], b[2p][1], b[2p + 1][1], ...
#pragma once

#include <immintrin.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace stepwire {

using bf16 = uint16_t;

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

inline __m512 widen(__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }
inline __m256i narrow(__m512 wide) { return (__m256i)_mm512_cvtneps_pbh(wide); }

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

struct alignas(64) Tile {
  uint8_t bytes[kTile][64];
};
inline thread_local Tile registers[8];
inline thread_local TileConfig shapes;

inline void tiles_begin(const TileConfig& config = {}) { shapes = config; }
inline void tiles_end() {}
inline void tile_load(int t, const void* from, size_t stride) {
  for (int row = 0; row < shapes.rows[t]; ++row) {
    memcpy(registers[t].bytes[row], static_cast<const uint8_t*>(from) + row * stride, shapes.row_bytes[t]);
  }
}
inline void tile_store(int t, void* to, size_t stride) {
  for (int row = 0; row < shapes.rows[t]; ++row) {
    memcpy(static_cast<uint8_t*>(to) + row * stride, registers[t].bytes[row], shapes.row_bytes[t]);
  }
}
inline void tile_dot(int c, int a, int b) {
  for (int row = 0; row < shapes.rows[c]; ++row) {
    __m512 sum = _mm512_load_ps(registers[c].bytes[row]);
    for (int pair = 0; pair < shapes.rows[b]; ++pair) {
      int both;
      memcpy(&both, registers[a].bytes[row] + 4 * pair, 4);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both),
                             (__m512bh)_mm512_load_si512(registers[b].bytes[pair]));
    }
    _mm512_store_ps(registers[c].bytes[row], sum);
  }
}

#define TILE_ZERO(t) memset(&registers[t], 0, sizeof(Tile))
#define TILE_LOAD(t, from, stride) tile_load(t, from, stride)
#define TILE_LOAD_PASSING(t, from, stride) tile_load(t, from, stride)
#define TILE_STORE(t, to, stride) tile_store(t, to, stride)
#define TILE_DOT(c, a, b) tile_dot(c, a, b)
constexpr bool kHasTiles = false;

#endif

}  // namespace stepwire
