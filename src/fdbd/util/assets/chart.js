// What every figure is made of: SVG elements, scales, axes, the tooltip, and the one detector that is selected.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function svg(name, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const percent = (fraction, digits = 2) => (100 * fraction).toFixed(digits);

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3))).replace("-", "−");
}

const linear = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

// An empty plot as wide as its box, with room for the axes. `label` is what a screen reader says of it.
function plot(box, height, label, margin = { top: 8, right: 8, bottom: 34, left: 46 }) {
  const style = getComputedStyle(box);
  const width = Math.max(240, Math.round(box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
  const root = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const area = { root, width, height, left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom };
  return area;
}

function axisX(area, scale, values, format, title) {
  for (const value of values) {
    const x = scale(value);
    area.root.append(svg("line", { class: "axis", x1: x, x2: x, y1: area.bottom, y2: area.bottom + 4 }));
    area.root.append(svg("text", { x, y: area.bottom + 16, "text-anchor": "middle" }, format(value)));
  }
  area.root.append(svg("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }));
  if (title) area.root.append(svg("text", { x: area.right, y: area.bottom + 32, "text-anchor": "end" }, title));
}

function axisY(area, scale, values, format, title) {
  for (const value of values) {
    const y = scale(value);
    area.root.append(svg("line", { class: "rule", x1: area.left, x2: area.right, y1: y, y2: y }));
    area.root.append(svg("text", { x: area.left - 8, y: y + 4, "text-anchor": "end" }, format(value)));
  }
  if (title) area.root.append(svg("text", { x: area.left, y: area.top - 8 }, title));
}

const path = (points) => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

const tip = byId("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y - height - 12 < 8 ? y + 18 : y - height - 12}px`;
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

// Calls `over` with the pointer's place in the plot's own units, and `out` when it leaves.
function onPointer(area, over, out = hideTip) {
  const move = (event) => {
    const frame = area.root.getBoundingClientRect();
    const unit = area.width / frame.width;
    over((event.clientX - frame.left) * unit, (event.clientY - frame.top) * unit, event);
  };
  area.root.addEventListener("pointermove", move);
  area.root.addEventListener("pointerdown", move);
  area.root.addEventListener("pointerleave", out);
}

function options(select, names) {
  select.replaceChildren(...names.map((name, k) => el("option", { value: k }, name)));
}

function key(box, entries) {
  box.replaceChildren(...entries.map(([color, name]) => {
    const swatch = el("i");
    swatch.style.background = color;
    return el("span", {}, swatch, name);
  }));
}

// Figures that cannot be drawn say why, in their place.
function missing(box, why) {
  box.replaceChildren(el("p", { class: "remark" }, why));
}

const state = { detector: 0, listeners: [] };
function select(detector) {
  state.detector = detector;
  for (const listener of state.listeners) listener();
}
