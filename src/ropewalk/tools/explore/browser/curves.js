"use strict";
// The numbers of the panels, from frequencies: no page, no rule. Held to ropewalk.theory and ropewalk.reference by tests.
const Curves = (() => {
  // Integers from 0 to most, at most `count` of them: all of them, or 0 and a geometric sequence.
  function distances(most, count) {
    if (most < count) return Float64Array.from({ length: most + 1 }, (_, i) => i);
    const steps = new Set([0]);
    for (let i = 0; i < count - 1; i++) steps.add(Math.round(most ** (i / (count - 2))));
    return Float64Array.from(steps);
  }

  // S(D) = sum_j cos(D theta_j), the score of parallel pairs of norm 1: theory.score_sum.
  function scoreSum(theta, gaps) {
    return gaps.map((gap) => {
      let sum = 0;
      for (let i = 0; i < theta.length; i++) sum += Math.cos(gap * theta[i]);
      return sum;
    });
  }

  // Mean of |S_1| .. |S_{d/2}|, the bound of RoFormer's figure 2: theory.decay_curve.
  function decayCurve(theta, gaps) {
    return gaps.map((gap) => {
      let [re, im, total] = [0, 0, 0];
      for (let i = 0; i < theta.length; i++) {
        const angle = gap * theta[i];
        re += Math.cos(angle);
        im += Math.sin(angle);
        total += Math.sqrt(re * re + im * im);
      }
      return total / theta.length;
    });
  }

  // The score of a query and a key of ones, relative to plain RoPE at distance 0. Features beyond rotary_dim count 1.
  function constantScore(theta, gaps, { headDim, amplitude, softmaxScale }) {
    const still = headDim - 2 * theta.length;
    return scoreSum(theta, gaps).map((sum) => (softmaxScale * (2 * amplitude * amplitude * sum + still)) / headDim);
  }

  // Edges of bands: 1, 32, 64, ... and the end. Every band except the first and the last is an octave. The last one has
  // half an octave to one and a half, because the mean over a few distances is no mean of an oscillation.
  function octaves(length) {
    const edges = [1];
    for (let edge = 32; 1.5 * edge <= length; edge *= 2) edges.push(edge);
    return [...edges, length];
  }

  const BLOCK = 2048;

  // Calls `visit(m, cos, sin)` for m = low .. high-1, with cos(m theta_i) and sin(m theta_i), until it returns true. Phases
  // are rotated from m to m + 1, and computed anew for every block, so that rounding does not grow.
  function walk(theta, [stepCos, stepSin], low, high, visit) {
    for (let start = low; start < high; start += BLOCK) {
      const [x, y] = [theta.map((t) => Math.cos(start * t)), theta.map((t) => Math.sin(start * t))];
      const end = Math.min(start + BLOCK, high);
      for (let m = start; m < end; m++) {
        if (visit(m, x, y)) return;
        for (let i = 0; i < theta.length; i++) {
          const u = x[i];
          const v = y[i];
          x[i] = u * stepCos[i] - v * stepSin[i];
          y[i] = u * stepSin[i] + v * stepCos[i];
        }
      }
    }
  }

  // The first integer distance from 1 to `most` with a negative constant score, or null. Distances between drawn points may
  // have one although these do not, so all are computed.
  function firstNegative(theta, most, form) {
    const still = (form.headDim - 2 * theta.length) / (2 * form.amplitude ** 2);
    let first = null;
    walk(theta, [theta.map(Math.cos), theta.map(Math.sin)], 1, most + 1, (m, cos) => {
      let sum = still;
      for (let i = 0; i < theta.length; i++) sum += cos[i];
      // The rotated phases have rounding errors of about 1e-13.
      if (sum < 1e-9 && constantScore(theta, Float64Array.of(m), form)[0] < 0) first = m;
      return first !== null;
    });
    return first;
  }

  // The first position from 1 to `most` at which the error of an angle is 1 rad or more, or null.
  function firstWrong(theta, most, round) {
    for (let start = 1; start <= most; start += BLOCK) {
      const xs = Float64Array.from({ length: Math.min(BLOCK, most + 1 - start) }, (_, i) => start + i);
      const index = angleError(theta, xs, round).findIndex((x) => x >= 1);
      if (index !== -1) return xs[index];
    }
    return null;
  }

  // The mean of the decay curve over all integer distances of each octave: [{low, high, mean}]. A generator, because a long
  // context takes a second: it yields after every block of distances. Phases are rotated from distance to distance, and
  // computed anew for every block, so that rounding does not grow.
  function* octaveMeans(theta, length) {
    const edges = octaves(length);
    const means = [];
    const step = [theta.map(Math.cos), theta.map(Math.sin)];
    for (let k = 0; k + 1 < edges.length; k++) {
      const [low, high] = [edges[k], edges[k + 1]];
      let sum = 0;
      const add = (_, cos, sin) => {
        let [re, im, total] = [0, 0, 0];
        for (let i = 0; i < theta.length; i++) {
          re += cos[i];
          im += sin[i];
          total += Math.sqrt(re * re + im * im);
        }
        sum += total / theta.length;
      };
      for (let start = low; start < high; start += BLOCK) {
        walk(theta, step, start, Math.min(start + BLOCK, high), add);
        yield;
      }
      means.push({ low, high, mean: sum / (high - low) });
    }
    return means;
  }

  // How a rule changes each pair, as theory.classify does.
  function classify(theta, unscaled) {
    const ratios = Array.from(theta, (x, i) => Math.abs(x / unscaled[i]));
    const smallest = Math.min(...ratios.filter((ratio) => ratio > 0));
    return ratios.map((ratio) => {
      if (ratio === 0) return "still";
      if (Math.abs(ratio - 1) <= 1e-9) return "unchanged";
      if (ratio > 1) return "faster";
      return ratio <= smallest * (1 + 1e-9) ? "interpolated" : "between";
    });
  }

  // Runs of equal entries: [{kind, first, last}].
  function runs(kinds) {
    const list = [];
    kinds.forEach((kind, i) => {
      const run = list.at(-1);
      if (run && run.kind === kind) run.last = i;
      else list.push({ kind, first: i, last: i });
    });
    return list;
  }

  function alibiSlopes(heads) {
    let below = 1;
    while (2 * below <= heads) below *= 2;
    const slopes = Array.from({ length: below }, (_, h) => 2 ** ((-8 * (h + 1)) / below));
    const between = Array.from({ length: heads - below }, (_, h) => 2 ** ((-4 * (2 * h + 1)) / below));
    return [...slopes, ...between];
  }

  // The first distances of T5's buckets for causal attention, in exact integers.
  function t5Starts(buckets, farthest) {
    const exact = Math.floor(buckets / 2);
    const count = buckets - exact;
    const starts = Array.from({ length: exact + 1 }, (_, n) => n);
    for (let step = 1; step < count; step++) {
      const target = BigInt(farthest) ** BigInt(step) * BigInt(exact) ** BigInt(count - step);
      let [low, high] = [0, farthest];
      while (high - low > 1) {
        const middle = Math.floor((low + high) / 2);
        if (BigInt(middle) ** BigInt(count) < target) low = middle;
        else high = middle;
      }
      starts.push(high);
    }
    return starts;
  }

  // The bucket of a distance: the last one whose first distance is not beyond it. Buckets may be empty.
  function t5Bucket(starts, distance) {
    let bucket = starts.length - 1;
    while (bucket > 0 && starts[bucket] > distance) bucket -= 1;
    return bucket;
  }

  const float = new Float32Array(1);
  const bits = new Uint32Array(float.buffer);

  // Round to bfloat16, ties to even, by way of float32.
  function bfloat16(x) {
    float[0] = x;
    bits[0] = ((bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) & 0xffff0000) >>> 0;
    return float[0];
  }

  // The error of angles m * theta in radians, if m, theta and the product are rounded by `round`: the largest of all pairs.
  function angleError(theta, positions, round) {
    const rounded = theta.map(round);
    return positions.map((m) => {
      const position = round(m);
      let worst = 0;
      for (let i = 0; i < theta.length; i++) {
        worst = Math.max(worst, Math.abs(round(position * rounded[i]) - m * theta[i]));
      }
      return worst;
    });
  }

  return {
    distances, scoreSum, decayCurve, constantScore, octaves, octaveMeans, firstNegative, firstWrong, classify, runs, alibiSlopes, t5Starts, t5Bucket,
    bfloat16, float32: Math.fround, angleError,
  };
})();
