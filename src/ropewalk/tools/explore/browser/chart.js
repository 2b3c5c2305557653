"use strict";
// Line charts as SVG, at the size of their frame, so that text keeps its size. Text is set as text, never as markup.
const Chart = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 20 });

  function svg(name, attributes = {}, ...children) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  // A number for people: 131,072; 0.0123; 1.3 × 10⁻⁷. Always with a point, whatever the language of the browser.
  function text(x, digits = 4) {
    if (x === 0 || Object.is(x, -0)) return "0";
    if (!Number.isFinite(x)) return x > 0 ? "∞" : x < 0 ? "−∞" : "–";
    const size = Math.abs(x);
    if (size >= 1e9 || size < 1e-4) {
      const [mantissa, exponent] = x.toExponential(Math.min(digits, 3) - 1).split("e");
      return `${Number(mantissa) === 1 ? "" : `${mantissa.replace("-", "−")} × `}10${power(Number(exponent))}`;
    }
    const rounded = Number.isInteger(x) || size >= 10 ** digits ? Math.round(x) : Number(x.toPrecision(digits));
    return (size >= 1000 ? grouped.format(rounded) : String(rounded)).replace("-", "−");
  }

  function power(exponent) {
    return [...String(exponent)].map((c) => SUPERSCRIPT[c]).join("");
  }

  function linearTicks(low, high, most) {
    const rough = (high - low) / Math.max(most, 2);
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((x) => x * size).find((x) => x >= rough * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    return ticks.map((x) => Number(x.toPrecision(12)));
  }

  function logTicks(low, high, most) {
    const decades = Math.log10(high / low);
    const first = Math.ceil(Math.log10(low) - 1e-9);
    const last = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first + 1) / most));
    const ticks = [];
    for (let e = first; e <= last; e += every) {
      for (const m of decades < 1.6 && every === 1 ? [1, 2, 5] : [1]) if (m * 10 ** e <= high * 1.0000001) ticks.push(m * 10 ** e);
    }
    return ticks.length > 1 ? ticks : linearTicks(low, high, most);
  }

  // Position of a value on an axis, in pixels.
  function scale({ log, domain: [low, high] }, from, to) {
    const f = log ? Math.log10 : (x) => x;
    const [a, b] = [f(low), f(high)];
    return (x) => from + ((f(x) - a) / (b - a || 1)) * (to - from);
  }

  function domainOf(axis, values) {
    if (axis.domain) return axis.domain;
    let [low, high] = [Infinity, -Infinity];
    for (const list of values) {
      for (const x of list) {
        if (!Number.isFinite(x) || (axis.log && x <= 0)) continue;
        if (x < low) low = x;
        if (x > high) high = x;
      }
    }
    for (const x of axis.include ?? []) [low, high] = [Math.min(low, x), Math.max(high, x)];
    if (low > high) return axis.log ? [0.1, 1] : [0, 1];
    if (axis.log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    // An axis from 0 begins there.
    return [low === 0 && axis.include?.includes(0) ? 0 : low - room, high + room];
  }

  function path(line, x, y, log) {
    const parts = [];
    let pen = "M";
    for (let i = 0; i < line.xs.length; i++) {
      const [u, v] = [line.xs[i], line.ys[i]];
      if (!Number.isFinite(v) || (log.x && u <= 0) || (log.y && v <= 0)) {
        pen = "M";
        continue;
      }
      parts.push(pen, Math.round(10 * x(u)) / 10, " ", Math.round(10 * y(v)) / 10);
      pen = "L";
    }
    return parts.join("");
  }

  // The widths of a letter and of a digit of 14px, at most: what is shown must not depend on measuring.
  const [LETTER, DIGIT] = [7.6, 9];

  // How far the axis must end before the edge, so that the label of its last tick is whole.
  function overhang(axis, domain, tick, left, edge, width) {
    if (tick === undefined) return 0;
    const place = scale({ ...axis, domain }, left, edge)(tick);
    const beyond = place + (text(tick).length * DIGIT) / 2 - width;
    return beyond > 0 ? (beyond * (edge - left)) / (place - left) : 0;
  }

  // Draws `chart` into `frame`: {label, x, y, lines, marks, areas}. Axes: {label, log, domain, include, ticks}.
  // Returns `at(pixel)`: the value of x at a place, and `point(x)`, which shows a vertical line at x, or none for null.
  function draw(frame, chart) {
    const [width, height] = [Math.max(frame.clientWidth, 260), Math.max(frame.clientHeight, 200)];
    const xDomain = domainOf(chart.x, chart.lines.map((line) => line.xs));
    const yDomain = domainOf(chart.y, chart.lines.map((line) => line.ys));
    const yTicks = (chart.y.log ? logTicks : linearTicks)(...yDomain, Math.floor(height / 55));
    const labels = yTicks.map((tick) => text(tick));
    const left = 18 + Math.max(3, ...labels.map((label) => label.length)) * 8.2 + 14;
    // Labels of vertical marks are above the plot, where they hide nothing.
    const [top, bottom] = [(chart.marks ?? []).some((mark) => "x" in mark) ? 28 : 12, height - 50];
    const edge = width - 14;
    const xTicks = chart.x.ticks ?? (chart.x.log ? logTicks : linearTicks)(...xDomain, Math.floor((edge - left) / 85));
    const right = edge - overhang(chart.x, xDomain, xTicks.at(-1), left, edge, width);
    const x = scale({ ...chart.x, domain: xDomain }, left, right);
    const y = scale({ ...chart.y, domain: yDomain }, bottom, top);
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.label });
    for (const { from, to, kind } of chart.areas ?? []) {
      root.append(svg("rect", { x: x(from), y: top, width: Math.max(x(to) - x(from), 0), height: bottom - top, class: `area ${kind}` }));
    }
    yTicks.forEach((tick, i) => {
      root.append(svg("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), class: "grid" }));
      root.append(svg("text", { x: left - 8, y: y(tick) + 5, "text-anchor": "end" }, labels[i]));
    });
    xTicks.forEach((tick) => {
      root.append(svg("line", { x1: x(tick), x2: x(tick), y1: top, y2: bottom, class: "grid" }));
      root.append(svg("text", { x: Math.max(x(tick), left), y: bottom + 20, "text-anchor": "middle" }, text(tick)));
    });
    const half = (chart.x.label.length * LETTER) / 2;
    root.append(svg("text", { x: Math.max(Math.min((left + right) / 2, width - half), half), y: height - 8, "text-anchor": "middle", class: "axis" }, chart.x.label));
    const middle = (top + bottom) / 2;
    root.append(svg("text", { x: 14, y: middle, transform: `rotate(-90 14 ${middle})`, "text-anchor": "middle", class: "axis" }, chart.y.label));
    const log = { x: chart.x.log, y: chart.y.log };
    // An inner svg cuts off what leaves the axes, with room for dots at their ends.
    const [w, h] = [right - left + 8, bottom - top + 8];
    const plot = svg("svg", { x: left - 4, y: top - 4, width: w, height: h, viewBox: `${left - 4} ${top - 4} ${w} ${h}` });
    root.append(plot);
    for (const line of chart.lines) {
      if (line.dots) {
        const dots = svg("g", { class: `dots ${line.colour}` });
        const radius = line.xs.length > 80 ? 2.5 : 3.5;
        for (let i = 0; i < line.xs.length; i++) {
          if (Number.isFinite(line.ys[i]) && (!log.y || line.ys[i] > 0)) dots.append(svg("circle", { cx: x(line.xs[i]), cy: y(line.ys[i]), r: radius }));
        }
        plot.append(dots);
      } else {
        plot.append(svg("path", { d: path(line, x, y, log), class: `line ${line.colour} ${line.dashed ? "dashed" : ""} ${line.thin ? "thin" : ""}` }));
      }
    }
    const inside = (value, [low, high]) => value >= low && value <= high;
    const taken = [];
    for (const mark of chart.marks ?? []) {
      if ("y" in mark && inside(mark.y, yDomain)) {
        root.append(svg("line", { x1: left, x2: right, y1: y(mark.y), y2: y(mark.y), class: "mark" }));
        let place = y(mark.y) - 6 < top + 12 ? y(mark.y) + 17 : y(mark.y) - 6;
        while (taken.some((other) => Math.abs(other - place) < 16)) place += 16;
        taken.push(place);
        const end = mark.at === "start";
        root.append(svg("text", { x: end ? left + 6 : right - 6, y: place, "text-anchor": end ? "start" : "end", class: "halo" }, mark.label));
      } else if ("x" in mark && (!chart.x.log || mark.x > 0) && inside(mark.x, xDomain)) {
        root.append(svg("line", { x1: x(mark.x), x2: x(mark.x), y1: top, y2: bottom, class: "mark" }));
        const end = x(mark.x) > (left + right) / 2;
        root.append(svg("text", { x: x(mark.x) + (end ? 4 : -4), y: top - 8, "text-anchor": end ? "end" : "start", class: "halo" }, mark.label));
      }
    }
    const pointer = svg("line", { y1: top, y2: bottom, class: "pointer", visibility: "hidden" });
    root.append(pointer);
    frame.replaceChildren(root);
    return {
      at(pixel) {
        const share = Math.min(Math.max((pixel - left) / (right - left), 0), 1);
        const [low, high] = xDomain;
        return chart.x.log ? low * (high / low) ** share : low + share * (high - low);
      },
      point(value) {
        const visible = value !== null && inside(value, xDomain);
        pointer.setAttribute("visibility", visible ? "visible" : "hidden");
        if (visible) for (const end of ["x1", "x2"]) pointer.setAttribute(end, x(value));
      },
    };
  }

  // The index of the entry of a sorted list that is nearest to x.
  function nearest(xs, x) {
    let [low, high] = [0, xs.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  // The x with a point that is nearest to a place, and what every line has there: [name, y]. Lines need not share points.
  // A line of steps has a value between the ends of each step.
  function readings(lines, place) {
    const points = lines.filter((line) => !line.steps && line.xs.length);
    const candidates = points.map((line) => line.xs[nearest(line.xs, place)]);
    const value = candidates.reduce((best, x) => (Math.abs(x - place) < Math.abs(best - place) ? x : best));
    const indexOf = ({ xs, steps }) => {
      if (!steps) return xs[nearest(xs, value)] === value ? nearest(xs, value) : -1;
      return Array.from(xs).findIndex((x, i) => i % 2 === 0 && x <= value && value <= xs[i + 1]);
    };
    const listed = lines.map((line) => [line.name, line.ys[indexOf(line)]]).filter(([, y]) => y !== undefined);
    return { value, readings: listed };
  }

  function capital(words) {
    return words[0].toUpperCase() + words.slice(1);
  }

  return { draw, svg, text, nearest, readings, capital };
})();
