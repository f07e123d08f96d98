// Runs every format, prefill and decode, whole and partial blocks, on small shapes, call by call and as whole greedy
// steps; a sanitiser looks on.

#include "step.cpp"

#include <cstdio>

using namespace stepwire;

struct Rng {
  uint32_t state = 1;
  uint32_t next() { return state = state * 1664525u + 1013904223u; }
};

// Exactly as long as the kernels may read, on the heap, so that one byte more is seen.
struct Weights {
  std::unique_ptr<uint8_t[], decltype(&free)> data{nullptr, &free};
  std::vector<float> bias;
  Matrix matrix{};

  void make(Format format, int columns, int depth, Rng& rng) {
    matrix.format = format;
    matrix.columns = columns;
    matrix.depth = depth;
    const size_t bytes = matrix.num_panels() * matrix.panel_bytes();
    data.reset(static_cast<uint8_t*>(aligned_alloc(64, bytes)));
    for (size_t i = 0; i < bytes; i += 2) {
      const uint16_t value = format == kDense ? 0x3c00 + rng.next() % 64 : 0x1400;  // small numbers in either meaning
      memcpy(data.get() + i, &value, 2);
    }
    bias.assign(matrix.num_panels() * kPanel, 0.5f);
    matrix.bias = bias.data();
    matrix.data = data.get();
  }
};

static void fail(const char* what, Format format, int count) {
  fprintf(stderr, "%s: format %d, %d tokens\n", what, format, count);
  exit(1);
}

// Whole greedy steps of `num_rows` rows of state and one more that pads: a mixed step, then decoding, with rows that are
// padding, dead, or do not sample.
static void run_whole(void* decoder, Format format, int num_blocks, int64_t width) {
  const int64_t num_rows = 3;
  std::vector<int32_t> tables((num_rows + 1) * width, num_blocks), dead(num_rows + 1);
  for (int64_t i = 0; i < num_rows * width; ++i) tables[i] = static_cast<int32_t>(i);
  std::vector<int64_t> lengths{40, 1, 9, 1}, last{7, 1, 8, 1};
  const Rows state{lengths.data(), last.data(), dead.data(), tables.data(), width, num_rows, num_blocks + 1};

  // Row 0 decodes, the next place is padding, row 1 reads 37 tokens of its prompt and samples, row 2 has one token that
  // the host knows and does not sample.
  const std::vector<int64_t> rows{0, -1, 1, 2};
  std::vector<int64_t> token_at{0, 1}, ids{-1, -1}, positions{-1, -1};
  const int64_t prompt = 37;
  for (int64_t i = 0; i < prompt; ++i) {
    token_at.push_back(2);
    ids.push_back(i % 5);
    positions.push_back(i);
  }
  lengths[1] = prompt;
  token_at.push_back(3);
  ids.push_back(4);
  positions.push_back(8);
  const std::vector<int64_t> last_at{0, 1, 1 + prompt, 2 + prompt}, sampling{0, 2}, decode_tokens{0, 1}, decode_at{0, 1};
  const std::vector<int64_t> chunks{2, 3, 2, 2 + prompt, prompt, 1, 0, 8};  // [4, 2]: place, first, count, start
  std::vector<int64_t> tokens(rows.size(), -1), status(rows.size(), -1);
  Batch batch{};
  batch.rows = rows.data();
  batch.num_rows = rows.size();
  batch.tokens = tokens.data();
  batch.status = status.data();
  batch.token_at = token_at.data();
  batch.token_ids = ids.data();
  batch.positions = positions.data();
  batch.last_at = last_at.data();
  batch.sampling = sampling.data();
  batch.decode_tokens = decode_tokens.data();
  batch.decode_at = decode_at.data();
  batch.chunks = chunks.data();
  batch.num_tokens = token_at.size();
  batch.num_decodes = decode_tokens.size();
  batch.num_chunks = 2;
  batch.num_sampling = sampling.size();
  if (stepwire_run(decoder, &state, &batch)) fail("no memory", format, 40);
  if (lengths != std::vector<int64_t>{41, prompt + 1, 9, 1}) fail("lengths of a mixed step", format, 40);
  if (status != std::vector<int64_t>{kFine, kPadding, kFine, kFine}) fail("status of a mixed step", format, 40);

  for (const bool samples : {true, false}) {
    Batch decode{};
    decode.rows = rows.data();
    decode.num_rows = rows.size();
    decode.num_sampling = samples ? rows.size() : 0;
    decode.tokens = tokens.data();
    decode.status = status.data();
    dead[2] = 1;
    if (stepwire_run(decoder, &state, &decode)) fail("no memory", format, 4);
    if (status != std::vector<int64_t>{kFine, kPadding, kFine, kPadding}) fail("status of a step", format, 4);
    if (lengths != std::vector<int64_t>{42, prompt + 2, 9, 1}) fail("lengths of a step", format, 4);
  }
}

static void run(Format format, int block_size, int window, int threads) {
  Rng rng;
  const bool large = kFactorBytes[format] > 0;
  const int hidden = large ? 256 : 64, heads = large ? 8 : 6, kv_heads = 2, dim = 32, intermediate = large ? 512 : 96;
  const int vocab = 70, layers = 2, blocks = 70;
  const int num_positions = 128;
  std::vector<Weights> weights(4 * layers + 1);
  std::vector<Layer> all(layers);
  std::vector<float> ones(intermediate, 1.0f), rotary(num_positions * dim, 0.5f);
  const size_t cache_size = static_cast<size_t>(blocks + 2) * block_size * kv_heads * dim;
  std::vector<std::vector<bf16>> caches(2 * layers, std::vector<bf16>(cache_size, 0x3f80));
  for (int i = 0; i < layers; ++i) {
    Weights* own = &weights[4 * i];
    own[0].make(format, (heads + 2 * kv_heads) * dim, hidden, rng);
    own[1].make(format, hidden, heads * dim, rng);
    own[2].make(format, 2 * intermediate, hidden, rng);
    own[3].make(format, hidden, intermediate, rng);
    all[i] = Layer{own[0].matrix, own[1].matrix, own[2].matrix, own[3].matrix, ones.data(), ones.data(), ones.data(),
                   ones.data(), caches[2 * i].data(), caches[2 * i + 1].data(), window, 0};
  }
  weights.back().make(format, vocab, hidden, rng);
  std::vector<bf16> embedding(vocab * hidden, 0x3f00);
  Model model{{layers, hidden, heads, kv_heads, dim, intermediate, vocab, block_size, blocks, 1e-5f, 0.2f},
              all.data(), weights.back().matrix, ones.data(), rotary.data(), embedding.data()};
  void* decoder = stepwire_create(&model, threads, nullptr);

  // Three rows with blocks of their own: a prompt, two that decode.
  const int64_t width = num_positions / block_size + 1;
  std::vector<int32_t> tables(3 * width);
  for (int64_t i = 0; i < 3 * width; ++i) tables[i] = static_cast<int32_t>(i);
  const std::vector<int64_t> lengths{0, 50, 50}, rows{0, 1, 2};
  for (const int count : {1, 2, 4, 5, 16, 17, 33, 70, 110}) {
    const int decodes = count > 16 ? 2 : count > 1 ? 1 : 0, prefill = count - decodes;
    std::vector<int64_t> ids(count, 3), positions(count), slots(count), index(decodes);
    for (int i = 0; i < count; ++i) {
      positions[i] = i < prefill ? i + 5 : 49;
      const int32_t* table = tables.data() + (i < prefill ? 0 : i - prefill + 1) * width;
      slots[i] = table[positions[i] / block_size] * block_size + positions[i] % block_size;
    }
    for (int i = 0; i < decodes; ++i) index[i] = prefill + i;
    Chunk chunk{rows.data(), 0, prefill, 5};
    std::vector<bf16> out(count * hidden);
    Step step{ids.data(), positions.data(), slots.data(), tables.data(), lengths.data(), rows.data() + 1, index.data(),
              &chunk, count, decodes, width, 1, out.data()};
    stepwire_forward(decoder, &step);
    std::vector<float> logits(count * vocab);
    stepwire_logits(decoder, out.data(), count, logits.data());
    std::vector<int64_t> tokens(count);
    std::vector<uint8_t> is_finite(count);
    stepwire_greedy(decoder, out.data(), count, tokens.data(), is_finite.data());
    for (float value : logits) {
      if (!std::isfinite(value)) fail("not finite", format, count);
    }
  }
  run_whole(decoder, format, blocks, width);
  uint64_t spent[kParts];
  stepwire_spent(decoder, spent);
  stepwire_destroy(decoder);
}

int main() {
  for (Format format : {kDense, kInt8, kInt4, kInt40, kInt4K, kInt5K, kInt6K}) {
    run(format, 16, 0, 2);
    run(format, 6, 20, 1);
  }
  run(kInt4, 32, 7, 4);
  return 0;
}
