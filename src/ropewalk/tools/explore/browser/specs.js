"use strict";
// Specs as values of the page: checked, clamped, written into a link and read from one, and written as code.
//
// `schema` describes the rules: {Yarn: {label, rope_type, config_keys, fields: [{name, kind, default, choices}]}}. Python
// makes it from the classes of the rules. Whatever comes from outside (a link, a field) passes `check`.
const makeSpecs = (schema) => {
  const MOST_LENGTH = 2 ** 40;
  const MOST_LINK = 200_000;
  const PAIRINGS = ["interleaved", "half"];
  // What a number may be: the smallest, the largest, and whether it is an integer (or even).
  const LIMITS = {
    head_dim: { low: 2, high: 2048, step: 2 },
    rotary_dim: { low: 2, high: 2048, step: 2 },
    base: { low: 1.01, high: 1e12 },
    factor: { low: 1, high: 1e6 },
    trained_length: { low: 2, high: MOST_LENGTH, step: 1 },
    trained: { low: 2, high: MOST_LENGTH, step: 1 },
    context: { low: 2, high: MOST_LENGTH, step: 1 },
    record: { low: 0, high: 999, step: 1 },
    position: { low: 0, high: MOST_LENGTH - 1, step: 1 },
    distance: { low: 0, high: MOST_LENGTH - 1, step: 1 },
    heads: { low: 1, high: 1024, step: 1 },
    head: { low: 0, high: 255, step: 1 },
    num_heads: { low: 1, high: 64, step: 1 },
    fraction: { low: 0, high: 1 },
    bend: { low: 0.01, high: 4 },
    mscale: { low: 1e-6, high: 100 },
    mscale_all_dim: { low: 1e-6, high: 100 },
  };
  const ROTATIONS = { low: 1e-6, high: 1e6 };
  const OTHERS = { low: 1e-6, high: 1e6 };
  // Numbers of rotations: the first may not exceed the second.
  const ORDERED = [["alpha", "beta"], ["low_freq_factor", "high_freq_factor"], ["beta_slow", "beta_fast"]];

  function limitsOf(name) {
    if (Object.hasOwn(LIMITS, name)) return LIMITS[name];
    return ORDERED.flat().includes(name) ? ROTATIONS : OTHERS;
  }

  function shown(x) {
    return typeof x === "number" ? String(x) : JSON.stringify(String(x).slice(0, 40));
  }

  // A number within the limits of its field. States in `notes` if it had to be changed.
  function number(name, value, fallback, notes, { low, high, step } = limitsOf(name)) {
    const stated = typeof value === "string" && value.trim() === "" ? NaN : Number(value);
    if (Number.isNaN(stated)) {
      if (value !== undefined) notes.push(`${name}: ${shown(value)} is not a number; ${fallback} is used`);
      return fallback;
    }
    let x = Math.min(Math.max(stated, low), high);
    if (step) x = Math.min(Math.max(Math.round(x / step) * step, low), high);
    if (x !== stated) notes.push(`${name}: ${shown(stated)} was changed to ${shown(x)}`);
    return x;
  }

  function choice(name, value, choices, fallback, notes) {
    if (choices.includes(value)) return value;
    if (value !== undefined) notes.push(`${name}: ${shown(value)} is not one of ${choices.join(", ")}; ${fallback} is used`);
    return fallback;
  }

  function row(value, { low, high }) {
    if (!Array.isArray(value) || value.length === 0 || value.length > 1024) return null;
    return value.every((x) => typeof x === "number" && x >= low && x <= high) ? value : null;
  }

  // Divisors, or frequencies per pair or per head and pair. Null if they are none.
  function list(name, value) {
    if (name !== "inv_freq") return row(value, { low: 1e-12, high: 1e12 });
    const limits = { low: -1e12, high: 1e12 };
    if (!Array.isArray(value) || !Array.isArray(value[0])) return row(value, limits);
    const same = value.length <= 64 && value.every((r) => Array.isArray(r) && r.length === value[0].length);
    return same && value.every((r) => row(r, limits)) ? value : null;
  }

  function field({ name, kind, default: usual, choices }, value, notes) {
    if (kind === "flag") {
      if (typeof value !== "boolean" && value !== undefined) notes.push(`${name}: ${shown(value)} is neither true nor false`);
      return typeof value === "boolean" ? value : usual;
    }
    if (kind === "choice") return choice(name, value, choices, usual, notes);
    if (kind === "list") return list(name, value);
    if (kind === "optional") return value == null || value === "" ? null : number(name, value, null, notes);
    return number(name, value ?? undefined, usual ?? 4, notes);
  }

  // A spec with valid fields from any object, and what was changed. Lists of a rule decide the number of pairs.
  function check(raw, notes = []) {
    const stated = raw.frequencies ?? {};
    let name = choice("rule", stated.rule, Object.keys(schema), "Plain", notes);
    let frequencies = { rule: name };
    for (const description of schema[name].fields) {
      frequencies[description.name] = field(description, stated[description.name], notes);
    }
    const lists = schema[name].fields.filter(({ kind }) => kind === "list").map((x) => frequencies[x.name]);
    const pairs = lists.length ? (Array.isArray(lists[0]?.[0]) ? lists[0][0] : lists[0])?.length : null;
    if (lists.some((x) => x == null || (x[0].length ?? x.length) !== pairs)) {
      notes.push(`rule: ${name} needs valid lists of numbers; plain RoPE is used`);
      frequencies = { rule: "Plain", base: number("base", stated.base, 10000, []) };
      name = "Plain";
    }
    for (const [low, high] of ORDERED) {
      if (frequencies[low] > frequencies[high]) {
        notes.push(`${low}: ${frequencies[low]} was changed to ${frequencies[high]}, the value of ${high}`);
        frequencies[low] = frequencies[high];
      }
    }
    if (name === "LongRope") checkAmplitudes(frequencies, notes);
    // NTK's exponent is d/(d-2).
    const least = ["NTK", "DynamicNTK"].includes(name) ? 4 : 2;
    let rotary = raw.rotary_dim == null ? null : number("rotary_dim", raw.rotary_dim, null, notes);
    let head = number("head_dim", raw.head_dim, 128, notes);
    if (pairs && name !== "Plain") {
      if (rotary !== null && rotary !== 2 * pairs) notes.push(`rotary_dim: the rule has numbers for ${2 * pairs} features`);
      rotary = 2 * pairs;
    }
    if (Math.max(rotary ?? head, least) > head && (pairs || least > head)) {
      const changed = Math.max(rotary ?? least, least);
      notes.push(`head_dim: ${head} was changed to ${changed}, the least for this rule`);
      head = changed;
    }
    rotary ??= head;
    if (rotary > head || rotary < least) {
      const changed = Math.min(Math.max(rotary, least), head);
      notes.push(`rotary_dim: ${rotary} was changed to ${changed}`);
      rotary = changed;
    }
    return {
      head_dim: head,
      frequencies,
      rotary_dim: rotary,
      pairing: choice("pairing", raw.pairing, PAIRINGS, "interleaved", notes),
      rotary_slice: choice("rotary_slice", raw.rotary_slice, ["leading", "trailing"], "leading", notes),
      sign: choice("sign", raw.sign, [1, -1], 1, notes),
      angles: choice("angles", raw.angles, ["exact", "float32"], "exact", notes),
    };
  }

  function checkAmplitudes(rule, notes) {
    const alone = (rule.short_amplitude == null) !== (rule.long_amplitude == null);
    if (alone || (rule.short_amplitude != null && rule.attention_factor != null)) {
      notes.push("short_amplitude and long_amplitude: both or none, and without an attention_factor; they are left out");
      rule.short_amplitude = rule.long_amplitude = null;
    }
  }

  // The same spec with another rule. Fields that both rules have keep their values.
  function withRule(spec, name, context, notes = [], trained = 4096) {
    const old = spec.frequencies;
    const fields = { ...old, rule: name };
    const pairs = spec.rotary_dim / 2;
    fields.base ??= 10000;
    fields.trained_length ??= trained;
    fields.factor ??= 4;
    if (name === "Explicit") fields.inv_freq = toLists(Rules.invFreq({ ...spec, sign: 1 }, context));
    if (name === "LongRope") {
      fields.short_factor = Array(pairs).fill(1);
      fields.long_factor = Array(pairs).fill(fields.factor);
    }
    const known = schema[name].fields.map((x) => x.name);
    if (known.includes("base") && !("base" in old)) notes.push(`base: ${schema[old.rule].label} does not have one; ${fields.base} is used`);
    for (const key of Object.keys(fields)) if (key !== "rule" && !known.includes(key)) delete fields[key];
    const next = check({ ...spec, frequencies: fields }, notes);
    for (const [words, of] of [["amplitude", (x) => Rules.amplitude(x, context)], ["softmax scale", Rules.softmaxScale]]) {
      const [before, now] = [of(spec), of(next)];
      if (before !== 1 && now !== before) notes.push(`${words}: ${before} of ${schema[old.rule].label} is not kept; it is ${now}`);
    }
    return next;
  }

  function toLists(theta) {
    return Array.isArray(theta) ? theta.map((x) => Array.from(x)) : Array.from(theta);
  }

  // The spec without its rule, or null: a rule without a base, or with frequencies per head, has no such frequencies.
  function unscaled(spec) {
    const { base, num_heads: perHead } = spec.frequencies;
    return base == null || perHead != null ? null : { ...spec, frequencies: { rule: "Plain", base } };
  }

  // --- Links -------------------------------------------------------------------------------------------------------

  const PLACES = [["trained", 4096], ["context", 4096], ["position", 1], ["distance", 1], ["heads", 8], ["head", 0], ["record", 0]];
  const PLAIN_KEYS = ["head_dim", "rotary_dim", "pairing", "rotary_slice", "sign", "angles"];

  function asText(value) {
    if (!Array.isArray(value)) return String(value);
    // Every row of a list per head ends with a semicolon, so that one row is not a list per pair.
    return Array.isArray(value[0]) ? value.map((x) => `${x.join(",")};`).join("") : value.join(",");
  }

  function writeSpec(into, prefix, spec) {
    const { rule, ...fields } = spec.frequencies;
    into.set(`${prefix}rule`, rule);
    for (const [name, value] of Object.entries(fields)) if (value !== null) into.set(prefix + name, asText(value));
    for (const name of PLAIN_KEYS) into.set(prefix + name, String(spec[name]));
  }

  function fromText(text, kind) {
    if (kind === "flag") return text === "true" ? true : text === "false" ? false : text;
    if (kind !== "list") return text;
    const rows = text.replace(/;$/, "").split(";").map((x) => x.split(",").map((y) => (y.trim() === "" ? NaN : Number(y))));
    return text.includes(";") ? rows : rows[0];
  }

  function readSpec(stated, prefix, notes) {
    const rule = stated.get(`${prefix}rule`);
    const frequencies = { rule: rule ?? undefined };
    for (const { name, kind } of Object.hasOwn(schema, rule) ? schema[rule].fields : schema.Plain.fields) {
      if (stated.has(prefix + name)) frequencies[name] = fromText(stated.get(prefix + name), kind);
    }
    const raw = { frequencies };
    for (const name of PLAIN_KEYS) if (stated.has(prefix + name)) raw[name] = stated.get(prefix + name);
    if (["1", "-1"].includes(raw.sign)) raw.sign = Number(raw.sign);
    return check(raw, notes);
  }

  // The state of the page as the part of a link after #.
  function write(state) {
    const into = new URLSearchParams();
    into.set("panel", state.panel);
    if (state.preset) into.set("preset", state.preset);
    if (state.from) into.set("from", state.from);
    writeSpec(into, "", state.a);
    for (const [name] of PLACES) into.set(name, String(state[name]));
    if (state.b) {
      if (state.bName) into.set("b.name", state.bName);
      writeSpec(into, "b.", state.b);
    }
    return into.toString();
  }

  // The state in a link, with every value checked: [state or null, notes].
  function read(text, panels) {
    if (!text || text.length > MOST_LINK) return [null, text ? ["the link is too long and was ignored"] : []];
    const stated = new URLSearchParams(text);
    if (!stated.has("rule") && !stated.has("panel")) return [null, ["the link has no rule and no panel and was ignored"]];
    const notes = [];
    const state = { panel: choice("panel", stated.get("panel") ?? undefined, panels, panels[0], notes) };
    state.preset = (stated.get("preset") ?? "").slice(0, 200);
    // The model from which a changed spec came.
    state.from = (stated.get("from") ?? "").slice(0, 200);
    state.a = readSpec(stated, "", notes);
    for (const [name, usual] of PLACES) state[name] = number(name, stated.get(name) ?? undefined, usual, notes);
    state.b = stated.has("b.rule") ? readSpec(stated, "b.", notes) : null;
    state.bName = state.b ? (stated.get("b.name") ?? "").slice(0, 200) : "";
    return [state, notes];
  }

  // --- Code --------------------------------------------------------------------------------------------------------

  function python(value) {
    if (value === true) return "True";
    if (value === false) return "False";
    if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
    return typeof value === "string" ? JSON.stringify(value) : String(value);
  }

  // Fields of the rule that are set: null is every default of an optional field.
  function setFields(spec) {
    return Object.entries(spec.frequencies).filter(([name, value]) => name !== "rule" && value !== null);
  }

  // Fields of a spec that differ from the defaults.
  function otherFields(spec) {
    const usual = { rotary_dim: spec.head_dim, pairing: "interleaved", rotary_slice: "leading", sign: 1, angles: "exact" };
    return Object.entries(usual).filter(([name, value]) => spec[name] !== value).map(([name]) => [name, spec[name]]);
  }

  function asCode(spec) {
    const { rule } = spec.frequencies;
    const fields = setFields(spec).map(([name, value]) => `        ${name}=${python(value)},\n`);
    const others = otherFields(spec).map(([name, value]) => `    ${name}=${python(value)},\n`);
    return (
      `from ropewalk.spec import ${[rule, "RopeSpec"].sort().join(", ")}\n\n` +
      `spec = RopeSpec(\n    head_dim=${spec.head_dim},\n    frequencies=${rule}(\n${fields.join("")}    ),\n${others.join("")})\n`
    );
  }

  function asJson(spec) {
    return `${JSON.stringify({ head_dim: spec.head_dim, frequencies: spec.frequencies, ...Object.fromEntries(otherFields(spec)) }, null, 2)}\n`;
  }

  // What transformers reads: RopeSpec.to_config. Throws with the reason if it has no rope type for the rule.
  function asConfig(spec) {
    let rule = spec.frequencies;
    if (rule.rule === "NTK") {
      rule = { rule: "Plain", base: rule.base * rule.factor ** (spec.rotary_dim / (spec.rotary_dim - 2)) };
    }
    const { rope_type: type, config_keys: keys, label } = schema[rule.rule];
    if (!type || (rule.rule === "Yarn" && rule.ramp !== "index")) {
      throw new RangeError(`transformers has no rope type for ${label}${type ? " with a ramp over rotations" : ""}; copy the JSON`);
    }
    if (rule.rule === "Yarn" && Rules.amplitude({ frequencies: { ...rule, policy: "transformers" } }) !== Rules.amplitude({ frequencies: rule })) {
      rule = { ...rule, attention_factor: Rules.amplitude({ frequencies: rule }) };
    }
    const parameters = { rope_type: type };
    for (const [name, key] of Object.entries(keys)) {
      if (rule[name] != null && !(rule.rule === "Proportional" && name === "factor" && rule.factor === 1)) parameters[key] = rule[name];
    }
    if (spec.rotary_dim < spec.head_dim && spec.rotary_slice === "leading") {
      const share = shareOf(spec.rotary_dim, spec.head_dim);
      if ((parameters.partial_rotary_factor ??= share) !== share) {
        throw new RangeError("transformers has one key for the fraction and for rotary_dim; copy the JSON");
      }
    }
    const config = { rope_parameters: parameters };
    if (rule.rule === "DynamicNTK") config.max_position_embeddings = rule.trained_length;
    return `${JSON.stringify(config, null, 2)}\n`;
  }

  // rotary_dim / head_dim, rounded up so that the integer part of head_dim * share is rotary_dim.
  function shareOf(rotary, head) {
    const share = new Float64Array([rotary / head]);
    const ulps = new BigInt64Array(share.buffer);
    while (Math.floor(head * share[0]) < rotary) ulps[0] += 1n;
    return share[0];
  }

  return { check, number, limitsOf, withRule, unscaled, write, read, asCode, asJson, asConfig, MOST_LINK };
};
