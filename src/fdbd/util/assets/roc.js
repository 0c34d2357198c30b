// ROC curves of all detectors on one OOD set: the best five and the selected one in colour.

const TOP = 5;
const COLORS = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)"];
let rocHover = null;

function drawRoc() {
  const set = Number(byId("roc-set").value) || 0;
  const name = data.ood[set];
  const order = data.detectors.map((_, k) => k).sort((a, b) => data.detectors[b].auroc[name] - data.detectors[a].auroc[name]);
  const top = order.slice(0, TOP);
  const colors = new Map(top.map((k, place) => [k, COLORS[place]]));
  if (!colors.has(state.detector)) colors.set(state.detector, "var(--ink)");
  const box = byId("roc-chart");
  const area = plot(box, Math.min(460, Math.max(300, box.clientWidth * 0.62)), `ROC curves on ${name}`, { top: 24, right: 10, bottom: 40, left: 44 });
  const x = linear(0, 1, area.left, area.right), y = linear(0, 1, area.bottom, area.top);
  const whole = (value) => `${Math.round(100 * value)} %`;
  axisY(area, y, [0, 0.25, 0.5, 0.75, 1], whole, "ID accepted");
  axisX(area, x, [0, 0.25, 0.5, 0.75, 1], whole, "OOD accepted");
  const at = data.positive === "id" ? [[0, 0.95], [1, 0.95]] : [[0.05, 0], [0.05, 1]];
  area.root.append(svg("path", { class: "dash", d: path(at.map(([u, v]) => [x(u), y(v)])) }));
  const lines = data.detectors.map((detector) => {
    const flat = detector.roc[set], points = [];
    for (let p = 0; p < flat.length; p += 2) points.push([x(flat[p] / 1000), y(flat[p + 1] / 1000)]);
    return points;
  });
  const paint = () => {
    for (const node of [...area.root.querySelectorAll(".curve")]) node.remove();
    const rank = (k) => (k === rocHover ? 3 : k === state.detector ? 2 : colors.has(k) ? 1 : 0);
    for (const k of [...order].sort((a, b) => rank(a) - rank(b))) {
      const strong = rank(k) >= 2;
      const color = colors.get(k) || (rank(k) ? "var(--ink)" : "var(--faint)");
      area.root.append(svg("path", { class: "curve", d: path(lines[k]), fill: "none", stroke: color, "stroke-width": strong ? 3 : colors.has(k) ? 1.8 : 1, "stroke-opacity": colors.has(k) || strong ? 1 : 0.55, "stroke-linejoin": "round" }));
    }
  };
  paint();
  onPointer(area, (px, py, event) => {
    let nearest = null, best = 24 ** 2;
    lines.forEach((points, k) => {
      for (let p = 1; p < points.length; p++) {
        const d = toSegment(px, py, points[p - 1], points[p]);
        if (d < best) [best, nearest] = [d, k];
      }
    });
    if (nearest !== rocHover) { rocHover = nearest; paint(); }
    if (nearest === null) return hideTip();
    const found = data.detectors[nearest];
    showTip(`${found.name}\nAUROC ${percent(found.auroc[name])}, FPR95 ${percent(found.fpr[set])}`, event.clientX, event.clientY);
  }, () => { rocHover = null; paint(); hideTip(); });
  area.root.addEventListener("click", () => { if (rocHover !== null) select(rocHover); });
  box.replaceChildren(area.root);

  byId("roc-legend").replaceChildren(...order.map((k) => {
    const mark = el("i");
    mark.style.color = colors.get(k) || "var(--faint)";
    const entry = el("button", { type: "button", "aria-pressed": k === state.detector, title: data.detectors[k].name }, mark, el("span", {}, data.detectors[k].name), el("small", {}, percent(data.detectors[k].auroc[name])));
    entry.addEventListener("click", () => select(k));
    entry.addEventListener("pointerenter", () => { rocHover = k; paint(); });
    entry.addEventListener("pointerleave", () => { rocHover = null; paint(); });
    return entry;
  }));
}

// Squared distance of (px, py) to the segment from a to b.
function toSegment(px, py, a, b) {
  const dx = b[0] - a[0], dy = b[1] - a[1];
  const t = Math.max(0, Math.min(1, ((px - a[0]) * dx + (py - a[1]) * dy) / (dx * dx + dy * dy || 1)));
  return (px - a[0] - t * dx) ** 2 + (py - a[1] - t * dy) ** 2;
}
