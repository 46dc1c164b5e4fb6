// The playground page: a form whose state is a list of words (what one types behind
// `python -m launcher`), a worker that answers it, and the answer's picture in a frame.
"use strict";

(() => {
const ROOT = document.getElementById("play");
const FILES = new URL(ROOT.dataset.files, document.baseURI);
const CSV = "my.csv"; // what messages and commands call the text of the form
const LONGEST_LINK = 8000; // characters; some servers and chats cut longer ones
const SLOW_MS = 1500, STALE_MS = 4000;

const units = (state) => state.costs === "uniform";
const machine = (state) => !units(state);
const again = (state) => !["none", "selective"].includes(state.recompute || "none");
const number = { type: "number", step: "any" };
const each = { inputMode: "decimal", title: "a number, or one per rank, or one per stage: [1,1,2,1]" };

// One line per key that the form offers; `rest` is what the key has when nobody types it.
const FIELDS = [
  { key: "schedule", label: "schedule", always: true },
  { key: "pp", label: "ranks (pp)", ...number, step: 1, always: true },
  { key: "num_microbatches", label: "microbatches (m)", ...number, step: 1 },
  { key: "schedule.stages_per_rank", label: "stages per rank (v)", ...number, step: 1, hint: "the schedule's" },
  { key: "schedule.group", rare: true, label: "group", hint: "the schedule's" },
  { key: "recompute", label: "recomputation", rest: "none" },
  { key: "recompute.max_full_activations", label: "activations kept", ...number, when: (s) => s.recompute === "optimal" },
  { key: "overlap", label: "gradients reduced", rest: "grad_reduce", words: { grad_reduce: "under compute", none: "at the flush", zero1: "sharded (zero1)" } },
  { key: "costs", label: "costs", always: true, words: { uniform: "in units", analytic: "of a model" } },
  { key: "costs.forward", label: "forward F", ...each, rest: "1", when: units },
  { key: "costs.backward", label: "backward B", ...each, rest: "2", when: units },
  { key: "costs.backward_input", rare: true, label: "of B, for inputs (I)", ...each, hint: "half", when: units },
  { key: "costs.backward_weight", rare: true, label: "of B, for weights (W)", ...each, hint: "the rest", when: units },
  { key: "costs.recompute", label: "forward again R", ...each, hint: "as F", when: (s) => units(s) && again(s) },
  { key: "costs.stage_input", label: "kept for R, share", ...number, rest: "0", when: (s) => units(s) && again(s) },
  { key: "costs.p2p", label: "message", ...number, rest: "0", when: units },
  { key: "costs.grad_reduce", label: "gradient reduction", ...each, rest: "0", when: units },
  { key: "costs.fused", rare: true, label: "F and B as one", ...number, hint: "their sum", when: (s) => units(s) && /dualpipe|custom/.test(s.schedule) },
  { key: "model", label: "model", rest: "tiny", when: machine },
  { key: "hardware", label: "machine", rest: "cpu_laptop", always: true, when: machine },
  { key: "trainer.precision", label: "precision", rest: "32-true", options: ["32-true", "bf16-mixed", "bf16-true"], when: machine },
  { key: "data.microbatch_size", label: "rows per microbatch", ...number, step: 1, rest: "1", when: machine },
  { key: "dp", label: "replicas (dp)", ...number, step: 1, rest: "1", when: machine },
  { key: "tp", rare: true, label: "tensor ranks (tp)", ...number, step: 1, rest: "1", when: machine },
  { key: "schedule.layers_per_stage", rare: true, label: "layers of each stage", hint: "[8,8,8,8]", when: machine },
  { key: "costs.transport", rare: true, label: "a send", rest: "buffered", options: ["buffered", "rendezvous"], words: { buffered: "never waits", rendezvous: "waits for its receive" } },
  { key: "schedule.split_backward", rare: true, label: "split backwards", type: "checkbox", rest: "false" },
  { key: "more", rare: true, label: "more keys, as on the command line", wide: true, hint: "hardware.memory_gb=40 model.layers=48" },
];

const START = { schedule: "zb_v", pp: "4", num_microbatches: "8", costs: "uniform" };
const DEADLOCK = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n";
const PRESETS = [
  ["1F1B", { schedule: "1f1b" }],
  ["zero bubble", START],
  ["Fold: gradients under compute", { schedule: "foldx_fifo", "costs.grad_reduce": "6" }],
  ["DualPipe", { schedule: "dualpipe", "costs.fused": "2.5" }],
  ["recomputed where ranks wait", { schedule: "1f1b", recompute: "mario", "costs.stage_input": "0.1" }],
  ["Llama 2 7B on 8 H100", { schedule: "interleaved_1f1b", pp: "8", num_microbatches: "16", costs: "analytic", model: "llama2_7b", hardware: "h100", "trainer.precision": "bf16-mixed" }],
  ["a deadlock", { schedule: "custom", pp: "2", num_microbatches: "", csv: DEADLOCK }],
];

let state = {};
let choices = {};
let shown = null; // the answer in the picture
let asked = null; // {id, since, words}: what the worker works at
let next = null; // what it is to be asked when it has done that
let worker = null, ready = false, number_of_questions = 0;
const controls = new Map();

// Form ------------------------------------------------------------------------------------------

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function control(field) {
  const options = field.options || choices[field.key];
  let made;
  if (options) {
    made = element("select", {}, ...options.map((name) =>
      element("option", { value: name, textContent: (field.words || {})[name] || name })));
  } else {
    made = element("input", { type: field.type || "text", step: field.step || "", spellcheck: false,
      autocomplete: "off", placeholder: field.hint || "", inputMode: field.inputMode || "" });
  }
  made.name = field.key;
  made.title = field.title || field.key;
  made.addEventListener("input", () => {
    const bad = made.validity && made.validity.badInput;
    if (made.type === "checkbox") state[field.key] = String(made.checked);
    else state[field.key] = bad ? "?" : made.value.trim();
    changed();
  });
  controls.set(field.key, made);
  return made;
}

const form = element("form", { onsubmit: (event) => event.preventDefault() });
const rare = element("details", { className: "wide" }, element("summary", { textContent: "more settings" }));
const rareFields = element("div", { className: "fields" });
rare.append(rareFields);
const csv = element("textarea", { name: "csv", spellcheck: false, rows: 6, placeholder: "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1" });
const csvLabel = element("label", { className: "wide" }, "your order: a line per rank, a cell per instruction", csv);
const status = element("div", { className: "status", role: "status" });
const cancel = element("button", { type: "button", textContent: "stop", hidden: true });
const error = element("pre", { className: "error", role: "alert", hidden: true });
const picture = element("div", { className: "picture" });
const commands = element("div", { className: "commands", hidden: true });
const presets = element("div", { className: "buttons presets" });
const actions = element("div", { className: "buttons actions" });

function build() {
  for (const field of FIELDS) {
    const made = control(field);
    const check = field.type === "checkbox";
    const label = element("label", { className: check ? "check" : field.wide ? "wide" : "" });
    label.append(...(check ? [made, field.label] : [field.label, made]));
    (field.rare ? rareFields : form).append(label);
    if (field.key === "costs") form.append(csvLabel);
  }
  form.append(rare);
  csv.addEventListener("input", () => { state.csv = csv.value; changed(); });
  for (const [name, values] of PRESETS)
    presets.append(button(name, () => set({ ...START, ...values })));
  actions.append(
    button("copy link", (event) => copyLink(event.target)),
    button("edit as CSV", () => set({ ...state, schedule: "custom", pp: String(shown.result.pp),
      num_microbatches: "", "schedule.stages_per_rank": "", "schedule.group": "",
      "schedule.split_backward": "", csv: shown.csv })),
    button("save schedule.csv", () => save("schedule.csv", shown.csv, "text/csv")),
    button("save timeline.html", () => save("timeline.html", shown.page, "text/html")),
  );
  cancel.addEventListener("click", () => { next = null; restart("Stopped."); });
  ROOT.replaceChildren(presets, form,
    element("div", { className: "buttons" }, status, cancel), error, picture, actions, commands);
}

function button(text, onclick) {
  return element("button", { type: "button", textContent: text, onclick });
}

function set(values) {
  state = { ...values };
  fill();
  changed();
}

function fill() {
  for (const field of FIELDS) {
    const made = controls.get(field.key), value = state[field.key] ?? field.rest ?? "";
    if (made.type === "checkbox") made.checked = value === "true";
    else made.value = value;
  }
  csv.value = state.csv || "";
  const said = (field) => state[field.key] && state[field.key] !== field.rest && shows(field);
  if (FIELDS.some((field) => field.rare && said(field))) rare.open = true;
}

function shows(field) {
  return !field.when || field.when(state);
}

function words() {
  const found = [];
  for (const field of FIELDS) {
    const value = state[field.key] ?? (field.always ? field.rest : "") ?? "";
    if (field.key === "more" || value === "" || !shows(field)) continue;
    if (field.always || value !== field.rest) found.push(`${field.key}=${value}`);
  }
  if (state.schedule === "custom") found.push(`schedule.file=${CSV}`);
  return [...found, ...(state.more || "").split(/\s+/).filter(Boolean)];
}

function arrange() {
  for (const field of FIELDS) controls.get(field.key).closest("label").hidden = !shows(field);
  csvLabel.hidden = state.schedule !== "custom";
}

// Link ------------------------------------------------------------------------------------------

function toHash() {
  const pairs = new URLSearchParams();
  for (const field of FIELDS)
    if (state[field.key] && shows(field) && (field.always || state[field.key] !== field.rest))
      pairs.set(field.key, state[field.key]);
  if (state.schedule === "custom" && state.csv) pairs.set("csv", state.csv);
  return "#" + pairs;
}

function fromHash() {
  const pairs = new URLSearchParams(location.hash.slice(1));
  const known = new Set([...FIELDS.map((field) => field.key), "csv"]);
  const values = Object.fromEntries([...pairs].filter(([key]) => known.has(key)));
  return Object.keys(values).length ? { costs: "uniform", schedule: "1f1b", pp: "1", ...values } : { ...START };
}

async function copyLink(target) {
  const link = location.href.split("#")[0] + toHash();
  if (link.length > LONGEST_LINK) {
    say(`A link with this CSV would have ${link.length} characters; save schedule.csv in its place.`);
    return;
  }
  await copy(link, target);
}

async function copy(text, target) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const before = target.textContent;
  target.textContent = "copied";
  setTimeout(() => { target.textContent = before; }, 1200);
}

function save(name, text, type) {
  const link = element("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Questions -------------------------------------------------------------------------------------

let waiting = 0;

function changed() {
  arrange();
  history.replaceState(null, "", toHash().length > LONGEST_LINK ? "#" : toHash());
  clearTimeout(waiting);
  waiting = setTimeout(ask, 200);
}

function ask() {
  next = { words: words(), files: state.schedule === "custom" ? { [CSV]: state.csv || "" } : {} };
  if (asked && Date.now() - asked.since > STALE_MS) restart("");
  send();
}

function send() {
  tell();
  if (!next || asked || !ready) return;
  number_of_questions += 1;
  asked = { id: number_of_questions, since: Date.now(), ...next };
  next = null;
  worker.postMessage({ id: asked.id, words: asked.words, files: asked.files });
  setTimeout(tell, SLOW_MS + 50);
  tell();
}

function restart(note) {
  worker.terminate();
  asked = null;
  begin();
  say(note);
}

function begin() {
  ready = false;
  worker = new Worker(new URL("worker.js", FILES), { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.ready) {
      ready = true;
      if (!next) say("Python is ready: change something.");
      send();
    } else if (data.broken) {
      broken(data.broken);
    } else if (asked && data.id === asked.id) {
      const done = asked;
      asked = null;
      show(JSON.parse(data.text), done);
      send();
    }
  };
  worker.onerror = (event) => { event.preventDefault(); broken(event.message || "its files are not there"); };
}

function broken(why) {
  asked = next = null;
  say("");
  fail(`Python did not start in this browser (${why}). The site's builder needs npm for this page: ` +
    "make playground-packages docs. On your machine: make install in a checkout, then " +
    "python -m launcher mode=simulate costs=uniform schedule=zb_v pp=4");
  picture.classList.remove("old"); // the picture that is there stays right
  commands.hidden = !shown;
}

function tell() {
  const slow = asked && Date.now() - asked.since > SLOW_MS;
  cancel.hidden = !slow;
  status.classList.toggle("busy", Boolean(asked || next));
  if (!ready && next) status.textContent = "starting Python in your browser (13 MB, the first time)";
  else if (slow) status.textContent = `compiling and simulating for ${Math.round((Date.now() - asked.since) / 1000)} s`;
  else if (asked) status.textContent = "compiling and simulating";
  if (slow) setTimeout(tell, 500);
}

function say(text) {
  status.classList.toggle("busy", false);
  status.textContent = text;
}

// Answers ---------------------------------------------------------------------------------------

function fail(text) {
  error.hidden = false;
  error.textContent = text;
  error.classList.toggle("grid", text.includes("\n"));
  picture.classList.add("old");
  commands.hidden = true; // they would be those of the picture before
}

function show(answer, question) {
  window.playgroundAnswer = { answer, words: question.words };
  if (answer.error) {
    say("");
    fail(answer.error);
    return;
  }
  error.hidden = true;
  picture.classList.remove("old");
  shown = answer;
  const took = question.since ? ` in ${((Date.now() - question.since) / 1000).toFixed(2)} s` : "";
  say(`${question.words.join(" ")}: compiled, verified and simulated${took}`);
  const file = question.words.includes(`schedule.file=${CSV}`) ? ` (${CSV} is what "save schedule.csv" saves)` : "";
  commands.hidden = false;
  commands.replaceChildren(
    ...command(`Train in this order${file}:`, answer.train),
    ...command("The same picture on your machine:", answer.simulate));
  draw(answer.page);
}

function command(title, text) {
  const copying = button("copy", (event) => copy(text, event.target));
  return [element("span", { textContent: title }),
    element("div", {}, element("code", { textContent: text }), copying)];
}

// The new picture is loaded behind the old one, so that nothing flickers. It is a page of its own
// that may run its scripts and reach nothing of this one; once it is seen it says how high it is.
const TELLS = `<script>
new ResizeObserver(() => parent.postMessage(
  { height: document.body.getBoundingClientRect().height }, "*")).observe(document.body);
</script>`;

// The picture's page follows the system; here it follows the site, whose reader may have switched.
function themed(page) {
  const dark = document.body.dataset.mdColorScheme === "slate";
  return page.replace("@media (prefers-color-scheme: dark)", dark ? "@media all" : "@media not all")
    .replace("color-scheme: light dark", `color-scheme: ${dark ? "dark" : "light"}`);
}

function draw(page) {
  for (const old of picture.querySelectorAll("iframe.next")) old.remove();
  const before = picture.querySelector("iframe");
  const frame = element("iframe", { className: "next", title: "timeline of every rank",
    sandbox: "allow-scripts", srcdoc: themed(page) + TELLS });
  if (before) frame.style.height = before.style.height;
  frame.addEventListener("load", () => {
    if (!frame.classList.contains("next")) return;
    for (const old of picture.querySelectorAll("iframe")) if (old !== frame) old.remove();
    frame.classList.remove("next");
  });
  picture.append(frame);
}

addEventListener("message", ({ data, source }) => {
  for (const frame of picture.querySelectorAll("iframe"))
    if (frame.contentWindow === source && data.height > 0)
      frame.style.height = Math.ceil(data.height) + "px";
});

// Start -----------------------------------------------------------------------------------------

async function main() {
  if (location.protocol === "file:") {
    ROOT.textContent = "Browsers run Python only in pages that come from a server: " +
      "python -m http.server --directory build/site, then open http://localhost:8000/playground.html";
    return;
  }
  const first = await fetch(new URL("first.json", FILES)).then((found) => (found.ok ? found.json() : null), () => null);
  if (!first) {
    ROOT.textContent = "This copy of the site was built without the playground: make docs builds it.";
    return;
  }
  choices = first.choices;
  build();
  state = fromHash();
  fill();
  arrange();
  addEventListener("hashchange", () => { if (location.hash !== toHash()) set(fromHash()); });
  new MutationObserver(() => { if (shown) draw(shown.page); })
    .observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  const same = JSON.stringify(words()) === JSON.stringify(first.words);
  if (same) show(first.answer, { words: first.words });
  begin();
  if (same) say("Change something: Python is starting in your browser (13 MB, the first time).");
  else ask();
}

main();
})();
