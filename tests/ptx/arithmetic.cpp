// Arithmetic, comparisons and moves.
#include <cmath>
#include <limits>

#include "tests/ptx/instructions.hpp"
#include "tests/ptx/warp.hpp"

namespace gyre::ptx {
namespace {

using U16 = std::uint16_t;
using U32 = std::uint32_t;
using U64 = std::uint64_t;
using S16 = std::int16_t;
using S32 = std::int32_t;
using S64 = std::int64_t;

// Each computes Operation::of(sources...) as type T; registers have values of 16 bits as 32, zero
// above.
template <typename T>
InRegister<T> held(T value) {
    if constexpr (sizeof(T) == 2) {
        return static_cast<std::uint16_t>(value);
    } else {
        return value;
    }
}
template <typename T, typename Operation>
void unary(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<T>(warp, instruction);
    const auto* const a = source<T>(warp, instruction, 0);
    for_lanes(mask, [=](int i) { d[i] = held<T>(Operation::of(static_cast<T>(a[i]))); });
}
template <typename T, typename Operation>
void binary(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<T>(warp, instruction);
    const auto *const a = source<T>(warp, instruction, 0), *const b =
                                                               source<T>(warp, instruction, 1);
    for_lanes(mask, [=](int i) {
        d[i] = held<T>(Operation::of(static_cast<T>(a[i]), static_cast<T>(b[i])));
    });
}
template <typename T, typename Operation>
void ternary(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<T>(warp, instruction);
    const auto *const a = source<T>(warp, instruction, 0),
                      *const b = source<T>(warp, instruction, 1),
                      *const c = source<T>(warp, instruction, 2);
    for_lanes(mask, [=](int i) {
        d[i] = held<T>(
            Operation::of(static_cast<T>(a[i]), static_cast<T>(b[i]), static_cast<T>(c[i])));
    });
}

template <typename T>
auto bits(T value) {  // whose sums and products wrap
    if constexpr (sizeof(T) < 4) {
        return static_cast<U32>(static_cast<std::make_unsigned_t<T>>(value));
    } else {
        return static_cast<std::make_unsigned_t<T>>(value);
    }
}

#define GYRE_PTX_UNARY(name, expression)       \
    struct name {                              \
        template <typename T>                  \
        static T of(T a) {                     \
            return static_cast<T>(expression); \
        }                                      \
    }
#define GYRE_PTX_BINARY(name, expression)      \
    struct name {                              \
        template <typename T>                  \
        static T of(T a, T b) {                \
            return static_cast<T>(expression); \
        }                                      \
    }
GYRE_PTX_UNARY(FloatNegative, -a);
GYRE_PTX_UNARY(FloatAbsolute, std::fabs(a));
GYRE_PTX_UNARY(Negative, 0 - bits(a));
GYRE_PTX_UNARY(Not, ~bits(a));
GYRE_PTX_UNARY(NotPredicate, a ^ 1u);
GYRE_PTX_UNARY(MovePredicate, a != 0);  // nvcc writes true as -1
GYRE_PTX_UNARY(SquareRoot, std::sqrt(a));
GYRE_PTX_UNARY(Reciprocal, T(1) / a);
GYRE_PTX_UNARY(Truncate, std::trunc(a));
GYRE_PTX_UNARY(Saturate, std::isnan(a) ? T(0) : a<0 ? T(0) : a> 1 ? T(1) : a);
GYRE_PTX_BINARY(FloatAdd, a + b);
GYRE_PTX_BINARY(FloatSubtract, a - b);
GYRE_PTX_BINARY(FloatMultiply, a* b);
GYRE_PTX_BINARY(FloatDivide, a / b);
GYRE_PTX_BINARY(Add, bits(a) + bits(b));
GYRE_PTX_BINARY(Subtract, bits(a) - bits(b));
GYRE_PTX_BINARY(Multiply, bits(a) * bits(b));
// The manual leaves open what a division by zero gives.
GYRE_PTX_BINARY(Divide, b == 0                              ? T(-1)
                        : std::is_signed_v<T> && b == T(-1) ? T(0 - bits(a))
                                                            : T(a / b));
GYRE_PTX_BINARY(Remainder, b == 0 ? a : std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b));
GYRE_PTX_BINARY(Min, a < b ? a : b);
GYRE_PTX_BINARY(Max, a > b ? a : b);
GYRE_PTX_BINARY(And, bits(a) & bits(b));
GYRE_PTX_BINARY(Or, bits(a) | bits(b));
GYRE_PTX_BINARY(Xor, bits(a) ^ bits(b));

__extension__ using S128 = __int128;
__extension__ using U128 = unsigned __int128;
struct MultiplyHigh {
    template <typename T>
    static T of(T a, T b) {
        using Wide = std::conditional_t<std::is_signed_v<T>, S128, U128>;
        return static_cast<T>(Wide{a} * Wide{b} >> (8 * sizeof(T)));
    }
};
// NaN gives way to a number, and -0 is less than +0.
template <bool kMax>
struct FloatExtreme {
    template <typename T>
    static T of(T a, T b) {
        if (std::isnan(a) || std::isnan(b)) {
            return !std::isnan(a) ? a : !std::isnan(b) ? b : std::numeric_limits<T>::quiet_NaN();
        }
        const bool less = a < b || (a == b && std::signbit(a) && !std::signbit(b));
        return less == kMax ? b : a;
    }
};
struct MultiplyAdd {
    template <typename T>
    static T of(T a, T b, T c) {
        return static_cast<T>(bits(a) * bits(b) + bits(c));
    }
};
struct FusedMultiplyAdd {
    static float of(float a, float b, float c) { return std::fma(a, b, c); }
    static double of(double a, double b, double c) { return std::fma(a, b, c); }
};
// Rounded towards minus infinity: the product is exact as a double, and the sum rounded to one is
// corrected by what was rounded away.
struct FusedMultiplyAddDown {
    static float of(float a, float b, float c) {
        const double product = double{a} * b, sum = product + c;
        const double part = sum - product;
        const double rest = (product - (sum - part)) + (c - part);
        const auto rounded = static_cast<float>(sum);
        const bool above = rounded > sum || (rounded == sum && rest < 0.0);
        return above ? std::nextafter(rounded, -std::numeric_limits<float>::infinity()) : rounded;
    }
};
// Only the upper words of operand and result count.
struct ApproximateReciprocal {
    static double upper(double value) {
        return std::bit_cast<double>(std::bit_cast<U64>(value) & ~U64{0xffffffff});
    }
    static double of(double a) { return upper(1.0 / upper(a)); }
};
// The manual allows a relative error of 2^-22; this one is exact but for the rounding.
struct ApproximatePower {
    static float flushed(float value) {
        return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
    }
    static float of(float a) { return flushed(static_cast<float>(std::exp2(double{flushed(a)}))); }
};
// These stand for expf and logf: host_functions.hpp.
struct HostExponential {
    static float of(float a) { return std::exp(a); }
};
struct HostLogarithm {
    static float of(float a) { return std::log(a); }
};
struct Power {
    static double of(double a, double b) { return std::pow(std::fabs(a), b); }
};

template <typename From, typename To>
void multiply_wide(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<To>(warp, instruction);
    const auto *const a = source<From>(warp, instruction, 0), *const b = source<From>(
                                                                  warp, instruction, 1);
    for_lanes(mask, [=](int i) {
        d[i] = static_cast<To>(To{static_cast<From>(a[i])} * To{static_cast<From>(b[i])});
    });
}
template <typename T>
void multiply_add_wide(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    using To = std::conditional_t<std::is_signed_v<T>, S64, U64>;
    auto* const d = result<To>(warp, instruction);
    const auto *const a = source<T>(warp, instruction, 0), *const b =
                                                               source<T>(warp, instruction, 1);
    const auto* const c = source<To>(warp, instruction, 2);
    for_lanes(mask, [=](int i) {
        d[i] = static_cast<To>(bits(static_cast<To>(To{a[i]} * To{b[i]})) + bits(c[i]));
    });
}
template <bool kLeft, typename T>
void shift(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<T>(warp, instruction);
    const auto* const a = source<T>(warp, instruction, 0);
    const auto* const by = source<U32>(warp, instruction, 1);
    constexpr U32 kMost = sizeof(T) * 8 - 1;
    for_lanes(mask, [=](int i) {
        const T value = static_cast<T>(a[i]);
        if constexpr (kLeft) {
            d[i] = held<T>(by[i] > kMost ? T(0) : static_cast<T>(bits(value) << by[i]));
        } else {
            const T far = static_cast<T>(value < 0 ? -1 : 0);
            d[i] = held<T>(by[i] > kMost ? far : static_cast<T>(value >> by[i]));
        }
    });
}
// d = b with the lower `length` bits of a at `position`.
void insert_bits(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    for_lanes(mask, [&](int i) {
        const U32 position = source<U32>(warp, instruction, 2)[i] & 255;
        const U32 length = source<U32>(warp, instruction, 3)[i] & 255;
        const U64 field = ((length < 32 ? U64{1} << length : U64{1} << 32) - 1);
        const U64 at = position < 32 ? field << position : 0;
        const U64 a = position < 32 ? U64{source<U32>(warp, instruction, 0)[i]} << position : 0;
        const U64 b = source<U32>(warp, instruction, 1)[i];
        result<U32>(warp, instruction)[i] = static_cast<U32>((b & ~at) | (a & at));
    });
}
void extract_bits(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    for_lanes(mask, [&](int i) {
        const U32 position = source<U32>(warp, instruction, 1)[i] & 255;
        const U32 length = source<U32>(warp, instruction, 2)[i] & 255;
        const U64 field = (length < 32 ? U64{1} << length : U64{1} << 32) - 1;
        const U64 a = source<U32>(warp, instruction, 0)[i];
        result<U32>(warp, instruction)[i] =
            static_cast<U32>(position < 32 ? a >> position & field : 0);
    });
}

// Each byte is one of the eight of a and b, by four bits of the selector; the highest of these asks
// for the byte's sign in all bits.
void permute_bytes(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    for_lanes(mask, [&](int i) {
        const U64 bytes =
            U64{source<U32>(warp, instruction, 1)[i]} << 32 | source<U32>(warp, instruction, 0)[i];
        const U32 selector = source<U32>(warp, instruction, 2)[i];
        U32 value = 0;
        for (int byte = 0; byte < 4; ++byte) {
            const U32 choice = selector >> 4 * byte;
            const auto chosen = static_cast<U32>(bytes >> 8 * (choice & 7) & 0xff);
            const U32 sign = (chosen & 0x80u) != 0 ? 0xffu : 0u;
            value |= ((choice & 8) != 0 ? sign : chosen) << 8 * byte;
        }
        result<U32>(warp, instruction)[i] = value;
    });
}

template <typename T, typename Relation>
void compare(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<U32>(warp, instruction);
    const auto *const a = source<T>(warp, instruction, 0), *const b =
                                                               source<T>(warp, instruction, 1);
    for_lanes(mask, [=](int i) {
        d[i] = Relation::of(static_cast<T>(a[i]), static_cast<T>(b[i])) ? 1u : 0u;
    });
}
#define GYRE_PTX_RELATION(name, expression) \
    struct name {                           \
        template <typename T>               \
        static bool of(T a, T b) {          \
            return expression;              \
        }                                   \
    }
GYRE_PTX_RELATION(Equal, a == b);
GYRE_PTX_RELATION(NotEqual, a<b || a> b);  // false for NaN
GYRE_PTX_RELATION(Less, a < b);
GYRE_PTX_RELATION(LessEqual, a <= b);
GYRE_PTX_RELATION(Greater, a > b);
GYRE_PTX_RELATION(GreaterEqual, a >= b);
// True for NaN.
GYRE_PTX_RELATION(EqualOrNan, !(a < b || a > b));
GYRE_PTX_RELATION(NotEqualOrNan, !(a <= b && a >= b));
GYRE_PTX_RELATION(LessOrNan, !(a >= b));
GYRE_PTX_RELATION(LessEqualOrNan, !(a > b));
GYRE_PTX_RELATION(GreaterOrNan, !(a <= b));
GYRE_PTX_RELATION(GreaterEqualOrNan, !(a < b));
GYRE_PTX_RELATION(EitherNan, std::isnan(a) || std::isnan(b));
GYRE_PTX_RELATION(BothNumbers, !std::isnan(a) && !std::isnan(b));

template <typename T>
void select(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<T>(warp, instruction);
    const auto *const a = source<T>(warp, instruction, 0), *const b =
                                                               source<T>(warp, instruction, 1);
    const auto* const predicate = source<U32>(warp, instruction, 2);
    for_lanes(mask, [=](int i) { d[i] = predicate[i] != 0 ? a[i] : b[i]; });
}

template <typename T>
void add_relations(Handlers& handlers, const std::string& type) {
    handlers.add("setp.eq." + type, compare<T, Equal>);
    handlers.add("setp.ne." + type, compare<T, NotEqual>);
    handlers.add("setp.lt." + type, compare<T, Less>);
    handlers.add("setp.le." + type, compare<T, LessEqual>);
    handlers.add("setp.gt." + type, compare<T, Greater>);
    handlers.add("setp.ge." + type, compare<T, GreaterEqual>);
}
template <typename T>
void add_integers(Handlers& handlers, const std::string& type) {
    const auto name = [&](const char* of) { return of + type; };
    handlers.add(name("add."), binary<T, Add>);
    handlers.add(name("sub."), binary<T, Subtract>);
    handlers.add(name("mul.lo."), binary<T, Multiply>);
    handlers.add(name("mad.lo."), ternary<T, MultiplyAdd>);
    handlers.add(name("div."), binary<T, Divide>);
    handlers.add(name("rem."), binary<T, Remainder>);
    handlers.add(name("min."), binary<T, Min>);
    handlers.add(name("max."), binary<T, Max>);
    handlers.add(name("neg."), unary<T, Negative>);
    handlers.add(name("shr."), shift<false, T>);
    handlers.add(name("mul.hi."), binary<T, MultiplyHigh>);
    add_relations<T>(handlers, type);
}
template <typename T>
void add_bits(Handlers& handlers, const std::string& type) {
    const auto name = [&](const char* of) { return of + type; };
    handlers.add(name("and."), binary<T, And>);
    handlers.add(name("or."), binary<T, Or>);
    handlers.add(name("xor."), binary<T, Xor>);
    handlers.add(name("not."), unary<T, Not>);
    handlers.add(name("shl."), shift<true, T>);
    handlers.add(name("shr."), shift<false, T>);
    add_relations<T>(handlers, type);
}
template <typename T>
void add_floats(Handlers& handlers, const std::string& type) {
    const auto name = [&](const char* of) { return of + type; };
    const auto both = [&](const std::string& of) {
        return of + "." + type + " " + of + ".rn." + type;
    };
    handlers.add(both("add"), binary<T, FloatAdd>);
    handlers.add(both("sub"), binary<T, FloatSubtract>);
    handlers.add(both("mul"), binary<T, FloatMultiply>);
    handlers.add(name("div.rn."), binary<T, FloatDivide>);
    handlers.add(name("fma.rn."), ternary<T, FusedMultiplyAdd>);
    handlers.add(name("max."), binary<T, FloatExtreme<true>>);
    handlers.add(name("min."), binary<T, FloatExtreme<false>>);
    handlers.add(name("abs."), unary<T, FloatAbsolute>);
    handlers.add(name("neg."), unary<T, FloatNegative>);
    handlers.add(name("sqrt.rn."), unary<T, SquareRoot>);
    handlers.add(name("rcp.rn."), unary<T, Reciprocal>);
    add_relations<T>(handlers, type);
    handlers.add(name("setp.equ."), compare<T, EqualOrNan>);
    handlers.add(name("setp.neu."), compare<T, NotEqualOrNan>);
    handlers.add(name("setp.ltu."), compare<T, LessOrNan>);
    handlers.add(name("setp.leu."), compare<T, LessEqualOrNan>);
    handlers.add(name("setp.gtu."), compare<T, GreaterOrNan>);
    handlers.add(name("setp.geu."), compare<T, GreaterEqualOrNan>);
    handlers.add(name("setp.nan."), compare<T, EitherNan>);
    handlers.add(name("setp.num."), compare<T, BothNumbers>);
}

}  // namespace

void add_arithmetic(Handlers& handlers) {
    add_integers<S16>(handlers, "s16");
    add_integers<U16>(handlers, "u16");
    add_integers<S32>(handlers, "s32");
    add_integers<U32>(handlers, "u32");
    add_integers<S64>(handlers, "s64");
    add_integers<U64>(handlers, "u64");
    add_bits<U16>(handlers, "b16");
    add_bits<U32>(handlers, "b32");
    add_bits<U64>(handlers, "b64");
    add_floats<float>(handlers, "f32");
    add_floats<double>(handlers, "f64");
    handlers.add("and.pred", binary<U32, And>);
    handlers.add("or.pred", binary<U32, Or>);
    handlers.add("xor.pred", binary<U32, Xor>);
    handlers.add("not.pred", unary<U32, NotPredicate>);
    handlers.add("mov.pred", unary<U32, MovePredicate>);
    handlers.add("mul.wide.s16", multiply_wide<S16, S32>);
    handlers.add("mul.wide.u16", multiply_wide<U16, U32>);
    handlers.add("mul.wide.s32", multiply_wide<S32, S64>);
    handlers.add("mul.wide.u32", multiply_wide<U32, U64>);
    handlers.add("mad.wide.s32", multiply_add_wide<S32>);
    handlers.add("mad.wide.u32", multiply_add_wide<U32>);
    handlers.add("bfi.b32", insert_bits);
    handlers.add("bfe.u32", extract_bits);
    handlers.add("prmt.b32", permute_bytes);
    handlers.add("fma.rm.f32", ternary<float, FusedMultiplyAddDown>);
    handlers.add("rcp.approx.ftz.f64", unary<double, ApproximateReciprocal>);
    handlers.add("ex2.approx.ftz.f32", unary<float, ApproximatePower>);
    handlers.add("sin.approx.f32", unary<float, HostExponential>);
    handlers.add("cos.approx.f32", unary<float, HostLogarithm>);
    handlers.add("call.pow", binary<double, Power>);
    handlers.add("cvt.rzi.f64.f64", unary<double, Truncate>);
    handlers.add("cvt.sat.f32.f32", unary<float, Saturate>);
    handlers.add("selp.b16 selp.u16 selp.s16 selp.b32 selp.u32 selp.s32 selp.f32", select<U32>);
    handlers.add("selp.b64 selp.u64 selp.s64 selp.f64", select<U64>);
}

}  // namespace gyre::ptx
