"use strict";
// Elements, charts and curves, for every page: numbers in, parts of the page out.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "path", "line", "circle", "rect", "text", "title", "g", "clipPath"]);
const byId = (id) => document.getElementById(id);
const clamp = (value, most) => Math.max(0, Math.min(value, most));
const narrow = () => window.innerWidth < 820;

function make(tag, attributes = {}, ...children) {
  const element = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

const minus = (text) => String(text).replace("-", "−");
const signed = (x) => (x > 0 ? "+" : "") + minus(x);
const number = (x, digits = 3) => {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return minus(x.toExponential(2));
  return minus(x.toFixed(Math.min(digits, size >= 100 ? 1 : size >= 10 ? 2 : digits)));
};

// Draws now, and again when the theme changes or the page becomes a phone's.
const drawings = [];
function drawn(draw) { drawings.push(draw); draw(); }
const redraw = () => drawings.forEach((draw) => draw());
const scheme = window.matchMedia("(prefers-color-scheme: dark)");
const dark = () => (document.documentElement.dataset.theme || (scheme.matches ? "dark" : "light")) === "dark";
scheme.addEventListener("change", redraw);
byId("theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; redraw(); });
let small = narrow();
window.addEventListener("resize", () => { if (small !== narrow()) { small = narrow(); redraw(); } });

function ticks(low, high, count = 5) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + 1e-9 * step; t += step) found.push(Math.abs(t) < step * 1e-6 ? 0 : t);
  return found;
}

// Axes of a chart: returns the svg, and the maps from values to places and back.
function chart({ width = 640, height = 300, x, y, label, xName, yName, xTicks, yTicks, xLog, yLog, form = (t) => minus(+t.toPrecision(6)) }) {
  // On a phone the same letters need a smaller drawing.
  if (narrow() && width > 380) { height = Math.max(260, (height * 380) / width); width = 380; }
  const left = 46, right = 12, top = 20, bottom = 38;
  const share = (v, [low, high], log) => (log ? Math.log(v / low) / (Math.log(high / low) || 1) : (v - low) / (high - low || 1));
  const px = (v) => left + share(v, x, xLog) * (width - left - right);
  const py = (v) => height - bottom - share(v, y, yLog) * (height - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const t of yTicks || ticks(y[0], y[1], 4))
    svg.append(make("line", { x1: left, x2: width - right, y1: py(t), y2: py(t), stroke: "var(--line)" }),
      make("text", { x: left - 6, y: py(t) + 4, "text-anchor": "end", text: form(t) }));
  for (const t of xTicks || ticks(x[0], x[1], 6)) svg.append(make("text", { x: px(t), y: height - bottom + 17, "text-anchor": "middle", text: minus(+t.toPrecision(6)) }));
  if (xName) svg.append(make("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle", text: xName }));
  if (yName) svg.append(make("text", { x: left, y: 10, text: yName }));
  // The value of x under the pointer; only where axes are not logarithms.
  const under = (event) => {
    const box = svg.getBoundingClientRect();
    return x[0] + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (x[1] - x[0]);
  };
  return { svg, px, py, under, width, height, left, right, top, bottom };
}

function line(place, xs, ys, stroke, options = {}) {
  let path = "", pen = false;
  for (let i = 0; i < xs.length; i++) {
    if (!Number.isFinite(ys[i])) { pen = false; continue; }
    path += `${pen ? "L" : "M"}${place.px(xs[i]).toFixed(1)} ${place.py(ys[i]).toFixed(1)}`;
    pen = true;
  }
  return make("path", { d: path, fill: "none", stroke, "stroke-width": 2, "stroke-linejoin": "round", ...options });
}

const across = (place, y, options) => make("line", { x1: place.left, x2: place.width - place.right, y1: place.py(y), y2: place.py(y), ...options });
const upright = (place, x, options) => make("line", { x1: place.px(x), x2: place.px(x), y1: place.top, y2: place.height - place.bottom, ...options });

// One head's f(k), so small that it can be chosen among many.
function tile(values) {
  const low = Math.min(0, ...values), most = Math.max(0, ...values, low + 1e-3), last = values.length - 1;
  const place = { px: (i) => (64 * i) / last, py: (v) => 31 - (28 * (v - low)) / (most - low) };
  return make("svg", { viewBox: "0 0 64 34", "aria-hidden": "true" }, make("line", { x1: 32, x2: 32, y1: 0, y2: 34, stroke: "var(--line)" }),
    make("line", { x1: 0, x2: 64, y1: place.py(0), y2: place.py(0), stroke: "var(--grey)", "stroke-width": 0.5, "stroke-dasharray": "2 2" }),
    line(place, values.map((_, i) => i), values, "var(--blue)", { class: "curve" }));
}

function legend(entries) {
  return make("div", { class: "legend" }, ...entries.map(([hue, text, dash]) => {
    const dot = make("i");
    dot.style.background = dash ? `repeating-linear-gradient(90deg, var(--${hue}) 0 4px, transparent 4px 6px)` : `var(--${hue})`;
    return make("span", {}, dot, text);
  }));
}

// A method has one colour on every page's charts; ours have two that no other gets.
function lineStyles(names) {
  const own = { tisa: "blue", "near-far": "orange" }, hues = ["green", "pink", "gold", "sky", "grey", "ink"];
  let count = 0;
  return Object.fromEntries(names.map((name) => {
    const at = own[name] ? 0 : count++;
    return [name, { hue: own[name] || hues[at % hues.length], dash: at >= hues.length ? "5 4" : null, wide: own[name] ? 2.8 : 1.7 }];
  }));
}

// A chart of DATA.charts: one line for each name, what leaves the frame cut off.
function plot(figure) {
  const given = DATA.charts[figure.dataset.chart], percent = (v) => `${Math.round(100 * v)} %`;
  const styles = lineStyles(DATA.names), place = chart({ ...given, form: given.percent ? percent : undefined });
  const clip = `clip-${figure.dataset.chart}`, inside = make("g", { "clip-path": `url(#${clip})` });
  const box = { x: place.left - 4, y: place.top - 4, width: place.width - place.left - place.right + 8, height: place.height - place.top - place.bottom + 8 };
  place.svg.append(make("clipPath", { id: clip }, make("rect", box)));
  if (given.mark) place.svg.append(upright(place, given.mark, { stroke: "var(--soft)", "stroke-dasharray": "4 4" }), make("text", { x: place.px(given.mark) + 5, y: place.top + 8, text: "trained" }));
  const out = make("p", { class: "readout", "aria-live": "polite", text: " " }), ring = make("circle", { r: 6, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, cx: -99 }), points = [];
  for (const { name, xs, ys } of given.lines) {
    const { hue, dash, wide } = styles[name];
    inside.append(line(place, xs, ys, `var(--${hue})`, { "stroke-width": wide, "stroke-dasharray": dash }));
    xs.forEach((x, i) => {
      if (!Number.isFinite(ys[i])) return;
      points.push({ cx: place.px(x), cy: place.py(ys[i]), text: `${name}, ${given.xName} ${number(x, 0)}: ${given.percent ? percent(ys[i]) : number(ys[i])}` });
      if (given.dots !== false) inside.append(make("circle", { cx: place.px(x), cy: place.py(ys[i]), r: 3, fill: `var(--${hue})` }));
    });
  }
  inside.append(ring);
  place.svg.addEventListener("pointermove", (event) => {
    const frame = place.svg.getBoundingClientRect(), scale = place.width / frame.width;
    const far = (p) => Math.hypot(p.cx - (event.clientX - frame.left) * scale, p.cy - (event.clientY - frame.top) * scale);
    const near = points.reduce((best, p) => (far(p) < far(best) ? p : best));
    ring.setAttribute("cx", near.cx);
    ring.setAttribute("cy", near.cy);
    out.textContent = near.text;
  });
  place.svg.append(inside);
  figure.querySelector("[data-here]").replaceChildren(place.svg, out);
}

if (DATA && DATA.charts) {
  drawn(() => document.querySelectorAll("[data-chart]").forEach(plot));
  const styles = lineStyles(DATA.names);
  document.querySelectorAll("[data-legend]").forEach((box) => box.append(legend(DATA.names.map((name) => [styles[name].hue, name, styles[name].dash]))));
}

function radios(box, names, chosen, pick, label) {
  box.replaceChildren(...names.map((name, i) => make("button", {
    type: "button", role: "radio", "aria-checked": String(i === chosen), tabindex: i === chosen ? 0 : -1, text: name, "aria-label": label ? label(i) : null,
    onclick: () => pick(i),
    onkeydown: (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const to = (i + move + names.length) % names.length;
      pick(to);
      box.querySelectorAll('[role="radio"]')[to].focus();
    },
  })));
}

// Words to choose one of; the darker another, the more of the chosen one's attention it gets.
function lookingWords(box, words, weights, chosen, pick) {
  const most = Math.max(...weights), had = box.contains(document.activeElement);
  radios(box, words, chosen, pick, (i) => `${words[i]}: ${number(100 * weights[i], 1)} % of the attention of ${words[chosen]}`);
  box.querySelectorAll("button").forEach((button, j) => {
    button.append(make("small", { text: weights[j] < 0.0005 ? "0" : `${number(100 * weights[j], 0)} %` }));
    button.style.setProperty("--w", Math.round((70 * weights[j]) / most));
  });
  if (had) box.querySelectorAll("button")[chosen].focus();
}

function softmax(scores) {
  const most = Math.max(...scores), odds = scores.map((s) => Math.exp(s - most)), sum = odds.reduce((a, b) => a + b, 0);
  return odds.map((o) => o / sum);
}
