// Sixteen numbers at a time: one register of AVX-512, or two of AVX2.
//
// Memory need not be aligned. What differs in more than its instructions is not here but where it is used.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace stepwire {

using bf16 = uint16_t;
using Halves = __m256i;  // 16 bfloat16 or float16

constexpr int kLanes = 16;

inline Halves load_halves(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_halves(void* to, Halves x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#define STEPWIRE_AVX512
constexpr bool kHasAvx512 = true;

using Floats = __m512;
using Ints = __m512i;

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
// The first `count`, at most 16; after them `rest`.
inline Floats load_first(const float* from, int count, float rest) {
  return _mm512_mask_loadu_ps(all(rest), static_cast<__mmask16>((1u << count) - 1), from);
}
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }    // a * b - c
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
// Of two numbers, one of them NaN, the second.
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float greatest_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline float first_of(Floats x) { return _mm512_cvtss_f32(x); }
// A bit for each lane.
inline uint32_t are_equal(Floats a, Floats b) { return _mm512_cmpeq_ps_mask(a, b); }
inline uint32_t are_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

inline Ints all_ints(int x) { return _mm512_set1_epi32(x); }
inline Ints from_zero() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
inline Ints load_ints(const void* from) { return _mm512_loadu_si512(from); }
inline Ints load_bytes(const uint8_t* from) {  // with a sign
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_ints(void* to, Ints x) { _mm512_storeu_si512(to, x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints shift_left(Ints x, int bits) { return _mm512_slli_epi32(x, bits); }
inline Ints shift_right(Ints x, int bits) { return _mm512_srli_epi32(x, bits); }
inline Ints shift_right_signed(Ints x, int bits) { return _mm512_srai_epi32(x, bits); }
inline int sum_of(Ints x) { return _mm512_reduce_add_epi32(x); }
inline Ints cut_and_set(Ints x, Ints cut, Ints base) {  // (x & cut) | base
  return _mm512_ternarylogic_epi32(x, cut, base, 0xea);
}
// The lower 16 bits of each of `low`, the upper of `high`.
inline Ints mixed(Ints low, Ints high) { return _mm512_mask_blend_epi16(0xaaaaaaaa, low, high); }
// yes where a < b, as numbers without a sign, else no.
inline Floats where_below(Ints a, Ints b, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(_mm512_cmplt_epu32_mask(a, b), no, yes);
}
inline __m128i to_bytes(Ints x) { return _mm512_cvtepi32_epi8(x); }  // the lowest 8 bits of each

inline Floats same_bits(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints same_bits(Floats x) { return _mm512_castps_si512(x); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }  // to the nearest

inline Floats widen(Halves x) { return same_bits(shift_left(_mm512_cvtepu16_epi32(x), 16)); }  // from bfloat16
inline Floats from_float16(Halves x) { return _mm512_cvtph_ps(x); }
// to[2 * i + odd] = x[i]; what lies between is neither read nor written.
inline void store_every_second(bf16* to, int odd, Halves x) {
  const __m512i wide = _mm512_sll_epi32(_mm512_cvtepu16_epi32(x), _mm_cvtsi32_si128(16 * odd));
  _mm512_mask_storeu_epi16(to, odd ? 0xaaaaaaaa : 0x55555555, wide);
}
inline Halves narrow(Floats x) { return (Halves)_mm512_cvtneps_pbh(x); }  // to bfloat16, the nearest
// sums[i] + a[i][0] * b[i][0] + a[i][1] * b[i][1], of pairs of bfloat16.
inline Floats dot_pairs(Floats sums, Ints a, Ints b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

inline Floats nearest_whole(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats above_floor(Floats x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// x * 2^floor(power), 0 where that is too small. power: below 127.
inline Floats scaled(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }
// a / b, |b| at most 2^126. An estimate of 14 bits and one step of Newton's: quicker than a division.
inline Floats quotient(Floats a, Floats b) {
  const Floats estimate = _mm512_rcp14_ps(b);
  return mul(a, mul(estimate, fnma(b, estimate, all(2.0f))));
}

#else

constexpr bool kHasAvx512 = false;

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};

inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
// The first `count`, at most 16; after them `rest`.
inline Floats load_first(const float* from, int count, float rest) {
  if (count == kLanes) return load(from);
  float own[kLanes];
  for (int i = 0; i < kLanes; ++i) own[i] = i < count ? from[i] : rest;
  return load(own);
}
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats fma(Floats a, Floats b, Floats c) {  // a * b + c
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fms(Floats a, Floats b, Floats c) {  // a * b - c
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {  // c - a * b
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
// Of two numbers, one of them NaN, the second.
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline float sum_of(Floats x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float greatest_of(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float first_of(Floats x) { return _mm256_cvtss_f32(x.low); }
// A bit for each lane.
inline uint32_t bits_of(__m256 low, __m256 high) {
  return static_cast<uint32_t>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}
inline uint32_t are_equal(Floats a, Floats b) {
  return bits_of(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
}
inline uint32_t are_nan(Floats x) {
  return bits_of(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q), _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q));
}

inline Ints all_ints(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints from_zero() {
  return {_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set_epi32(15, 14, 13, 12, 11, 10, 9, 8)};
}
inline Ints load_ints(const void* from) {
  const auto* at = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline __m256i load_eight_bytes(const uint8_t* from) {  // with a sign
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Ints load_bytes(const uint8_t* from) { return {load_eight_bytes(from), load_eight_bytes(from + 8)}; }
inline void store_ints(void* to, Ints x) {
  auto* at = static_cast<__m256i*>(to);
  _mm256_storeu_si256(at, x.low);
  _mm256_storeu_si256(at + 1, x.high);
}
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints sub(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline Ints shift_left(Ints x, int bits) { return {_mm256_slli_epi32(x.low, bits), _mm256_slli_epi32(x.high, bits)}; }
inline Ints shift_right(Ints x, int bits) { return {_mm256_srli_epi32(x.low, bits), _mm256_srli_epi32(x.high, bits)}; }
inline Ints shift_right_signed(Ints x, int bits) {
  return {_mm256_srai_epi32(x.low, bits), _mm256_srai_epi32(x.high, bits)};
}
inline int sum_of(Ints x) {
  const __m256i eight = _mm256_add_epi32(x.low, x.high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline Ints cut_and_set(Ints x, Ints cut, Ints base) {  // (x & cut) | base
  return {_mm256_or_si256(_mm256_and_si256(x.low, cut.low), base.low),
          _mm256_or_si256(_mm256_and_si256(x.high, cut.high), base.high)};
}
// The lower 16 bits of each of `low`, the upper of `high`.
inline Ints mixed(Ints low, Ints high) {
  return {_mm256_blend_epi16(low.low, high.low, 0xaa), _mm256_blend_epi16(low.high, high.high, 0xaa)};
}
// yes where a < b, as numbers without a sign, else no.
inline Floats where_below(Ints a, Ints b, Floats yes, Floats no) {
  const auto chosen = [](__m256i own, __m256i bound, __m256 below, __m256 other) {
    const __m256i not_below = _mm256_cmpeq_epi32(_mm256_max_epu32(own, bound), own);
    return _mm256_blendv_ps(below, other, _mm256_castsi256_ps(not_below));
  };
  return {chosen(a.low, b.low, yes.low, no.low), chosen(a.high, b.high, yes.high, no.high)};
}
inline __m128i to_bytes(Ints x) {  // the lowest 8 bits of each
  const auto eight = [](__m256i own) {
    const __m256i fours = _mm256_shuffle_epi8(own, _mm256_set1_epi32(0x0c080400));
    return _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  };
  return _mm_unpacklo_epi64(eight(x.low), eight(x.high));
}

inline Floats same_bits(Ints x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Ints same_bits(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }  // to the nearest

inline Floats widen(Halves x) {  // from bfloat16
  const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
  return same_bits(shift_left(Ints{_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)}, 16));
}
inline Floats from_float16(Halves x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
// to[2 * i + odd] = x[i]; what lies between is neither read nor written.
inline void store_every_second(bf16* to, int odd, Halves x) {
  alignas(32) bf16 own[kLanes];
  store_halves(own, x);
  for (int i = 0; i < kLanes; ++i) to[2 * i + odd] = own[i];
}
inline Halves narrow(Floats x) {  // to bfloat16, the nearest
  const auto rounded = [](__m256 own) {
    const __m256i bits = _mm256_castps_si256(own);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));  // a NaN must not round to infinity
    const __m256 is_nan = _mm256_cmp_ps(own, own, _CMP_UNORD_Q);
    return _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, _mm256_castps_si256(is_nan)), 16);
  };
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(x.low), rounded(x.high)), 0xd8);
}
// Of each pair of bfloat16.
inline Floats first_of_pairs(Ints x) { return same_bits(shift_left(x, 16)); }
inline Floats second_of_pairs(Ints x) { return same_bits(mixed(all_ints(0), x)); }
// sums[i] + a[i][0] * b[i][0] + a[i][1] * b[i][1], of pairs of bfloat16.
inline Floats dot_pairs(Floats sums, Ints a, Ints b) {
  return fma(second_of_pairs(a), second_of_pairs(b), fma(first_of_pairs(a), first_of_pairs(b), sums));
}

inline Floats nearest_whole(Floats x) {
  constexpr int kWay = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kWay), _mm256_round_ps(x.high, kWay)};
}
inline Floats floor_of(Floats x) { return {_mm256_floor_ps(x.low), _mm256_floor_ps(x.high)}; }
inline Floats above_floor(Floats x) { return sub(x, floor_of(x)); }
// x * 2^floor(power), 0 where that is too small. power: below 127.
inline Floats scaled(Floats x, Floats power) {
  const Ints exponent = add(to_ints(max(floor_of(power), all(-127.0f))), all_ints(127));
  return mul(x, same_bits(shift_left(exponent, 23)));
}
// a / b, |b| at most 2^126.
inline Floats quotient(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

#endif

}  // namespace stepwire
