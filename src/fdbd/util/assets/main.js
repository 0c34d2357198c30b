// The page: theme, choices, and drawing again when the width or the selected detector changes.

// Figures by the section they stand in; a section without data goes, with its link.
function startFigures() {
  const { deviation, samples } = data.figures;
  const any = data.detectors.length > 0;
  const scored = any && data.detectors.every((detector) => detector.roc); // results from a file may lack the scores
  const batches = any ? Object.keys(data.detectors.find((d) => Object.keys(d.latency).length)?.latency ?? {}) : [];
  const figures = {
    scores: scored && drawHistograms,
    roc: scored && drawRoc,
    risk: scored && data.detectors.every((detector) => detector.risk) && drawRisk, // without labels nothing is wrong
    deviation: deviation && drawDeviation,
    samples: samples && drawSamples,
    latency: batches.length > 0 && drawLatency,
  };
  for (const [name, draw] of Object.entries(figures)) {
    if (draw) continue;
    byId(name).remove();
    document.querySelector(`nav a[href="#${name}"]`).remove();
    delete figures[name];
  }
  for (const name of ["deviation", "samples"]) {
    if (!figures[name] || !data.figures[name].error) continue;
    const section = byId(name);
    for (const box of section.querySelectorAll(".controls, .chart, .grid, .remark")) box.remove();
    section.append(el("p", { class: "remark" }, `Not drawn: ${data.figures[name].error}.`));
    delete figures[name];
  }
  if (figures.roc) options(byId("roc-set"), data.ood);
  if (figures.risk) options(byId("risk-set"), [`${data.id} alone`, ...data.ood.map((name) => `${data.id} and ${name}`)]);
  if (figures.deviation) options(byId("deviation-set"), data.ood);
  if (figures.samples) options(byId("samples-set"), data.ood);
  if (figures.latency) {
    options(byId("latency-column"), data.columns);
    options(byId("latency-batch"), batches);
    byId("latency-batch").value = batches.length - 1; // the largest batch: throughput
  }
  for (const [id, name] of [["roc-set", "roc"], ["risk-set", "risk"], ["deviation-set", "deviation"], ["samples-set", "samples"], ["latency-column", "latency"], ["latency-batch", "latency"]]) {
    if (figures[name]) byId(id).addEventListener("change", figures[name]);
  }
  for (const radio of document.querySelectorAll("input[name=scale]")) radio.addEventListener("change", drawHistograms);
  return figures;
}

function start() {
  startTheme();
  const figures = startFigures();
  if (results) startTable();
  else for (const part of document.querySelectorAll("#table .about, #table .controls, #table .scroller")) part.remove();
  for (const choice of document.querySelectorAll("select.detector")) {
    options(choice, data.detectors.map((detector) => detector.name));
    choice.addEventListener("change", () => select(Number(choice.value)));
    state.listeners.push(() => { choice.value = state.detector; });
  }
  for (const name of ["scores", "roc", "risk", "latency"]) if (figures[name]) state.listeners.push(figures[name]);
  select(0);
  for (const name of ["deviation", "samples"]) if (figures[name]) figures[name]();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    for (const draw of Object.values(figures)) draw();
  });
}

start();
