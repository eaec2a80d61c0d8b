const percent = (share, digits = 0) => `${number(share === null ? null : 100 * share, digits)} %`;

// The report: one state, one function per panel, everything redrawn from the state.
const state = { a: 0, b: -1, view: 0, source: 0, layer: 0, head: 0, kernels: 5, reach: 64, component: 0 };
const VIEWS = ["P", "its Toeplitz fit", "what the fit leaves", "the table E_P"];

function gauge(part, null_, interval) {
  const svg = make("svg", { class: "gauge", viewBox: "0 0 200 26", preserveAspectRatio: "none", role: "img",
    "aria-label": `${number(part)}, interval ${number(interval[0])} to ${number(interval[1])}, chance ${number(null_)}` });
  const x = (v) => 200 * clamp(v, 1);
  svg.append(make("rect", { x: 0, y: 8, width: 200, height: 8, rx: 4, fill: "var(--shade)" }),
    make("rect", { x: 0, y: 8, width: x(part), height: 8, rx: 4, fill: "var(--blue)" }),
    make("line", { x1: x(interval[0]), x2: x(interval[1]), y1: 12, y2: 12, stroke: "var(--ink)", "stroke-width": 1.5 }),
    make("line", { x1: x(null_), x2: x(null_), y1: 3, y2: 21, stroke: "var(--orange)", "stroke-width": 3 }));
  return svg;
}

function card(big, what, extra, id) {
  return make("div", { class: "card" }, make("p", { class: "big", text: big, "data-number": id }), extra || null, make("p", { text: what }));
}

function summaryPanel(model) {
  const n = model.numbers, panel = make("div", {}, make("h3", { text: `${n.name} · ${n.family}` })), cards = make("div", { class: "row facts" });
  if (n.toeplitz) {
    const t = n.toeplitz.table;
    cards.append(
      card(number(t.r2), `Toeplitz R² of P; chance alone gives ${number(t.null)} at this shape`, gauge(t.r2, t.null, t.interval), "toeplitz.table.r2"),
      card(number(t.off_diagonal), `the same off the main diagonal; chance ${number(t.off_diagonal_null)}`, gauge(t.off_diagonal, t.off_diagonal_null, t.off_diagonal_interval), "toeplitz.table.off_diagonal"),
      card(`${n.layers_as_read[0].sensitive.filter(Boolean).length} of ${n.heads}`, "heads of the first layer are position-sensitive"),
      card(`${n.pca.dimensions_90} of ${n.width}`, "dimensions hold 90 % of the table's variance", null, "pca"),
      card(percent(n.input_shares.position), "of the variance of the first layer's input comes from the position, whatever the word"));
    const rows = [["P = E_P E_Pᵀ", t], ["columns centred", n.toeplitz.centred], ["without the first position", n.toeplitz.without_first], ["as the first layer reads it", n.toeplitz.as_read],
      ...n.blocks.map((block) => [`among positions ${block.start}–${block.end - 1}`, block])];
    if (n.grid) rows.push([`by step on the ${n.grid.rows} × ${n.grid.columns} grid`, n.grid]);
    const body = rows.map(([label, p]) => make("tr", {}, make("td", { text: label }), ...[p.r2, p.null, p.off_diagonal, p.off_diagonal_null].map((v) => make("td", { text: number(v) }))));
    panel.append(cards, make("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "Toeplitz R² in detail" }, make("table", {},
      make("thead", {}, make("tr", {}, ...["Toeplitz R² of", "whole", "chance", "off diagonal", "chance"].map((h) => make("th", { scope: "col", text: h })))),
      make("tbody", {}, ...body))));
    if (n.leading_rows) panel.append(make("p", { class: "note", text: `The table's first ${n.leading_rows} rows are left out: no token ever gets them.` }));
  }
  if (n.curves) {
    cards.append(card(String(n.curves.length), n.curves.length === 1 ? "set of learned scores f(k) in this model" : "sets of learned scores f(k) in this model"));
    const best = n.curves[0].r2.at(-1), mean = best.reduce((x, y) => x + y, 0) / best.length;
    cards.append(card(number(mean), `mean R² of ${n.curves[0].r2.length - 1} kernels fitted to the first one's heads`));
    if (!n.toeplitz) panel.append(cards);
  }
  return panel;
}

function gramPanel(model) {
  if (!model.table) return make("p", { class: "note", text: `${model.numbers.name} has no table of positions: its learned curves are below.` });
  const n = model.table.rows, d = model.table.columns, gram = gramOf(model), name = model.numbers.name;
  if (state.view === 3) {
    const values = unpack(model.table), limit = quantile(values.map(Math.abs), 0.995);
    const rows = [1, 2, 100, n >> 1].filter((r, i, all) => r < n && all.indexOf(r) === i);
    return make("div", { class: "row two" }, mapFigure({ values, rows: n, columns: d, low: -limit, high: limit, diverging: true, caption: `${name}: E_P, ${n} positions × ${model.numbers.width} dimensions${d < model.numbers.width ? " (strongest " + d + ")" : ""}`,
      label: `Table of position embeddings of ${name}, ${n} by ${d}: no structure that can be read`, ends: ["dimension 0", `${d - 1}`], side: "↓ position",
      read: (i, j) => `position ${i}, dimension ${j}: ${number(values[i * d + j], 4)}` }), rowsFigure(rows, (r) => values.subarray(r * d, (r + 1) * d), limit));
  }
  const side = gram.side, fit = gram.fit, at = (i, j) => fit[j - i + side - 1];
  let values = gram.map;
  if (state.view > 0) values = values.map((v, t) => { const f = at((t / side) | 0, t % side); return state.view === 1 ? f : v - f; });
  const diverging = state.view === 2;
  const limit = diverging ? quantile(values.map(Math.abs), 0.995) : 0;
  const low = diverging ? -limit : quantile(gram.map, 0.005), high = diverging ? limit : quantile(gram.map, 0.995);
  return make("div", { class: "row two" }, mapFigure({ values, rows: side, columns: side, low, high, diverging, caption: `${name}: ${VIEWS[state.view]}, R² ${number(model.numbers.toeplitz.table.r2)}`,
    label: `Heat map of ${VIEWS[state.view]} for ${name}, ${n} by ${n} positions, Toeplitz R² ${number(model.numbers.toeplitz.table.r2)}`, ends: ["position 0", `${n - 1}`], side: "↓ position",
    read: (i, j) => { const p = i * gram.step, q = j * gram.step; return `P[${p}, ${q}] = ${number(gramEntry(model, p, q), 4)} · offset ${minus(q - p)}: mean ${number(at(i, j), 4)}`; } }), diagonalFigure(gram, n));
}

// Rows of P over the offset: one line where the table is translation-invariant.
function diagonalFigure(gram, n) {
  const side = gram.side, reach = Math.min(96, side >> 1), hues = ["blue", "orange", "green", "pink"];
  const rows = [1, 3, 5, 7].map((part) => Math.floor((part * side) / 8)), lines = [], seen = [];
  for (const row of rows) {
    const xs = [], ys = [];
    for (let k = -reach; k <= reach; k++) if (row + k >= 0 && row + k < side) { xs.push(k * gram.step); ys.push(gram.map[row * side + row + k]); }
    lines.push([xs, ys]);
    for (let i = 0; i < xs.length; i++) if (xs[i] !== 0) seen.push(ys[i]);
  }
  const xs = [], ys = [];
  for (let k = -reach; k <= reach; k++) { xs.push(k * gram.step); ys.push(gram.fit[k + side - 1]); if (k) seen.push(gram.fit[k + side - 1]); }
  const low = Math.min(...seen), high = Math.max(...seen), room = (high - low) * 0.12, ceiling = high + room;
  const place = chart({ width: 560, height: 520, x: [-reach * gram.step, reach * gram.step], y: [low - room, ceiling], xName: "offset", yName: "inner product",
    label: "Four rows of P over the offset, and the mean diagonal; one line where the table is translation-invariant" });
  lines.forEach(([x, y], i) => place.svg.append(line(place, x, y.map((v) => Math.min(v, ceiling)), `var(--${hues[i]})`, { "stroke-width": 1.3, opacity: 0.9 })));
  place.svg.append(line(place, xs, ys.map((v) => Math.min(v, ceiling)), "var(--ink)", { "stroke-width": 2.8 }));
  return make("figure", { class: "card" }, make("figcaption", { text: "Rows of P over the offset: were only distance to count, they would be one line" }), place.svg,
    legend([...rows.map((row, i) => [hues[i], `row ${row * gram.step}`]), ["ink", "mean diagonal"]]));
}

function rowsFigure(rows, valuesOf, limit) {
  const hues = ["blue", "orange", "green", "pink"], d = valuesOf(rows[0]).length;
  const place = chart({ width: 560, height: 520, x: [0, d - 1], y: [-1.6 * limit, 1.6 * limit], xName: "dimension", yName: "value", label: `Rows ${rows.join(", ")} of the table, value over dimension: noise to the eye` });
  rows.forEach((row, i) => place.svg.append(line(place, Array.from({ length: d }, (_, c) => c), Array.from(valuesOf(row), (v) => Math.max(-1.6 * limit, Math.min(1.6 * limit, v))), `var(--${hues[i]})`, { "stroke-width": 1 })));
  return make("figure", { class: "card" }, make("figcaption", { text: "Some rows: nothing in them says “next to each other”" }), place.svg, legend(rows.map((row, i) => [hues[i], `position ${row}`])));
}

const headNumbers = (model, source, layer) => ({ read: (model.numbers.layers_as_read || [])[layer], raw: model.numbers.first_layer_raw }[source.key] || null);

function strengthOf(model, source, layer, head) {
  const found = headNumbers(model, source, layer);
  if (found) return found.strength[head];
  const values = curveOf(model, source, layer, head).values.filter(Number.isFinite);
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  return Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / values.length);
}

function headPicker(model, source, layer, head) {
  const box = make("div", { class: "grid-heads", role: "radiogroup", "aria-label": "All layers and heads; brighter reads positions more strongly" });
  box.style.gridTemplateColumns = `auto repeat(${source.heads}, minmax(16px, 1fr))`;
  const all = source.layers.map((_, l) => Array.from({ length: source.heads }, (_, h) => strengthOf(model, source, l, h)));
  const top = Math.log1p(Math.max(...all.flat(), 1e-9)), lut = LUT.sequential;
  source.layers.forEach((part, l) => {
    box.append(make("span", { text: source.layers.length > 24 ? l + 1 : part.label.length > 10 ? l + 1 : part.label }));
    for (let h = 0; h < source.heads; h++) {
      const level = Math.round((255 * Math.log1p(all[l][h])) / top) * 3, chosen = l === layer && h === head;
      const cell = make("button", { type: "button", "aria-checked": String(chosen), role: "radio", tabindex: chosen ? 0 : -1, "data-layer": l, "data-head": h,
        "aria-label": `${part.label}, head ${h + 1}, strength ${number(all[l][h])}`, title: `${part.label}, head ${h + 1}: strength ${number(all[l][h])}`,
        onclick: () => { state.layer = l; state.head = h; drawHeads(true); },
        onkeydown: (event) => {
          const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
          if (!move) return;
          event.preventDefault();
          state.layer = clamp(l + move[0], source.layers.length - 1);
          state.head = clamp(h + move[1], source.heads - 1);
          drawHeads(true);
        } });
      cell.style.background = `rgb(${lut[level]},${lut[level + 1]},${lut[level + 2]})`;
      box.append(cell);
    }
  });
  return box;
}

function curveFigure(model, source, layer, head) {
  const curve = curveOf(model, source, layer, head);
  // A decoder's curve ends at 0.
  const start = Math.max(-state.reach, curve.first), end = Math.min(state.reach, curve.first + curve.values.length - 1);
  const xs = [], ys = [];
  for (let k = start; k <= end; k++) { xs.push(k); ys.push(curve.values[k - curve.first]); }
  const kernels = kernelsOf(source, layer, head, state.kernels, state.reach > 64);
  const fine = [], sum = [];
  const parts = kernels ? kernels.list.map(() => []) : [];
  if (kernels) for (let t = 0; t <= 600; t++) {
    const k = start + ((end - start) * t) / 600;
    fine.push(k);
    sum.push(kernels.constant + kernelSum(kernels.list, k));
    kernels.list.forEach((one, s) => parts[s].push(kernels.constant + kernelSum([one], k)));
  }
  const seen = [...ys, ...sum].filter(Number.isFinite), low = Math.min(...seen), high = Math.max(...seen), room = (high - low) * 0.06 || 1;
  const said = kernels && kernels.size ? `${kernels.size} kernel${kernels.size > 1 ? "s" : ""} explain${kernels.size > 1 ? "" : "s"} ${percent(kernels.r2, 1)} of it up to distance ${kernels.reach}` : "";
  const place = chart({ width: 560, height: 480, x: [start, end], y: [low - room, high + room], xName: "offset k = key − query", yName: "logit",
    label: `Curve of head ${head + 1}, ${source.layers[layer].label}, over offsets from ${number(start, 0)} to ${number(end, 0)}. ${said}` });
  const inside = (v) => Math.max(place.top, Math.min(place.height - place.bottom, place.py(v))).toFixed(1);
  parts.forEach((values) => {
    const base = inside(kernels.constant), path = `M${place.px(start)} ${base}` + values.map((v, i) => `L${place.px(fine[i]).toFixed(1)} ${inside(v)}`).join("") + `L${place.px(end)} ${base}Z`;
    place.svg.append(make("path", { d: path, fill: "var(--green)", opacity: 0.2, class: "kernel-area" }));
  });
  place.svg.append(upright(place, 0, { stroke: "var(--soft)", "stroke-dasharray": "2 3" }),
    line(place, xs, ys, "var(--blue)", { class: "curve" }));
  if (kernels && kernels.size) place.svg.append(line(place, fine, sum, "var(--orange)", { "stroke-dasharray": "7 4", class: "fit" }));
  const out = make("p", { class: "readout", "aria-live": "polite", text: said });
  place.svg.addEventListener("pointermove", (event) => {
    const k = Math.round(place.under(event));
    if (k < start || k > end) return;
    out.textContent = `k = ${minus(k)}: ${number(curve.values[k - curve.first])}` + (kernels ? `, kernels ${number(kernels.constant + kernelSum(kernels.list, k))}` : "");
  });
  place.svg.addEventListener("pointerleave", () => { out.textContent = said; });
  return make("figure", { class: "card" }, make("figcaption", { text: `f(k): mean diagonal${kernels ? ", and its kernels" : ""}` }), place.svg,
    legend([["blue", "mean diagonal"], ["orange", "sum of kernels"], ["green", "single kernels"]]), out);
}

function headsPanel(model) {
  const sources = model.sources;
  if (!sources.length) return make("p", { class: "note", text: "Nothing to read heads from." });
  const wanted = DATA.models[state.a].sources[state.source];
  const source = sources.find((s) => wanted && s.key === wanted.key) || sources[0];
  const layer = clamp(state.layer, source.layers.length - 1), head = clamp(state.head, source.heads - 1);
  const found = headNumbers(model, source, layer), map = headMap(model, source, layer, head), shown = rowCentred(map.map, map.side);
  const limit = quantile(shown.map(Math.abs), 0.995) || 1e-9, n = map.side * map.step;
  const title = `${model.numbers.name} · ${source.layers[layer].label}, head ${head + 1}`;
  const about = found
    ? `R² ${number(found.r2[head])}${found.null[head] === null ? "" : ` (positions shuffled: ${number(found.null[head])})`} · strength ${number(found.strength[head])} logits: ${found.sensitive[head] ? "position-sensitive" : "position-blind"}`
    : source.note;
  return make("div", {}, make("h3", { text: title }), make("p", { class: "note", "data-head-about": "", text: about }), headPicker(model, source, layer, head),
    make("div", { class: "row two" },
      mapFigure({ values: shown, rows: map.side, columns: map.side, low: -limit, high: limit, diverging: true, caption: "F̂_P, rows less their mean: orange draws attention, blue turns it away",
        label: `Positional attention of ${title}`, ends: ["key 0", `${n - 1}`], side: "↓ query",
        read: (i, j) => { const p = i * map.step, q = j * map.step; return `query ${p}, key ${q} (offset ${minus(q - p)}): ${number(map.entry(p, q))} logits`; } }),
      curveFigure(model, source, layer, head)));
}

function partsPanel(model) {
  const n = model.numbers;
  if (!n.pca) return make("p", { class: "note", text: `${n.name} has no table to take apart.` });
  const first = Math.min(2 * state.component, model.components.columns - 2), values = unpack(model.components), columns = model.components.columns, rows = model.components.rows;
  const xs = [], ys = [];
  for (let i = 0; i < rows; i++) { xs.push(values[i * columns + first]); ys.push(values[i * columns + first + 1]); }
  const limit = Math.max(...xs.map(Math.abs), ...ys.map(Math.abs)) * 1.08;
  const square = chart({ width: 560, height: 530, x: [-limit, limit], y: [-limit, limit], xName: `component ${first + 1}`, yName: `component ${first + 2}`, label: `Path of the ${rows} positions in components ${first + 1} and ${first + 2}, from dark to bright` });
  const path = line(square, xs, ys, "var(--line)", { "stroke-width": 0.8 });
  square.svg.append(path);
  const lut = LUT.sequential, step = Math.max(1, Math.floor(rows / 600));
  for (let i = 0; i < rows; i += step) { const l = Math.round((255 * i) / (rows - 1)) * 3; square.svg.append(make("circle", { cx: square.px(xs[i]).toFixed(1), cy: square.py(ys[i]).toFixed(1), r: 3, fill: `rgb(${lut[l]},${lut[l + 1]},${lut[l + 2]})` })); }
  const period = (c) => number(rows / Math.max(1, n.pca.frequencies[c]), 1);
  const panel = make("div", {}, make("h3", { text: n.name }), make("div", { class: "row two" }, make("figure", { class: "card" },
    make("figcaption", { text: `The table's path, first position dark, last bright. Strongest periods: ${period(first)} and ${period(first + 1)} positions.` }), square.svg,
    make("p", { class: "note", text: `One fixed rotation takes each row to the next with R² ${number(n.pca.step_r2)}; standing still would give ${number(n.pca.still_r2)}.` }))));
  if (n.logit_terms) {
    const terms = n.logit_terms, colours = ["blue", "orange", "pink", "green", "sky", "gold"], height = 24 * n.heads + 34, whole = narrow() ? 380 : 560, room = whole - 76;
    const svg = make("svg", { viewBox: `0 0 ${whole} ${height}`, role: "img", "aria-label": "What the logits of the first layer's heads are made of: " + terms.names.map((t, i) => `${t} ${number((100 * terms.shares.reduce((s, row) => s + row[i], 0)) / n.heads, 0)} %`).join(", ") });
    terms.shares.forEach((row, h) => {
      let x = 62;
      svg.append(make("text", { x: 56, y: 24 * h + 17, "text-anchor": "end", text: `head ${h + 1}` }));
      row.forEach((share, i) => {
        const bar = make("rect", { x, y: 24 * h + 4, width: Math.max(0, share * room), height: 17, fill: `var(--${colours[i]})` });
        bar.append(make("title", { text: `head ${h + 1}, ${terms.names[i]}: ${number(100 * share, 1)} %` }));
        svg.append(bar);
        x += share * room;
      });
    });
    for (const t of [0, 0.5, 1]) svg.append(make("text", { x: 62 + room * t, y: height - 10, "text-anchor": "middle", text: `${100 * t} %` }));
    const names = { "position-position": "position × position", "position-word": "query's position × key's word", "word-position": "query's word × key's position", "word-word": "word × word", position: "key's position alone", word: "key's word alone" };
    panel.querySelector(".row").append(make("figure", { class: "card" }, make("figcaption", { text: "What the first layer's logits are made of, by variance" }), svg,
      legend(terms.names.map((t, i) => [colours[i], names[t]]))));
  }
  return panel;
}

const PANELS = { summary: summaryPanel, gram: gramPanel, heads: headsPanel, parts: partsPanel };

function drawPanel(name) {
  const box = document.querySelector(`[data-panel="${name}"]`);
  const shown = [state.a, state.b].filter((m) => m >= 0);
  box.classList.toggle("two", shown.length > 1);
  box.replaceChildren(...shown.map((m) => { const panel = make("div", { class: "panel" }); panel.append(PANELS[name](DATA.models[m])); return panel; }));
}

function drawHeads(focus) {
  const model = DATA.models[state.a], sources = model.sources;
  state.source = clamp(state.source, sources.length - 1);
  const source = sources[state.source];
  state.layer = clamp(state.layer, source.layers.length - 1);
  state.head = clamp(state.head, source.heads - 1);
  options(byId("source"), sources.map((s) => s.label), state.source);
  options(byId("layer"), source.layers.map((l) => l.label), state.layer);
  options(byId("head"), Array.from({ length: source.heads }, (_, h) => `${h + 1}`), state.head);
  byId("kernels-out").textContent = state.kernels;
  drawPanel("heads");
  if (focus) document.querySelector('[data-panel="heads"] .grid-heads [aria-checked="true"]').focus({ preventScroll: true });
}

function drawViews() {
  radios(byId("gram-view"), VIEWS, state.view, (i) => { state.view = i; drawViews(); drawPanel("gram"); });
}

function drawAll() {
  drawPanel("summary");
  drawViews();
  drawPanel("gram");
  drawHeads();
  drawPanel("parts");
}

function start() {
  const names = DATA.models.map((m) => m.numbers.name);
  options(byId("model-a"), names, 0);
  byId("model-b").replaceChildren(make("option", { value: -1, text: "nothing" }), ...names.map((name, i) => make("option", { value: i, text: name })));
  if (names.length < 2) byId("beside").hidden = true;
  else { state.b = 1; byId("model-b").value = "1"; }
  const listen = (id, event, name) => byId(id).addEventListener(event, () => { state[name] = Number(byId(id).value); name === "a" || name === "b" ? drawAll() : name === "component" ? drawPanel("parts") : drawHeads(); });
  byId("models").addEventListener("submit", (event) => event.preventDefault());
  for (const [id, name] of [["model-a", "a"], ["model-b", "b"], ["source", "source"], ["layer", "layer"], ["head", "head"], ["reach", "reach"], ["components", "component"]]) listen(id, "change", name);
  listen("kernels", "input", "kernels");
  const strongest = DATA.models[0].sources[0];
  if (strongest) {
    const all = Array.from({ length: strongest.heads }, (_, h) => strengthOf(DATA.models[0], strongest, 0, h));
    state.head = all.indexOf(Math.max(...all));
  }
  options(byId("components"), ["1 and 2", "3 and 4", "5 and 6", "7 and 8"], 0);
  drawn(drawAll);
  startPlay();
}
