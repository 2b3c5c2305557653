"use strict";
// The page: one state, drawn into one panel after every change.
const explorer = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const specs = makeSpecs(data.rules);
  const { element, number, select, flag } = makeFields(specs);
  const panels = makePanels(specs, data);
  const byId = (id) => document.getElementById(id);
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const NONE = "none";
  const UNSCALED = "unscaled";
  // The name of a B that follows A.
  const FOLLOWS = "A without its rule";
  const PINNED = "pinned";
  const SHORT = ["base", "factor", "alpha", "beta", "low_freq_factor", "high_freq_factor", "fraction", "num_heads", "bend", "beta_fast", "beta_slow"];

  let state = null;
  let shown = {};
  let messages = [];
  let textKind = "code";
  let scheduled = false;
  let playing = 0;
  let written = "";
  let later = 0;

  // --- State -------------------------------------------------------------------------------------------------------

  function fromPreset(index, panel = "rotation") {
    const preset = data.presets[index];
    messages = [];
    const a = specs.check(preset.spec);
    const context = specs.number("context", preset.context, 4096, messages);
    const trained = specs.number("trained", preset.trained, 4096, messages);
    const place = Math.min(100, context - 1);
    const alibi = data.biases.find((bias) => bias.num_heads);
    const heads = specs.number("heads", alibi?.num_heads, 8, messages);
    const { name } = preset;
    return { panel, preset: name, from: name, a, b: null, bName: "", trained, context, position: place, distance: place, heads, head: 0, record: 0 };
  }

  // Position and distance are below the context; a head is one that the rule has. Returns what was changed.
  function within(next) {
    const theta = Rules.invFreq(next.a, next.context);
    const ends = {
      position: [next.context - 1, "the last one of the context; raise Context for more"],
      distance: [next.context - 1, "the last one of the context; raise Context for more"],
      head: [Array.isArray(theta) ? theta.length - 1 : 0, "the last head"],
    };
    const changes = [];
    for (const [name, [end, words]] of Object.entries(ends)) {
      if (next[name] <= end) continue;
      changes.push(`${name}: ${next[name]} was changed to ${end}, ${words}`);
      next[name] = end;
    }
    return changes;
  }

  function presetOf(name) {
    return data.presets.find((preset) => preset.name === name);
  }

  function same(a, b) {
    return JSON.stringify(a) === JSON.stringify(b);
  }

  // A link without a rule means its preset, or the first one, and what the link states beside it.
  function completed(text) {
    const stated = new URLSearchParams(text);
    if (stated.has("rule") || !(stated.has("preset") || stated.has("panel"))) return [text, []];
    const name = stated.get("preset");
    const index = data.presets.findIndex((preset) => preset.name === name);
    const unknown = name !== null && index === -1;
    if (unknown) stated.delete("preset");
    const whole = new URLSearchParams(specs.write(fromPreset(index === -1 ? data.first : index)));
    for (const [key, value] of stated) whole.set(key, value);
    return [whole.toString(), unknown ? [`the link names a model that this page does not have; ${data.presets[data.first].name} is shown`] : []];
  }

  // A link may contain any name. It stays if the spec is the one that has this name.
  function fromLink(text) {
    const [whole, missing] = completed(text);
    const [read, changes] = specs.read(whole, Object.keys(panels));
    if (!read) return [null, changes];
    const named = (name, spec) => presetOf(name) && same(specs.check(presetOf(name).spec), spec);
    if (!named(read.preset, read.a)) read.preset = "";
    read.from = read.preset || presetOf(read.from)?.name || "";
    const follows = read.bName === FOLLOWS && same(specs.unscaled(read.a), read.b);
    if (!follows && !named(read.bName, read.b)) read.bName = "";
    return [read, [...missing, ...changes, ...within(read)]];
  }

  // "A without its rule" changes with A, until another B is chosen.
  function follow() {
    if (state.bName !== FOLLOWS) return;
    state.b = specs.unscaled(state.a);
    if (state.b) return;
    state.bName = "";
    messages.push(`B was removed: ${data.rules[state.a.frequencies.rule].label} has no frequencies without the rule`);
  }

  // Change fields of A's rule or of A. Returns what was changed further.
  function changeA(fields, rule = {}) {
    const changes = [];
    const full = state.a.rotary_dim === state.a.head_dim;
    const raw = { ...state.a, ...fields, frequencies: { ...state.a.frequencies, ...rule } };
    if ("head_dim" in fields && full && !("inv_freq" in raw.frequencies || "long_factor" in raw.frequencies)) raw.rotary_dim = fields.head_dim;
    state.a = specs.check(raw, changes);
    state.preset = "";
    follow();
    changes.push(...within(state));
    changed();
    return changes.join(". ");
  }

  // Sliders whose steps follow from other fields.
  const FOLLOWING = ["position", "distance", "rotary_dim", "head"];

  function changed() {
    for (const [name, field] of Object.entries(shown)) {
      const value = valueOf(name);
      if (value !== undefined && (value !== field.value || FOLLOWING.includes(name))) {
        field.value = value;
        field.show(value);
      }
    }
    const chooser = byId("preset");
    if (chooser) chooser.value = state.preset;
    schedule();
  }

  function valueOf(name) {
    if (name in state.a.frequencies) return state.a.frequencies[name];
    return state.a[name] ?? state[name];
  }

  // --- Controls ----------------------------------------------------------------------------------------------------

  function add(into, options) {
    const value = options.value;
    // The field's own value is current when it calls `update`; all other fields are shown anew.
    const field = number({ ...options, id: options.id ?? options.name, update: (x) => ((shown[options.name].value = x), options.update(x)) });
    shown[options.name] = { value, show: field.show };
    into.append(field.row);
  }

  function place(name, value) {
    state[name] = value;
    const changes = within(state);
    // A field that was limited shows its value.
    if (state[name] !== value) shown[name].value = null;
    changed();
    return changes.join(". ");
  }

  function build() {
    shown = {};
    const a = state.a;
    const description = data.rules[a.frequencies.rule];
    const lists = description.fields.filter((x) => x.kind === "list");
    const rotation = byId("rotation-fields");
    rotation.replaceChildren();
    const names = [["", "(changed)"], ...data.presets.map((x) => [x.name, x.name])];
    rotation.append(select({
      id: "preset", label: "Preset", options: names, value: state.preset,
      update: (name) => {
        const index = data.presets.findIndex((x) => x.name === name);
        if (index === -1) return changed();
        const kept = { b: state.b, bName: state.bName, heads: state.heads };
        state = { ...fromPreset(index, state.panel), ...kept };
        follow();
        restart("preset");
      },
    }));
    add(rotation, { label: "Head dim", name: "head_dim", value: a.head_dim, disabled: lists.length > 0, update: (x) => changeA({ head_dim: x }) });
    add(rotation, {
      label: "Rotary dim", name: "rotary_dim", value: a.rotary_dim, disabled: lists.length > 0,
      steps: () => Array.from({ length: Math.max(state.a.head_dim / 2, 1) }, (_, i) => 2 * (i + 1)), update: (x) => {
        const changes = changeA({ rotary_dim: x });
        if (state.a.rotary_dim !== x) shown.rotary_dim.show(state.a.rotary_dim);
        return changes;
      },
    });
    rotation.append(select({ id: "pairing", label: "Pairing", options: [["interleaved", "interleaved: (0, 1), (2, 3), …"], ["half", "half: (i, i + rotary_dim/2)"]], value: a.pairing, update: (x) => changeA({ pairing: x }) }));
    buildRule(description, lists);
    const into = byId("place-fields");
    into.replaceChildren();
    const positions = () => Array.from(Curves.distances(state.context - 1, 300));
    add(into, { label: "Context", name: "context", value: state.context, update: (x) => place("context", x) });
    add(into, { label: "Position", name: "position", value: state.position, steps: positions, update: (x) => place("position", x) });
    add(into, { label: "Distance", name: "distance", value: state.distance, steps: positions, update: (x) => place("distance", x) });
    // Someone who types a position does not want the next one.
    for (const id of ["position", "position-slider"]) for (const event of ["focus", "input"]) byId(id).addEventListener(event, stop);
    add(into, { label: "ALiBi heads", name: "heads", value: state.heads, update: (x) => place("heads", x) });
    buildCompare();
  }

  // LongRope has both amplitudes or none: the other one follows if it is missing, or if one is removed.
  const PARTNERS = { short_amplitude: "long_amplitude", long_amplitude: "short_amplitude" };

  function partner(name, value) {
    const other = PARTNERS[name];
    const follows = other && (value === null || state.a.frequencies[other] === null);
    return follows ? { [other]: value } : {};
  }

  function together(name, value) {
    const other = PARTNERS[name];
    return other && value !== null && state.a.frequencies[other] === value ? `${other} is the same: the rule has both or none` : "";
  }

  function buildRule(description, lists) {
    const into = byId("rule-fields");
    into.replaceChildren();
    const rule = state.a.frequencies;
    into.append(select({
      id: "rule", label: "Rule", options: Object.entries(data.rules).map(([name, { label }]) => [name, `${label}`]), value: rule.rule,
      update: (name) => {
        messages = [];
        // What the old rule does not have comes from the page.
        const length = state.a.frequencies.trained_length ?? state.trained;
        state.trained = length;
        state.a = specs.withRule(state.a, name, state.context, messages, length);
        state.preset = "";
        follow();
        messages.push(...within(state));
        restart("rule");
      },
    }));
    const more = element("details", {}, element("summary", { textContent: "More fields of the rule" }));
    const changeField = (field) => (x) => {
      if (field.name === "trained_length") state.trained = x;
      const changes = [changeA({}, { [field.name]: x, ...partner(field.name, x) }), together(field.name, x)].filter(Boolean).join(". ");
      if (field.name === "num_heads") shown.head?.show(state.head);
      if (state.a.frequencies[field.name] !== x) shown[field.name]?.show(state.a.frequencies[field.name]);
      return changes;
    };
    for (const field of description.fields.filter((x) => x.kind !== "list")) {
      const target = SHORT.includes(field.name) || field.name === "trained_length" ? into : more;
      const label = field.name === "trained_length" ? "Trained length" : Chart.capital(field.name.replaceAll("_", " "));
      const value = rule[field.name];
      const update = changeField(field);
      if (field.kind === "flag") target.append(flag({ id: field.name, label, value, update }));
      else if (field.kind === "choice") target.append(select({ id: field.name, label, options: field.choices.map((x) => [x, x]), value, update }));
      else add(target, { label, name: field.name, value, optional: field.kind === "optional", update });
    }
    if (!description.fields.some((x) => x.name === "trained_length")) {
      add(into, { id: "trained_length", label: "Trained length", name: "trained", value: state.trained, update: (x) => place("trained", x) });
    }
    const theta = Rules.invFreq(state.a, state.context);
    if (Array.isArray(theta)) {
      const heads = () => Array.from({ length: Rules.invFreq(state.a, state.context).length }, (_, i) => i);
      add(into, { label: "Head", name: "head", value: state.head, steps: heads, update: (x) => place("head", x) });
    }
    for (const field of lists) {
      into.append(element("p", { className: "hint", textContent: `${field.name}: ${rule[field.name].flat().length} numbers, from the preset or the rule before. They fix the number of pairs.` }));
    }
    if (more.children.length > 1) into.append(more);
  }

  function buildCompare() {
    const into = byId("compare-fields");
    const options = [[NONE, "nothing"], ...(specs.unscaled(state.a) ? [[UNSCALED, FOLLOWS]] : []), ...(state.b ? [[PINNED, `B: ${state.bName || data.rules[state.b.frequencies.rule].label}`]] : []), ...data.presets.map((x, i) => [String(i), x.name])];
    const chooser = select({
      id: "compare", label: "Spec B", options, value: state.b ? PINNED : NONE,
      update: (key) => {
        if (key === PINNED) return;
        messages = [];
        if (key === NONE) [state.b, state.bName] = [null, ""];
        else if (key === UNSCALED) [state.b, state.bName] = [specs.unscaled(state.a), FOLLOWS];
        else [state.b, state.bName] = [specs.check(data.presets[key].spec, messages), data.presets[key].name];
        buildCompare();
        byId("compare").focus();
        showNotes();
        schedule();
      },
    });
    const pin = element("button", { type: "button", id: "pin", className: "wide", textContent: "Keep A as B, then change A" });
    pin.addEventListener("click", () => {
      [state.b, state.bName] = [structuredClone(state.a), state.preset];
      buildCompare();
      byId("pin").focus();
      showNotes();
      schedule();
    });
    into.replaceChildren(chooser, element("div", { className: "field" }, pin));
  }

  // --- Drawing -----------------------------------------------------------------------------------------------------

  function schedule() {
    delete document.documentElement.dataset.ready;
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      render();
    });
  }

  function render() {
    const panel = panels[state.panel];
    wanted = [];
    const drawn = panel.draw(state, meansOf);
    setText(byId("panel-title"), panel.title);
    setText(byId("intro"), panel.intro);
    setText(byId("summary"), drawn.summary);
    showExport();
    const picture = byId("picture");
    if (drawn.circles) circles(picture, drawn);
    else charts(picture, drawn.charts);
    clearTimeout(later);
    // What nobody sees while a slider moves is written when it stops.
    later = setTimeout(() => afterwards(drawn), 120);
  }

  // Means over octaves, by frequencies and length. What is missing is computed when no slider moves.
  const means = new Map();
  let wanted = [];

  function meansOf(theta, length) {
    const key = `${length} ${theta.join()}`;
    if (means.has(key)) return means.get(key);
    wanted.push([key, theta, length]);
    return null;
  }

  // Computes in slices, so that the page answers in between. A change of the state ends it.
  function computeMeans(drawn) {
    const steps = wanted.map(([key, theta, length]) => [key, Curves.octaveMeans(theta, length)]);
    const slice = () => {
      if (JSON.stringify(state) !== drawn) return;
      const end = performance.now() + 12;
      while (steps.length && performance.now() < end) {
        const [key, generator] = steps[0];
        const { done, value } = generator.next();
        if (!done) continue;
        if (means.size > 20) means.clear();
        means.set(key, value);
        steps.shift();
      }
      if (steps.length) setTimeout(slice);
      else schedule();
    };
    slice();
  }

  function setText(into, words) {
    if (into.textContent !== words) into.textContent = words;
  }

  function afterwards(drawn) {
    if (byId("numbers").open) fillTable(byId("table"), drawn.table);
    showText();
    // For screen readers, which would read every step of a slider.
    if (!playing) setText(byId("spoken"), drawn.summary);
    written = specs.write(state);
    try {
      history.replaceState(null, "", `#${written}`);
    } catch {
      // Browsers limit how often an address may change. The next change writes it.
    }
    if (wanted.length) computeMeans(JSON.stringify(state));
    else document.documentElement.dataset.ready = "true";
  }

  function fillTable(into, { caption, head, rows }) {
    const cell = (x, i) => element(i ? "td" : "th", { ...(i ? {} : { scope: "row" }), textContent: typeof x === "number" ? Chart.text(x, 6) : String(x) });
    into.replaceChildren(element("table", {},
      element("caption", { textContent: caption }),
      element("thead", {}, element("tr", {}, ...head.map((x) => element("th", { scope: "col", textContent: x })))),
      element("tbody", {}, ...rows().map((row) => element("tr", {}, ...row.map(cell)))),
    ));
  }

  function charts(picture, list) {
    if (picture.dataset.kind !== `charts ${list.length}`) {
      picture.dataset.kind = `charts ${list.length}`;
      picture.className = `frames ${list.length > 1 ? "two" : ""}`;
      picture.replaceChildren(...list.map(() => element("div", {}, element("ul", { className: "legend" }), element("div", { className: "frame" }))));
    }
    for (const name of ["role", "aria-label"]) picture.removeAttribute(name);
    byId("readout").hidden = false;
    byId("readout").textContent = "";
    list.forEach((chart, i) => {
      const [legend, frame] = picture.children[i].children;
      showLegend(legend, chart.lines);
      const handle = Chart.draw(frame, chart);
      frame.onpointermove = (event) => {
        const x = handle.at(event.clientX - frame.getBoundingClientRect().left);
        const { value, readings } = Chart.readings(chart.lines, x);
        handle.point(value);
        byId("readout").textContent = `${chart.x.label.split(",")[0]} ${Chart.text(value)}: ` + readings.map(([name, y]) => `${name} ${Chart.text(y)}`).join("; ");
      };
      frame.onpointerleave = () => {
        handle.point(null);
        byId("readout").textContent = "";
      };
    });
  }

  function showLegend(legend, lines) {
    const key = lines.map((line) => `${line.name} ${line.colour}`).join("\n");
    if (legend.dataset.key === key) return;
    legend.dataset.key = key;
    legend.replaceChildren(...lines.map((line) => {
      const sample = line.dots
        ? Chart.svg("g", { class: `dots ${line.colour}` }, Chart.svg("circle", { cx: 13, cy: 6, r: 4 }))
        : Chart.svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, class: `line ${line.colour} ${line.dashed ? "dashed" : ""}` });
      return element("li", {}, Chart.svg("svg", { width: 26, height: 12, "aria-hidden": "true" }, sample), element("span", { textContent: line.name }));
    }));
  }

  const RADIUS = 38;

  function circles(picture, { circles: list, length, summary }) {
    byId("readout").hidden = true;
    const kind = `circles ${list.map((x) => `${x.pair}:${x.features}`).join(" ")}`;
    if (picture.dataset.kind !== kind) {
      picture.dataset.kind = kind;
      picture.className = "circles";
      picture.replaceChildren(...list.map((x) => {
        const box = Chart.svg("svg", { width: 90, height: 90, viewBox: "-45 -45 90 90", role: "img" },
          Chart.svg("circle", { r: RADIUS, class: "rim" }), Chart.svg("path", { class: "trail" }), Chart.svg("line", { class: "vector" }), Chart.svg("circle", { r: 4, class: "tip" }));
        return element("figure", {}, box, element("figcaption", {}, element("span", { textContent: `pair ${x.pair}` }), element("span", { textContent: `(${x.features.join(", ")})` })));
      }));
    }
    const most = Math.max(length, 1);
    list.forEach(({ pair, angle, theta }, i) => {
      const [box] = picture.children[i].children;
      const [, trail, vector, tip] = box.children;
      const reach = (RADIUS * length) / most;
      // Counter-clockwise, as in the papers; the y of a screen points down.
      const [x, y] = [reach * Math.cos(angle), -reach * Math.sin(angle)];
      const back = Math.sign(theta) * Math.min(Math.abs(theta) * 6, Math.abs(angle), 1.9 * Math.PI);
      const [u, v] = [reach * Math.cos(angle - back), -reach * Math.sin(angle - back)];
      trail.setAttribute("d", back === 0 ? "" : `M${u} ${v}A${reach} ${reach} 0 ${Math.abs(back) > Math.PI ? 1 : 0} ${back > 0 ? 0 : 1} ${x} ${y}`);
      for (const [name, value] of [["x2", x], ["y2", y]]) vector.setAttribute(name, value);
      for (const [name, value] of [["cx", x], ["cy", y]]) tip.setAttribute(name, value);
      const degrees = ((((angle * 180) / Math.PI) % 360) + 360) % 360;
      box.setAttribute("aria-label", `Pair ${pair} at ${Chart.text(degrees, 3)} degrees`);
    });
    picture.setAttribute("role", "group");
    picture.setAttribute("aria-label", summary);
  }

  function panelControls() {
    const into = byId("panel-controls");
    into.replaceChildren();
    if (state.panel === "rotation") {
      const play = element("button", { type: "button", id: "play", textContent: atRest() });
      play.addEventListener("click", () => (playing ? stop() : still.matches ? advance() : start()));
      into.append(play);
    }
    if (state.panel === "lab") {
      const options = data.lab.map((record, i) => [String(i), record.title]);
      into.append(select({ id: "record", label: "Curve", options, value: String(state.record), update: (x) => place("record", Number(x)) }));
    }
  }

  function advance() {
    state.position = state.position + 1 < state.context ? state.position + 1 : 0;
    changed();
  }

  function start() {
    playing = setInterval(advance, 110);
    byId("play").textContent = "Pause";
  }

  function stop() {
    clearInterval(playing);
    playing = 0;
    if (byId("play")) byId("play").textContent = atRest();
  }

  function atRest() {
    return still.matches ? "Next position" : "Play";
  }

  // --- Tabs, buttons, links ----------------------------------------------------------------------------------------

  function openPanel(name, focus = false) {
    stop();
    state.panel = name;
    for (const tab of byId("tabs").children) {
      const selected = tab.dataset.panel === name;
      tab.setAttribute("aria-selected", String(selected));
      tab.tabIndex = selected ? 0 : -1;
      if (selected && focus) tab.focus();
      if (selected) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
      if (selected) byId("panel").setAttribute("aria-labelledby", tab.id);
    }
    panelControls();
    schedule();
  }

  function buildTabs() {
    const names = Object.keys(panels);
    byId("tabs").replaceChildren(...names.map((name) => {
      const tab = element("button", { type: "button", id: `tab-${name}`, role: "tab", "aria-controls": "panel", textContent: panels[name].title });
      tab.dataset.panel = name;
      tab.addEventListener("click", () => openPanel(name));
      return tab;
    }));
    byId("tabs").addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -names.indexOf(state.panel), End: names.length - 1 - names.indexOf(state.panel) };
      if (!Object.hasOwn(steps, event.key)) return;
      event.preventDefault();
      openPanel(names[(names.indexOf(state.panel) + steps[event.key] + names.length) % names.length], true);
    });
  }

  const TEXTS = {
    code: ["Python code of the spec", () => specs.asCode(state.a)],
    json: ["JSON of the spec", () => specs.asJson(state.a)],
    config: ["rope_parameters for transformers", () => specs.asConfig(state.a)],
    link: ["Link to this view", () => `${location.href.split("#")[0]}#${specs.write(state)}`],
  };

  // What can be copied, and what a copy lacks.
  function showExport() {
    const button = document.querySelector('[data-copy="config"]');
    const why = byId("why");
    try {
      TEXTS.config[1]();
      [button.disabled, why.hidden] = [false, true];
    } catch (reason) {
      [button.disabled, why.hidden] = [true, false];
      setText(why, `Not for transformers: ${reason.message}`);
      if (textKind === "config") textKind = "code";
    }
    const leftOut = presetOf(state.from)?.left_out ?? [];
    byId("lacks").hidden = leftOut.length === 0;
    setText(byId("lacks"), `What is copied lacks a part of ${state.from}: ${leftOut.join("; ")}.`);
  }

  function showText() {
    const [label, write] = TEXTS[textKind];
    setText(byId("text-label"), label);
    byId("code").setAttribute("aria-label", label);
    setText(byId("code"), write());
  }

  // The button itself tells that it has copied: notes may be out of sight.
  async function copy(button, kind, what) {
    if (kind === "link" && specs.write(state).length > specs.MOST_LINK) {
      messages = ["The link would be too long for this page to read it: copy the JSON of the spec instead."];
      showNotes();
      return;
    }
    try {
      await navigator.clipboard.writeText(TEXTS[kind][1]());
      messages = [`${what} copied.`];
      button.dataset.label ??= button.textContent;
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = button.dataset.label), 2000);
    } catch {
      textKind = kind;
      showExport();
      showText();
      byId("text").open = true;
      messages = ["The browser does not allow copying: the text is shown; select it there."];
    }
    showNotes();
  }

  // The notes on the models of A and B, and messages about the last change.
  function showNotes() {
    const models = [...new Set([state.from, state.bName])].map(presetOf).filter(Boolean);
    const notes = models.flatMap(({ name, notes, left_out: leftOut }) => [...notes, ...leftOut].map((note) => `${name}: ${note}`));
    byId("notes").replaceChildren(...[...notes, ...messages].map((text) => element("p", { className: "note", textContent: text })));
  }

  function restart(focus = null) {
    stop();
    build();
    openPanel(state.panel);
    showNotes();
    if (focus) byId(focus)?.focus();
  }

  function theme(name) {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light" : "Dark";
    byId("theme").setAttribute("aria-label", `Use the ${name === "dark" ? "light" : "dark"} theme`);
  }

  function load() {
    const [linked, changes] = fromLink(location.hash.slice(1));
    messages = [];
    state = linked ?? fromPreset(data.first);
    messages.push(...changes);
    restart();
  }

  // A spec beyond the limits of the page is shown with other numbers, which its name must not hide.
  for (const preset of data.presets) {
    const changes = [];
    specs.check(preset.spec, changes);
    preset.left_out.push(...changes);
  }
  buildTabs();
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  byId("reset").addEventListener("click", () => {
    state = fromPreset(data.first);
    restart();
  });
  byId("copy-link").addEventListener("click", (event) => copy(event.currentTarget, "link", "Link"));
  for (const button of document.querySelectorAll("[data-copy]")) {
    const what = button.textContent.replace("Copy ", "Spec ");
    button.addEventListener("click", () => copy(button, button.dataset.copy, what));
  }
  still.addEventListener("change", stop);
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("numbers").addEventListener("toggle", schedule);
  window.addEventListener("hashchange", () => location.hash.slice(1) !== written && load());
  new ResizeObserver(schedule).observe(byId("picture"));
  load();
  return { data, specs, panels, state: () => structuredClone(state), meansOf };
})();
