// The least of a browser that a page's scripts need. What they tell, after each of some steps:
// node browser.js page.html '["", "state.layer = 1; drawAll()"]'
"use strict";
const fs = require("fs"), vm = require("vm");

const fits = (element, selector) => {
  const last = selector.split(" ").at(-1);
  return (last.match(/^[\w-]+|\.[\w-]+|\[[^\]]+\]/g) || []).every((part) => {
    if (part[0] === ".") return (element.attributes.class || "").split(" ").includes(part.slice(1));
    if (part[0] !== "[") return element.tag === part;
    const [name, value] = part.slice(1, -1).split("=");
    return value === undefined ? name in element.attributes : element.attributes[name] === value.replaceAll('"', "");
  });
};

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, dataset: {}, value: "", text: "" });
    this.style = { setProperty() {} };
    this.classList = { toggle() {} };
  }
  append(...parts) { this.children.push(...parts.filter((part) => part instanceof Element)); }
  replaceChildren(...parts) { this.children = []; this.append(...parts); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(kind, act) { (this.listeners[kind] ||= []).push(act); }
  set textContent(text) { this.children = []; this.text = String(text); }
  get textContent() { return this.text; }
  get firstChild() { return this.children[0]; }
  get lastChild() { return this.children.at(-1); }
  get parentElement() { return new Element("div"); }
  every() { return [this, ...this.children.flatMap((child) => child.every())]; }
  querySelectorAll(selector) { return this.every().slice(1).filter((element) => fits(element, selector)); }
  querySelector(selector) { return this.querySelectorAll(selector)[0] || null; }
  contains() { return false; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 600, height: 300 }; }
  focus() {}
  scrollIntoView() {}
  getContext() {
    const image = (columns, rows) => ({ data: new Uint8ClampedArray(4 * columns * rows) });
    return { createImageData: image, getImageData: (x, y, columns, rows) => image(columns, rows), putImageData() {}, fillRect() {} };
  }
}

const page = fs.readFileSync(process.argv[2], "utf8"), places = {};
const body = new Element("body"), scripts = [...page.matchAll(/<script>([^]*?)<\/script>/g)];
// Places of the template, and what stands in them; those with a number of their own by its order.
function place(key, attributes = {}) {
  if (!places[key]) {
    places[key] = new Element("div");
    Object.assign(places[key].attributes, attributes);
    body.append(places[key]);
  }
  return places[key];
}
const hidden = new Element("script");
hidden.textContent = page.match(/<script type="application\/json" id="data">([^]*?)<\/script>/)[1];
for (const [, name] of page.matchAll(/data-chart="([^"]*)"/g)) {
  const figure = place(`chart ${name}`, { "data-chart": name }), here = new Element("div");
  figure.dataset.chart = name;
  here.setAttribute("data-here", "");
  figure.append(here);
}
const heads = [...page.matchAll(/class="head[ "]/g)].map((_, i) => place(`head ${i}`, { class: "head" }));
for (const [, id, value] of page.matchAll(/<input id="([^"]*)"[^>]*value="([^"]*)"/g)) place(id).value = value;

globalThis.document = {
  documentElement: new Element("html"),
  activeElement: null,
  getElementById: (id) => (id === "data" ? hidden : place(id)),
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  querySelectorAll: (selector) => body.querySelectorAll(selector),
  querySelector: (selector) => body.querySelector(selector) || place(selector),
};
globalThis.window = { innerWidth: 1400, addEventListener() {}, removeEventListener() {}, matchMedia: () => ({ matches: false, addEventListener() {} }) };
// Lets every element that listens to such an event hear one.
globalThis.happens = (kind, event = {}) => body.every().forEach((element) => (element.listeners[kind] || []).forEach((act) => act({ preventDefault() {}, ...event })));

// In a drawing numbers alone are marks of an axis.
const said = (e) => [e.tag === "text" && !/\p{L}/u.test(e.text) ? "" : e.text, e.attributes["aria-label"], e.attributes.title];
const told = () => body.every().flatMap(said).filter((text) => text && text.trim());
vm.runInThisContext(scripts.map((script) => script[1]).join("\n"));
console.log(JSON.stringify(JSON.parse(process.argv[3]).map((step) => { vm.runInThisContext(step); return told(); })));
