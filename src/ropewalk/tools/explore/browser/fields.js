"use strict";
// The controls: a label, a native slider and a native field each. Labels and names are text, never markup.
const makeFields = (specs) => {
  function element(name, properties = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key.includes("-") || key === "for" || key === "role") made.setAttribute(key, value);
      else made[key] = value;
    }
    made.append(...children);
    return made;
  }

  const MANTISSAS = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
  const between = (list, low, high) => list.filter((x) => x >= low && x <= high);
  const decades = (low, high) => {
    const first = Math.floor(Math.log10(low));
    const all = Array.from({ length: 20 }, (_, e) => MANTISSAS.map((m) => Number(`${m}e${first + e}`))).flat();
    return between(all, low, high);
  };
  const even = (low, high, step) => Array.from({ length: Math.round((high - low) / step) + 1 }, (_, i) => Number((low + i * step).toPrecision(12)));
  const octaves = (low, high) => between(Array.from({ length: 60 }, (_, e) => [1, 1.25, 1.5, 1.75].map((m) => m * 2 ** e)).flat(), low, high);
  const FACTORS = [1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128];

  // The values that a slider steps through. The field beside it accepts any number.
  function stepsOf(name) {
    if (name === "head_dim" || name === "rotary_dim") return even(2, 512, 2);
    if (name === "base") return decades(100, 1e8);
    if (name === "factor") return FACTORS;
    if (["trained_length", "trained", "context"].includes(name)) return octaves(256, 2 ** 21);
    if (name === "fraction") return even(0, 1, 0.05);
    if (name === "bend") return even(0.1, 2, 0.025);
    if (name === "heads" || name === "num_heads") return even(1, 64, 1);
    return decades(0.1, 1000);
  }

  // A number with a slider. `update(value)` receives a valid value; it may return a sentence about a further change.
  function number({ id, label, name, value, steps = () => stepsOf(name), optional = false, disabled = false, update }) {
    const limits = specs.limitsOf(name);
    const error = element("p", { id: `${id}-error`, className: "error", hidden: true, role: "alert" });
    const field = element("input", { type: "number", id, name: id, step: "any", disabled, "aria-describedby": `${id}-error` });
    // Hints for the browser. Values are clamped below, which states it.
    field.min = limits.low;
    field.max = limits.high;
    const slider = optional ? null : element("input", { type: "range", id: `${id}-slider`, min: 0, step: 1, disabled, "aria-label": `${label}, slider` });
    let last = value;
    const state = (message) => {
      error.hidden = !message;
      error.textContent = message;
    };
    // A value from elsewhere makes what was said of the last one untrue.
    const show = (x) => {
      state("");
      last = x;
      field.value = x === null ? "" : String(x);
      if (!slider || x === null) return;
      const list = steps();
      slider.max = list.length - 1;
      slider.value = Chart.nearest(list, x);
      slider.setAttribute("aria-valuetext", Chart.text(x));
    };
    slider?.addEventListener("input", () => {
      field.removeAttribute("aria-invalid");
      last = steps()[Number(slider.value)];
      field.value = String(last);
      slider.setAttribute("aria-valuetext", Chart.text(last));
      state(update(last) ?? "");
    });
    field.addEventListener("change", () => {
      const notes = [];
      const blank = field.value.trim() === "";
      const bad = field.validity.badInput || (blank && !optional);
      const x = bad ? last : blank ? null : specs.number(label, field.value, last, notes, limits);
      if (bad) notes.push(`${label}: a number is needed; ${last === null ? "none" : last} is used`);
      field.setAttribute("aria-invalid", String(notes.length > 0));
      show(x);
      const more = update(x);
      state([...notes, more].filter(Boolean).join(". "));
    });
    show(value);
    const row = element("div", { className: "field" }, element("label", { for: id, textContent: label }));
    if (slider) row.append(slider);
    else field.classList.add("wide");
    row.append(field, error);
    return { row, show };
  }

  function select({ id, label, options, value, update, disabled = false }) {
    const field = element("select", { id, name: id, disabled });
    for (const [key, text] of options) field.append(element("option", { value: key, textContent: text }));
    field.value = value;
    field.addEventListener("change", () => update(field.value));
    return element("div", { className: "field" }, element("label", { for: id, textContent: label }), field);
  }

  function flag({ id, label, value, update }) {
    const field = element("input", { type: "checkbox", id, name: id, checked: value });
    field.addEventListener("change", () => update(field.checked));
    return element("div", { className: "field" }, element("label", { for: id, textContent: label }), field);
  }

  return { element, number, select, flag };
};
