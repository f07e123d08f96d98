// One step of a decoder of Llama's family on the CPU: embedding, all layers, final norm; and the product with the head.
//
// Residuals, norms, rotary and softmax are float32; the inputs of products, keys and values are bfloat16. Weights are
// as weights.h says, products in products.h. One call is one run of a team of threads (threads.h); between phases the
// members meet at a barrier. Called from one thread at a time. No exceptions leave: a call answers 0, or 1 when memory or
// threads were lacking.

#include <cmath>
#include <exception>
#include <memory>
#include <vector>

#include "attention.h"
#include "batch.h"
#include "products.h"
#include "threads.h"

namespace stepwire {

// Up to this many rows each member computes the norms of all rows for itself, which is quicker than meeting. A multiple
// of the 32 rows that tiles read.
constexpr int kOwnRows = 64;

enum Part { kProducts, kAttention, kNorms, kHead, kParts };

struct Layer {
  Matrix qkv, output, gate_up, down;  // gate_up: panels hold 16 columns of gate, then the same 16 of up
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two: null where the model has none
  bf16 *keys, *values;                                    // see CacheShape (attention.h)
  int32_t window, reserved;
};

struct Shape {
  int32_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, block_size;
  int64_t null_block;
  float eps, scale;
};

struct Model {
  Shape shape;
  const Layer* layers;
  Matrix head;
  const float* final_norm;
  const float* rotary;      // [positions, 2, head_dim / 2]: cosines, sines
  const bf16* embedding;    // [vocab, hidden]
};

// A step's tokens, and what each attends to. block_tables: [rows, table_size], lengths: [rows], state by row. Decoding
// rows have one token each, token decode_index[i] of the step (null: token i), and attend to all of their length.
struct Step {
  const int64_t *token_ids, *positions, *slots;
  const int32_t* block_tables;
  const int64_t *lengths, *decode_rows, *decode_index;
  const Chunk* chunks;
  int64_t num_tokens, num_decodes, table_size, num_chunks;
  bf16* out;  // [num_tokens, hidden]
};

inline uint64_t ticks() { return __rdtsc(); }

// out = x / rms(x) * weight. size: a multiple of 16.
inline void normalise(const float* x, const float* weight, int size, float eps, bf16* out) {
  Floats squares = all(0.0f);
  for (int i = 0; i < size; i += 16) {
    const Floats v = load(x + i);
    squares = fma(v, v, squares);
  }
  const Floats factor = all(1.0f / std::sqrt(sum_of(squares) / size + eps));
  for (int i = 0; i < size; i += 16) {
    const Floats v = mul(mul(load(x + i), factor), load(weight + i));
    store_halves(out + i, narrow(v));
  }
}

inline Floats silu(Floats x) {
  // quotient() takes no larger divisor.
  const Floats power = min(mul(x, all(-1.44269504f)), all(126.0f));
  return quotient(x, add(all(1.0f), exp2_fast(power)));
}

inline int rounded(int64_t rows) { return static_cast<int>((rows + 31) / 32 * 32); }

struct Unit {
  Span span;
  int kv_head;
  int64_t column;
};

class Decoder {
 public:
  Decoder(const Model& model, int threads, const int* cpus)
      : model_(model), shape_(model.shape), team_(threads, cpus) {
    const Shape& s = shape_;
    layers_.assign(model.layers, model.layers + s.num_layers);
    const size_t deepest = std::max({s.hidden, s.intermediate, s.heads * s.head_dim});
    for (int i = 0; i < threads; ++i) members_.push_back(std::make_unique<Member>(s, deepest));
    cache_ = CacheShape{s.kv_heads, s.head_dim, s.block_size, s.null_block};
  }

  void forward(const Step& step) {
    const Shape& s = shape_;
    const int rows = static_cast<int>(step.num_tokens), padded = rounded(rows);
    residual_.grow(static_cast<size_t>(rows) * s.hidden);
    normed_.grow(static_cast<size_t>(padded) * s.hidden);
    queries_.grow(static_cast<size_t>(rows) * s.heads * s.head_dim);
    context_.grow(static_cast<size_t>(padded) * s.heads * s.head_dim);
    gated_.grow(static_cast<size_t>(padded) * s.intermediate);
    // The last chunk of a prompt sees most keys: what takes longest comes first.
    units_.clear();
    const auto table = [&](int64_t row) { return step.block_tables + row * step.table_size; };
    for (int64_t i = step.num_chunks - 1; i >= 0; --i) {
      const Chunk& chunk = step.chunks[i];
      add_units({table(*chunk.row), step.table_size, chunk.first, chunk.count, chunk.start});
    }
    for (int64_t i = 0; i < step.num_decodes; ++i) {
      const int64_t row = step.decode_rows[i], token = step.decode_index ? step.decode_index[i] : i;
      add_units({table(row), step.table_size, token, 1, step.lengths[row] - 1});
    }
    team_.run([&](int id) { forward(step, rows, *members_[id], id == 0); });
  }

  // A whole step whose sampling rows take their most likely token; the row state is the next step's afterwards.
  void run(const Rows& state, const Batch& batch) {
    const int hidden = shape_.hidden;
    Prepared& p = prepared_;
    p.begin(state, batch, shape_.block_size);
    const int64_t count = static_cast<int64_t>(p.tokens.size());
    hidden_.grow(static_cast<size_t>(count) * hidden);
    const bool mixed = batch.token_at != nullptr;
    forward({p.tokens.data(), p.positions.data(), p.slots.data(), state.block_tables, state.lengths,
             p.decode_rows.data(), mixed ? batch.decode_tokens : nullptr, p.chunks.data(), count,
             static_cast<int64_t>(p.decode_rows.size()), state.table_size, static_cast<int64_t>(p.chunks.size()),
             hidden_.get()});
    p.set_status(state, batch, hidden_.get(), hidden);
    const int sampling = static_cast<int>(batch.num_sampling);
    if (sampling == 0) return;
    last_.grow(static_cast<size_t>(sampling) * hidden);
    const auto place = [&](int i) { return batch.sampling != nullptr ? batch.sampling[i] : i; };
    for (int i = 0; i < sampling; ++i) {
      const int64_t token = mixed ? batch.last_at[place(i)] : place(i);
      memcpy(last_.get() + static_cast<int64_t>(i) * hidden, hidden_.get() + token * hidden, sizeof(bf16) * hidden);
    }
    chosen_.resize(sampling);
    is_finite_.resize(sampling);
    greedy(last_.get(), sampling, chosen_.data(), is_finite_.data());
    for (int i = 0; i < sampling; ++i) p.commit(state, batch, place(i), chosen_[i], is_finite_[i]);
  }

  void logits(const bf16* hidden, int rows, float* out) {
    const int vocab = shape_.vocab;
    multiply_head(hidden, rows, [&](Member&, int first, int count, int column, const float* x) {
      const int width = std::min(kPanel, vocab - column);
      for (int row = 0; row < count; ++row) {
        memcpy(out + static_cast<int64_t>(first + row) * vocab + column, x + row * kPanel, sizeof(float) * width);
      }
    });
  }

  // The most likely token of each row, of equal ones the least, and whether all of its logits are finite.
  void greedy(const bf16* hidden, int rows, int64_t* tokens, uint8_t* is_finite) {
    for (auto& member : members_) member->best.assign(rows, Best());
    multiply_head(hidden, rows, [&](Member& me, int first, int count, int column, const float* x) {
      const int real = std::min(kPanel, shape_.vocab - column);
      const int low = std::min(kTile, real), high = real - low;
      const uint32_t seen = real == kPanel ? ~0u : (1u << real) - 1;
      for (int row = 0; row < count; ++row) {
        const Floats a = load_first(x + row * kPanel, low, -INFINITY);
        const Floats b = load_first(x + row * kPanel + kTile, high, -INFINITY);
        Best& best = me.best[first + row];
        // Not finite: x - x is NaN, which no number equals.
        best.broken |= ((are_nan(sub(a, a)) | are_nan(sub(b, b)) << kTile) & seen) != 0;
        const float value = greatest_of(max(a, b));
        if (value < best.value || (value == best.value && column > best.token)) continue;
        const Floats found = all(value);
        const uint32_t where = are_equal(a, found) | are_equal(b, found) << kTile;
        if (where != 0) best = {value, column + __builtin_ctz(where), best.broken};
      }
    });
    for (int row = 0; row < rows; ++row) {
      Best all;
      for (const auto& member : members_) {
        const Best& own = member->best[row];
        const bool is_better = own.value > all.value || (own.value == all.value && own.token < all.token);
        all = {is_better ? own.value : all.value, is_better ? own.token : all.token, all.broken || own.broken};
      }
      tokens[row] = all.broken ? 0 : all.token;
      is_finite[row] = !all.broken;
    }
  }

  // Ticks of the time stamp counter by part, of member 0, since the last call.
  void take_spent(uint64_t* out) {
    for (int part = 0; part < kParts; ++part) {
      out[part] = spent_[part];
      spent_[part] = 0;
    }
  }

 private:
  struct Best {
    float value = -INFINITY;
    int token = INT32_MAX;
    bool broken = false;
  };

  struct Member {
    Member(const Shape& s, size_t deepest)
        : panels(2 * deepest / kTileDepth * kReadyBytes), normed(kOwnRows * s.hidden), one_head(s.head_dim),
          groups(deepest), space(s.head_dim) {}
    Buffer<uint8_t> panels;
    Buffer<bf16> normed, one_head;
    Buffer<float> head;
    Groups groups;
    std::vector<Best> best;
    AttentionSpace space;
  };

  void add_units(const Span& span) {
    const int group = shape_.heads / shape_.kv_heads;
    for (int64_t column = (span.count * group - 1) / kTile * kTile; column >= 0; column -= kTile) {
      for (int head = 0; head < shape_.kv_heads; ++head) units_.push_back({span, head, column});
    }
  }

  void forward(const Step& step, int rows, Member& me, bool first) {
    const Shape& s = shape_;
    uint64_t last = ticks();
    const auto spent = [&](Part part) {
      if (!first) return;
      const uint64_t now = ticks();
      spent_[part] += now - last;
      last = now;
    };
    tiles_begin();
    each(rows, [&](int row) {
      const bf16* from = model_.embedding + step.token_ids[row] * s.hidden;
      float* to = residual_.get() + static_cast<int64_t>(row) * s.hidden;
      for (int i = 0; i < s.hidden; i += 16) {
        store(to + i, widen(load_halves(from + i)));
      }
    });
    team_.barrier();
    for (const Layer& layer : layers_) {
      const bf16* x = norm(layer.input_norm, rows, me);
      spent(kNorms);
      multiply_heads(layer, step, x, rows, me);
      team_.barrier();
      spent(kProducts);
      const Attention attention(cache_, s.heads / s.kv_heads, layer.window, s.scale);
      each(static_cast<int>(units_.size()), [&](int index) {
        const Unit& unit = units_[index];
        attention.run(unit.span, unit.kv_head, unit.column, layer.keys, layer.values, queries_.get(), context_.get(),
                      me.space);
      });
      me.space.rows = 0;
      tiles_begin();
      team_.barrier();
      spent(kAttention);
      multiply_into_residual(layer.output, context_.get(), rows, me);
      team_.barrier();
      spent(kProducts);
      x = norm(layer.post_norm, rows, me);
      spent(kNorms);
      multiply(layer.gate_up, x, rows, me, [&](int at, int count, int column, const float* values) {
        const float* bias = layer.gate_up.bias;
        const Floats gate_bias = bias ? load(bias + column) : all(0.0f);
        const Floats up_bias = bias ? load(bias + column + kTile) : all(0.0f);
        for (int row = 0; row < count; ++row) {
          const Floats gate = add(load(values + row * kPanel), gate_bias);
          const Floats up = add(load(values + row * kPanel + kTile), up_bias);
          bf16* to = gated_.get() + static_cast<int64_t>(at + row) * s.intermediate + column / 2;
          store_halves(to, narrow(mul(silu(gate), up)));
        }
      });
      team_.barrier();
      multiply_into_residual(layer.down, gated_.get(), rows, me);
      team_.barrier();
      spent(kProducts);
    }
    each(rows, [&](int row) {
      const int64_t at = static_cast<int64_t>(row) * s.hidden;
      normalise(residual_.get() + at, model_.final_norm, s.hidden, s.eps, step.out + at);
    });
    spent(kNorms);
    tiles_end();
  }

  template <typename Use>
  void each(int total, const Use& use) {
    int begin, end;
    while (team_.next(total, begin, end)) {
      for (int i = begin; i < end; ++i) use(i);
    }
  }

  // Numbers below `total` that nobody else has, one after the other, then -1. `together` neighbours go to one member.
  class Taker {
   public:
    Taker(Team& team, int total, int together) : team_(team), total_(total / together), together_(together) {}

    int operator()() {
      if (at_ == end_) {
        if (!team_.next(total_, at_, end_)) return -1;
        at_ *= together_;
        end_ *= together_;
      }
      return at_++;
    }

   private:
    Team& team_;
    const int total_, together_;
    int at_ = 0, end_ = 0;
  };

  // use(first row, number of rows, first column, values[rows][32]) for every part of matrix * x.
  template <typename Use>
  void multiply(const Matrix& matrix, const bf16* x, int rows, Member& me, const Use& use, int together = 1) {
    me.groups.find(x, matrix.depth, rows, static_cast<Format>(matrix.format));
    Taker take(team_, num_turns(matrix, rows), together);
    multiply_panels(matrix, x, me.groups, rows, me.panels.get(), take,
                    [&](int index, int first, int count, const float* values) {
                      use(first, count, index * kPanel, values);
                    });
  }

  // use(member, first row, number of rows, first column, values[rows][32]) for every part of the head's product.
  template <typename Use>
  void multiply_head(const bf16* hidden, int rows, const Use& use) {
    head_in_.grow(static_cast<size_t>(rounded(rows)) * shape_.hidden);
    memcpy(head_in_.get(), hidden, sizeof(bf16) * rows * shape_.hidden);
    const uint64_t begin = ticks();
    team_.run([&](int id) {
      Member& me = *members_[id];
      tiles_begin();
      multiply(model_.head, head_in_.get(), rows, me, [&](int first, int count, int column, const float* x) {
        use(me, first, count, column, x);
      });
      tiles_end();
    });
    spent_[kHead] += ticks() - begin;
  }

  void multiply_into_residual(const Matrix& matrix, const bf16* x, int rows, Member& me) {
    const int hidden = shape_.hidden;
    multiply(matrix, x, rows, me, [&](int at, int count, int column, const float* values) {
      float* to = residual_.get() + static_cast<int64_t>(at) * hidden + column;
      const float* bias = matrix.bias ? matrix.bias + column : nullptr;
      if (column + kPanel > hidden) {
        for (int row = 0; row < count; ++row, to += hidden, values += kPanel) {
          for (int i = 0; i < hidden - column; ++i) to[i] += values[i] + (bias ? bias[i] : 0.0f);
        }
        return;
      }
      const Floats low = bias ? load(bias) : all(0.0f);
      const Floats high = bias ? load(bias + kTile) : all(0.0f);
      for (int row = 0; row < count; ++row, to += hidden, values += kPanel) {
        // The next rows of these columns are wanted when as many have been multiplied.
        _mm_prefetch(reinterpret_cast<const char*>(to + 2 * kTile * hidden), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(to + 2 * kTile * hidden + kTile), _MM_HINT_T0);
        const auto put = [&](int i, Floats own) {
          store(to + i, add(load(to + i), add(load(values + i), own)));
        };
        put(0, low);
        put(kTile, high);
      }
    });
  }

  // Every member returns with all rows in place.
  const bf16* norm(const float* weight, int rows, Member& me) {
    const int hidden = shape_.hidden;
    bf16* out = rows <= kOwnRows ? me.normed.get() : normed_.get();
    const auto one = [&](int row) {
      const int64_t at = static_cast<int64_t>(row) * hidden;
      normalise(residual_.get() + at, weight, hidden, shape_.eps, out + at);
    };
    if (rows <= kOwnRows) {
      for (int row = 0; row < rows; ++row) one(row);
    } else {
      each(rows, one);
      team_.barrier();
    }
    return out;
  }

  // Queries, keys and values, a head at a time, so that who multiplied a head can norm and rotate it without meeting
  // anyone. Keys and values go to their slots of the cache.
  void multiply_heads(const Layer& layer, const Step& step, const bf16* x, int rows, Member& me) {
    const Shape& s = shape_;
    const Matrix& matrix = layer.qkv;
    const int dim = s.head_dim;
    me.head.grow(static_cast<size_t>(rows) * dim);
    const auto use = [&](int first, int count, int column, const float* values) {
      const Floats low = matrix.bias ? load(matrix.bias + column) : all(0.0f);
      const Floats high = matrix.bias ? load(matrix.bias + column + kTile) : all(0.0f);
      float* const head = me.head.get() + static_cast<int64_t>(first) * dim;
      float* to = head + column % dim;
      for (int row = 0; row < count; ++row, to += dim, values += kPanel) {
        store(to, add(load(values), low));
        store(to + kTile, add(load(values + kTile), high));
      }
      if (column % dim + kPanel < dim) return;
      for (int row = 0; row < count; ++row) {
        place_head(layer, step, first + row, column / dim, head + static_cast<int64_t>(row) * dim, me);
      }
    };
    multiply(matrix, x, rows, me, use, dim / kPanel);
  }

  void place_head(const Layer& layer, const Step& step, int row, int head, const float* from, Member& me) {
    const Shape& s = shape_;
    const float* turn = model_.rotary + step.positions[row] * s.head_dim;
    const int kv_head = head - s.heads, value_head = kv_head - s.kv_heads;
    if (kv_head < 0) {
      const int64_t at = static_cast<int64_t>(row) * s.heads + head;
      rotate_head(from, turn, layer.q_norm, queries_.get() + at * s.head_dim);
    } else if (value_head < 0) {
      rotate_head(from, turn, layer.k_norm, me.one_head.get());
      cache_.put_key(me.one_head.get(), layer.keys, step.slots[row], kv_head);
    } else {
      bf16* to = me.one_head.get();
      for (int i = 0; i < s.head_dim; i += 16) store_halves(to + i, narrow(load(from + i)));
      cache_.put_value(to, layer.values, step.slots[row], value_head);
    }
  }

  void rotate_head(const float* from, const float* turn, const float* weight, bf16* to) const {
    const int half = shape_.head_dim / 2;
    Floats factor = all(1.0f);
    if (weight != nullptr) {
      Floats squares = all(0.0f);
      for (int i = 0; i < 2 * half; i += 16) {
        const Floats v = load(from + i);
        squares = fma(v, v, squares);
      }
      factor = all(1.0f / std::sqrt(sum_of(squares) / (2 * half) + shape_.eps));
    }
    for (int i = 0; i < half; i += 16) {
      Floats a = load(from + i), b = load(from + half + i);
      if (weight != nullptr) {
        a = mul(mul(a, factor), load(weight + i));
        b = mul(mul(b, factor), load(weight + half + i));
      }
      const Floats cosine = load(turn + i), sine = load(turn + half + i);
      const Floats first = fms(a, cosine, mul(b, sine));
      const Floats second = fma(b, cosine, mul(a, sine));
      store_halves(to + i, narrow(first));
      store_halves(to + half + i, narrow(second));
    }
  }

  const Model model_;
  const Shape shape_;
  std::vector<Layer> layers_;
  CacheShape cache_;
  Team team_;
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<Unit> units_;
  Prepared prepared_;
  std::vector<int64_t> chosen_;
  std::vector<uint8_t> is_finite_;
  Buffer<float> residual_;
  Buffer<bf16> normed_, queries_, context_, gated_, head_in_, hidden_, last_;
  uint64_t spent_[kParts] = {};
};

}  // namespace stepwire

#if defined(__AMX_BF16__) && !defined(STEPWIRE_PORTABLE_TILES)
// The system gives a process the tile registers when it asks (Linux, Documentation/arch/x86/xstate.rst).
static bool ask_for_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#else
static bool ask_for_tiles() { return true; }
#endif

template <typename Work>
static int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception&) {  // std::bad_alloc, or std::system_error of a thread
    return 1;
  }
}

#define API __attribute__((visibility("default")))

extern "C" {

// 0: this processor or system does not let the code run; 1: AVX2; 2: AVX-512; 3: that and tile registers.
API int stepwire_ready() {
  if (!ask_for_tiles()) return 0;
  return stepwire::kHasTiles ? 3 : stepwire::kHasAvx512 ? 2 : 1;
}

// cpus: the processor each member of the team keeps to, but for the first, which is whoever calls; null: none does. Answers
// null where memory or threads were lacking. What `model` points to must outlive the decoder.
API void* stepwire_create(const stepwire::Model* model, int threads, const int* cpus) {
  stepwire::Decoder* made = nullptr;
  guarded([&] { made = new stepwire::Decoder(*model, threads, cpus); });
  return made;
}

API void stepwire_destroy(void* decoder) { delete static_cast<stepwire::Decoder*>(decoder); }

API int stepwire_forward(void* decoder, const stepwire::Step* step) {
  return guarded([&] { static_cast<stepwire::Decoder*>(decoder)->forward(*step); });
}

API int stepwire_run(void* decoder, const stepwire::Rows* rows, const stepwire::Batch* batch) {
  return guarded([&] { static_cast<stepwire::Decoder*>(decoder)->run(*rows, *batch); });
}

// hidden: bfloat16 [rows, hidden]; out: float [rows, vocab].
API int stepwire_logits(void* decoder, const uint16_t* hidden, int rows, float* out) {
  return guarded([&] { static_cast<stepwire::Decoder*>(decoder)->logits(hidden, rows, out); });
}

// tokens: int64 [rows]; is_finite: uint8 [rows].
API int stepwire_greedy(void* decoder, const uint16_t* hidden, int rows, int64_t* tokens, uint8_t* is_finite) {
  return guarded([&] { static_cast<stepwire::Decoder*>(decoder)->greedy(hidden, rows, tokens, is_finite); });
}

API uint64_t stepwire_ticks() { return stepwire::ticks(); }

// Ticks of products (rotation included), attention, norms and head since the last call: uint64 [4].
API void stepwire_spent(void* decoder, uint64_t* out) { static_cast<stepwire::Decoder*>(decoder)->take_spent(out); }
}
