"use strict";
// The frequency rules of ropewalk.spec in JavaScript. A spec has the form that RopeSpec.to_json writes.
//
// The reference is RopeSpec.inv_freq. Tests compare every rule with it, under node and inside the page. Operations are
// in the order of the Python code, so that results differ by the last bits of a power or a logarithm at most.
const Rules = (() => {
  const TWO_PI = 2 * Math.PI;
  const LONGEST = 2 ** 53;

  // base^(2i/dim) for i = 0 .. dim/2-1, or the first `count` of them.
  function powers(base, dim, count = dim / 2) {
    return Float64Array.from({ length: count }, (_, i) => base ** ((2 * i) / dim));
  }

  function plain(base, dim, count) {
    return powers(base, dim, count).map((power) => 1 / power);
  }

  function stretchExponent(dim) {
    if (dim < 4) throw new RangeError("NTK needs a rotary_dim of at least 4: the exponent is d/(d-2)");
    return dim / (dim - 2);
  }

  function checkCount(list, dim) {
    if (list.length !== dim / 2) throw new RangeError(`${list.length} numbers for ${dim / 2} pairs`);
  }

  // theta above `high` rotations within the trained length, theta / factor below `low`, and a ramp between.
  function byRotations(rule, dim, low, high) {
    const slope = high - low || 1;
    return plain(rule.base, dim).map((theta) => {
      const wavelength = TWO_PI / theta;
      if (wavelength > rule.trained_length / low) return theta / rule.factor;
      if (wavelength < rule.trained_length / high) return theta;
      const gamma = (rule.trained_length / wavelength - low) / slope;
      return ((1 - gamma) * theta) / rule.factor + gamma * theta;
    });
  }

  // ln 2 in two parts: products of the first with an exponent are exact.
  const [LN2, LN2_REST] = [0.6931471803691238, 1.9082149292705877e-10];

  // The exact product of two numbers as a sum of two.
  function product(a, b) {
    const [p, q] = [134217729 * a, 134217729 * b];
    const [u, v] = [p - (p - a), q - (q - b)];
    const high = a * b;
    return [high, (u * v - high + u * (b - v) + (a - u) * v) + (a - u) * (b - v)];
  }

  // The logarithm as C's libraries round it. Math.log differs from them in the last bit of 2 % of the numbers, and where a
  // ramp begins, that bit is multiplied by the factor: frequencies differed by 1.3e-14. This function differs in 0.04 %.
  // With x = m 2^e and s = (m-1)/(m+1): ln x = e ln 2 + 2 (s + s^3/3 + s^5/5 + ...).
  function log(x) {
    let e = Math.floor(Math.log2(x));
    let m = x / 2 ** e;
    if (m > Math.SQRT2) [m, e] = [m / 2, e + 1];
    const top = m - 1;
    const bottom = m + 1;
    const rest = m - (bottom - 1);
    const s = top / bottom;
    const [high, low] = product(s, bottom);
    const sRest = (top - high - low - s * rest) / bottom;
    let series = 0;
    for (let n = 25; n >= 3; n -= 2) series = s * s * (series + 1 / n);
    const whole = e * LN2;
    const sum = whole + 2 * s;
    const lost = Math.abs(whole) > Math.abs(2 * s) ? whole - sum + 2 * s : 2 * s - sum + whole;
    return sum + (lost + (2 * s * series + (2 * sRest + e * LN2_REST)));
  }

  // The pair indices at which YaRN's ramp over indices starts and ends.
  function correctionRange(rule, dim) {
    let [low, high] = [rule.beta_fast, rule.beta_slow].map(
      (rotations) => (dim * log(rule.trained_length / (rotations * 2 * Math.PI))) / (2 * log(rule.base)),
    );
    if (rule.truncate) [low, high] = [Math.floor(low), Math.ceil(high)];
    [low, high] = [Math.max(low, 0), Math.min(high, dim - 1)];
    return low === high ? [low, high + 0.001] : [low, high];
  }

  function g(rule, mscale) {
    return 0.1 * mscale * Math.log(rule.factor) + 1;
  }

  function yarnAmplitude(rule) {
    if (rule.policy === "vllm") return g(rule, 1) * (rule.attention_factor ?? 1);
    if (rule.attention_factor != null) return rule.attention_factor;
    if (rule.policy === "deepseek") return g(rule, rule.mscale ?? 1) / g(rule, rule.mscale_all_dim || 0);
    return rule.mscale && rule.mscale_all_dim ? g(rule, rule.mscale) / g(rule, rule.mscale_all_dim) : g(rule, 1);
  }

  function longRopeAmplitude(rule, length) {
    if (rule.attention_factor != null) return rule.attention_factor;
    if (rule.short_amplitude != null && rule.long_amplitude != null) {
      return length != null && length > rule.trained_length ? rule.long_amplitude : rule.short_amplitude;
    }
    return rule.factor == null ? 1 : Math.sqrt(1 + Math.log(rule.factor) / Math.log(rule.trained_length));
  }

  // evaluate(rule, dim, length) returns theta of each pair, or a list of rows if each head has its own frequencies.
  const known = {
    Plain: { evaluate: (rule, dim) => plain(rule.base, dim) },
    Explicit: {
      evaluate(rule, dim) {
        const perHead = Array.isArray(rule.inv_freq[0]);
        const rows = perHead ? rule.inv_freq : [rule.inv_freq];
        rows.forEach((row) => checkCount(row, dim));
        return perHead ? rows.map((row) => Float64Array.from(row)) : Float64Array.from(rows[0]);
      },
    },
    AcrossHeads: {
      evaluate(rule, dim) {
        const theta = plain(rule.base, rule.num_heads * dim);
        return Array.from({ length: rule.num_heads }, (_, h) => theta.slice((h * dim) / 2, ((h + 1) * dim) / 2));
      },
    },
    Proportional: {
      evaluate(rule, dim) {
        const theta = new Float64Array(dim / 2);
        const rotated = Math.floor((rule.fraction * dim) / 2);
        theta.set(plain(rule.base, dim, rotated).map((t) => t / rule.factor));
        return theta;
      },
    },
    PositionInterpolation: { evaluate: (rule, dim) => plain(rule.base, dim).map((theta) => theta / rule.factor) },
    NTK: { evaluate: (rule, dim) => plain(rule.base * rule.factor ** stretchExponent(dim), dim) },
    DynamicNTK: {
      varies: true,
      evaluate(rule, dim, length) {
        const exponent = stretchExponent(dim);
        if (length == null || length <= rule.trained_length) return plain(rule.base, dim);
        const growth = (rule.factor * length) / rule.trained_length - (rule.factor - 1);
        return plain(rule.base * growth ** exponent, dim);
      },
    },
    NTKFixed: {
      evaluate: (rule, dim) => plain(rule.base * rule.factor, dim).map((theta) => theta / rule.factor ** (2 / dim)),
    },
    NTKMixed: {
      evaluate(rule, dim) {
        const rate = Math.log(rule.factor) / (dim / 2) ** rule.bend;
        return plain(rule.base, dim).map((theta, i) => theta / Math.exp(rate * (i + 1) ** rule.bend));
      },
    },
    LongRope: {
      varies: true,
      evaluate(rule, dim, length) {
        const divisors = length != null && length > rule.trained_length ? rule.long_factor : rule.short_factor;
        checkCount(rule.short_factor, dim);
        checkCount(rule.long_factor, dim);
        return powers(rule.base, dim).map((power, i) => 1 / (divisors[i] * power));
      },
      amplitude: longRopeAmplitude,
    },
    NTKByParts: { evaluate: (rule, dim) => byRotations(rule, dim, rule.alpha, rule.beta) },
    Llama3: { evaluate: (rule, dim) => byRotations(rule, dim, rule.low_freq_factor, rule.high_freq_factor) },
    Yarn: {
      evaluate(rule, dim) {
        if (rule.ramp === "ratio") return byRotations(rule, dim, rule.beta_slow, rule.beta_fast);
        const [low, high] = correctionRange(rule, dim);
        return powers(rule.base, dim).map((power, i) => {
          const kept = 1 - Math.min(Math.max((i - low) / (high - low), 0), 1);
          return (1 / (rule.factor * power)) * (1 - kept) + (1 / power) * kept;
        });
      },
      amplitude: yarnAmplitude,
      softmaxScale: (rule) => (rule.policy === "deepseek" ? g(rule, rule.mscale_all_dim || 0) ** 2 : 1),
    },
  };

  function ruleOf(spec) {
    const name = spec.frequencies.rule;
    if (!Object.hasOwn(known, name)) throw new RangeError(`this page does not compute the rule ${name}`);
    return known[name];
  }

  function lengthOf(length) {
    return length == null ? null : Math.min(length, LONGEST);
  }

  // sign * theta_i: one Float64Array, or one per head. A length of null is at most the trained length.
  function invFreq(spec, length = null) {
    const theta = ruleOf(spec).evaluate(spec.frequencies, spec.rotary_dim, lengthOf(length));
    const signed = (row) => (spec.sign === -1 ? row.map((x) => -x) : row);
    return Array.isArray(theta) ? theta.map(signed) : signed(theta);
  }

  function amplitude(spec, length = null) {
    return ruleOf(spec).amplitude?.(spec.frequencies, lengthOf(length)) ?? 1;
  }

  function softmaxScale(spec) {
    return ruleOf(spec).softmaxScale?.(spec.frequencies) ?? 1;
  }

  return { known, log, plain, invFreq, amplitude, softmaxScale, correctionRange };
})();
