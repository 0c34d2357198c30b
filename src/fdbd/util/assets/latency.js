// Latency against AUROC, with the front of those that none is both faster and better than.

function drawLatency() {
  const column = data.columns[Number(byId("latency-column").value) || 0];
  const batch = byId("latency-batch").selectedOptions[0].textContent;
  const points = data.detectors
    .map((detector, k) => ({ k, name: detector.name, us: detector.latency[batch] * 1e6, share: detector.share[batch], auroc: detector.auroc[column] }))
    .filter((p) => p.us > 0);
  const front = paretoFront(points);
  const box = byId("latency-chart");
  const area = plot(box, Math.min(460, Math.max(340, box.clientWidth * 0.5)), `Latency against AUROC on ${column}; on the front: ${front.map((p) => p.name).join(", ")}`, { top: 26, right: 14, bottom: 42, left: 48 });
  const logs = points.map((p) => Math.log10(p.us));
  const [from, to] = [Math.min(...logs) - 0.12, Math.max(...logs) + 0.25];
  const values = points.map((p) => p.auroc).sort((a, b) => a - b);
  const quarter = (share) => values[Math.round(share * (values.length - 1))];
  const fence = quarter(0.25) - 1.5 * (quarter(0.75) - quarter(0.25)); // outliers would squeeze all others into a line
  const best = values[values.length - 1], worst = values.find((value) => value >= fence);
  const pad = Math.max(0.004, (best - worst) * 0.08);
  const low = Math.max(0, worst - pad), high = best + pad * 1.5;
  const x = (us) => linear(from, to, area.left, area.right)(Math.log10(us));
  const scale = linear(low, high, area.bottom, area.top);
  const y = (auroc) => Math.min(scale(auroc), area.bottom - 7); // what lies below stands at the lower edge, as a triangle
  axisY(area, scale, ticks(low, Math.min(high, 1), 5), (value) => number(100 * value), `AUROC, % (${column})`);
  const marks = [];
  const few = area.width < 500 || to - from > 3;
  for (let power = Math.floor(from); power <= to; power++) for (const m of few ? [1] : [1, 2, 5]) marks.push(m * 10 ** power);
  axisX(area, x, marks.filter((us) => Math.log10(us) > from && Math.log10(us) < to), number, `µs per sample, batches of ${batch}`);

  const steps = front.flatMap((p, k) => (k ? [[x(p.us), y(front[k - 1].auroc)], [x(p.us), y(p.auroc)]] : [[x(p.us), y(p.auroc)]]));
  if (front.length) steps.push([area.right, y(front[front.length - 1].auroc)]);
  area.root.append(svg("path", { d: path(steps), fill: "none", stroke: "var(--accent)", "stroke-width": 1.6, "stroke-opacity": 0.7 }));
  const onFront = new Set(front.map((p) => p.k));
  const drawn = [...points].sort((a, b) => onFront.has(a.k) - onFront.has(b.k));
  for (const p of drawn) {
    const selected = p.k === state.detector;
    const style = { fill: onFront.has(p.k) ? "var(--accent)" : "var(--faint)", stroke: selected ? "var(--ink)" : "var(--panel)", "stroke-width": selected ? 2.2 : 1.5 };
    if (p.auroc < low) {
      area.root.append(svg("path", { class: "below", d: `M${x(p.us) - 6},${area.bottom - 11}h12l-6,9Z`, ...style }));
      continue;
    }
    area.root.append(svg("circle", { class: onFront.has(p.k) ? "front" : "", cx: x(p.us), cy: y(p.auroc), r: selected ? 7 : onFront.has(p.k) ? 5.5 : 4.5, ...style }));
  }
  label(area, points, [...front].reverse().concat(points.filter((p) => p.k === state.detector && !onFront.has(p.k))), x, y);
  onPointer(area, (px, py, event) => {
    const near = nearestPoint(points, px, py, x, y);
    area.root.style.cursor = near ? "pointer" : "";
    if (!near) return hideTip();
    const share = near.share ? `, ${percent(near.share)} % of the forward pass` : "";
    showTip(`${near.name}\n${percent(near.auroc)} % AUROC\n${number(near.us)} µs per sample${share}`, event.clientX, event.clientY);
  });
  area.root.addEventListener("click", (event) => {
    const frame = area.root.getBoundingClientRect(), unit = area.width / frame.width;
    const near = nearestPoint(points, (event.clientX - frame.left) * unit, (event.clientY - frame.top) * unit, x, y);
    if (near) select(near.k);
  });
  box.replaceChildren(area.root);
}

function paretoFront(points) {
  const front = [];
  for (const p of [...points].sort((a, b) => a.us - b.us || b.auroc - a.auroc)) {
    if (!front.length || p.auroc > front[front.length - 1].auroc) front.push(p);
  }
  return front;
}

function nearestPoint(points, px, py, x, y) {
  const near = points.map((p) => [(x(p.us) - px) ** 2 + (y(p.auroc) - py) ** 2, p]).sort((a, b) => a[0] - b[0])[0];
  return near && near[0] < 22 ** 2 ? near[1] : null;
}

// Names beside their points, each at the first place around it that is free; a name without one is left to the tooltip.
function label(area, points, named, x, y) {
  const taken = points.map((p) => ({ left: x(p.us) - 5, right: x(p.us) + 5, top: y(p.auroc) - 5, bottom: y(p.auroc) + 5 }));
  taken.push({ left: 0, right: area.left + 180, top: 0, bottom: area.top }); // the axis title
  for (const p of named) {
    const px = x(p.us), py = y(p.auroc), width = Math.min(p.name.length, 24) * 6.6;
    const places = [["start", px + 9, py - 8], ["end", px - 9, py - 8], ["start", px + 10, py + 4], ["end", px - 10, py + 4], ["start", px + 9, py + 16], ["end", px - 9, py + 16], ["middle", px, py - 14], ["middle", px, py - 26], ["middle", px, py + 22]];
    for (const [anchor, tx, ty] of places) {
      const left = anchor === "start" ? tx : anchor === "end" ? tx - width : tx - width / 2;
      const frame = { left, right: left + width, top: ty - 10, bottom: ty + 3 };
      if (frame.left < area.left || frame.right > area.width || frame.top < 0 || frame.bottom > area.bottom) continue;
      if (taken.some((t) => t.left < frame.right && frame.left < t.right && t.top < frame.bottom && frame.top < t.bottom)) continue;
      const name = p.name.length > 24 ? `${p.name.slice(0, 23)}…` : p.name;
      area.root.append(svg("text", { class: "strong halo", x: tx, y: ty, "text-anchor": anchor }, name));
      taken.push(frame);
      break;
    }
  }
}
