// Causal attention over the paged cache, for decoding rows and for chunks of prompts alike.
//
// The unit of work is one key/value head and up to 16 of the (query, head) pairs that share it, one per column: with
// the keys of 16 tokens as they lie in the cache, one tile product gives 16 x 16 scores. Keys are taken 32 at a time
// from position 0 with a running maximum (arXiv 1805.02867), so a query's result depends on its position alone, never
// on chunks or company.
#pragma once

#include <algorithm>

#include "tiles.h"

namespace stepwire {

constexpr int kKeys = 32;
// Positions that are not seen, and the least running maximum: far apart, so that hidden scores weigh exactly nothing.
constexpr float kHidden = -1e30f, kLeast = -1e20f;

struct CacheShape {
  int kv_heads, head_dim, block_size;
  int64_t null_block;
};

// Tokens [first, first + count) of the step: positions [start, start + count) of a row whose blocks `table` names.
struct Span {
  const int32_t* table;
  int64_t table_size;
  int64_t first, count, start;
};

// Scratch of one thread.
struct AttentionSpace {
  explicit AttentionSpace(int head_dim)
      : queries(head_dim * kTile), keys(kKeys * head_dim), values(kKeys * head_dim), out(kTile * head_dim) {}
  Buffer<bf16> queries, keys, values;
  Buffer<float> out;
  alignas(64) bf16 weights[kTile * kTileDepth];
};

inline __m512 exp2_fast(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  // Taylor's series of 2^f around 0, |f| <= 1/2: relative error below 2e-7.
  __m512 sum = _mm512_set1_ps(1.5403530e-4f);
  for (float factor : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
    sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(factor));
  }
  return _mm512_scalef_ps(sum, whole);
}

// In place: 16 x 16 numbers of 32 bits.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
  }
}

// Where the dimension at place `at` of a row of interleaved values lies in the head: see interleave().
inline int true_dimension(int at) {
  const int within = at % 32, lane = within % 16 / 4;
  return at - within + 8 * lane + (within >= 16 ? 4 : 0) + within % 4;
}

class Attention {
 public:
  Attention(const CacheShape& cache, int group, int window, float scale)
      : cache_(cache), group_(group), window_(window), scale_(scale * 1.44269504f) {}

  // Columns [column, column + 16) of `span` for one key/value head. queries, out: [tokens, heads, head_dim] of the step.
  void run(const Span& span, int kv_head, int64_t column, const bf16* keys, const bf16* values, const bf16* queries,
           bf16* out, AttentionSpace& space) const {
    const int dim = cache_.head_dim, heads = cache_.kv_heads * group_;
    const int columns = static_cast<int>(std::min<int64_t>(kTile, span.count * group_ - column));
    alignas(64) int32_t from[kTile] = {}, to[kTile] = {};
    int64_t begin = INT64_MAX, end = 0;
    memset(space.queries.get(), 0, sizeof(bf16) * kTile * dim);
    for (int c = 0; c < columns; ++c) {
      const int64_t query = (column + c) / group_, position = span.start + query;
      to[c] = static_cast<int32_t>(position + 1);
      from[c] = window_ ? static_cast<int32_t>(std::max<int64_t>(0, position + 1 - window_)) : 0;
      begin = std::min<int64_t>(begin, from[c]);
      end = std::max<int64_t>(end, to[c]);
      const bf16* q = queries + ((span.first + query) * heads + kv_head * group_ + (column + c) % group_) * dim;
      for (int pair = 0; pair < dim / 2; ++pair) memcpy(space.queries.get() + (pair * kTile + c) * 2, q + 2 * pair, 4);
    }
    const __m512i first_seen = _mm512_load_si512(from), last_seen = _mm512_load_si512(to);
    memset(space.out.get(), 0, sizeof(float) * kTile * dim);
    __m512 maximum = _mm512_set1_ps(kLeast), total = _mm512_setzero_ps();
    for (int64_t at = begin / kKeys * kKeys; at < end; at += kKeys) {
      alignas(64) float scores[kKeys][kTile];
      for (int half = 0; half < kKeys; half += kTile) {
        size_t stride;
        const bf16* block = sixteen(span, kv_head, at + half, keys, space.keys.get(), stride);
        TILE_ZERO(0);
        for (int d = 0; d < dim; d += kTileDepth) {
          TILE_LOAD(1, block + d, stride);
          TILE_LOAD(2, space.queries.get() + d * kTile, 64);
          TILE_DOT(0, 1, 2);
        }
        TILE_STORE(0, scores[half], 64);
      }
      weigh(scores, at, first_seen, last_seen, maximum, total, space);
      interleave(span, kv_head, at, values, space);
      for (int d = 0; d < dim; d += kTile) {
        TILE_LOAD(0, space.out.get() + d, sizeof(float) * dim);
        TILE_LOAD(1, space.weights, 64);
        TILE_LOAD(2, space.values.get() + d * kKeys, 64);
        TILE_DOT(0, 1, 2);
        TILE_STORE(0, space.out.get() + d, sizeof(float) * dim);
      }
    }
    alignas(64) float sums[kTile];
    _mm512_store_ps(sums, total);
    for (int c = 0; c < columns; ++c) {
      const int64_t query = (column + c) / group_;
      bf16* row = out + ((span.first + query) * heads + kv_head * group_ + (column + c) % group_) * dim;
      const __m512 factor = _mm512_set1_ps(1.0f / sums[c]);
      for (int d = 0; d < dim; d += kTileDepth) {
        const float* from_row = space.out.get() + c * dim + d;
        alignas(64) bf16 mixed[kTileDepth];
        _mm256_store_si256((__m256i*)mixed, narrow(_mm512_mul_ps(_mm512_loadu_ps(from_row), factor)));
        _mm256_store_si256((__m256i*)(mixed + kTile), narrow(_mm512_mul_ps(_mm512_loadu_ps(from_row + kTile), factor)));
        for (int i = 0; i < kTileDepth; i += 4) memcpy(row + d + true_dimension(i), mixed + i, 8);
      }
    }
  }

 private:
  // Scores become weights, bfloat16 in the order of a left tile; what was summed so far shrinks to the new maximum.
  void weigh(float scores[kKeys][kTile], int64_t at, __m512i first_seen, __m512i last_seen, __m512& maximum,
             __m512& total, AttentionSpace& space) const {
    const __m512 scale = _mm512_set1_ps(scale_);
    const int32_t start = static_cast<int32_t>(at);
    const bool all_seen = _mm512_cmpgt_epi32_mask(first_seen, _mm512_set1_epi32(start)) == 0 &&
                          _mm512_cmplt_epi32_mask(last_seen, _mm512_set1_epi32(start + kKeys)) == 0;
    __m512 best = maximum;
    for (int key = 0; key < kKeys; ++key) {
      __m512 score = _mm512_mul_ps(_mm512_load_ps(scores[key]), scale);
      if (!all_seen) {
        const __m512i position = _mm512_set1_epi32(start + key);
        const __mmask16 seen = _mm512_cmple_epi32_mask(first_seen, position) & _mm512_cmplt_epi32_mask(position, last_seen);
        score = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kHidden), score);
      }
      _mm512_store_ps(scores[key], score);
      best = _mm512_max_ps(best, score);
    }
    const __m512 shrink = exp2_fast(_mm512_sub_ps(maximum, best));
    const __mmask16 changed = _mm512_cmp_ps_mask(maximum, best, _CMP_NEQ_UQ);
    maximum = best;
    __m512i pairs[16];
    __m512 sum = _mm512_setzero_ps();
    for (int pair = 0; pair < kTile; ++pair) {
      const __m512 even = exp2_fast(_mm512_sub_ps(_mm512_load_ps(scores[2 * pair]), best));
      const __m512 odd = exp2_fast(_mm512_sub_ps(_mm512_load_ps(scores[2 * pair + 1]), best));
      sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
      pairs[pair] = _mm512_or_si512(_mm512_cvtepu16_epi32(narrow(even)),
                                    _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(odd)), 16));
    }
    total = _mm512_fmadd_ps(total, shrink, sum);
    transpose(pairs);
    for (int c = 0; c < kTile; ++c) _mm512_store_si512(space.weights + c * kTileDepth, pairs[c]);
    if (changed) {
      alignas(64) float factors[kTile];
      _mm512_store_ps(factors, shrink);
      for (int c = 0; c < kTile; ++c) {
        float* row = space.out.get() + c * cache_.head_dim;
        const __m512 factor = _mm512_set1_ps(factors[c]);
        for (int d = 0; d < cache_.head_dim; d += kTile) {
          _mm512_store_ps(row + d, _mm512_mul_ps(_mm512_load_ps(row + d), factor));
        }
      }
    }
  }

  // The values of 32 tokens as right tiles of 16 dimensions each. Neighbouring tokens are interleaved within 128 bits,
  // which leaves the dimensions of 32 in another order: true_dimension().
  void interleave(const Span& span, int kv_head, int64_t at, const bf16* values, AttentionSpace& space) const {
    const int dim = cache_.head_dim;
    for (int half = 0; half < kKeys; half += kTile) {
      size_t stride;
      const auto* block = reinterpret_cast<const uint8_t*>(
          sixteen(span, kv_head, at + half, values, space.keys.get() + kTile * dim, stride));
      for (int token = 0; token < kTile; token += 2) {
        const uint8_t *even = block + token * stride, *odd = even + stride;
        for (int d = 0; d < dim; d += kTileDepth) {
          const __m512i a = _mm512_loadu_si512(even + 2 * d), b = _mm512_loadu_si512(odd + 2 * d);
          bf16* tile = space.values.get() + d * kKeys + (half + token) * kTile;
          _mm512_store_si512(tile, _mm512_unpacklo_epi16(a, b));
          _mm512_store_si512(tile + kTile * kKeys, _mm512_unpackhi_epi16(a, b));
        }
      }
    }
  }

  // One head of 16 tokens from position `at`, a multiple of 16. Where blocks do not hold them in one piece they are
  // copied into `space`. stride: bytes from token to token.
  const bf16* sixteen(const Span& span, int kv_head, int64_t at, const bf16* cache, bf16* space, size_t& stride) const {
    const int size = cache_.block_size, dim = cache_.head_dim;
    const auto row = [&](int64_t position) {
      const int64_t index = position / size;
      const int64_t block = index < span.table_size ? span.table[index] : cache_.null_block;
      return cache + ((block * size + position % size) * cache_.kv_heads + kv_head) * dim;
    };
    if (size % kTile == 0) {
      stride = sizeof(bf16) * cache_.kv_heads * dim;
      return row(at);
    }
    for (int token = 0; token < kTile; ++token) memcpy(space + token * dim, row(at + token), sizeof(bf16) * dim);
    stride = sizeof(bf16) * dim;
    return space;
  }

  const CacheShape& cache_;
  const int group_, window_;
  const float scale_;
};

}  // namespace stepwire
