// A few samples: distances to their nearest boundaries, and their place among the ID scores.

const ID_KINDS = { odd: "among the oddest 2 %", typical: "typical", clear: "among the clearest 2 %" };
const OOD_KINDS = { clear: "among the clearest 5 %", typical: "typical", "look-alike": "looks like ID" };

const className = (index) => data.classes[index] ?? `class ${index}`;
const shorten = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

function drawSamples() {
  const standing = data.figures.samples;
  const [inside, ...others] = standing.sets;
  const outside = others[Number(byId("samples-set").value) || 0];
  const all = standing.sets.flatMap((set) => set.samples.flatMap((sample) => sample.boundaries.map((b) => b[1])));
  const largest = Math.max(...all, 1e-12);
  const cards = [inside, outside].flatMap((set) => set.samples.map((sample) => sampleCard(standing, set.name, sample, largest, set !== inside)));
  byId("sample-cards").replaceChildren(...cards);
  byId("samples-remark").hidden = standing.sets.some((set) => set.samples.some((sample) => sample.image));
  for (const card of cards) card.draw();
}

function picture(sample) {
  const named = sample.file ? [el("small", {}, sample.file)] : [];
  return el("div", { class: "picture" }, el("img", { src: sample.image, alt: `Sample ${sample.row}` }), ...named);
}

function sampleCard(standing, name, sample, largest, ood) {
  const color = ood ? "var(--out)" : "var(--in)";
  const kind = ood ? `OOD, ${OOD_KINDS[sample.kind]}` : `ID, ${ID_KINDS[sample.kind]}`;
  const caption = el("figcaption", {}, el("span", { title: name }, name), el("small", {}, kind));
  const truth = ood || sample.label === null ? "" : sample.label === sample.predicted ? ", rightly" : `, wrongly: it is ${className(sample.label)}`;
  const said = el("p", {}, `Sample ${sample.row.toLocaleString("en")}, taken for ${className(sample.predicted)}${truth}`);
  const card = el("figure", {}, caption, ...(sample.image ? [picture(sample)] : []), said);
  card.draw = () => {
    const count = sample.boundaries.length, row = 15, strip = 56;
    const height = count * row + (sample.others ? 16 : 0) + 14 + strip + 18;
    const verdict = `fDBD score ${number(sample.score)}, above ${percent(sample.rank, 1)} % of ${data.id}`;
    const area = plot(card, height, `${name}: ${verdict}`, { top: 0, right: 42, bottom: 18, left: data.classes.length ? 76 : 58 });
    const x = linear(0, largest, area.left, area.right);
    sample.boundaries.forEach(([other, distance], k) => {
      area.root.append(svg("text", { x: area.left - 8, y: k * row + 11, "text-anchor": "end" }, shorten(className(other), 11)));
      area.root.append(svg("rect", { x: area.left, y: k * row + 2, width: Math.max(1, x(distance) - area.left), height: row - 5, rx: 2, fill: color, "fill-opacity": 0.75 }));
      area.root.append(svg("text", { x: x(distance) + 6, y: k * row + 11 }, distance.toFixed(2)));
    });
    let base = count * row;
    if (sample.others) area.root.append(svg("text", { x: area.left, y: (base += 16) - 5 }, `and ${sample.others.toLocaleString("en")} farther`));
    const s = linear(standing.low, standing.high, 0, area.width);
    const y = linear(0, Math.max(...standing.counts), area.bottom, area.bottom - strip + 16);
    const width = area.width / standing.counts.length;
    standing.counts.forEach((bar, k) => area.root.append(svg("rect", { x: k * width, y: y(bar), width: Math.max(0.5, width - 1), height: area.bottom - y(bar), fill: "var(--faint)", "fill-opacity": 0.7 })));
    const at = Math.max(1, Math.min(area.width - 1, s(sample.score)));
    area.root.append(svg("line", { x1: at, x2: at, y1: area.bottom - strip + 8, y2: area.bottom + 3, stroke: color, "stroke-width": 2.5 }));
    area.root.append(svg("circle", { cx: at, cy: area.bottom - strip + 8, r: 4.5, fill: color }));
    area.root.append(svg("text", { x: 0, y: area.bottom + 16 }, verdict));
    card.append(area.root);
  };
  return card;
}
