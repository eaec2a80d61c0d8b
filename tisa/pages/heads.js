// A head is chosen, its f(k) drawn large, and the words it looks at.
const SENTENCE = "the cat that sat on the mat saw the other cat and ran away".split(" ");
const look = { head: DATA.curves.first, word: 6 };

function drawHead() {
  const { heads, reach } = DATA.curves, head = heads[look.head], values = head.values, name = `Layer ${head.layer}, head ${head.head}`;
  const low = Math.min(0, ...values), high = Math.max(0, ...values, low + 1e-3), said = `${name}: largest at ${head.peak === null ? "several offsets" : `k = ${signed(head.peak)}`}`;
  const place = chart({ width: 980, height: 290, x: [-reach, reach], y: [low, high], xName: "offset k = key − query", yName: "f(k)", label: `f(k) of layer ${head.layer}, head ${head.head}` });
  const dot = make("circle", { r: 4.5, fill: "var(--orange)" });
  const point = (k) => { dot.setAttribute("cx", place.px(k)); dot.setAttribute("cy", place.py(values[k + reach])); };
  place.svg.append(across(place, 0, { stroke: "var(--grey)", "stroke-dasharray": "3 3" }), upright(place, 0, { stroke: "var(--grey)", "stroke-dasharray": "3 3" }),
    line(place, values.map((_, i) => i - reach), values, "var(--blue)", { class: "curve" }), dot);
  point(head.peak ?? 0);
  byId("chosen").textContent = said;
  place.svg.addEventListener("pointermove", (event) => {
    const k = Math.max(-reach, Math.min(reach, Math.round(place.under(event))));
    point(k);
    byId("chosen").textContent = `${name}: f(${signed(k)}) = ${number(values[k + reach], 2)}`;
  });
  place.svg.addEventListener("pointerleave", () => { point(head.peak ?? 0); byId("chosen").textContent = said; });
  byId("large").replaceChildren(place.svg);
  const scores = SENTENCE.map((_, j) => values[clamp(j - look.word + reach, 2 * reach)]);
  lookingWords(byId("words"), SENTENCE, softmax(scores), look.word, (i) => { look.word = i; drawHead(); });
  document.querySelectorAll(".head").forEach((button, i) => button.setAttribute("aria-pressed", String(i === look.head)));
}

document.querySelectorAll(".head").forEach((button, i) => {
  button.append(tile(DATA.curves.heads[i].values));
  button.addEventListener("click", () => { look.head = i; drawHead(); byId("large").parentElement.scrollIntoView({ block: "nearest" }); });
});
drawn(drawHead);
