// Causal attention over the paged cache, for decoding rows and for chunks of prompts alike.
//
// The unit of work is one key/value head and up to 16 of the (query, head) pairs that share it, one per row of the tiles:
// with the keys of 16 tokens as they lie in the cache, one tile product gives 16 x 16 scores. Keys are taken 128 at a time
// from position 0 with a running maximum (arXiv 1805.02867), so a query's result depends on its position alone, never
// on chunks or company.
#pragma once

#include <algorithm>

#include "tiles.h"

namespace stepwire {

constexpr int kKeys = 128;
// So many groups of keys a decoding row scores before it weighs them: fewer pauses for the memory it waits for.
constexpr int kGroups = 4;
// Positions that are not seen, and the least running maximum: far apart, so that hidden scores weigh exactly nothing.
constexpr float kHidden = -1e30f, kLeast = -1e20f;

// Where a token's keys and values lie in a layer's cache, [blocks, block_size, kv_heads, head_dim] numbers for both.
//
// Blocks of a multiple of 16 tokens are in the order of tiles, so that a product reads them as they are: a block is
// [kv_heads][block_size / 16] pieces of 16 tokens; a piece of keys [head_dim / 2][16 tokens][2 dimensions], one of values
// [head_dim / 16][8 pairs of tokens][16 dimensions][2 tokens]. Other blocks are [block_size][kv_heads][head_dim], and
// their tokens are put in that order when they are read. executor_svc/kernels_cpu/cache.py knows the same.
struct CacheShape {
  int kv_heads, head_dim, block_size;
  int64_t null_block;

  bool is_tiled() const { return block_size % kTile == 0; }

  // Of one head of the 16 tokens from `slot` on, a multiple of 16.
  int64_t piece(int64_t slot, int head) const {
    return (slot / block_size * kv_heads + head) * block_size * head_dim + slot % block_size * head_dim;
  }
  // Of one head of one token, in blocks that are not tiled.
  int64_t token(int64_t slot, int head) const { return (slot * kv_heads + head) * head_dim; }

  void put_key(const bf16* from, bf16* cache, int64_t slot, int head) const {
    if (!is_tiled()) return void(memcpy(cache + token(slot, head), from, sizeof(bf16) * head_dim));
    into_keys(from, static_cast<int>(slot % kTile), cache + piece(slot / kTile * kTile, head));
  }
  void put_value(const bf16* from, bf16* cache, int64_t slot, int head) const {
    if (!is_tiled()) return void(memcpy(cache + token(slot, head), from, sizeof(bf16) * head_dim));
    into_values(from, static_cast<int>(slot % kTile), cache + piece(slot / kTile * kTile, head));
  }

  // One token into its place of a piece.
  void into_keys(const bf16* from, int at, bf16* piece) const {
    for (int d = 0; d < head_dim; d += 2) memcpy(piece + d * kTile + 2 * at, from + d, 4);
  }
  void into_values(const bf16* from, int at, bf16* piece) const {
    // The token between them is another's, who may be writing it now.
    for (int d = 0; d < head_dim; d += kTile) {
      store_every_second(piece + d * kTile + at / 2 * 2 * kTile, at % 2, load_halves(from + d));
    }
  }
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
      : queries(head_dim * kTile), piece(2 * kTile * head_dim), out(kTile * head_dim) {}
  Buffer<bf16> queries, piece;
  Buffer<float> out;
  // [groups][keys / 16][rows][16 keys]
  alignas(64) float scores[kGroups][kKeys / kTile][kTile][kTile];
  alignas(64) bf16 weights[kGroups][kKeys / kTile][kTile][kTile];
  float shrinks[kGroups][kTile];  // what a group's maxima do to the sums before it
  int rows = 0;  // that the tile registers are set up for
};

inline Floats exp2_fast(Floats x) {
  const Floats whole = nearest_whole(x);
  const Floats f = sub(x, whole);
  // Taylor's series of 2^f around 0, |f| <= 1/2: relative error below 2e-7.
  Floats sum = all(1.5403530e-4f);
  for (float factor : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
    sum = fma(sum, f, all(factor));
  }
  return scaled(sum, whole);
}

// For weights that become bfloat16, which rounds by 2e-3: relative error below 1.1e-4.
inline Floats exp2_coarse(Floats x) {
  const Floats f = above_floor(x);
  Floats sum = all(7.8024517e-02f);
  for (float factor : {2.2606716e-01f, 6.9583354e-01f, 0.99992522f}) sum = fma(sum, f, all(factor));
  return scaled(sum, x);
}

class Attention {
 public:
  Attention(const CacheShape& cache, int group, int window, float scale)
      : cache_(cache), group_(group), window_(window), scale_(scale * 1.44269504f) {}

  // Columns [column, column + 16) of `span` for one key/value head. queries, out: [tokens, heads, head_dim] of the step.
  // Leaves the tile registers set up for itself, as `space` knows.
  void run(const Span& span, int kv_head, int64_t column, const bf16* keys, const bf16* values, const bf16* queries,
           bf16* out, AttentionSpace& space) const {
    const int dim = cache_.head_dim, heads = cache_.kv_heads * group_;
    const int columns = static_cast<int>(std::min<int64_t>(kTile, span.count * group_ - column));
    const auto place = [&](int c) {
      return ((span.first + (column + c) / group_) * heads + kv_head * group_ + (column + c) % group_) * dim;
    };
    set_up(columns, space);
    int64_t from[kTile], to[kTile];
    for (int c = 0; c < columns; ++c) {
      to[c] = span.start + (column + c) / group_ + 1;
      from[c] = window_ ? std::max<int64_t>(0, to[c] - window_) : 0;
      memcpy(space.queries.get() + c * dim, queries + place(c), sizeof(bf16) * dim);
    }
    // Of one row the first sees least, the last most.
    const int64_t begin = from[0] / (2 * kTile) * (2 * kTile), end = to[columns - 1];
    float most[kTile];
    Floats totals[kTile];
    for (int c = 0; c < columns; ++c) {
      most[c] = kLeast;
      totals[c] = all(0.0f);
    }
    const int most_groups = span.count == 1 ? kGroups : 1;  // a prompt's chunk has its keys near, and little room
    for (int64_t at = begin / kKeys * kKeys; at < end;) {
      Keys groups[kGroups];
      int count = 0;
      for (; count < most_groups && at < end; ++count, at += kKeys) {
        const int64_t first = std::max(at, begin), size = std::min(at + kKeys, end) - first;
        groups[count] = {first, static_cast<int>((size + 2 * kTile - 1) / (2 * kTile) * 2), count, first > begin};
        if constexpr (!kHasTiles) {
          fetch(span, kv_head, groups[count], keys);
          fetch(span, kv_head, groups[count], values);
        }
        score(span, kv_head, groups[count], keys, space);
      }
      for (int i = 0; i < count; ++i) {
        float before[kTile];
        memcpy(before, most, sizeof(before));
        // All first: the next steps of one column would fill the processor's window while its maximum is found.
        for (int c = 0; c < columns; ++c) most[c] = greatest(c, groups[i], from[c], to[c], most[c], space);
        for (int c = 0; c < columns; ++c) weigh(c, groups[i], before[c], most[c], totals[c], space);
      }
      for (int i = 0; i < count; ++i) {
        if (groups[i].goes_on) shrink(columns, space.shrinks[i], space.out.get());
        mix(span, kv_head, groups[i], values, space);
      }
    }
    for (int c = 0; c < columns; ++c) {
      const Floats factor = all(1.0f / sum_of(totals[c]));
      for (int d = 0; d < dim; d += kTile) {
        const Floats mixed = load(space.out.get() + c * dim + d);
        store_halves(out + place(c) + d, narrow(mul(mixed, factor)));
      }
    }
  }

 private:
  // Up to 128 keys; place: of the scratch.
  struct Keys {
    int64_t first;
    int pieces, place;
    bool goes_on;  // others were before
  };

  // Registers 0 and 1: sums [rows][16]; 2: queries [rows][32 dimensions]; 3, 4: keys; 5: weights [rows][16 keys]; 6, 7:
  // values of 16 keys.
  static void set_up(int rows, AttentionSpace& space) {
    if (space.rows == rows) return;
    space.rows = rows;
    TileConfig config;
    for (int t : {0, 1, 2, 5}) config.rows[t] = static_cast<uint8_t>(rows);
    config.rows[6] = config.rows[7] = kTile / 2;
    config.row_bytes[5] = sizeof(bf16) * kTile;
    tiles_begin(config);
  }

  // Asks for all of a group's pieces at once: products of few rows without tiles have too little under way to hide how
  // long each takes to come.
  void fetch(const Span& span, int kv_head, const Keys& group, const bf16* cache) const {
    for (int piece = 0; cache_.is_tiled() && piece < group.pieces; ++piece) {
      const bf16* from = sixteen(span, kv_head, group.first + piece * kTile, cache, nullptr, &CacheShape::into_keys);
      for (int i = 0; i < kTile * cache_.head_dim; i += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
      }
    }
  }

  void score(const Span& span, int kv_head, const Keys& group, const bf16* keys, AttentionSpace& space) const {
    const int dim = cache_.head_dim;
    for (int piece = 0; piece < group.pieces; piece += 2) {
      const int64_t at = group.first + piece * kTile;
      const bf16* low = sixteen(span, kv_head, at, keys, space.piece.get(), &CacheShape::into_keys);
      const bf16* high =
          sixteen(span, kv_head, at + kTile, keys, space.piece.get() + kTile * dim, &CacheShape::into_keys);
      TILE_ZERO(0);
      TILE_ZERO(1);
      for (int d = 0; d < dim; d += kTileDepth) {
        TILE_LOAD(2, space.queries.get() + d, sizeof(bf16) * dim);
        TILE_LOAD(3, low + d * kTile, 64);
        TILE_DOT(0, 2, 3);
        TILE_LOAD(4, high + d * kTile, 64);
        TILE_DOT(1, 2, 4);
      }
      TILE_STORE(0, space.scores[group.place][piece], 64);
      TILE_STORE(1, space.scores[group.place][piece + 1], 64);
    }
  }

  // Of one query's scores and of those before, `most`. Scores of positions outside [from, to) are hidden on the way.
  float greatest(int c, const Keys& group, int64_t from, int64_t to, float most, AttentionSpace& space) const {
    auto& scores = space.scores[group.place];
    Floats best = all(most);
    if (from <= group.first && to >= group.first + group.pieces * kTile) {
      for (int piece = 0; piece < group.pieces; ++piece) best = max(best, load(scores[piece][c]));
      return greatest_of(best);
    }
    // Distances from the first position that is seen: those before it are large numbers without a sign.
    Ints away = add(from_zero(), all_ints(static_cast<int>(group.first - from)));
    const Ints size = all_ints(static_cast<int>(to - from));
    const Floats hidden = all(kHidden);
    for (int piece = 0; piece < group.pieces; ++piece) {
      const Floats own = where_below(away, size, load(scores[piece][c]), hidden);
      store(scores[piece][c], own);
      best = max(best, own);
      away = add(away, all_ints(kTile));
    }
    return greatest_of(best);
  }

  // One query's scores become weights; the sum of those before shrinks from the maximum before to this one.
  void weigh(int c, const Keys& group, float before, float most, Floats& total, AttentionSpace& space) const {
    const Floats scale = all(scale_), offset = all(most * scale_);
    Floats sum = all(0.0f);
    for (int piece = 0; piece < group.pieces; ++piece) {
      const Floats score = load(space.scores[group.place][piece][c]);
      const Floats weight = exp2_coarse(fms(score, scale, offset));
      sum = add(sum, weight);
      store_halves(space.weights[group.place][piece][c], narrow(weight));
    }
    float& shrink = space.shrinks[group.place][c];
    shrink = 1.0f;
    if (group.goes_on && before != most) {
      const Floats factor = exp2_fast(all((before - most) * scale_));
      total = mul(total, factor);
      shrink = first_of(factor);
    }
    total = add(total, sum);
  }

  void shrink(int columns, const float* shrinks, float* out) const {
    for (int c = 0; c < columns; ++c) {
      if (shrinks[c] == 1.0f) continue;
      float* row = out + c * cache_.head_dim;
      for (int d = 0; d < cache_.head_dim; d += kTile) {
        store(row + d, mul(load(row + d), all(shrinks[c])));
      }
    }
  }

  // Adds the values by their weights to what was summed so far, if anything.
  void mix(const Span& span, int kv_head, const Keys& group, const bf16* values, AttentionSpace& space) const {
    const int dim = cache_.head_dim;
    const size_t stride = sizeof(float) * dim;
    const auto piece_of = [&](int piece, bf16* own) {
      return sixteen(span, kv_head, group.first + piece * kTile, values, own, &CacheShape::into_values);
    };
    const bf16* found[kKeys / kTile];
    if (cache_.is_tiled()) {
      for (int piece = 0; piece < group.pieces; ++piece) found[piece] = piece_of(piece, nullptr);
    }
    for (int d = 0; d < dim; d += 2 * kTile) {
      float* out = space.out.get() + d;
      if (group.goes_on) {
        TILE_LOAD(0, out, stride);
        TILE_LOAD(1, out + kTile, stride);
      } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
      }
      for (int piece = 0; piece < group.pieces; ++piece) {
        if (!cache_.is_tiled()) found[piece] = piece_of(piece, space.piece.get());
        TILE_LOAD(5, space.weights[group.place][piece], sizeof(bf16) * kTile);
        TILE_LOAD(6, found[piece] + d * kTile, 64);
        TILE_DOT(0, 5, 6);
        TILE_LOAD(7, found[piece] + (d + kTile) * kTile, 64);
        TILE_DOT(1, 5, 7);
      }
      TILE_STORE(0, out, stride);
      TILE_STORE(1, out + kTile, stride);
    }
  }

  // The piece of one head's 16 tokens from position `at`, a multiple of 16; put together in `space` where blocks are not
  // tiled.
  template <typename Into>
  const bf16* sixteen(const Span& span, int kv_head, int64_t at, const bf16* cache, bf16* space, const Into& into) const {
    const uint32_t size = static_cast<uint32_t>(cache_.block_size);
    const auto slot = [&](uint32_t position) {
      const uint32_t index = position / size;
      const int64_t block = index < span.table_size ? span.table[index] : cache_.null_block;
      return block * size + position % size;
    };
    if (cache_.is_tiled()) return cache + cache_.piece(slot(static_cast<uint32_t>(at)), kv_head);
    for (int token = 0; token < kTile; ++token) {
      (cache_.*into)(cache + cache_.token(slot(static_cast<uint32_t>(at + token)), kv_head), token, space);
    }
    return space;
  }

  const CacheShape& cache_;
  const int group_, window_;
  const float scale_;
};

}  // namespace stepwire
