// Pointer, keys, tip and legend of timeline.html; the drawing is in timeline.js.

const HOWS = {
  message: "message", value: "made on this rank", rank: "the rank was busy with it",
  channel: "the channel was busy with it", release: "the bucket got ready inside it",
};

function hit(panel, x, y) {
  if (x < GUTTER || x > panel.canvas.clientWidth - RIGHT) return null;
  const time = toTime(panel, x);
  for (const line of panel.lines) {
    const { held } = line;
    if (y >= held.y && y <= held.y + held.height) return { panel, line, held, time };
    for (const band of line.bands) {
      if (y < band.y || y > band.y + band.height) continue;
      const bar = band.bars[firstAfter(band.bars, time)];
      return bar && bar[START] <= time ? { panel, line, band, bar } : null;
    }
  }
  return null;
}

const tip = document.getElementById("tip");

function showTip(event, found) {
  tip.hidden = !found;
  if (!found) return;
  tip.replaceChildren(...(found.bar ? barTip(found) : heldTip(found)));
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth
    ? event.clientX - 14 - box.width : event.clientX + 14;
  const y = event.clientY + 16 + box.height > innerHeight
    ? event.clientY - 12 - box.height : event.clientY + 16;
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = Math.max(4, y) + "px";
}

function heldTip({ panel, line, held, time }) {
  let value = 0;
  for (const [since, next] of held.points) if (since <= time) value = next;
  return [`rank ${line.rank} holds the activations of ${digits(value)} microbatches\n` +
    `at ${duration(time, panel.data.unit)}`];
}

function barTip(found) {
  const { panel, bar, line } = found;
  const unit = panel.data.unit, kind = DATA.kinds[bar[KIND]];
  const pair = bar[PAIR] ? `; stage ${bar[PAIR][STAGE]}, microbatch ${bar[PAIR][NUMBER]}` : "";
  const number = bar[NUMBER] < 0 ? "" : `, ${NUMBERS[kind]} ${bar[NUMBER]}${pair}`;
  const head = document.createElement("b");
  head.textContent = label(bar);
  const lines = [
    `  ${WORDS[kind]}`,
    `rank ${line.rank}, stage ${bar[STAGE]}${number}`,
    `start ${duration(bar[START], unit)}, end ${duration(bar[END], unit)}`,
    `duration ${duration(bar[END] - bar[START], unit)}`,
    waitText(panel, found),
  ];
  return [head, lines.join("\n")];
}

function waitText(panel, { bar, band }) {
  if (!bar[WAIT]) return "waited for nothing";
  const where = bar[HOW] === "message" ? ` on rank ${bar[WAIT_RANK]}` : "";
  const before = band.bars[band.bars.indexOf(bar) - 1];
  const idle = bar[START] - (before ? before[END] : 0);
  const long = idle > 1e-6 * panel.span ? `, idle for ${duration(idle, panel.data.unit)}` : "";
  return `waited for ${bar[WAIT]}${where} (${HOWS[bar[HOW]]})${long}`;
}

for (const panel of panels) {
  const { canvas } = panel;
  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    if (event.offsetX < GUTTER || event.ctrlKey) return;
    // In somebody's page the wheel scrolls that page, until the picture has been clicked.
    if (window !== window.parent && !document.hasFocus()) return;
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 16 : 1;
    const width = view.high - view.low;
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
      setView(view.low + (sideways * pixels / plotWidth(panel)) * width, width);
    else
      zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * pixels * 0.002))),
        toTime(panel, event.offsetX) / panel.span);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.offsetX, low: view.low, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = event.offsetX - drag.x;
      if (Math.abs(by) > 3) drag.moved = true;
      if (!drag.moved) return;
      canvas.classList.add("dragging");
      showTip(event, null);
      const width = view.high - view.low;
      setView(drag.low - (by / plotWidth(panel)) * width, width);
      return;
    }
    const found = hit(panel, event.offsetX, event.offsetY);
    showTip(event, found);
    const next = found && found.bar ? found : null;
    if ((next && next.bar) !== (hovered && hovered.bar)) {
      hovered = next;
      redraw();
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    canvas.classList.remove("dragging");
    if (drag && !drag.moved) {
      const found = hit(panel, event.offsetX, event.offsetY);
      const follow = found && found.bar && found.band.name === "compute" && found.bar[NUMBER] >= 0;
      const next = follow ? found.bar[NUMBER] : null;
      selected = next === selected ? null : next;
      redraw();
    }
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => {
    canvas.classList.remove("dragging");
    drag = null;
  });
  canvas.addEventListener("pointerleave", (event) => {
    showTip(event, null);
    hovered = null;
    redraw();
  });
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const width = view.high - view.low, middle = view.low + width / 2;
  const actions = {
    "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1 / 0.7, middle),
    ArrowLeft: () => setView(view.low - width / 5, width),
    ArrowRight: () => setView(view.low + width / 5, width),
    "0": () => setView(0, 1), Home: () => setView(0, 1), m: () => setCompact(!folded),
    Escape: () => { selected = null; redraw(); },
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
});

for (const [id, action] of [
  ["closer", () => zoom(0.5, (view.low + view.high) / 2)],
  ["farther", () => zoom(2, (view.low + view.high) / 2)],
  ["whole", () => setView(0, 1)],
]) document.getElementById(id)?.addEventListener("click", action);

// Legend --------------------------------------------------------------------------------------

function fillLegend() {
  const used = new Set();
  for (const panel of panels)
    for (const line of panel.lines)
      for (const band of line.bands) for (const bar of band.bars) used.add(DATA.kinds[bar[KIND]]);
  const legend = document.getElementById("legend");
  const add = (background, text) => {
    const item = document.createElement("span"), box = document.createElement("i");
    box.style.background = background;
    item.append(box, text);
    legend.append(item);
  };
  for (const kind of DATA.kinds) {
    if (!used.has(kind)) continue;
    const [first, last] = [shade(kind, 0, 2).fill, shade(kind, 1, 2).fill];
    add(`linear-gradient(to right, ${first}, ${last})`, `${kind} ${WORDS[kind]}`);
  }
  add("var(--held)", "activations held, in full-rank microbatches; folded: the most, left of a rank");
  const note = document.createElement("span");
  const late = panels.filter((panel) => panel.data.versions).length;
  const stages = "light: first stage, dark: last stage";
  const versions = "light to dark, and again: #0, #1 ... versions of the weights";
  const both = late < panels.length ? `${stages}; without a flush ${versions}` : versions;
  note.textContent = `${late ? both : stages}; narrow bars name their microbatch only`;
  legend.append(note);
}

fillLegend();
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
