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

#if defined(__AMX_BF16__) && !defined(STEPWIRE_PORTABLE_TILES)

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Before a thread's first tile operation of a run, and after its last.
inline void tiles_begin() {
  const TileConfig config;
  _tile_loadconfig(&config);
}
inline void tiles_end() { _tile_release(); }

#define TILE_ZERO(t) _tile_zero(t)
// The compiler must not move stores past a load it does not see.
#define TILE_LOAD(t, from, stride)   \
  do {                               \
    asm volatile("" ::: "memory");   \
    _tile_loadd(t, from, stride);    \
  } while (0)
#define TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
constexpr bool kHasTiles = true;

#else

struct alignas(64) Tile {
  uint8_t bytes[kTile][64];
};
inline thread_local Tile registers[8];

inline void tiles_begin() {}
inline void tiles_end() {}
inline void tile_load(Tile& tile, const void* from, size_t stride) {
  for (int row = 0; row < kTile; ++row) memcpy(tile.bytes[row], static_cast<const uint8_t*>(from) + row * stride, 64);
}
inline void tile_store(const Tile& tile, void* to, size_t stride) {
  for (int row = 0; row < kTile; ++row) memcpy(static_cast<uint8_t*>(to) + row * stride, tile.bytes[row], 64);
}
inline void tile_dot(Tile& c, const Tile& a, const Tile& b) {
  for (int row = 0; row < kTile; ++row) {
    __m512 sum = _mm512_load_ps(c.bytes[row]);
    for (int pair = 0; pair < kTile; ++pair) {
      int both;
      memcpy(&both, a.bytes[row] + 4 * pair, 4);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)_mm512_load_si512(b.bytes[pair]));
    }
    _mm512_store_ps(c.bytes[row], sum);
  }
}

#define TILE_ZERO(t) memset(&registers[t], 0, sizeof(Tile))
#define TILE_LOAD(t, from, stride) tile_load(registers[t], from, stride)
#define TILE_STORE(t, to, stride) tile_store(registers[t], to, stride)
#define TILE_DOT(c, a, b) tile_dot(registers[c], registers[a], registers[b])
constexpr bool kHasTiles = false;

#endif

}  // namespace stepwire
