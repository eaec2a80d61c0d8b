"use strict";
// The chapter about the curves: a head is chosen, its f(k) drawn large, and the words it looks at.
const curves = JSON.parse(document.getElementById("curves-data").textContent);
const words = document.getElementById("words"), large = document.getElementById("large");
const SENTENCE = "the cat that sat on the mat saw the other cat and ran away".split(" ");
let chosen = curves.first, word = 6;

function element(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const signed = (x) => (x > 0 ? "+" : x < 0 ? "−" : "") + Math.abs(x);

function draw() {
  const head = curves.heads[chosen], reach = curves.reach, values = head.values;
  // On a phone the same letters need a smaller drawing.
  const width = window.innerWidth < 720 ? 360 : 640, height = 250, left = 44, bottom = 40, top = 14;
  const low = Math.min(0, ...values), high = Math.max(0, ...values, low + 1e-3);
  const x = (k) => left + ((k + reach) / (2 * reach)) * (width - left - 14);
  const y = (v) => top + ((high - v) / (high - low)) * (height - top - bottom);
  large.replaceChildren();
  large.setAttribute("viewBox", `0 0 ${width} ${height}`);
  large.setAttribute("aria-label", `f(k) of layer ${head.layer}, head ${head.head}`);
  for (let k = -reach; k <= reach; k += 8) {
    large.append(element("line", { class: "axis", x1: x(k), x2: x(k), y1: top, y2: height - bottom }));
    large.append(element("text", { x: x(k), y: height - bottom + 17, "text-anchor": k === reach ? "end" : "middle" }, signed(k)));
  }
  large.append(element("line", { class: "axis zero", x1: left, x2: width - 14, y1: y(0), y2: y(0) }));
  for (const v of [low, high]) large.append(element("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, v.toFixed(1).replace("-", "−")));
  large.append(element("text", { x: width - 14, y: height - 4, "text-anchor": "end" }, "offset k = key − query"));
  large.append(element("path", { class: "curve", d: values.map((v, i) => `${i ? "L" : "M"}${x(i - reach).toFixed(1)} ${y(v).toFixed(1)}`).join("") }));
  large.append(element("circle", { cx: x(head.peak), cy: y(values[head.peak + reach]), r: 4.5, fill: "var(--orange)" }));
  const scores = SENTENCE.map((_, j) => values[Math.max(-reach, Math.min(reach, j - word)) + reach]);
  const most = Math.max(...scores), odds = scores.map((s) => Math.exp(s - most)), sum = odds.reduce((a, b) => a + b);
  words.querySelectorAll("button").forEach((button, j) => {
    button.style.setProperty("--w", Math.round((70 * odds[j]) / sum));
    button.setAttribute("aria-pressed", String(j === word));
  });
  document.getElementById("chosen").textContent = `Layer ${head.layer}, head ${head.head}: largest at k = ${signed(head.peak)}`;
  document.querySelectorAll(".head").forEach((tile, i) => tile.setAttribute("aria-pressed", String(i === chosen)));
}

SENTENCE.forEach((text, j) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => { word = j; draw(); });
  words.append(button);
});
document.querySelectorAll(".head").forEach((tile, i) => tile.addEventListener("click", () => { chosen = i; draw(); }));
window.addEventListener("resize", draw);
draw();
