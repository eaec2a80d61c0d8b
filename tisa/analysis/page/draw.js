"use strict";
// Elements, maps and curves: arrays in, parts of the page out.
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "circle", "rect", "text", "g", "polyline"].includes(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

const dark = () => document.documentElement.dataset.theme === "dark";
const narrow = () => window.innerWidth < 820;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const number = (x, digits = 3) => {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return x.toExponential(2).replace("-", "−");
  return x.toFixed(Math.min(digits, size >= 100 ? 1 : size >= 10 ? 2 : digits)).replace("-", "−");
};

// Fills a canvas with values between low and high; a diverging map has 0 in its middle.
function paint(canvas, values, rows, columns, low, high, diverging) {
  const lut = LUT[diverging ? (dark() ? "diverging_dark" : "diverging") : "sequential"];
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const spread = high - low || 1;
  for (let i = 0; i < values.length; i++) {
    const level = Math.max(0, Math.min(255, Math.round(((values[i] - low) / spread) * 255))) || 0;
    image.data[4 * i] = lut[3 * level];
    image.data[4 * i + 1] = lut[3 * level + 1];
    image.data[4 * i + 2] = lut[3 * level + 2];
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

function gradient(diverging) {
  const lut = LUT[diverging ? (dark() ? "diverging_dark" : "diverging") : "sequential"], stops = [];
  for (let i = 0; i <= 8; i++) { const at = Math.round((i * 255) / 8) * 3; stops.push(`rgb(${lut[at]},${lut[at + 1]},${lut[at + 2]})`); }
  return `linear-gradient(90deg, ${stops.join(",")})`;
}

// A map that says what lies under the pointer, and under the arrow keys.
function mapFigure({ values, rows, columns, low, high, diverging, label, caption, read, ends, side }) {
  const canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": label });
  const out = make("p", { class: "readout", "aria-live": "polite", text: " " });
  paint(canvas, values, rows, columns, low, high, diverging);
  const base = canvas.getContext("2d").getImageData(0, 0, columns, rows);
  let row = Math.floor(rows / 2), column = Math.floor(columns / 2);
  const show = (quiet) => {
    const context = canvas.getContext("2d");
    context.putImageData(base, 0, 0);
    context.fillStyle = dark() ? "rgba(255,255,255,.55)" : "rgba(0,0,0,.45)";
    const thick = Math.max(1, Math.round(rows / 256));
    context.fillRect(0, row, columns, thick);
    context.fillRect(column, 0, thick, rows);
    if (!quiet) out.textContent = read(row, column);
  };
  const clear = () => { canvas.getContext("2d").putImageData(base, 0, 0); };
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    column = Math.max(0, Math.min(columns - 1, Math.floor(((event.clientX - box.left) / box.width) * columns)));
    row = Math.max(0, Math.min(rows - 1, Math.floor(((event.clientY - box.top) / box.height) * rows)));
    show();
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) clear(); });
  canvas.addEventListener("focus", () => show());
  canvas.addEventListener("blur", clear);
  canvas.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? Math.max(1, Math.round(rows / 16)) : 1;
    const moves = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] };
    if (!moves[event.key]) return;
    event.preventDefault();
    row = Math.max(0, Math.min(rows - 1, row + moves[event.key][0]));
    column = Math.max(0, Math.min(columns - 1, column + moves[event.key][1]));
    show();
  });
  const bar = make("i");
  bar.style.background = gradient(diverging);
  return make("figure", { class: "card map" },
    caption ? make("figcaption", { text: caption }) : null, canvas,
    make("div", { class: "axis" }, make("span", { text: ends[0] }), make("span", { text: side }), make("span", { text: ends[1] })),
    make("div", { class: "key" }, make("span", { text: number(low) }), bar, make("span", { text: number(high) })), out);
}

function ticks(low, high, count = 5) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + 1e-9 * step; t += step) found.push(Math.abs(t) < step * 1e-6 ? 0 : t);
  return found;
}

// Axes of a chart: returns the svg and the maps from values to places.
function chart({ width = 640, height = 300, x, y, label, xName, yName }) {
  // On a phone the same letters need a smaller drawing.
  if (narrow() && width > 380) { height = Math.max(260, (height * 380) / width); width = 380; }
  const left = 46, right = 12, top = 10, bottom = 38;
  const px = (v) => left + ((v - x[0]) / (x[1] - x[0] || 1)) * (width - left - right);
  const py = (v) => height - bottom - ((v - y[0]) / (y[1] - y[0] || 1)) * (height - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const t of ticks(y[0], y[1], 4))
    svg.append(make("line", { x1: left, x2: width - right, y1: py(t), y2: py(t), stroke: "var(--line)" }),
      make("text", { x: left - 6, y: py(t) + 4, "text-anchor": "end", text: String(+t.toPrecision(6)).replace("-", "−") }));
  for (const t of ticks(x[0], x[1], 6)) svg.append(make("text", { x: px(t), y: height - bottom + 17, "text-anchor": "middle", text: String(+t.toPrecision(6)).replace("-", "−") }));
  if (xName) svg.append(make("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle", text: xName }));
  if (yName) svg.append(make("text", { x: left + 4, y: top + 4, text: yName }));
  return { svg, px, py, width, height, left, right, top, bottom };
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

function legend(entries) {
  return make("div", { class: "legend" }, ...entries.map(([hue, text]) => { const dot = make("i"); dot.style.background = `var(--${hue})`; return make("span", {}, dot, text); }));
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

function options(select, names, chosen) {
  select.replaceChildren(...names.map((name, i) => make("option", { value: i, text: name, selected: i === chosen })));
}
