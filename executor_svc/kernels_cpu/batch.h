// A batch of rows around the forward pass: what it reads of the row state before, and what it leaves there after. The
// meaning of every column is that of StepInputs and RowState (executor_svc/device_step.py, executor_svc/buffers.py).
#pragma once

#include <cmath>
#include <vector>

#include "tiles.h"

namespace stepwire {

// Tokens [first, first + count) of the step, positions [start, start + count) of row *row.
struct Chunk {
  const int64_t* row;
  int64_t first, count, start;
};

// State by row; row `pad_row`, the last, is what padding reads and writes.
struct Rows {
  int64_t *lengths, *last_token;
  int32_t* dead;
  const int32_t* block_tables;
  int64_t table_size, pad_row, sink_block;
};

// rows: [num_rows], -1 pads. Where token_at is null every row decodes one token; else token_at, token_ids, positions:
// [num_tokens]; last_at: [num_rows]; decode_tokens, decode_at: [num_decodes]; chunks: [4, num_chunks], place in the
// batch, first, count, start. sampling: [num_sampling], places; null: all. Out: tokens, status: [num_rows].
struct Batch {
  const int64_t *rows, *token_at, *token_ids, *positions, *last_at, *sampling, *decode_tokens, *decode_at, *chunks;
  int64_t num_rows, num_tokens, num_decodes, num_chunks, num_sampling;
  int64_t *tokens, *status;
};

constexpr int64_t kFailed = 0, kFine = 1, kPadding = 2;

inline bool all_finite(const bf16* x, int size) {
  Floats sum = all(0.0f);
  for (int i = 0; i < size; i += 16) {
    sum = add(sum, widen(load_halves(x + i)));
  }
  return std::isfinite(sum_of(sum));
}

// A batch as the forward pass wants it. Memory only grows.
class Prepared {
 public:
  std::vector<int64_t> rows, tokens, positions, slots, decode_rows;
  std::vector<Chunk> chunks;

  void begin(const Rows& state, const Batch& batch, int block_size) {
    rows.clear();
    for (int64_t i = 0; i < batch.num_rows; ++i) {
      const int64_t row = batch.rows[i] < 0 ? state.pad_row : batch.rows[i];
      rows.push_back(state.dead[row] ? state.pad_row : row);
    }
    const bool mixed = batch.token_at != nullptr;
    const int64_t count = mixed ? batch.num_tokens : batch.num_rows;
    tokens.resize(count);
    positions.resize(count);
    slots.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = rows[mixed ? batch.token_at[i] : i];
      const bool is_known = mixed && batch.token_ids[i] >= 0, is_placed = mixed && batch.positions[i] >= 0;
      tokens[i] = is_known ? batch.token_ids[i] : state.last_token[row];
      const int64_t position = positions[i] = is_placed ? batch.positions[i] : state.lengths[row] - 1;
      const int64_t block =
          row == state.pad_row ? state.sink_block : state.block_tables[row * state.table_size + position / block_size];
      slots[i] = block * block_size + position % block_size;
    }
    chunks.clear();
    decode_rows.clear();
    if (!mixed) decode_rows = rows;
    for (int64_t i = 0; mixed && i < batch.num_decodes; ++i) decode_rows.push_back(rows[batch.decode_at[i]]);
    for (int64_t i = 0; mixed && i < batch.num_chunks; ++i) {
      const auto field = [&](int64_t which) { return batch.chunks[which * batch.num_chunks + i]; };
      chunks.push_back({&rows[field(0)], field(1), field(2), field(3)});
    }
  }

  // hidden: [tokens, size]. A row fails with any of its tokens.
  void set_status(const Rows& state, const Batch& batch, const bf16* hidden, int size) const {
    for (int64_t i = 0; i < batch.num_rows; ++i) batch.status[i] = rows[i] == state.pad_row ? kPadding : kFine;
    for (size_t i = 0; i < tokens.size(); ++i) {
      int64_t& status = batch.status[batch.token_at != nullptr ? batch.token_at[i] : i];
      if (status == kFine && !all_finite(hidden + i * size, size)) status = kFailed;
    }
    for (int64_t i = 0; i < batch.num_rows; ++i) {
      batch.tokens[i] = 0;
      state.dead[rows[i]] = batch.status[i] == kFailed;
    }
  }

  // Makes `token` the next input of the row at `place`.
  void commit(const Rows& state, const Batch& batch, int64_t place, int64_t token, bool is_finite) const {
    const int64_t row = rows[place];
    batch.tokens[place] = token;
    if (row == state.pad_row) return;
    if (!is_finite) batch.status[place] = kFailed;
    state.dead[row] = batch.status[place] == kFailed;
    state.last_token[row] = token;
    state.lengths[row] += 1;
  }
};

}  // namespace stepwire
