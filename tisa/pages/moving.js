"use strict";
// A phrase is dragged through a sentence, or moved with a slider: bars follow.
document.querySelectorAll(".moving").forEach((root) => {
  const { words, phrase, attention, word: first } = JSON.parse(root.querySelector("script").textContent);
  const [start, state] = root.querySelectorAll(".state"), text = state.querySelector(".text"), mark = text.querySelector("mark");
  const top = Math.max(...Object.values(attention).flat(3)), last = attention.table.length - 1, models = ["table", "tisa"];
  const share = (x) => `${(100 * x).toFixed(0)} %`;
  const moved = (name, at, word) => attention[name][at][word].reduce((sum, x, i) => sum + Math.abs(x - attention[name][0][word][i]), 0) / 2;
  const most = (name, word) => Math.max(...attention[name].map((_, at) => moved(name, at, word)));
  let word = first, at = attention.table.reduce((best, _, i) => (moved("table", i, first) > moved("table", best, first) ? i : best), 0);

  const make = (tag, attributes, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const slider = make("input", { type: "range", min: 0, max: last, step: 1 });
  const choices = phrase.map((w, i) => make("button", { type: "button", role: "radio" }, w));
  const use = make("div", { class: "use" }, make("label", {}, "Place of the phrase", slider),
    make("div", { role: "radiogroup", "aria-label": "Whose attention" }, "Attention of ", ...choices));
  start.remove();
  root.classList.add("live");
  const ask = root.querySelector(".ask");
  ask.replaceChildren(make("b", {}, "Drag the coloured words"), " through the sentence, or use the slider. Inside the phrase, words and distances stay the same. Where does ",
    make("q", { class: "asked" }), " look?");
  state.after(use);

  // The sentence with the phrase at a place, as text around the mark, which stays the same element.
  const put = (place) => {
    mark.previousSibling.textContent = words.slice(0, place + 1).join(" ") + " ";
    mark.nextSibling.textContent = " " + words.slice(place + 1).join(" ");
  };
  // As high as the sentence is where it breaks into most lines: nothing below jumps.
  function fit() {
    text.style.minHeight = "";
    text.style.minHeight = `${Math.max(...attention.table.map((_, place) => { put(place); return text.offsetHeight; }))}px`;
    put(at);
  }
  function show() {
    put(at);
    slider.value = at;
    slider.setAttribute("aria-valuetext", `after ${words.slice(Math.max(0, at - 1), at + 1).join(" ")}: of the attention of ${phrase[word]} ${share(moved("table", at, word))} has moved with the table, ${share(moved("tisa", at, word))} with TISA`);
    for (const name of models) {
      const model = state.querySelector(`.${name}`), now = attention[name][at][word], before = attention[name][0][word];
      model.querySelectorAll('[role="listitem"]').forEach((item, i) => {
        item.querySelector("i").style.height = `${(100 * now[i]) / top}%`;
        item.querySelector("s").style.bottom = `${(100 * before[i]) / top}%`;
        item.querySelector("b").textContent = share(now[i]);
      });
      model.querySelector(".moved").textContent = share(moved(name, at, word));
    }
    root.querySelectorAll(".asked").forEach((place) => { place.textContent = phrase[word]; });
    root.querySelectorAll(".most").forEach((place, i) => { place.textContent = share(most(models[i], word)); });
    choices.forEach((button, i) => { button.setAttribute("aria-checked", String(i === word)); button.tabIndex = i === word ? 0 : -1; });
  }
  const go = (place) => { at = Math.max(0, Math.min(last, place)); show(); };
  slider.addEventListener("input", () => go(Number(slider.value)));
  choices.forEach((button, i) => {
    const pick = (to) => { word = (to + phrase.length) % phrase.length; show(); choices[word].focus(); };
    button.addEventListener("click", () => pick(i));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) { event.preventDefault(); pick(i + step); }
    });
  });

  // Where the held word would stand at each place, lines that break included; the nearest is taken.
  let centres = null;
  const centre = (element) => { const box = element.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; };
  mark.addEventListener("pointerdown", (event) => {
    const spans = [...mark.querySelectorAll("span")], held = spans.includes(event.target) ? event.target : spans[Math.floor(spans.length / 2)];
    const top = text.getBoundingClientRect().top, left = centre(held);
    centres = { grip: [event.clientX - left[0], event.clientY - left[1]], top, at: attention.table.map((_, place) => { put(place); return centre(held); }) };
    put(at);
    mark.setPointerCapture(event.pointerId);
    root.classList.add("held");
    event.preventDefault();
  });
  mark.addEventListener("pointermove", (event) => {
    if (!centres) return;
    const scrolled = text.getBoundingClientRect().top - centres.top, x = event.clientX - centres.grip[0], y = event.clientY - centres.grip[1] - scrolled;
    // A line is far: only who leaves the line with the pointer leaves it with the phrase.
    const far = ([cx, cy]) => Math.abs(cx - x) + 6 * Math.max(0, Math.abs(cy - y) - 12);
    go(centres.at.reduce((best, c, i) => (far(c) < far(centres.at[best]) ? i : best), 0));
  });
  const drop = () => { centres = null; root.classList.remove("held"); };
  mark.addEventListener("pointerup", drop);
  mark.addEventListener("pointercancel", drop);
  window.addEventListener("resize", fit);
  show();
  fit();
});
