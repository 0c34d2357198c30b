// Risk-coverage curves of all detectors: on the ID set alone, or with one OOD set.

function drawRisk() {
  const set = Number(byId("risk-set").value) || 0;
  const box = byId("risk-chart");
  const area = plot(box, Math.min(380, Math.max(260, box.clientWidth * 0.42)), "Risk against coverage", { top: 24, right: 10, bottom: 40, left: 52 });
  const lines = data.detectors.map((detector) => {
    const flat = detector.risk[set], points = [];
    for (let p = 0; p < flat.length; p += 2) points.push([flat[p] / 1000, flat[p + 1] / 1000]);
    return points;
  });
  const highest = Math.max(0.01, ...lines.flat().map(([, risk]) => risk));
  const x = linear(0, 1, area.left, area.right), y = linear(0, highest, area.bottom, area.top);
  axisY(area, y, ticks(0, highest, 4), (value) => `${number(100 * value)} %`, "wrong or OOD among the accepted");
  axisX(area, x, [0, 0.25, 0.5, 0.75, 1], (value) => `${Math.round(100 * value)} %`, "accepted");
  const drawn = lines.map((points) => points.map(([u, v]) => [x(u), y(v)]));
  let hovered = null;
  const paint = () => {
    for (const node of [...area.root.querySelectorAll(".curve")]) node.remove();
    const rank = (k) => (k === hovered ? 2 : k === state.detector ? 1 : 0);
    const order = drawn.map((_, k) => k).sort((a, b) => rank(a) - rank(b));
    for (const k of order) {
      const color = rank(k) === 2 ? "var(--ink)" : rank(k) === 1 ? "var(--c1)" : "var(--faint)";
      area.root.append(svg("path", { class: "curve", d: path(drawn[k]), fill: "none", stroke: color, "stroke-width": rank(k) ? 3 : 1, "stroke-opacity": rank(k) ? 1 : 0.55, "stroke-linejoin": "round" }));
    }
  };
  paint();
  onPointer(area, (px, py, event) => {
    let nearest = null, best = 24 ** 2;
    drawn.forEach((points, k) => {
      for (let p = 1; p < points.length; p++) {
        const d = toSegment(px, py, points[p - 1], points[p]);
        if (d < best) [best, nearest] = [d, k];
      }
    });
    if (nearest !== hovered) { hovered = nearest; paint(); }
    if (nearest === null) return hideTip();
    showTip(data.detectors[nearest].name, event.clientX, event.clientY);
  }, () => { hovered = null; paint(); hideTip(); });
  area.root.addEventListener("click", () => { if (hovered !== null) select(hovered); });
  box.replaceChildren(area.root);
}
