// Average boundary distance by deviation level: the ID set against one OOD set.

function drawDeviation() {
  const profile = data.figures.deviation, box = byId("deviation-chart");
  const [inside, ...others] = profile.sets;
  const outside = others[Number(byId("deviation-set").value) || 0];
  const both = [[inside, "var(--in)"], [outside, "var(--out)"]];
  key(byId("deviation-key"), both.map(([set, color]) => [color, set.name]));
  const levels = both.flatMap(([set]) => groups(set));
  if (!levels.length) return missing(box, "There are too few samples to group.");
  const area = plot(box, 380, `Average boundary distance by deviation, ${inside.name} and ${outside.name}`, { top: 26, right: 12, bottom: 42, left: 48 });
  const xs = levels.map((g) => g.deviation), low = Math.min(...levels.map((g) => g.mean - g.std)), high = Math.max(...levels.map((g) => g.mean + g.std));
  const pad = (Math.max(...xs) - Math.min(...xs)) * 0.05 || 1;
  const [from, to] = [Math.min(...xs) - pad, Math.max(...xs) + pad];
  const x = linear(from, to, area.left, area.right), y = linear(Math.min(0, low), high, area.bottom, area.top);
  axisY(area, y, ticks(Math.min(0, low), high, 7), number, "average distance to the decision boundaries");
  for (const edge of profile.edges.slice(1, -1)) {
    if (edge > from && edge < to) area.root.append(svg("line", { class: "rule", x1: x(edge), x2: x(edge), y1: area.top, y2: area.bottom, "stroke-dasharray": "2 4" }));
  }
  axisX(area, x, ticks(from, to, area.width < 500 ? 4 : 8), number, "deviation from the training mean ‖z − μ‖");
  for (const [set, color] of both) {
    const shown = groups(set);
    if (!shown.length) continue; // too few samples on every level
    const band = [...shown.map((g) => [x(g.deviation), y(g.mean + g.std)]), ...[...shown].reverse().map((g) => [x(g.deviation), y(g.mean - g.std)])];
    area.root.append(svg("path", { d: `${path(band)}Z`, fill: color, "fill-opacity": 0.13 }));
    area.root.append(svg("path", { d: path(shown.map((g) => [x(g.deviation), y(g.mean)])), fill: "none", stroke: color, "stroke-width": 1.6 }));
  }
  for (const [set, color] of both) {
    for (const g of groups(set)) {
      const at = x(g.deviation);
      area.root.append(svg("line", { x1: at, x2: at, y1: y(g.mean - g.std), y2: y(g.mean + g.std), stroke: color, "stroke-opacity": 0.55, "stroke-width": 1.4 }));
      area.root.append(svg("circle", { cx: at, cy: y(g.mean), r: 5, fill: color, stroke: "var(--panel)", "stroke-width": 1.5 }));
    }
  }
  const points = both.flatMap(([set]) => groups(set).map((g) => ({ ...g, name: set.name })));
  onPointer(area, (px, py, event) => {
    const near = points.map((g) => [(x(g.deviation) - px) ** 2 + (y(g.mean) - py) ** 2, g]).sort((a, b) => a[0] - b[0])[0];
    if (near[0] > 45 ** 2) return hideTip();
    const g = near[1];
    showTip(`${g.name}, ${g.count.toLocaleString("en")} samples\n‖z − μ‖ ${number(g.deviation)}\ndistance ${number(g.mean)} ± ${number(g.std)}`, event.clientX, event.clientY);
  });
  box.replaceChildren(area.root);
  const said = outside.auroc === null || outside.auroc_by_level === null ? ""
    : `By distance alone the AUROC against ${outside.name} is ${percent(outside.auroc)} %; among samples of the same deviation level it is ${percent(outside.auroc_by_level)} %.`;
  byId("deviation-remark").textContent = said;
}

function groups(set) {
  return set.mean.map((mean, k) => ({ mean, std: set.std[k], deviation: set.deviation[k], count: set.count[k] })).filter((g) => g.mean !== null);
}
