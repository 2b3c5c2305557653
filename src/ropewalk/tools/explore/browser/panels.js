"use strict";
// The panels: what each shows for a state. A panel returns sentences, charts and a table, and touches no page.
const makePanels = (specs, data) => {
  const POINTS = 2048;
  // The largest number of cosines for means over all distances: a second.
  const MOST_TERMS = 2 ** 26;
  // The largest number of cosines for the search for one distance: a step of a slider waits for it.
  const MOST_SEARCHED = 2 ** 23;
  // The same for roundings to bfloat16, which take longer.
  const MOST_ROUNDED = 2 ** 20;
  const { text, capital } = Chart;
  const KINDS = {
    faster: "rotate faster",
    unchanged: "unchanged",
    between: "between the two",
    interpolated: "divided the most",
    still: "do not rotate",
  };

  // Frequencies of one head at the length of the context, with what the panels need of the spec.
  function view(spec, state) {
    const all = Rules.invFreq(spec, state.context);
    const theta = Array.isArray(all) ? all[Math.min(state.head, all.length - 1)] : all;
    return {
      spec,
      theta,
      headDim: spec.head_dim,
      amplitude: Rules.amplitude(spec, state.context),
      softmaxScale: Rules.softmaxScale(spec),
      perHead: Array.isArray(all),
    };
  }

  // The views to draw: A, and B if there is one.
  function views(state) {
    const shown = [{ ...view(state.a, state), name: state.b ? `A: ${nameOfA(state)}` : labelOf(state.a), colour: "a" }];
    if (state.b) shown.push({ ...view(state.b, state), name: `B: ${state.bName || labelOf(state.b)}`, colour: "b", dashed: true });
    return shown;
  }

  function nameOfA(state) {
    return state.preset || labelOf(state.a);
  }

  function labelOf(spec) {
    return data.rules[spec.frequencies.rule].label;
  }

  // Frequencies without the rule: theory.plain_inv_freq. Null for a rule without a base, or with frequencies per head.
  function plainOf(spec) {
    const plain = specs.unscaled(spec);
    return plain && Rules.plain(plain.frequencies.base, spec.rotary_dim);
  }

  function noPlain(spec) {
    return `${capital(labelOf(spec))} has no frequencies without the rule.`;
  }

  function rangeText({ first, last }) {
    return first === last ? `pair ${first}` : `pairs ${first}–${last}`;
  }

  const indices = (theta) => Float64Array.from(theta, (_, i) => i);
  const wavelengths = (theta) => theta.map((x) => (x === 0 ? Infinity : (2 * Math.PI) / Math.abs(x)));
  const trainedLength = (state) => state.a.frequencies.trained_length ?? state.trained;
  const atDistance = (state) => [{ x: state.distance, label: `distance ${text(state.distance)}` }];

  function distanceAxis(state) {
    const xs = Curves.distances(state.context, POINTS);
    return { xs, axis: { label: "distance between query and key, in positions", log: true, domain: [1, Math.max(state.context, 3)] } };
  }

  // What a search found last, per panel. A slider that moves along distances does not change it.
  const searches = new Map();

  function searched(panel, most, { theta, amplitude, headDim }, search) {
    const key = `${most} ${amplitude} ${headDim} ${theta.join()}`;
    if (searches.get(panel)?.key !== key) searches.set(panel, { key, result: search() });
    return searches.get(panel).result;
  }

  // One curve per view over distances, with its value at the chosen distance first in the summary.
  function overDistance(state, compute, y, label) {
    const { xs, axis } = distanceAxis(state);
    const lines = views(state).map((v) => ({ ...v, xs, ys: compute(v, xs) }));
    const atPlace = Float64Array.of(state.distance);
    const values = views(state).map((v, i) => `${state.b ? "AB"[i] : v.name}: ${text(compute(v, atPlace)[0])}`).join("; ");
    return { charts: [{ label, x: axis, y, lines, marks: atDistance(state) }], values, lines, xs };
  }

  function curveTable(caption, first, xs, lines) {
    const every = Math.max(1, Math.floor(xs.length / 64));
    return {
      caption,
      head: [first, ...lines.map((line) => line.name)],
      rows: () => Array.from(xs).filter((_, i) => i % every === 0 || i === xs.length - 1)
        .map((x) => [x, ...lines.map((line) => line.ys[Chart.nearest(xs, x)])]),
    };
  }

  const rotation = {
    title: "Rotation",
    intro: "Pair i of a token at position m is rotated by the angle m·θᵢ. In parentheses: the features that form the pair.",
    draw(state) {
      const v = view(state.a, state);
      const angle = (i, m = state.position) => m * v.theta[i];
      const count = Math.min(v.theta.length, 24);
      const chosen = Array.from({ length: count }, (_, i) => Math.round((i * (v.theta.length - 1)) / Math.max(count - 1, 1)));
      const features = (i) => {
        const start = state.a.rotary_slice === "trailing" ? state.a.head_dim - state.a.rotary_dim : 0;
        return state.a.pairing === "half" ? [start + i, start + i + v.theta.length] : [start + 2 * i, start + 2 * i + 1];
      };
      const completed = Array.from(v.theta).filter((x) => Math.abs(x) * state.position >= 2 * Math.PI).length;
      return {
        summary: `At position ${text(state.position)}, ${completed} of ${v.theta.length} pairs have completed a rotation. ` +
          `Per position, pair 0 rotates by ${text(Math.abs(v.theta[0]))} rad${v.theta.length > 1 ? ` and pair ${v.theta.length - 1} by ${text(Math.abs(v.theta.at(-1)))} rad` : ""}.` +
          (v.amplitude === 1 ? "" : ` The vectors have the length ${text(v.amplitude, 6)}, the amplitude.`),
        circles: chosen.map((i) => ({ pair: i, angle: angle(i), theta: v.theta[i], features: features(i) })),
        length: v.amplitude,
        table: {
          caption: `The angle of each pair at position ${text(state.position)}`,
          head: ["pair", "features", "θ (rad per position)", "angle m·θ (rad)", "rotations", "cos", "sin"],
          rows: () => Array.from(v.theta, (theta, i) => [
            i, features(i).join(", "), theta, angle(i), angle(i) / (2 * Math.PI), v.amplitude * Math.cos(angle(i)), v.amplitude * Math.sin(angle(i)),
          ]),
        },
      };
    },
  };

  const wavelength = {
    title: "Wavelengths",
    intro: "The wavelength 2π/θᵢ is the number of positions after which a pair points the same way again. A pair whose wavelength exceeds the trained length has not completed a rotation in training.",
    draw(state) {
      const trained = trainedLength(state);
      const lines = views(state).map((v) => ({ ...v, xs: indices(v.theta), ys: wavelengths(v.theta), dots: true }));
      const plain = plainOf(state.a);
      const same = state.a.frequencies.rule === "Plain" || plain === null;
      if (!same) {
        lines.unshift({ name: state.b ? "A without the rule" : "without the rule", colour: "c", dashed: true, xs: indices(plain), ys: wavelengths(plain) });
      }
      const waves = wavelengths(view(state.a, state).theta);
      const within = (list, length) => list.filter((x) => x <= length).length;
      const [old, now] = [within(same ? waves : wavelengths(plain), trained), within(waves, state.context)];
      return {
        summary: `Trained length ${text(trained)}: ${old} of ${waves.length} pairs complete a rotation within it` +
          `${same ? "" : " without the rule"}. Context ${text(state.context)}: ${now} of ${waves.length} do${same ? "" : ", with the rule"}. ` +
          `The longest wavelength is ${text(Math.max(...waves))} positions.${plain === null ? ` ${noPlain(state.a)}` : ""}`,
        charts: [{
          label: "Wavelength of each pair, with lines at the trained length and at the context",
          x: { label: "pair" }, y: { label: "wavelength, in positions", log: true, include: [trained, state.context] }, lines,
          marks: [{ y: trained, label: `trained length ${text(trained)}`, at: "start" }, ...(state.context === trained ? [] : [{ y: state.context, label: `context ${text(state.context)}`, at: "start" }])],
        }],
        table: {
          caption: "Each pair: frequency, wavelength, and rotations within the trained length and the context",
          head: ["pair", "θ (rad per position)", "wavelength", "rotations in trained length", "rotations in context", ...(state.b ? ["wavelength of B"] : [])],
          rows: () => {
            const other = state.b ? wavelengths(view(state.b, state).theta) : [];
            return Array.from(view(state.a, state).theta, (x, i) => [
              i, x, waves[i], trained / waves[i], state.context / waves[i], ...(state.b ? [other[i] ?? NaN] : []),
            ]);
          },
        },
      };
    },
  };

  const rule = {
    title: "What the rule changes",
    intro: "The frequency of each pair with the rule, divided by its frequency without it. 1 is unchanged; 1/factor is as if positions were divided by the factor.",
    draw(state) {
      const v = view(state.a, state);
      const plain = plainOf(state.a);
      if (plain === null) return withoutPlain(state, v);
      const kinds = Curves.classify(v.theta, plain);
      const runs = Curves.runs(kinds);
      const ratio = Float64Array.from(v.theta, (x, i) => Math.abs(x / plain[i]));
      const smallest = Math.min(...ratio.filter((x) => x > 0));
      const changeOf = ({ kind, first, last }) => {
        if (kind === "interpolated") return `divided by ${text(1 / smallest)}`;
        if (kind !== "between") return KINDS[kind];
        const inside = ratio.subarray(first, last + 1);
        const ends = [Math.max(...inside), Math.min(...inside)].map((x) => text(1 / x));
        return `divided by ${ends[0] === ends[1] ? ends[0] : ends.join(" to ")}`;
      };
      const still = kinds.includes("still");
      const lines = Object.keys(KINDS).filter((kind) => kinds.includes(kind)).map((kind) => {
        const xs = Array.from(kinds.keys()).filter((i) => kinds[i] === kind);
        return { name: KINDS[kind], colour: `k-${kind}`, xs, ys: xs.map((i) => ratio[i]), dots: true };
      });
      const parts = runs.map((run) => `${rangeText(run)} ${changeOf(run)}`);
      const ramp = state.a.frequencies.rule === "Yarn" && state.a.frequencies.ramp === "index"
        ? ` YaRN's ramp runs from index ${Rules.correctionRange(state.a.frequencies, state.a.rotary_dim).map((x) => text(x)).join(" to ")}.` : "";
      return {
        summary: `${labelOf(state.a)} at ${text(state.context)} positions: ${parts.length > 8 ? `${parts.slice(0, 7).join("; ")}; …` : parts.join("; ")}. ` +
          `Amplitude of cos and sin: ${text(v.amplitude, 6)}.${v.softmaxScale === 1 ? "" : ` Scores are multiplied by ${text(v.softmaxScale, 6)}.`}${ramp}`,
        charts: [{
          label: `Ratio of the frequencies with and without the rule. ${capital(parts.slice(0, 8).join("; "))}`,
          x: { label: "pair", domain: [-0.5, v.theta.length - 0.5] }, y: { label: "θ with the rule / θ without", log: !still && smallest < 0.5, include: [1] }, lines,
          areas: runs.map((run) => ({ from: run.first - 0.5, to: run.last + 0.5, kind: `k-${run.kind}` })),
        }],
        table: {
          caption: "Each pair with and without the rule",
          head: ["pair", "θ without the rule", "θ with the rule", "ratio", "change"],
          rows: () => Array.from(v.theta, (x, i) => [i, plain[i], x, ratio[i], KINDS[kinds[i]]]),
        },
      };
    },
  };

  // What the panel of the rule shows if there is nothing to divide by.
  function withoutPlain(state, { theta, amplitude }) {
    const positive = theta.every((x) => x > 0);
    return {
      summary: `${noPlain(state.a)} The picture shows its own frequencies. Amplitude of cos and sin: ${text(amplitude, 6)}.`,
      charts: [{
        label: "Frequency of each pair", x: { label: "pair", domain: [-0.5, theta.length - 0.5] }, y: { label: "θ, in rad per position", log: positive, include: positive ? [] : [0] },
        lines: [{ name: labelOf(state.a), colour: "a", xs: indices(theta), ys: theta, dots: true }],
      }],
      table: { caption: "Each pair", head: ["pair", "θ (rad per position)"], rows: () => Array.from(theta, (x, i) => [i, x]) },
    };
  }

  const decay = {
    title: "Decay bound",
    intro: "The mean of |S₁|, |S₂|, …, where Sⱼ is the sum of exp(i·D·θ) over the first j pairs: RoFormer's bound on the score at distance D. It oscillates; its means over octaves of distances tell where it falls.",
    draw(state, meansOf) {
      const out = overDistance(state, (v, xs) => Curves.decayCurve(v.theta, xs), { label: "mean of |Sⱼ|", include: [0] }, "Decay bound over distance, with means over octaves");
      const most = Math.max(2, Math.floor(MOST_TERMS / Math.max(...out.lines.map((line) => line.theta.length))));
      const farthest = Math.min(state.context, most);
      const bands = views(state).map((v) => meansOf(v.theta, farthest));
      out.charts[0].lines = out.lines.map((line) => ({ ...line, thin: true }));
      bands.forEach((list, i) => list && out.charts[0].lines.push({
        name: `mean per octave${state.b ? ` of ${"AB"[i]}` : ""}`, colour: `${"ab"[i]} mean`, steps: true,
        xs: list.flatMap((b) => [b.low, b.high]), ys: list.flatMap((b) => [b.mean, b.mean]),
      }));
      return {
        ...out,
        summary: `${bands[0] ? falling(bands[0], farthest, farthest === most) : "The means over octaves are being computed."} At distance ${text(state.distance)}: ${out.values}.`,
        table: {
          caption: "Mean of the bound over all distances of an octave",
          head: ["distances", ...views(state).map((v) => v.name)],
          rows: () => (bands[0] ?? []).map((b, i) => [span(b), ...bands.map((list) => list?.[i].mean ?? NaN)]),
        },
      };
    },
  };

  function span(band) {
    return `${text(band.low)}–${text(band.high - 1)}`;
  }

  // Where the means over octaves first rise. Differences of rounding are none.
  function falling(bands, farthest, isMost) {
    if (bands.length < 2) return `The context is too short for means over octaves of distances.`;
    const rises = (x, y) => x > y * (1 + 1e-9);
    const first = bands.findIndex((band, i) => i > 0 && rises(band.mean, bands[i - 1].mean));
    if (first === -1) {
      const falls = rises(bands[0].mean, bands.at(-1).mean);
      const more = isMost ? ", the farthest that this page computes" : falls ? "; raise Context to see where they stop" : "";
      return `The means over octaves ${falls ? "fall" : "are equal"} through all distances below ${text(farthest)}${more}.`;
    }
    const lowest = bands.reduce((best, band) => (band.mean < best.mean ? band : best));
    return `The means over octaves first rise after distances ${span(bands[first - 1])}; the lowest is ${text(lowest.mean)}, at ${span(lowest)}.`;
  }

  function isDrawn(xs, x) {
    return xs[Chart.nearest(xs, x)] === x;
  }

  const score = {
    title: "Constant query",
    intro: "The score of a query and a key whose features are all 1, relative to plain RoPE at distance 0. What is left of it is what distance alone does to similar tokens.",
    draw(state) {
      const out = overDistance(state, (v, xs) => Curves.constantScore(v.theta, xs, v), { label: "relative score", include: [0] }, "Score of a constant query over distance");
      const v = view(state.a, state);
      const farthest = Math.min(state.context, Math.floor(MOST_SEARCHED / v.theta.length));
      const first = searched("score", farthest, v, () => Curves.firstNegative(v.theta, farthest, v));
      return {
        ...out,
        summary: `At distance ${text(state.distance)}: ${out.values}. ` +
          (first === null ? `No distance up to ${text(farthest)} has a negative score.` : `The first distance with a negative score is ${text(first)}${isDrawn(out.xs, first) ? "" : ", between two drawn points"}.`),
        table: curveTable("The score at some of the drawn distances", "distance", out.xs, out.lines),
      };
    },
  };

  const DRAWN_HEADS = 3;

  function drawnHeads(learned) {
    const cut = learned.filter((entry) => entry.heads.length > DRAWN_HEADS);
    return cut.map((entry) => ` The first ${DRAWN_HEADS} of ${entry.heads.length} heads of ${entry.name} are drawn.`).join("");
  }

  const bias = {
    title: "ALiBi and T5",
    intro: "What two other encodings add to a score at each distance. ALiBi: −slope × distance, one slope per head. T5: one learned number per bucket of distances, here the buckets of a decoder, which is causal.",
    draw(state) {
      const learned = data.biases.filter((entry) => entry.heads);
      const { xs, axis } = distanceAxis(state);
      const slopes = Curves.alibiSlopes(state.heads);
      const shown = [...new Set([0, Math.floor((slopes.length - 1) / 2), slopes.length - 1])];
      const lines = shown.map((h, i) => ({ name: `ALiBi head ${h + 1}`, colour: "acd"[i], xs, ys: xs.map((x) => -slopes[h] * x) }));
      const { num_buckets: count, max_distance: end } = learned[0] ?? { num_buckets: 32, max_distance: 128 };
      const starts = Curves.t5Starts(count, end);
      const buckets = xs.map((x) => Curves.t5Bucket(starts, x));
      const charts = [{
        label: "ALiBi's bias over distance, in score units", x: axis, lines, marks: atDistance(state),
        y: { label: "added to the score", domain: [-16, 1] },
      }];
      const t5 = [];
      for (const entry of learned) {
        const edges = Curves.t5Starts(entry.num_buckets, entry.max_distance);
        entry.heads.slice(0, DRAWN_HEADS).forEach((numbers, h) => t5.push({
          name: `${entry.name}, head ${h + 1}`, colour: "bdc"[h], xs, ys: xs.map((x) => numbers[Curves.t5Bucket(edges, x)]),
        }));
      }
      charts.push(t5.length
        ? { label: "T5's learned bias over distance, in score units", x: axis, y: { label: "added to the score", include: [0] }, lines: t5, marks: atDistance(state) }
        : { label: "T5's bucket over distance", x: axis, y: { label: "T5's bucket", domain: [0, count] }, lines: [{ name: `T5's bucket of ${count}`, colour: "b", xs, ys: buckets }], marks: atDistance(state) });
      const atPlace = shown.map((h) => `head ${h + 1} ${text(-slopes[h] * state.distance)}`).join(", ");
      const factor = text(Math.exp(-slopes.at(-1) * state.distance));
      return {
        charts,
        summary: `At distance ${text(state.distance)}, ALiBi with ${state.heads} heads adds: ${atPlace}; the weight of head ${slopes.length} is multiplied by ${factor}. ` +
          `${learned.length ? learned[0].name : "T5"} uses bucket ${Curves.t5Bucket(starts, state.distance)} of ${count}; ` +
          (learned.length ? `its numbers are those of the weights.${drawnHeads(learned)}` : "its numbers are learned: pass a T5 model folder to draw them."),
        table: {
          caption: `Bias per distance: ALiBi in score units, and T5's bucket of ${count} with a largest distance of ${text(end)}`,
          head: ["distance", ...lines.map((line) => line.name), "T5's bucket", ...t5.map((line) => line.name)],
          rows: () => Array.from(xs).filter((_, i) => i % 32 === 0).map((x) => {
            const i = Chart.nearest(xs, x);
            return [x, ...lines.map((line) => line.ys[i]), buckets[i], ...t5.map((line) => line.ys[i])];
          }),
        },
      };
    },
  };

  // What two views do not share apart from frequencies, as a sentence.
  function unequal(one, two) {
    const fields = ["head_dim", "rotary_dim", "pairing", "rotary_slice", "sign", "angles"].map((name) => [name, one.spec[name], two.spec[name]]);
    fields.push(["amplitude", one.amplitude, two.amplitude], ["softmax scale", one.softmaxScale, two.softmaxScale]);
    // Fields that both rules have.
    const [rules, others] = [one, two].map((v) => v.spec.frequencies);
    const ofRule = Object.keys(rules).filter((name) => name !== "rule" && name in others).map((name) => [name, rules[name], others[name]]);
    fields.unshift(["rule", labelOf(one.spec), labelOf(two.spec)], ...ofRule);
    const shown = (x) => (typeof x === "number" ? text(x, 6) : x ?? "none");
    const phrase = (name, x, y) => ([x, y].some(Array.isArray) ? name : `${name} ${shown(x)} and ${shown(y)}`);
    const differ = fields.filter(([, x, y]) => JSON.stringify(x) !== JSON.stringify(y)).map((field) => phrase(...field));
    return differ.length ? `Different: ${differ.join("; ")}.` : "All other fields are equal.";
  }

  const compare = {
    title: "Two specs",
    intro: "A and B side by side: the ratio of their frequencies per pair, and their scores with the difference. Choose B under “Compare with”.",
    draw(state) {
      const b = state.b ?? specs.unscaled(state.a);
      if (b === null) {
        const alone = score.draw(state);
        return { ...alone, summary: `${noPlain(state.a)} Choose B under “Compare with”. The picture shows the score of A.` };
      }
      const both = views({ ...state, b, bName: state.b ? state.bName : "A without its rule" });
      const invitation = state.b ? "" : "B is A without its rule, until you choose one under “Compare with”. ";
      const [one, two] = both;
      const pairs = Math.min(one.theta.length, two.theta.length);
      const ratio = Float64Array.from({ length: pairs }, (_, i) => Math.abs(one.theta[i] / two.theta[i]));
      const { xs, axis } = distanceAxis(state);
      const scores = both.map((v) => ({ ...v, thin: true, xs, ys: Curves.constantScore(v.theta, xs, v) }));
      const difference = { name: "A − B", colour: "c", thin: true, xs, ys: scores[0].ys.map((y, i) => y - scores[1].ys[i]) };
      // Pairs that do not rotate in both have 0/0.
      const equal = Array.from(ratio).filter((_, i) => one.theta[i] === two.theta[i] || Math.abs(one.theta[i] / two.theta[i] - 1) <= 1e-9).length;
      const head = both.some((v) => v.perHead) ? ` in head ${state.head}` : "";
      const widest = difference.ys.reduce((most, y, i) => (Math.abs(y) > Math.abs(difference.ys[most]) ? i : most), 0);
      const unlike = one.theta.length === two.theta.length ? "" : ` A has ${one.theta.length} pairs and B ${two.theta.length}: the first ${pairs} are compared.`;
      return {
        summary: `${invitation}${equal} of ${pairs} pairs ${equal === 1 ? "has" : "have"} the same frequency${head}.${unlike} ` +
          (Math.abs(difference.ys[widest]) <= 1e-12 ? "The scores are equal at all drawn distances. " : `Over the drawn distances, the scores differ most at ${text(xs[widest])}: by ${text(difference.ys[widest])}. `) +
          unequal(one, two),
        charts: [
          { label: "Frequency of A divided by that of B, per pair", x: { label: "pair" }, y: { label: "θ of A / θ of B", log: true, include: [1] }, lines: [{ name: "A / B", colour: "a", xs: indices(ratio), ys: ratio, dots: true }] },
          { label: "Scores of a constant query of A and B and their difference", x: axis, y: { label: "relative score", include: [0] }, lines: [...scores, difference], marks: atDistance(state) },
        ],
        table: {
          caption: "Each pair of A and B",
          head: ["pair", "θ of A", "θ of B", "A / B", "A − B"],
          rows: () => Array.from(ratio, (x, i) => [i, one.theta[i], two.theta[i], x, one.theta[i] - two.theta[i]]),
        },
      };
    },
  };

  const precision = {
    title: "Precision",
    intro: "The error of the angle m·θ if the position, the frequency and their product are rounded: the largest of all pairs. An error of 1 rad is a wrong rotation.",
    draw(state) {
      const v = view(state.a, state);
      const xs = Curves.distances(state.context, 512).slice(1);
      const kinds = [["float32", Curves.float32, "a"], ["bfloat16", Curves.bfloat16, "b"]];
      const lines = kinds.map(([name, round, colour]) => ({ name, colour, xs, ys: Curves.angleError(v.theta, xs, round) }));
      const atPlace = kinds.map(([name, round]) => `${name} ${text(Curves.angleError(v.theta, Float64Array.of(state.position), round)[0])} rad`);
      const farthest = Math.min(state.context, Math.floor(MOST_ROUNDED / v.theta.length));
      const wrong = searched("precision", farthest, v, () => Curves.firstWrong(v.theta, farthest, Curves.bfloat16));
      const kept = state.a.angles === "float32" ? "rounds them to float32, as the reference code of the model does" : "computes them in float64";
      return {
        summary: `At position ${text(state.position)}: ${atPlace.join(", ")}. ` +
          (wrong === null ? `With bfloat16, the error stays below 1 rad up to position ${text(farthest)}.` : `With bfloat16, the error reaches 1 rad at position ${text(wrong)}.`) +
          ` For angles of this spec, ropewalk ${kept}.`,
        charts: [{
          label: "Largest error of an angle by position, for float32 and bfloat16",
          x: { label: "position", log: true }, y: { label: "error of the angle, in rad", log: true, include: [1] }, lines,
          marks: [{ y: 1, label: "1 rad", at: "start" }, { x: state.position, label: `position ${text(state.position)}` }],
        }],
        table: curveTable("The largest error at some of the drawn positions, in rad", "position", xs, lines),
      };
    },
  };

  const lab = {
    title: "Lab",
    intro: "Curves of the small models that ropewalk lab trained: means over seeds.",
    draw(state) {
      const record = data.lab[Math.min(state.record, data.lab.length - 1)];
      const names = ["a", "b", "c", "d", "e", "f"];
      const lines = record.lines.map((line, i) => ({ ...line, colour: names[i % names.length], dashed: i >= names.length, dots: line.xs.length === 1 }));
      return {
        summary: `${record.verdicts} ${record.note}`.trim(),
        charts: [{ label: `${record.title}: ${record.y} by ${record.x}`, x: { label: record.x, log: record.log }, y: { label: record.y }, lines }],
        table: {
          caption: record.title,
          head: [record.x, ...lines.map((line) => line.name)],
          rows: () => [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b)
            .map((x) => [x, ...lines.map((line) => line.ys[line.xs.indexOf(x)] ?? NaN)]),
        },
      };
    },
  };

  // With B, a sentence about A names A.
  for (const panel of [rotation, wavelength, rule, decay, score, precision]) {
    const { draw } = panel;
    panel.draw = (state, ...rest) => {
      const drawn = draw(state, ...rest);
      return state.b ? { ...drawn, summary: `A (${nameOfA(state)}): ${drawn.summary}` } : drawn;
    };
  }

  return { rotation, wavelength, rule, decay, score, bias, compare, precision, ...(data.lab.length ? { lab } : {}) };
};
