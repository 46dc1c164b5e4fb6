// Tables that are sorted by a click on a heading and filtered by words: sweep.html and the page of
// plans. What a filter hides is hidden below, too: a job's timelines carry its number.

const tables = [...document.querySelectorAll("section.table table")].map((table) => ({
  table,
  heads: [...table.tHead.rows[0].cells],
  rows: [...table.tBodies[0].rows],
}));

function plain(text) {
  return text.replace(/\s+/g, " ").trim().toLowerCase();
}

// The number that a cell begins with; null where it is a text.
function numeric(text) {
  const found = /^[+-]?[\d,]*\.?\d+(e[+-]?\d+)?/i.exec(text.trim());
  return found ? Number(found[0].replaceAll(",", "")) : null;
}

// Durations and sizes of one column may come in several units.
const UNITS = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600 };

function value(cell) {
  const given = cell.dataset.value;
  if (given !== undefined) return given === "" ? null : Number(given);
  const text = cell.textContent, number = numeric(text);
  const unit = UNITS[text.trim().split(" ")[1]];
  return number === null || !unit ? number : number * unit;
}

function compare(left, right) {
  const [a, b] = [value(left), value(right)];
  if (a !== null && b !== null) return a - b;
  return left.textContent.localeCompare(right.textContent, "en", { numeric: true });
}

function sort(one, column, direction) {
  const order = [...one.rows];
  // An empty cell is neither the largest nor the smallest: it stays behind.
  const empty = (row) => row.cells[column].textContent.trim() === "";
  order.sort((a, b) => empty(a) - empty(b) ||
    direction * compare(a.cells[column], b.cells[column]));
  one.table.tBodies[0].append(...order);
  one.heads.forEach((head, index) => head.setAttribute("aria-sort",
    index !== column ? "none" : direction > 0 ? "ascending" : "descending"));
}

for (const one of tables)
  one.heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.title = "sort";
    const turn = () => sort(one, column, head.getAttribute("aria-sort") === "ascending" ? -1 : 1);
    head.addEventListener("click", turn);
    head.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      turn();
    });
  });

// Filter: words that all must fit. `pp=4` and `bubble<20` ask a column, the first whose heading has
// the name; any other word stands somewhere in the row.
const field = document.getElementById("filter");

function fits(one, row, word) {
  const asked = /^([^<>=]+)(<=|>=|=|<|>)(.+)$/.exec(word);
  const column = asked ? headed(one, asked[1]) : -1;
  if (column < 0) return plain(row.textContent).includes(word);
  const cell = row.cells[column], found = value(cell), wanted = numeric(asked[3]);
  const number = /^[-+\d.,e]+$/i.test(asked[3]) && found !== null && wanted !== null;
  if (asked[2] === "=") return number ? found === wanted : plain(cell.textContent) === asked[3];
  if (found === null || wanted === null) return false;
  return { "<": found < wanted, ">": found > wanted,
    "<=": found <= wanted, ">=": found >= wanted }[asked[2]];
}

// The whole name first: `pp` is not `pp something`.
function headed(one, name) {
  const words = one.heads.map((head) => plain(head.textContent));
  const whole = words.findIndex((text) => text === name);
  return whole >= 0 ? whole : words.findIndex((text) => text.includes(name));
}

function filter() {
  const words = plain(field.value).split(" ").filter(Boolean);
  const shown = new Set(), all = new Set();
  for (const one of tables)
    for (const row of one.rows) {
      // A word that asks for a column counts in the tables that have it.
      row.hidden = !words.every((word) => {
        const asked = /^([^<>=]+)(<=|>=|=|<|>)/.exec(word);
        const elsewhere = asked && headed(one, asked[1]) < 0 &&
          tables.some((other) => headed(other, asked[1]) >= 0);
        return elsewhere || fits(one, row, word);
      });
      all.add(row.dataset.job);
    }
  for (const number of all)
    if (tables.every((one) => one.rows.every((r) => r.dataset.job !== number || !r.hidden)))
      shown.add(number);
  for (const one of tables)
    for (const row of one.rows) row.hidden = !shown.has(row.dataset.job);
  for (const number of all) {
    const drawn = document.getElementById("job" + number);
    if (drawn) drawn.hidden = !shown.has(number);
    for (const dot of document.querySelectorAll(`[data-dot="${CSS.escape(number)}"]`))
      dot.classList.toggle("off", !shown.has(number));
  }
  document.getElementById("shown").textContent =
    words.length ? `${shown.size} of ${all.size}` : "";
  dispatchEvent(new Event("resize"));
}

field.addEventListener("input", filter);
field.addEventListener("keydown", (event) => event.stopPropagation());
