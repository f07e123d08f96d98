// In the place of the compiler's own: that, and the instructions of AVX-512 that the kernels use written out in plain C++,
// after Intel's intrinsics guide, so that what is built for AVX-512 runs on a processor with AVX2 alone. Slow.
#pragma once

#include_next <immintrin.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>

#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1

namespace emulated {

// The 64 bytes of a register as numbers of one kind.
template <typename T>
struct Lanes {
  T x[64 / sizeof(T)];
};

template <typename To, typename From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// One number after the other: out[i] = one(a[i], b[i], ...).
template <typename T, typename Register, typename One, typename... Registers>
inline Register each(const One& one, const Register& first, const Registers&... others) {
  auto out = bits<Lanes<T>>(first);
  for (size_t i = 0; i < std::size(out.x); ++i) out.x[i] = one(out.x[i], bits<Lanes<T>>(others).x[i]...);
  return bits<Register>(out);
}

// A bit for each number that holds(a[i], b[i]).
template <typename T, typename Register, typename Holds>
inline uint16_t mask_of(const Register& a, const Register& b, const Holds& holds) {
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint16_t>(holds(bits<Lanes<T>>(a).x[i], bits<Lanes<T>>(b).x[i]) << i);
  return mask;
}

// a's numbers, of b where the mask has a bit.
template <typename T, typename Register>
inline Register blend(uint32_t mask, const Register& a, const Register& b) {
  auto out = bits<Lanes<T>>(a);
  for (size_t i = 0; i < std::size(out.x); ++i) {
    if (mask >> i & 1) out.x[i] = bits<Lanes<T>>(b).x[i];
  }
  return bits<Register>(out);
}

template <typename T, typename Register>
inline Register filled(T x) {
  Lanes<T> out;
  for (T& one : out.x) one = x;
  return bits<Register>(out);
}

template <typename T, typename Register, typename Join>
inline T joined(const Register& a, const Join& join) {
  const auto all = bits<Lanes<T>>(a);
  T out = all.x[0];
  for (size_t i = 1; i < std::size(all.x); ++i) out = join(out, all.x[i]);
  return out;
}

template <typename Register>
inline Register loaded(const void* from) {
  Register out;
  memcpy(&out, from, sizeof(out));
  return out;
}

template <typename Register>
inline void stored(void* to, const Register& x) {
  memcpy(to, &x, sizeof(x));
}

inline float from_bfloat16(uint16_t half) { return bits<float>(static_cast<uint32_t>(half) << 16); }

inline uint16_t to_bfloat16(float x) {
  const auto all = bits<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>(all >> 16 | 0x40);
  return static_cast<uint16_t>((all + 0x7fff + (all >> 16 & 1)) >> 16);
}

inline __m512 floats(const float (&x)[16]) { return loaded<__m512>(x); }
inline __m512i ints(const int (&x)[16]) { return loaded<__m512i>(x); }

inline __m512i widened(__m256i halves) {
  const auto from = bits<std::array<uint16_t, 16>>(halves);
  int out[16];
  for (int i = 0; i < 16; ++i) out[i] = from[i];
  return ints(out);
}

inline __m512i widened_bytes(__m128i bytes) {
  const auto from = bits<std::array<int8_t, 16>>(bytes);
  int out[16];
  for (int i = 0; i < 16; ++i) out[i] = from[i];
  return ints(out);
}

inline __m512 widened_float16(__m256i halves) {
  float out[16];
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
  _mm256_storeu_ps(out + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
  return floats(out);
}

inline __m256i narrowed(__m512 x) {
  std::array<uint16_t, 16> out;
  for (int i = 0; i < 16; ++i) out[i] = to_bfloat16(bits<Lanes<float>>(x).x[i]);
  return bits<__m256i>(out);
}

inline __m128i lowest_bytes(__m512i x) {
  std::array<uint8_t, 16> out;
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(bits<Lanes<int>>(x).x[i]);
  return bits<__m128i>(out);
}

inline __m512 to_floats(__m512i x) {
  float out[16];
  for (int i = 0; i < 16; ++i) out[i] = static_cast<float>(bits<Lanes<int>>(x).x[i]);
  return floats(out);
}

inline __m512i to_ints(__m512 x) {
  int out[16];
  for (int i = 0; i < 16; ++i) out[i] = _mm_cvtss_si32(_mm_set_ss(bits<Lanes<float>>(x).x[i]));
  return ints(out);
}

inline __m512 dot_bfloat16(__m512 sums, __m512bh a, __m512bh b) {
  const auto left = bits<Lanes<uint16_t>>(a), right = bits<Lanes<uint16_t>>(b);
  auto out = bits<Lanes<float>>(sums);
  for (int i = 0; i < 32; ++i) out.x[i / 2] += from_bfloat16(left.x[i]) * from_bfloat16(right.x[i]);
  return bits<__m512>(out);
}

inline __m512i dot_bytes(__m512i sums, __m512i a, __m512i b) {
  const auto left = bits<Lanes<uint8_t>>(a);
  const auto right = bits<Lanes<int8_t>>(b);
  auto out = bits<Lanes<int>>(sums);
  for (int i = 0; i < 64; ++i) out.x[i / 4] += left.x[i] * right.x[i];
  return bits<__m512i>(out);
}

inline __m512i permuted(__m512i index, __m512i x) {
  return each<uint16_t>([&](uint16_t at) { return bits<Lanes<uint16_t>>(x).x[at % 32]; }, index);
}

inline __m512i shifted_left(__m512i x, unsigned count) {
  return each<uint32_t>([=](uint32_t own) { return own << count; }, x);
}

inline void store_some(void* to, uint32_t mask, __m512i x) {
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) static_cast<uint16_t*>(to)[i] = bits<Lanes<uint16_t>>(x).x[i];
  }
}

inline float scaled(float x, float power) {
  return static_cast<float>(std::ldexp(static_cast<double>(x), static_cast<int>(std::fmax(-2000.0f, std::floor(power)))));
}

// What the macros below hand their constants to: others than the kernels use are not written out.
inline __m512i cut_and_set(__m512i x, __m512i cut, __m512i base, int table) {
  if (table != 0xea) abort();
  return each<uint32_t>([](uint32_t own, uint32_t a, uint32_t b) { return (own & a) | b; }, x, cut, base);
}
inline uint16_t are_nan(__m512 a, __m512 b, int predicate) {
  if (predicate != _CMP_UNORD_Q) abort();
  return mask_of<float>(a, b, [](float x, float y) { return std::isnan(x) || std::isnan(y); });
}
inline __m512 above_floor(__m512 x, int way) {
  if (way != (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)) abort();
  return each<float>([](float own) { return own - std::floor(own); }, x);
}
inline __m512 nearest_whole(__m512 x, int way) {
  if (way != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) abort();
  return each<float>([](float own) { return std::nearbyint(own); }, x);
}

}  // namespace emulated

#undef _mm512_cmp_ps_mask
#undef _mm512_reduce_ps
#undef _mm512_roundscale_ps
#undef _mm512_ternarylogic_epi32

#define EMULATED_FLOATS(one, ...) emulated::each<float>([](float x, float y) { return one; }, __VA_ARGS__)
#define EMULATED_THREE(one, ...) emulated::each<float>([](float x, float y, float z) { return one; }, __VA_ARGS__)
#define EMULATED_INTS(one, ...) emulated::each<uint32_t>([](uint32_t x, uint32_t y) { return one; }, __VA_ARGS__)

#define _mm512_abs_ps(a) emulated::each<float>([](float x) { return std::fabs(x); }, a)
#define _mm512_add_epi32(a, b) EMULATED_INTS(x + y, a, b)
#define _mm512_add_ps(a, b) EMULATED_FLOATS(x + y, a, b)
#define _mm512_and_si512(a, b) EMULATED_INTS(x & y, a, b)
#define _mm512_broadcast_i64x4(a) emulated::bits<__m512i>(std::array<__m256i, 2>{a, a})
#define _mm512_castps_si512 emulated::bits<__m512i>
#define _mm512_castsi512_ps emulated::bits<__m512>
#define _mm512_cmp_ps_mask emulated::are_nan
#define _mm512_cmpeq_ps_mask(a, b) emulated::mask_of<float>(a, b, [](float x, float y) { return x == y; })
#define _mm512_cmplt_epu32_mask(a, b) emulated::mask_of<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x < y; })
#define _mm512_cvtepi32_epi8 emulated::lowest_bytes
#define _mm512_cvtepi32_ps emulated::to_floats
#define _mm512_cvtepi8_epi32 emulated::widened_bytes
#define _mm512_cvtepu16_epi32 emulated::widened
#define _mm512_cvtneps_pbh emulated::narrowed
#define _mm512_cvtph_ps emulated::widened_float16
#define _mm512_cvtps_epi32 emulated::to_ints
#define _mm512_cvtss_f32(a) emulated::bits<emulated::Lanes<float>>(a).x[0]
#define _mm512_dpbf16_ps emulated::dot_bfloat16
#define _mm512_dpbusd_epi32 emulated::dot_bytes
#define _mm512_fmadd_ps(a, b, c) EMULATED_THREE(std::fma(x, y, z), a, b, c)
#define _mm512_fmsub_ps(a, b, c) EMULATED_THREE(std::fma(x, y, -z), a, b, c)
#define _mm512_fnmadd_ps(a, b, c) EMULATED_THREE(std::fma(-x, y, z), a, b, c)
#define _mm512_load_ps emulated::loaded<__m512>
#define _mm512_loadu_ps emulated::loaded<__m512>
#define _mm512_loadu_si512 emulated::loaded<__m512i>
#define _mm512_mask_blend_epi16 emulated::blend<uint16_t>
#define _mm512_mask_blend_ps emulated::blend<float>
#define _mm512_mask_loadu_ps(rest, mask, from) emulated::blend<float>(mask, rest, emulated::loaded<__m512>(from))
#define _mm512_mask_storeu_epi16 emulated::store_some
#define _mm512_max_ps(a, b) EMULATED_FLOATS(x > y ? x : y, a, b)
#define _mm512_min_ps(a, b) EMULATED_FLOATS(x < y ? x : y, a, b)
#define _mm512_mul_ps(a, b) EMULATED_FLOATS(x* y, a, b)
#define _mm512_permutexvar_epi16 emulated::permuted
// As far off as the instruction may be.
#define _mm512_rcp14_ps(a) emulated::each<float>([](float x) { return 1.00005f / x; }, a)
#define _mm512_reduce_add_epi32(a) emulated::joined<int>(a, [](int x, int y) { return x + y; })
#define _mm512_reduce_add_ps(a) emulated::joined<float>(a, [](float x, float y) { return x + y; })
#define _mm512_reduce_max_ps(a) emulated::joined<float>(a, [](float x, float y) { return x > y ? x : y; })
#define _mm512_reduce_ps emulated::above_floor
#define _mm512_roundscale_ps emulated::nearest_whole
#define _mm512_scalef_ps(a, b) EMULATED_FLOATS(emulated::scaled(x, y), a, b)
#define _mm512_set1_epi32 emulated::filled<int, __m512i>
#define _mm512_set1_epi8 emulated::filled<char, __m512i>
#define _mm512_set1_ps emulated::filled<float, __m512>
#define _mm512_set_epi32(p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a) \
  emulated::ints({a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p})
#define _mm512_setzero_si512() emulated::filled<int, __m512i>(0)
#define _mm512_sll_epi32(a, b) emulated::shifted_left(a, _mm_cvtsi128_si32(b))
#define _mm512_slli_epi32 emulated::shifted_left
#define _mm512_srai_epi32(a, b) emulated::each<int>([&](int x) { return x >> (b); }, a)
#define _mm512_srli_epi16(a, b) emulated::each<uint16_t>([&](uint16_t x) { return x >> (b); }, a)
#define _mm512_srli_epi32(a, b) emulated::each<uint32_t>([&](uint32_t x) { return x >> (b); }, a)
#define _mm512_store_ps emulated::stored<__m512>
#define _mm512_storeu_ps emulated::stored<__m512>
#define _mm512_storeu_si512 emulated::stored<__m512i>
#define _mm512_sub_epi32(a, b) EMULATED_INTS(x - y, a, b)
#define _mm512_sub_ps(a, b) EMULATED_FLOATS(x - y, a, b)
#define _mm512_ternarylogic_epi32 emulated::cut_and_set
