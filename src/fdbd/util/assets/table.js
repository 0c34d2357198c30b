// The table: sorting, the metric, intervals, and picking a detector.

const results = byId("results");

const cellValue = (row, column) => {
  const cell = row.cells[column];
  const shown = cell.querySelector(`.v.${results.dataset.metric}`) || cell.querySelector(".v");
  return shown ? parseFloat(shown.dataset.v) : cell.querySelector(".pick").textContent.toLowerCase();
};

function sortBy(heading, direction) {
  const column = heading.cellIndex;
  for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  const keyed = [...results.tBodies[0].rows].map((row) => [cellValue(row, column), row]);
  keyed.sort(([a], [b]) => {
    if (typeof a === "string") return direction * a.localeCompare(b);
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b); // what is missing stands last
    return direction * (a - b);
  });
  results.tBodies[0].append(...keyed.map(([, row]) => row));
}

const smallerIsBetter = () => {
  const radio = document.querySelector(`input[name=metric][value=${results.dataset.metric}]`);
  return radio !== null && radio.dataset.better === "lower";
};

// Best first, or from A to Z.
const firstDirection = (heading) => (heading.dataset.kind === "metric" && smallerIsBetter() === false ? -1 : 1);

function startTable() {
  const headings = [...results.tHead.rows[0].cells];
  for (const heading of headings) {
    heading.querySelector("button").addEventListener("click", () => {
      const now = heading.getAttribute("aria-sort");
      sortBy(heading, now === null ? firstDirection(heading) : now === "ascending" ? -1 : 1);
    });
  }
  for (const radio of document.querySelectorAll("input[name=metric]")) {
    radio.addEventListener("change", () => {
      results.dataset.metric = radio.value;
      const heading = headings.find((th) => th.hasAttribute("aria-sort"));
      if (heading && heading.dataset.kind === "metric") sortBy(heading, firstDirection(heading));
    });
    if (radio.checked) results.dataset.metric = radio.value; // browsers restore forms on reload
  }
  const showMore = fadeEdge(results.parentNode);
  const intervals = byId("intervals");
  const showIntervals = () => {
    results.classList.toggle("intervals", intervals.checked);
    showMore();
  };
  intervals.addEventListener("change", showIntervals);
  showIntervals();
  results.tBodies[0].addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row && !event.target.closest("a")) select(Number(row.dataset.detector));
  });
  results.addEventListener("pointermove", (event) => {
    const value = event.target.closest(".v");
    const range = value && value.querySelector("small");
    if (!range) return hideTip();
    const lines = value.dataset.share === undefined ? `95 % interval ${range.textContent}` : `${range.textContent} µs\n${value.dataset.share}`;
    showTip(lines.trim(), event.clientX, event.clientY);
  });
  results.addEventListener("pointerleave", hideTip);
  state.listeners.push(() => {
    for (const row of results.tBodies[0].rows) {
      const selected = Number(row.dataset.detector) === state.detector;
      row.classList.toggle("selected", selected);
      row.querySelector(".pick").setAttribute("aria-pressed", selected);
    }
  });
}
