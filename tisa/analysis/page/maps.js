// Maps of numbers: arrays in, canvases that can be read out.
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

function options(select, names, chosen) {
  select.replaceChildren(...names.map((name, i) => make("option", { value: i, text: name, selected: i === chosen })));
}
