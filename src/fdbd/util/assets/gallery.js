const get = (id) => document.getElementById(id);
const count = data.names.length, PAGE = 120;
const chosen = new Set();
const finite = data.scores.filter((score) => score !== null);
const low = finite.length ? finite.reduce((a, b) => Math.min(a, b)) : 0;
const high = finite.length ? finite.reduce((a, b) => Math.max(a, b)) : 1;
let shown = [], page = 0;

// What a person says of the samples, by name; kept in this browser, for this page's samples.
const REVIEWS = { id: "in distribution", ood: "out of distribution", "wrong-class": "wrong class" };
const SHORT = { id: "ID", ood: "OOD", "wrong-class": "class" };
const KEYS = { i: "id", o: "ood", w: "wrong-class", u: null };
const store = `fdbd-reviews ${data.key}`;
const reviews = new Map(readReviews(storedReviews()));

function storedReviews() {
  try { return JSON.parse(localStorage.getItem(store)); } catch { return null; /* a page from a file may not store */ }
}

// The pairs in a file or in the browser's store; none if it is something else.
function readReviews(value) {
  if (!value || value.version !== 1 || typeof value.reviews !== "object" || value.reviews === null) return [];
  return Object.entries(value.reviews).filter(([, verdict]) => Object.hasOwn(REVIEWS, verdict));
}

const reviewFile = () => JSON.stringify({ version: 1, reviews: Object.fromEntries(reviews) });

function keepReviews() {
  try { localStorage.setItem(store, reviewFile()); } catch { /* as above */ }
  const counts = Object.keys(REVIEWS).map((verdict) => `${[...reviews.values()].filter((found) => found === verdict).length} ${REVIEWS[verdict]}`);
  get("reviewed").textContent = reviews.size ? `${reviews.size.toLocaleString()} reviewed: ${counts.join(", ")}` : "none reviewed";
}

function review(index, verdict) {
  if (verdict === null) reviews.delete(data.names[index]);
  else reviews.set(data.names[index], verdict);
  keepReviews();
}

function download(name, kind, text) {
  const link = document.createElement("a");
  link.href = `data:${kind};charset=utf-8,` + encodeURIComponent(text);
  link.download = name;
  link.click();
}

const level = () => low + (high - low) * get("threshold").value / 1000;
const isBelow = (index, at) => data.errors[index] !== undefined || data.scores[index] === null || data.scores[index] < at;
const score = (index) => data.scores[index] === null ? -Infinity : data.scores[index];
const className = (code) => code < 0 ? "–" : data.classes[code];
const element = (tag, text, kind) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
};

function place() {
  // The threshold as it was: between the highest rejected and the lowest accepted score, where one line parts them.
  let out = -Infinity, inside = Infinity;
  for (let i = 0; i < count; i++) {
    if (data.scores[i] === null) continue;
    if (data.ood[i]) out = Math.max(out, data.scores[i]); else inside = Math.min(inside, data.scores[i]);
  }
  const start = Number.isFinite(inside) ? inside : Number.isFinite(out) ? high : low;
  get("threshold").value = high > low ? Math.floor(1000 * (start - low) / (high - low)) : 0;
}

// The scores, with the same axes as the report's figures, and the threshold by name.
function histogram() {
  const box = get("histogram"), bins = new Array(80).fill(0);
  for (const value of finite) bins[Math.min(79, Math.floor(80 * (value - low) / (high - low || 1)))] += 1;
  const top = Math.max(1, ...bins);
  const area = plot(box, 190, "Histogram of the scores with the threshold", { top: 26, right: 10, bottom: 40, left: 52 });
  const x = linear(low, high, area.left, area.right), y = linear(0, top, area.bottom, area.top);
  axisY(area, y, ticks(0, top, 3).filter(Number.isInteger), (value) => value.toLocaleString(), "samples");
  axisX(area, x, ticks(low, high, 5), number, "score, higher is more in-distribution");
  const width = (area.right - area.left) / 80;
  bins.forEach((found, index) => {
    area.root.append(svg("rect", { class: "histogram-bar", x: area.left + width * index, width: Math.max(1, width - 1), y: y(found), height: area.bottom - y(found) }));
  });
  const line = x(level());
  area.root.append(svg("line", { class: "threshold-line", x1: line, x2: line, y1: area.top - 4, y2: area.bottom }));
  const isRight = line > (area.left + area.right) / 2;
  area.root.append(svg("text", { class: "threshold-name", x: line + (isRight ? -6 : 6), y: area.top + 4, "text-anchor": isRight ? "end" : "start" }, "threshold"));
  box.replaceChildren(area.root);
  const at = level();
  let below = 0;
  for (let i = 0; i < count; i++) if (isBelow(i, at)) below += 1;
  get("level").textContent = at.toPrecision(5);
  get("sides").textContent = `${below.toLocaleString()} below (out of distribution), ${(count - below).toLocaleString()} at or above it`;
}

function filter() {
  const verdict = get("verdict").value, kind = get("class").value, near = get("nearest").value, text = get("text").value.toLowerCase(), at = level();
  shown = [];
  for (let i = 0; i < count; i++) {
    if (kind !== "" && data.classes_of[i] !== Number(kind)) continue;
    if (near !== "" && data.nearest_of[i] !== Number(near)) continue;
    if (text && !words(i).includes(text)) continue;
    if (verdict === "out" && !isBelow(i, at)) continue;
    if (verdict === "in" && isBelow(i, at)) continue;
    if (verdict === "scored-out" && !data.ood[i]) continue;
    if (verdict === "error" && data.errors[i] === undefined) continue;
    if (verdict === "reviewed" && !reviews.has(data.names[i])) continue;
    if (verdict === "unreviewed" && reviews.has(data.names[i])) continue;
    shown.push(i);
  }
  const sort = get("sort").value, group = get("group").value;
  const order = sort === "name" ? (a, b) => data.names[a] < data.names[b] ? -1 : 1 : sort === "high" ? (a, b) => score(b) - score(a) || a - b : (a, b) => score(a) - score(b) || a - b;
  const key = group === "class" ? data.classes_of : group === "nearest" ? data.nearest_of : null;
  shown.sort(key ? (a, b) => key[a] - key[b] || order(a, b) : order);
  page = 0;
  list();
}

// What a search looks at: the sample's name, and its text if there are texts.
const words = (index) => `${data.names[index]} ${data.texts === null ? "" : data.texts[index]}`.toLowerCase();

function card(index) {
  const item = element("li");
  item.tabIndex = 0;
  item.dataset.index = index;
  const label = element("label"), box = document.createElement("input"), embedded = data.thumbnails[index];
  box.type = "checkbox";
  box.checked = chosen.has(index);
  box.addEventListener("change", () => { if (box.checked) chosen.add(index); else chosen.delete(index); selection(); });
  const address = embedded || (data.folder === null ? null : data.folder + "/" + data.names[index].split("/").map(encodeURIComponent).join("/"));
  if (address && data.errors[index] === undefined) {
    const image = document.createElement("img");
    image.loading = "lazy";
    image.src = address;
    image.alt = "";
    item.append(image);
  }
  if (data.texts !== null) item.append(element("p", data.texts[index], "text"));
  label.append(box, element("span", data.names[index]));
  const outside = isBelow(index, level());
  item.append(label, element("div", className(data.classes_of[index])), element("div", outside ? "out of distribution" : "in distribution", outside ? "verdict-out" : "verdict-in"));
  if (data.errors[index] !== undefined) item.append(element("div", data.errors[index], "verdict-out"));
  else item.append(element("div", `score ${data.scores[index] === null ? "not finite" : data.scores[index].toPrecision(4)}, p\u00a0=\u00a0${data.p_values[index] === null ? "–" : data.p_values[index].toPrecision(2)}`, "soft"));
  if (data.nearest_of[index] >= 0) item.append(element("div", "near " + className(data.nearest_of[index]), "soft"));
  item.append(element("div", "", "mark"), marks(item));
  showReview(item);
  return item;
}

// A button for each verdict; pressed again, it takes the verdict back.
function marks(item) {
  const box = element("div", undefined, "marks"), index = Number(item.dataset.index);
  for (const [verdict, words] of Object.entries(REVIEWS)) {
    const button = element("button", SHORT[verdict]);
    button.type = "button";
    button.dataset.verdict = verdict;
    button.setAttribute("aria-label", words);
    button.addEventListener("click", () => { review(index, reviews.get(data.names[index]) === verdict ? null : verdict); showReview(item); });
    box.append(button);
  }
  return box;
}

function showReview(item) {
  const verdict = reviews.get(data.names[Number(item.dataset.index)]);
  if (verdict === undefined) delete item.dataset.review;
  else item.dataset.review = verdict;
  for (const button of item.querySelectorAll(".marks button")) button.setAttribute("aria-pressed", button.dataset.verdict === verdict);
  item.querySelector(".mark").textContent = verdict === undefined ? "" : `reviewed: ${REVIEWS[verdict]}`;
}

// Marks the card that has the focus and goes on to the next; arrow keys only go.
function onKey(event) {
  const item = event.target.closest("li");
  if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
  const cards = [...get("list").querySelectorAll("li")], place = cards.indexOf(item);
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  let next = null;
  if (Object.hasOwn(KEYS, key)) {
    review(Number(item.dataset.index), KEYS[key]);
    showReview(item);
    next = key === "u" ? item : cards[place + 1] || item;
  } else if (key === "ArrowRight" || key === "ArrowDown") next = cards[place + 1];
  else if (key === "ArrowLeft" || key === "ArrowUp") next = cards[place - 1];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

function list() {
  const pages = Math.max(1, Math.ceil(shown.length / PAGE)), group = get("group").value, box = get("list");
  get("page").textContent = `${shown.length.toLocaleString()} sample${shown.length === 1 ? "" : "s"}, page ${page + 1} of ${pages}`;
  get("back").disabled = page === 0;
  get("next").disabled = page + 1 >= pages;
  box.replaceChildren();
  let current, heading;
  for (const index of shown.slice(page * PAGE, (page + 1) * PAGE)) {
    const name = group === "class" ? className(data.classes_of[index]) : group === "nearest" ? className(data.nearest_of[index]) : "Samples";
    if (name !== heading) {
      heading = name;
      current = element("ul");
      box.append(element("h2", name), current);
    }
    current.append(card(index));
  }
  selection();
}

function selection() { get("chosen").textContent = `${chosen.size.toLocaleString()} selected`; }

function save() {
  const cell = (value) => {
    let text = value === null || value === undefined ? "" : String(value);
    if (/^[=+\-@\t\r]/.test(text) && isNaN(Number(text))) text = "'" + text;
    return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  const lines = ["path,class,score,p_value,is_ood"];
  for (const index of [...chosen].sort((a, b) => a - b)) {
    lines.push([data.names[index], className(data.classes_of[index]), data.scores[index], data.p_values[index], data.ood[index] ? "true" : "false"].map(cell).join(","));
  }
  download("selected.csv", "text/csv", lines.join("\n") + "\n");
}

function load(file) {
  const reader = new FileReader();
  reader.addEventListener("load", () => {
    let found = [];
    try { found = readReviews(JSON.parse(reader.result)); } catch { /* said below */ }
    for (const [name, verdict] of found) reviews.set(name, verdict);
    keepReviews();
    if (!found.length) get("reviewed").textContent = `${file.name} holds no review of this page's form`;
    filter();
  });
  reader.readAsText(file);
}

for (const [id, codes] of [["class", data.classes_of], ["nearest", data.nearest_of]]) {
  const used = [...new Set(codes)].filter((code) => code >= 0).sort((a, b) => data.classes[a] < data.classes[b] ? -1 : 1);
  for (const code of used) {
    const option = element("option", data.classes[code]);
    option.value = code;
    get(id).append(option);
  }
  if (!used.length) {
    get(id).parentElement.hidden = true;
    get("group").querySelector(`[value="${id}"]`).remove();
  }
}
for (const id of ["verdict", "class", "nearest", "text", "sort", "group"]) get(id).addEventListener("input", filter);
get("controls").addEventListener("submit", (event) => event.preventDefault());
get("threshold").addEventListener("input", () => { histogram(); if (["in", "out"].includes(get("verdict").value)) filter(); else list(); });
get("back").addEventListener("click", () => { page -= 1; list(); });
get("next").addEventListener("click", () => { page += 1; list(); });
get("all").addEventListener("click", () => { shown.forEach((index) => chosen.add(index)); list(); });
get("none").addEventListener("click", () => { chosen.clear(); list(); });
get("save").addEventListener("click", save);
get("list").addEventListener("keydown", onKey);
get("save-review").addEventListener("click", () => download("reviews.json", "application/json", reviewFile() + "\n"));
get("load-review").addEventListener("change", (event) => { if (event.target.files.length) load(event.target.files[0]); event.target.value = ""; });
get("clear-review").addEventListener("click", () => { reviews.clear(); keepReviews(); filter(); });
startTheme();
keepReviews();
addEventListener("resize", histogram);
place();
histogram();
filter();
