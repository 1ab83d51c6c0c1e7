// Sines and cosines of vectors.
#pragma once

#include "core/simd.h"

namespace ostinato {

// Compute the sine and cosine of each x, of up to 2^20 to 2^-23, of up to 2^22 to 2^-18: x = n pi / 2 + r with |r| <=
// pi / 4, whose sine and cosine are polynomials (Cephes). pi / 2 has two parts; the first of its products is subtracted
// without a rounding.
inline void sincos(Float x, Float& sine, Float& cosine) {
    constexpr float TWO_OVER_PI = 0.636619772f, HALF_PI = 1.57079637f, HALF_PI_REST = -4.37113883e-8f;
    const Float shifted = fma(x, splat(TWO_OVER_PI), splat(ROUND)), n = shifted - ROUND;
    const Float r = fma(n, splat(-HALF_PI_REST), fma(n, splat(-HALF_PI), x)), square = r * r;
    Float s = fma(square, splat(-1.9515295891e-4f), splat(8.3321608736e-3f));
    s = fma(fma(square, s, splat(-1.6666654611e-1f)) * square, r, r);
    Float c = fma(square, splat(2.443315711809948e-5f), splat(-1.388731625493765e-3f));
    c = fma(fma(square, c, splat(4.166664568298827e-2f)) * square, square, fma(square, splat(-0.5f), splat(1.0f)));
    const Int quadrant = bits_as<Int>(shifted);  // in its lowest two bits
    const Int swaps = (quadrant & 1) != 0;
    const Float of_sine = swaps ? c : s, of_cosine = swaps ? s : c;
    sine = (quadrant & 2) != 0 ? -of_sine : of_sine;
    cosine = ((quadrant + 1) & 2) != 0 ? -of_cosine : of_cosine;
}

}  // namespace ostinato
