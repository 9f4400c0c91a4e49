// What PTX instructions compute, by the PTX manual: op_NAME is instruction NAME, its dots as underscores. Registers are
// unsigned words, in<T> reads one as an instruction's type and out<R> writes it back. An approximate instruction is off by
// as much as the manual allows, in a direction that depends on its operand: nothing may rely on luck.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
struct f16x2 {
  f16 low, high;
};
struct bf16x2 {
  bf16 low, high;
};
template <class T>
constexpr bool IS_HALF = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T>
constexpr bool IS_PAIR = std::is_same_v<T, f16x2> || std::is_same_v<T, bf16x2>;
template <class T>
constexpr bool IS_INTEGER = std::is_integral_v<T>;

// ---- registers

template <class T, class R>
T in(R word) {
  if constexpr (IS_INTEGER<T>) return T(word);
  else if constexpr (IS_INTEGER<R>) return std::bit_cast<T>(word);
  else return word;
}

template <class R, class T>
R out(T value) {
  if constexpr (IS_INTEGER<T>) return R(value);  // a signed value extends its sign
  else if constexpr (sizeof(T) == 2) return R(std::bit_cast<u16>(value));
  else if constexpr (sizeof(T) == 4) return R(std::bit_cast<u32>(value));
  else return R(std::bit_cast<u64>(value));
}

// ---- conversions

inline f32 widen(bf16 x) { return std::bit_cast<f32>(u32(x.bits) << 16); }
inline f32 widen(f16 x) { return f32(std::bit_cast<_Float16>(x.bits)); }
inline f32 widen(f32 x) { return x; }
inline f64 widen(f64 x) { return x; }

template <class H>
H narrow(f32 x) {
  if constexpr (std::is_same_v<H, f16>) return {x == x ? std::bit_cast<u16>(_Float16(x)) : u16(0x7fff)};
  const u32 word = std::bit_cast<u32>(x);
  return {x == x ? u16((word + 0x7fff + ((word >> 16) & 1)) >> 16) : u16(0x7fff)};
}

// x + y in double, rounded to odd, so that rounding once more to a narrower type rounds correctly.
inline f64 add_to_odd(f64 x, f64 y) {
  const f64 sum = x + y, part = sum - x, error = (x - (sum - part)) + (y - part);
  if (error == 0.0 || !std::isfinite(sum) || std::bit_cast<u64>(sum) & 1) return sum;
  return std::nextafter(sum, error > 0 ? INFINITY : -INFINITY);
}

template <class D, class A>
D convert(A a) {
  if constexpr (IS_HALF<D> && (IS_HALF<A> || std::is_same_v<A, f32>)) return narrow<D>(widen(a));
  else if constexpr (IS_HALF<A>) return D(widen(a));
  else return D(a);
}
template <class D>
D convert(f32 high, f32 low) {
  if constexpr (std::is_same_v<D, f16x2>) return {narrow<f16>(low), narrow<f16>(high)};
  else return {narrow<bf16>(low), narrow<bf16>(high)};
}

// A number without a fraction as D; an integer's range is the limit, and NaN becomes 0.
template <class D, class A>
D whole(A a) {
  if constexpr (!IS_INTEGER<D>) return D(a);
  if (a != a) return 0;
  const A low = A(std::numeric_limits<D>::min()), past = A(std::ldexp(1.0, std::numeric_limits<D>::digits));
  return a < low ? std::numeric_limits<D>::min() : a >= past ? std::numeric_limits<D>::max() : D(a);
}
template <class D, class A>
D convert_rzi(A a) {
  return whole<D>(std::trunc(widen(a)));
}
template <class D, class A>
D convert_rni(A a) {
  return whole<D>(std::nearbyint(widen(a)));
}
template <class D, class A>
D convert_rmi(A a) {
  return whole<D>(std::floor(widen(a)));
}
template <class D, class A>
D convert_rpi(A a) {
  return whole<D>(std::ceil(widen(a)));
}

// ---- modifiers

inline f32 flush(f32 x) { return std::fabs(x) < std::numeric_limits<f32>::min() ? std::copysign(0.0f, x) : x; }
template <class T>
T flush(T x) {
  return x;
}
template <class T>
T saturate(T x) {
  static_assert(std::is_floating_point_v<T>, ".sat of an integer");
  return x > T(0) ? std::min(x, T(1)) : T(0);  // NaN becomes 0
}

// Elementwise: pairs by their halves, halves in float (exact before the one rounding for +, - and *).
template <class T, class F, class... More>
T each(F f, T a, More... more) {
  if constexpr (IS_PAIR<T>) return {each(f, a.low, more.low...), each(f, a.high, more.high...)};
  else if constexpr (IS_HALF<T>) return narrow<T>(f(widen(a), widen(more)...));
  else return T(f(a, more...));
}

// ---- arithmetic

#define ELEMENTWISE(NAME, EXPRESSION)                             \
  template <class T>                                              \
  T op_##NAME(T a, T b) {                                         \
    return each([](auto a, auto b) { return EXPRESSION; }, a, b); \
  }
ELEMENTWISE(add, a + b)
ELEMENTWISE(sub, a - b)
ELEMENTWISE(mul, a* b)
ELEMENTWISE(mul_lo, a* b)
ELEMENTWISE(div, a / b)  // of integers: translate.py refuses a zero below
ELEMENTWISE(rem, a % b)
ELEMENTWISE(and, a & b)
ELEMENTWISE(or, a | b)
ELEMENTWISE(xor, a ^ b)

// NaN loses; -0 is below +0.
template <class T>
T lesser(T a, T b) {
  if constexpr (!IS_INTEGER<T>) {
    if (a != a) return b;
    if (a == b) return std::signbit(a) ? a : b;
  }
  return b < a ? b : a;
}
template <class T>
T greater(T a, T b) {
  if constexpr (!IS_INTEGER<T>) {
    if (a != a) return b;
    if (a == b) return std::signbit(a) ? b : a;
  }
  return a < b ? b : a;
}
ELEMENTWISE(min, lesser(a, b))
ELEMENTWISE(max, greater(a, b))
ELEMENTWISE(min_NaN, a != a || b != b ? decltype(a)(NAN) : lesser(a, b))
ELEMENTWISE(max_NaN, a != a || b != b ? decltype(a)(NAN) : greater(a, b))
#undef ELEMENTWISE

template <class T>
T op_neg(T a) {
  if constexpr (IS_PAIR<T>) return {op_neg(a.low), op_neg(a.high)};
  else if constexpr (IS_HALF<T>) return {u16(a.bits ^ 0x8000)};
  else return T(-a);
}
template <class T>
T op_abs(T a) {
  if constexpr (IS_PAIR<T>) return {op_abs(a.low), op_abs(a.high)};
  else if constexpr (IS_HALF<T>) return {u16(a.bits & 0x7fff)};
  else if constexpr (IS_INTEGER<T>) return a < 0 ? T(-a) : a;
  else return std::fabs(a);
}
template <class T>
T op_fma(T a, T b, T c) {
  if constexpr (IS_PAIR<T>) return {op_fma(a.low, b.low, c.low), op_fma(a.high, b.high, c.high)};
  else if constexpr (IS_HALF<T>) {
    const f64 sum = add_to_odd(f64(widen(a)) * f64(widen(b)), widen(c));
    f32 once = f32(sum);  // to odd again: two roundings more would not be one
    if (f64(once) != sum && std::isfinite(once) && !(std::bit_cast<u32>(once) & 1)) {
      once = std::nextafter(once, f64(once) < sum ? INFINITY : -INFINITY);
    }
    return narrow<T>(once);
  } else return std::fma(a, b, c);
}
inline f32 op_fma_rm(f32 a, f32 b, f32 c) {
  const f64 sum = add_to_odd(f64(a) * f64(b), c);
  const f32 near = f32(sum);
  return f64(near) > sum ? std::nextafter(near, -INFINITY) : near;
}
template <class T>
T op_mul_hi(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return T(Wide(a) * Wide(b) >> (sizeof(T) * 8));
}
template <class T>
struct Wider;
template <>
struct Wider<u16> : std::type_identity<u32> {};
template <>
struct Wider<s16> : std::type_identity<s32> {};
template <>
struct Wider<u32> : std::type_identity<u64> {};
template <>
struct Wider<s32> : std::type_identity<s64> {};
template <class T>
using wide = typename Wider<T>::type;
template <class T>
wide<T> op_mul_wide(T a, T b) {
  return wide<T>(a) * wide<T>(b);
}
template <class T>
wide<T> op_mad_wide(T a, T b, wide<T> c) {
  return op_mul_wide(a, b) + c;
}
template <class T>
T op_mad_lo(T a, T b, T c) {
  return T(a * b + c);
}
template <class T>
T op_mad_hi(T a, T b, T c) {
  return T(op_mul_hi(a, b) + c);
}
template <class T>
T op_rcp(T a) {
  return T(1) / a;
}
template <class T>
T op_sqrt(T a) {
  return std::sqrt(a);
}
template <class T>
T op_copysign(T a, T b) {
  return std::copysign(b, a);
}

// ---- approximations, and how far they may be off

// Between -1 and 1, from the operand's bits.
inline f64 direction(f32 a) { return f64(s32(std::bit_cast<u32>(a) * 2654435761u)) * 0x1p-31; }
inline f32 off_by(f64 exact, f64 relative, f32 operand) { return f32(exact * (1.0 + relative * direction(operand))); }

inline f32 op_ex2_approx(f32 a) { return a == 0.0f ? 1.0f : off_by(std::exp2(f64(a)), 0x1p-22, a); }
inline f32 op_lg2_approx(f32 a) {
  const f64 exact = std::log2(f64(a));
  if (a == 1.0f || !std::isfinite(exact)) return f32(exact);
  return a > 0.5f && a < 2.0f ? f32(exact + 0x1.50p-23 * direction(a)) : off_by(exact, 0x1.50p-23, a);
}
inline f32 op_rcp_approx(f32 a) { return off_by(1.0 / f64(a), 0x1p-23, a); }
inline f32 op_sqrt_approx(f32 a) { return off_by(std::sqrt(f64(a)), 0x1p-23, a); }
inline f32 op_rsqrt_approx(f32 a) { return off_by(1.0 / std::sqrt(f64(a)), 0x1.12p-23, a); }
inline f32 op_tanh_approx(f32 a) { return off_by(std::tanh(f64(a)), 0x1p-11, a); }
inline f32 op_div_approx(f32 a, f32 b) { return off_by(f64(a) / f64(b), 0x1p-22, b); }
inline f32 op_div_full(f32 a, f32 b) { return op_div_approx(a, b); }

// ---- bits

template <class T>
T op_not(T a) {
  if constexpr (std::is_same_v<T, bool>) return !a;
  else return T(~a);
}
template <class T>
T op_shl(T a, u32 by) {
  return by >= sizeof(T) * 8 ? T(0) : T(a << by);
}
template <class T>
T op_shr(T a, u32 by) {
  if (by >= sizeof(T) * 8) return a < 0 ? T(-1) : T(0);
  return T(a >> by);
}
inline u32 op_shf_l_wrap(u32 low, u32 high, u32 by) { return u32(((u64(high) << 32 | low) << (by & 31)) >> 32); }
inline u32 op_shf_r_wrap(u32 low, u32 high, u32 by) { return u32((u64(high) << 32 | low) >> (by & 31)); }
inline u32 op_shf_l_clamp(u32 low, u32 high, u32 by) { return by >= 32 ? low : op_shf_l_wrap(low, high, by); }
inline u32 op_shf_r_clamp(u32 low, u32 high, u32 by) { return by >= 32 ? high : op_shf_r_wrap(low, high, by); }
template <class T>
u32 op_popc(T a) {
  return u32(std::popcount(std::make_unsigned_t<T>(a)));
}
template <class T>
u32 op_clz(T a) {
  return u32(std::countl_zero(std::make_unsigned_t<T>(a)));
}
template <class T>
T op_brev(T a) {
  T reversed = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; i++) reversed = T(reversed << 1 | ((a >> i) & 1));
  return reversed;
}
// The field begins at bit `start` and has `length` bits; beyond the register's top a signed one repeats its sign.
template <class T>
T op_bfe(T a, u32 start, u32 length) {
  constexpr u32 BITS = sizeof(T) * 8;
  start &= 0xff, length &= 0xff;
  if (length == 0) return 0;
  const u32 top = std::min(start + length - 1, BITS - 1);
  const bool sign = std::is_signed_v<T> && (std::make_unsigned_t<T>(a) >> top & 1);
  T field = 0;
  for (u32 i = 0; i < BITS; i++) {
    const bool bit = i < length && start + i < BITS ? (std::make_unsigned_t<T>(a) >> (start + i)) & 1 : sign;
    field |= T(std::make_unsigned_t<T>(bit) << i);
  }
  return field;
}
template <class T>
T op_bfi(T field, T into, u32 start, u32 length) {
  start &= 0xff, length &= 0xff;
  for (u32 i = 0; i < length && start + i < sizeof(T) * 8; i++) {
    const T bit = T(1) << (start + i);
    into = (field >> i & 1) ? into | bit : into & ~bit;
  }
  return into;
}
inline u32 op_prmt(u32 a, u32 b, u32 selectors) {
  const u64 bytes = u64(b) << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 selector = selectors >> (4 * i), byte = u32(bytes >> (8 * (selector & 7))) & 0xff;
    result |= (selector & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
  }
  return result;
}
inline u32 op_lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (int i = 0; i < 32; i++) result |= (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i;
  return result;
}

// ---- comparison and choice: an ordered one is false and an unordered one true where an operand is NaN

template <class T>
T op_selp(T a, T b, bool first) {
  return first ? a : b;
}
template <class T>
auto comparable(T a) {
  if constexpr (IS_HALF<T>) return widen(a);
  else return a;
}
#define COMPARE(NAME, SIGN)                                                       \
  template <class T>                                                              \
  bool is_##NAME(T a, T b) {                                                      \
    return comparable(a) SIGN comparable(b) && is_num(a, b);                      \
  }                                                                               \
  template <class T>                                                              \
  bool is_##NAME##u(T a, T b) {                                                   \
    return comparable(a) SIGN comparable(b) || !is_num(a, b);                     \
  }
template <class T>
bool is_num(T a, T b) {
  return comparable(a) == comparable(a) && comparable(b) == comparable(b);
}
template <class T>
bool is_nan(T a, T b) {
  return !is_num(a, b);
}
COMPARE(lt, <)
COMPARE(le, <=)
COMPARE(gt, >)
COMPARE(ge, >=)
COMPARE(eq, ==)
COMPARE(ne, !=)
#undef COMPARE
