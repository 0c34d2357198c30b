// Score histograms of the selected detector: the ID set against each OOD set.

// The bars of a detector, in scores or in percentiles of the ID scores.
function bars(detector, k) {
  const ranked = document.querySelector("input[name=scale]:checked").value === "rank";
  return ranked
    ? { low: 0, high: 100, id: detector.ranks[k].map(() => 1), ood: detector.ranks[k], threshold: 100 * detector.cuts[k], unit: "percentile" }
    : { low: detector.low, high: detector.high, id: detector.id, ood: detector.ood[k], threshold: detector.thresholds[k], unit: "score" };
}

function drawHistograms() {
  const detector = data.detectors[state.detector];
  key(byId("scores-key"), [["var(--in)", data.id], ["var(--out)", "OOD"]]);
  byId("histograms").replaceChildren();
  data.ood.forEach((name, k) => byId("histograms").append(histogram(detector, name, k)));
  for (const figure of byId("histograms").children) figure.draw();
}

function histogram(detector, name, k) {
  const remark = `AUROC ${percent(detector.auroc[name])} · FPR95 ${percent(detector.fpr[k])}`;
  const figure = el("figure", {}, el("figcaption", {}, el("span", { title: name }, name), el("small", {}, remark)));
  figure.draw = () => {
    const area = plot(figure, 190, `${detector.name}: scores of ${data.id} and ${name}. ${remark}`, { top: 16, right: 4, bottom: 22, left: 4 });
    const share = (counts) => counts.map((count) => count / (counts.reduce((a, b) => a + b, 0) || 1));
    const { low, high, id, ood, threshold, unit } = bars(detector, k);
    const inside = share(id), outside = share(ood);
    const x = linear(low, high, area.left, area.right);
    const y = linear(0, Math.max(...inside, ...outside), area.bottom, area.top);
    const width = (area.right - area.left) / inside.length;
    for (const [bars, color] of [[outside, "var(--out)"], [inside, "var(--in)"]]) {
      const steps = bars.flatMap((bar, b) => [[area.left + b * width, y(bar)], [area.left + (b + 1) * width, y(bar)]]);
      const closed = [[area.left, area.bottom], ...steps, [area.right, area.bottom]];
      area.root.append(svg("path", { d: `${path(closed)}Z`, fill: color, "fill-opacity": 0.28, stroke: "none" }));
      area.root.append(svg("path", { d: path(closed), fill: "none", stroke: color, "stroke-width": 1.4 }));
    }
    axisX(area, x, ticks(low, high, 4), number);
    if (threshold !== null) {
      const at = Math.max(area.left, Math.min(area.right, x(threshold)));
      area.root.append(svg("line", { class: "dash", x1: at, x2: at, y1: area.top - 8, y2: area.bottom }));
    }
    onPointer(area, (px, py, event) => {
      const b = Math.max(0, Math.min(inside.length - 1, Math.floor((px - area.left) / width)));
      const step = (high - low) / inside.length;
      const from = low + b * step;
      showTip(`${unit} ${number(from)} to ${number(from + step)}\n${data.id} ${percent(inside[b], 1)} %\n${name} ${percent(outside[b], 1)} %`, event.clientX, event.clientY);
    });
    figure.append(area.root);
  };
  return figure;
}
