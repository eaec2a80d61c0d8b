// The playground: kernels to drag, the Toeplitz matrix they give, and where a sentence then looks.
const REACH = 12;
const HUES = ["blue", "orange", "green", "pink", "gold", "sky"];
const PRESETS = [
  ["the word before", [{ a: 6, b: 1.5, c: -1 }]],
  ["its neighbours", [{ a: 4, b: 0.12, c: 0 }, { a: -5, b: 3, c: 0 }]],
  ["two ahead", [{ a: 6, b: 1.2, c: 2 }]],
  ["anything but me", [{ a: -8, b: 4, c: 0 }]],
  ["far away", [{ a: -6, b: 0.03, c: 0 }]],
  ["no positions", [{ a: 0, b: 0.2, c: 0 }]],
];
const play = { kernels: PRESETS[0][1].map((k) => ({ ...k })), word: 6, top: 8 };

const sentence = () => byId("sentence").value.trim().split(/\s+/).filter(Boolean).slice(0, 40);

function playCurve() {
  const ks = [], sum = [];
  for (let k = -REACH; k <= REACH + 1e-9; k += 0.1) { ks.push(k); sum.push(kernelSum(play.kernels, k)); }
  const highest = Math.max(...sum.map(Math.abs), ...play.kernels.map((k) => Math.abs(k.a)), 1);
  if (!play.dragging) play.top = Math.ceil(highest * 1.2);
  const place = chart({ width: 900, height: 320, x: [-REACH, REACH], y: [-play.top, play.top], xName: "offset k = key − query", yName: "f(k)",
    label: "f(k) of your head: " + play.kernels.map((k) => `amplitude ${number(k.a, 2)}, sharpness ${number(k.b, 2)}, offset ${number(k.c, 2)}`).join("; ") });
  play.kernels.forEach((kernel, s) => {
    const values = ks.map((k) => kernelSum([kernel], k));
    place.svg.append(make("path", { d: `M${place.px(-REACH)} ${place.py(0)}` + ks.map((k, i) => `L${place.px(k).toFixed(1)} ${place.py(values[i]).toFixed(1)}`).join("") + `L${place.px(REACH)} ${place.py(0)}Z`, fill: `var(--${HUES[s]})`, opacity: 0.17 }));
  });
  place.svg.append(across(place, 0, { stroke: "var(--soft)" }), line(place, ks, sum, "var(--ink)", { "stroke-width": 2.6, id: "play-line" }));
  for (let k = -REACH; k <= REACH; k++) place.svg.append(make("circle", { cx: place.px(k), cy: place.py(kernelSum(play.kernels, k)), r: 2.8, fill: "var(--ink)" }));
  const unit = (place.width - place.left - place.right) / (2 * REACH), rise = (place.height - place.top - place.bottom) / (2 * play.top);
  play.kernels.forEach((kernel, s) => {
    const half = Math.min(REACH, Math.sqrt(Math.LN2 / Math.max(1e-4, Math.abs(kernel.b))));
    const right = kernel.c + half <= REACH ? 1 : -1;
    place.svg.append(
      drag(make("rect", { class: "handle", x: place.px(kernel.c + right * half) - 7, y: place.py(kernel.a / 2) - 7, width: 14, height: 14, rx: 3, fill: "var(--card)", stroke: `var(--${HUES[s]})`, "stroke-width": 3 }),
        (dx) => { const wide = Math.max(0.25, Math.abs(half + (right * dx) / unit)); kernel.b = Math.min(10, Math.LN2 / (wide * wide)); }),
      drag(make("circle", { class: "handle", "data-kernel": s, cx: place.px(kernel.c), cy: place.py(kernel.a), r: 9, fill: `var(--${HUES[s]})`, stroke: "var(--card)", "stroke-width": 3 }),
        (dx, dy) => { kernel.c = Math.max(-REACH, Math.min(REACH, kernel.c + dx / unit)); kernel.a = Math.max(-play.top, Math.min(play.top, kernel.a - dy / rise)); }));
  });
  byId("play-curve").replaceChildren(place.svg);
  play.scale = () => place.svg.getBoundingClientRect().width / place.width;
}

// Moves are measured from where the pointer was; the handle is drawn anew meanwhile.
function drag(handle, move) {
  handle.addEventListener("pointerdown", (down) => {
    down.preventDefault();
    play.dragging = true;
    const before = play.kernels.map((k) => ({ ...k })), scale = play.scale();
    const on = (event) => {
      play.kernels.forEach((k, s) => Object.assign(k, before[s]));
      move((event.clientX - down.clientX) / scale, (event.clientY - down.clientY) / scale);
      drawPlay();
    };
    const off = () => { play.dragging = false; window.removeEventListener("pointermove", on); window.removeEventListener("pointerup", off); window.removeEventListener("pointercancel", off); drawPlay(); };
    window.addEventListener("pointermove", on);
    window.addEventListener("pointerup", off);
    window.addEventListener("pointercancel", off);
  });
  handle.style.touchAction = "none";
  return handle;
}

function playSliders() {
  const box = byId("play-sliders"), active = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.slider : null;
  const make_ = (kernel, s, key, label, low, high, step) => {
    const log = key === "b", value = log ? Math.log10(Math.max(0.003, Math.abs(kernel.b))) : kernel[key];
    const input = make("input", { type: "range", min: low, max: high, step, value, "data-slider": `${s}-${key}`, "aria-label": `kernel ${s + 1}: ${label}`, "aria-valuetext": number(kernel[key], 2),
      oninput: (event) => { kernel[key] = log ? 10 ** Number(event.target.value) : Number(event.target.value); drawPlay(true); } });
    return make("label", {}, make("span", { text: `${label} ${number(kernel[key], 2)}` }), input);
  };
  box.replaceChildren(...play.kernels.map((kernel, s) => {
    const dot = make("i", { class: "dot" });
    dot.style.background = `var(--${HUES[s]})`;
    return make("div", { class: "kernel" }, dot, make_(kernel, s, "a", "amplitude a", -20, 20, 0.1), make_(kernel, s, "b", "sharpness b", -2.5, 1, 0.02), make_(kernel, s, "c", "offset c", -REACH, REACH, 0.1),
      make("button", { type: "button", text: "×", "aria-label": `remove kernel ${s + 1}`, disabled: play.kernels.length < 2, onclick: () => { play.kernels.splice(s, 1); drawPlay(); } }));
  }));
  if (active) { const again = box.querySelector(`[data-slider="${active}"]`); if (again) again.focus(); }
}

function playMaps() {
  const words = sentence(), n = words.length, causal = byId("causal").checked;
  if (!n) { byId("words").replaceChildren(make("p", { class: "note", text: "Write a few words." })); return; }
  play.word = clamp(play.word, n - 1);
  const scores = new Float32Array(n * n), weights = new Float32Array(n * n);
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < n; j++) scores[i * n + j] = kernelSum(play.kernels, j - i);
    weights.set(softmax(Array.from(scores.subarray(i * n, causal ? i * n + i + 1 : (i + 1) * n))), i * n);
  }
  const limit = Math.max(0.5, ...scores.map(Math.abs));
  const tell = (name, form) => (i, j) => `“${words[i]}” → “${words[j]}” (offset ${minus(j - i)}): ${name} ${form(i * n + j)}`;
  const shown = { rows: n, columns: n, ends: [words[0], words[n - 1]], side: "↓ query" }, of = `of each pair of words: ${words.join(" ")}`;
  byId("play-maps").replaceChildren(
    mapFigure({ ...shown, values: scores, low: -limit, high: limit, diverging: true, label: `score ${of}`, caption: "F on the sentence: one value per diagonal", read: tell("score", (at) => number(scores[at], 2)) }),
    mapFigure({ ...shown, values: weights, low: 0, high: Math.max(...weights), label: `weight ${of}`, caption: "softmax(F): where each word looks", read: tell("weight", (at) => number(100 * weights[at], 1) + " %") }));
  const row = Array.from(weights.subarray(play.word * n, (play.word + 1) * n));
  lookingWords(byId("words"), words, row, play.word, (i) => { play.word = i; playMaps(); });
}

function drawPlay(sliding) {
  playCurve();
  if (!sliding || !document.activeElement || document.activeElement.type !== "range") playSliders();
  else play.kernels.forEach((kernel, s) => byId("play-sliders").children[s].querySelectorAll("label").forEach((label, i) => {
    const key = "abc"[i], names = ["amplitude a", "sharpness b", "offset c"];
    label.firstChild.textContent = `${names[i]} ${number(kernel[key], 2)}`;
    label.lastChild.setAttribute("aria-valuetext", number(kernel[key], 2));
  }));
  playMaps();
}

function startPlay() {
  byId("presets").replaceChildren(...PRESETS.map(([name, kernels]) => make("button", { type: "button", text: name, onclick: () => { play.kernels = kernels.map((k) => ({ ...k })); drawPlay(); } })));
  byId("add-kernel").addEventListener("click", () => { if (play.kernels.length < HUES.length) play.kernels.push({ a: 2, b: 0.4, c: play.kernels.length + 1 }); drawPlay(); });
  byId("take-head").addEventListener("click", () => {
    const model = DATA.models[state.a], source = model.sources[state.source];
    const found = source ? kernelsOf(source, state.layer, state.head, Math.min(5, state.kernels || 5), false) : null;
    if (found && found.list.length) { play.kernels = found.list.map((k) => ({ a: k.a, b: Math.max(1e-4, Math.abs(k.b)), c: k.c })); drawPlay(); }
  });
  byId("causal").addEventListener("change", () => playMaps());
  byId("sentence").addEventListener("input", () => playMaps());
  drawn(() => drawPlay());
}

start();
