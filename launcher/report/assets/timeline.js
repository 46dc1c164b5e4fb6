// Draws the panels of timeline.html. All times are in the panel's own unit; the view is kept as
// fractions of the longest panel of that unit, so that panels of other units zoom along.

const DATA = JSON.parse(document.getElementById("data").textContent);
const [KIND, STAGE, NUMBER, START, END, WAIT, WAIT_RANK, HOW, SINCE, PAIR, VERSION] =
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
// WORDS, NUMBERS (microbatch, bucket or nothing) and COLOURS (hue and saturation; a stage's shade
// runs from light, the first, to dark, the last) of each kind stand in front of this script:
// html.py puts them there, from the table of kinds in ir/kinds.py.
const GUTTER = 84, RIGHT = 18, AXIS = 40, TOP = 4, TALL = 22;
const NARROWEST = 1e-6;

const view = { low: 0, high: 1 };
let selected = null; // a microbatch
let hovered = null; // {panel, bar}
let folded = false; // whether the curves of memory are hidden, see fold.js
let scheduled = false;

// On one scale the shorter of two steps would be a line of a few pixels: each has its own then, and
// says so. Jobs of a sweep are there to be compared, however much they differ.
const spans = DATA.panels.map((data) => data.makespan).filter((span) => span > 0);
const apart = DATA.panels.length === 2 && document.getElementById("whole") !== null &&
  Math.max(...spans) > 20 * Math.min(...spans);

const panels = DATA.panels.map((data, index) => {
  const canvas = document.getElementById("panel" + index);
  const same = DATA.panels.filter((other) => other.unit === data.unit && (!apart || other === data));
  const span = Math.max(...same.map((other) => other.makespan)) || 1;
  const ranks = data.rows.length;
  const bar = ranks <= 4 ? 26 : ranks <= 8 ? 20 : ranks <= 16 ? 18 : 16;
  const size = { bar, channel: Math.round(bar * 0.55), held: Math.round(bar * 0.8), gap: 8 };
  const peak = Math.max(...same.map((o) => Math.max(...o.rows.map(highest)))) || 1;
  // A tall panel has its times above the first rank, too: the axis below it is out of sight.
  const top = ranks > 12 ? TALL : TOP;
  const panel = { data, canvas, span, size, peak, top, lines: [] };
  let y = top;
  data.rows.forEach((row, rank) => {
    const line = { rank, row, y, bands: [], held: null };
    for (const [name, height] of [["compute", size.bar], ["channel", size.channel]]) {
      if (name === "channel" && !data.channel) continue;
      const lanes = row[name].length ? row[name] : [[]];
      const each = Math.max(6, Math.floor(height / lanes.length));
      for (const bars of lanes) {
        line.bands.push({ name, bars, y, height: each });
        y += each + 1;
      }
    }
    line.held = { y, height: size.held, points: row.held, peak: highest(row) };
    y += size.held + size.gap;
    panel.lines.push(line);
  });
  panel.bottom = y - size.gap + 3;
  panel.height = panel.bottom + AXIS;
  canvas.style.height = panel.height + "px";
  return panel;
});

function highest(row) {
  return Math.max(0, ...row.held.map((point) => point[1]));
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const shades = new Map();

// {fill, text}: the bar's colour and the better readable one of black and white upon it.
function shade(kind, stage, stages) {
  const key = `${kind} ${stage} ${stages}`;
  if (!shades.has(key)) {
    const [hue, saturation] = COLOURS[kind];
    const light = 76 - 36 * (stages > 1 ? stage / (stages - 1) : 0.4);
    const text = luminance(hue, saturation / 100, light / 100) < 0.2 ? "#ffffff" : "#121316";
    shades.set(key, { fill: `hsl(${hue} ${saturation}% ${light}%)`, text });
  }
  return shades.get(key);
}

function luminance(hue, saturation, light) {
  const linear = [0, 8, 4].map((offset) => {
    const k = (offset + hue / 30) % 12;
    const reach = saturation * Math.min(light, 1 - light);
    return Math.pow(light - reach * Math.max(-1, Math.min(k - 3, 9 - k, 1)), 2.2);
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function duration(value, unit) {
  if (unit !== "s") return digits(value) + " " + unit;
  for (const [scale, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]])
    if (Math.abs(value) >= scale) return digits(value / scale) + " " + name;
  return digits(value / 1e-9) + " ns";
}

function digits(value) {
  return String(Number(value.toPrecision(5)));
}

// Geometry ------------------------------------------------------------------------------------

function plotWidth(panel) {
  return panel.canvas.clientWidth - GUTTER - RIGHT;
}

function toX(panel, time) {
  return GUTTER + ((time / panel.span - view.low) / (view.high - view.low)) * plotWidth(panel);
}

function toTime(panel, x) {
  return (view.low + ((x - GUTTER) / plotWidth(panel)) * (view.high - view.low)) * panel.span;
}

function setView(low, width) {
  width = Math.min(1, Math.max(NARROWEST, width));
  view.low = Math.min(1 - width, Math.max(0, low));
  view.high = view.low + width;
  redraw();
}

function zoom(factor, around) {
  const width = Math.min(1, Math.max(NARROWEST, (view.high - view.low) * factor));
  const part = (around - view.low) / (view.high - view.low);
  setView(around - part * width, width);
}

// Index of the first bar that ends after `time`; the bars of a lane do not overlap.
function firstAfter(bars, time) {
  let low = 0, high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle][END] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Drawing -------------------------------------------------------------------------------------

function redraw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    const theme = {};
    for (const name of ["panel", "text", "muted", "line", "idle", "held", "mark"])
      theme[name] = css("--" + name);
    for (const panel of panels) if (panel.canvas.clientWidth) draw(panel, theme);
  });
}

function draw(panel, theme) {
  const { canvas } = panel;
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) ||
      canvas.height !== Math.round(panel.height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(panel.height * ratio);
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.fillStyle = theme.panel;
  g.fillRect(0, 0, width, panel.height);
  g.save();
  g.beginPath();
  g.rect(GUTTER, 0, width - GUTTER - RIGHT + 1, panel.bottom);
  g.clip();
  const end = Math.min(width - RIGHT, toX(panel, panel.data.makespan));
  for (const line of panel.lines) {
    for (const band of line.bands) {
      g.fillStyle = theme.idle;
      g.fillRect(GUTTER, band.y, Math.max(0, end - GUTTER), band.height);
      drawBars(g, panel, band, theme);
    }
    drawHeld(g, panel, line.held, theme);
  }
  drawGrid(g, panel, theme);
  drawHover(g, panel, theme);
  g.restore();
  drawAxis(g, panel, theme);
  drawGutter(g, panel, theme);
}

function drawBars(g, panel, band, theme) {
  const left = toTime(panel, GUTTER), right = toTime(panel, panel.canvas.clientWidth - RIGHT);
  g.font = (band.height >= 16 ? 11 : band.height >= 12 ? 10 : 9) + "px ui-monospace, monospace";
  g.textAlign = "center";
  g.textBaseline = "middle";
  for (let index = firstAfter(band.bars, left); index < band.bars.length; index += 1) {
    const bar = band.bars[index];
    if (bar[START] > right) break;
    const kind = DATA.kinds[bar[KIND]];
    const x = toX(panel, bar[START]), w = toX(panel, bar[END]) - x;
    const pair = bar[PAIR];
    // Of several versions of the weights the shade tells which; else it tells the stage.
    const versions = panel.data.versions;
    const colour =
      versions && bar.length > VERSION
        ? shade(kind, bar[VERSION] % versions, versions)
        : shade(pair ? "F" : kind, bar[STAGE], panel.data.stages);
    g.globalAlpha = selected !== null && !carries(band, bar, kind, selected) ? 0.22 : 1;
    g.fillStyle = pair ? blend(g, x, w, colour.fill, pair, panel.data.stages) : colour.fill;
    // A hairline between neighbours, once they are wide enough to spare it.
    g.fillRect(x, band.y, Math.max(0.6, w - (w > 3 ? 1 : 0)), band.height);
    const text = barText(g, band, bar, kind, w - 4);
    if (text) {
      g.fillStyle = colour.text;
      g.fillText(text, x + w / 2, band.y + band.height / 2 + 0.5);
    }
    g.globalAlpha = 1;
  }
}

// A fused pair runs from its forward's colour to its backward's.
function blend(g, x, w, fill, pair, stages) {
  const gradient = g.createLinearGradient(x, 0, x + Math.max(1, w), 0);
  gradient.addColorStop(0.25, fill);
  gradient.addColorStop(0.75, shade(DATA.kinds[pair[KIND]], pair[STAGE], stages).fill);
  return gradient;
}

function carries(band, bar, kind, microbatch) {
  if (band.name !== "compute") return false;
  return bar[NUMBER] === microbatch || (bar[PAIR] !== null && bar[PAIR][NUMBER] === microbatch);
}

function barText(g, band, bar, kind, room) {
  if (room < 5 || band.height < 9) return "";
  const full = label(bar);
  if (g.measureText(full).width <= room) return full;
  // A lone number reads as a microbatch, which an optimizer step has not.
  if (bar[NUMBER] < 0 && band.name !== "channel") return "";
  const short = String(band.name === "channel" ? bar[STAGE] : bar[NUMBER]);
  return g.measureText(short).width <= room ? short : "";
}

function label(bar) {
  const pair = bar[PAIR];
  if (pair) return `${bar[STAGE]}F${bar[NUMBER]}&${pair[STAGE]}${DATA.kinds[pair[KIND]]}${pair[NUMBER]}`;
  const version = bar.length > VERSION ? `#${bar[VERSION]}` : "";
  return bar[STAGE] + DATA.kinds[bar[KIND]] + (bar[NUMBER] < 0 ? "" : bar[NUMBER]) + version;
}

function drawHeld(g, panel, held, theme) {
  const { y, height, points } = held;
  const base = y + height, scale = height / panel.peak;
  g.beginPath();
  g.moveTo(toX(panel, 0), base);
  let value = 0;
  for (const [time, next] of points) {
    const x = toX(panel, time);
    g.lineTo(x, base - value * scale);
    g.lineTo(x, base - next * scale);
    value = next;
  }
  g.lineTo(toX(panel, panel.data.makespan), base - value * scale);
  g.lineTo(toX(panel, panel.data.makespan), base);
  g.closePath();
  g.globalAlpha = 0.55;
  g.fillStyle = theme.held;
  g.fill();
  g.globalAlpha = 1;
  g.strokeStyle = theme.line;
  g.beginPath();
  g.moveTo(GUTTER, base + 0.5);
  g.lineTo(panel.canvas.clientWidth - RIGHT, base + 0.5);
  g.stroke();
}

function ticks(panel) {
  const low = view.low * panel.span, high = view.high * panel.span;
  const rough = ((high - low) / plotWidth(panel)) * 90;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12); k += 1)
    found.push(k * step);
  return { found, step };
}

function drawGrid(g, panel, theme) {
  g.strokeStyle = theme.text;
  g.globalAlpha = 0.1;
  g.beginPath();
  for (const time of ticks(panel).found) {
    const x = Math.round(toX(panel, time)) + 0.5;
    g.moveTo(x, 0);
    g.lineTo(x, panel.bottom);
  }
  g.stroke();
  g.globalAlpha = 1;
}

function drawAxis(g, panel, theme) {
  const { found, step } = ticks(panel);
  let scale = 1, unit = panel.data.unit;
  if (unit === "s")
    [scale, unit] = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]]
      .find(([s]) => view.high * panel.span >= s) || [1e-9, "ns"];
  const decimals = Math.min(9, Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9)));
  g.font = "11px system-ui, sans-serif";
  g.textBaseline = "top";
  g.textAlign = "center";
  g.strokeStyle = theme.line;
  g.fillStyle = theme.muted;
  g.beginPath();
  g.moveTo(GUTTER, panel.bottom + 0.5);
  g.lineTo(panel.canvas.clientWidth - RIGHT, panel.bottom + 0.5);
  for (const time of found) {
    const x = Math.round(toX(panel, time)) + 0.5;
    g.moveTo(x, panel.bottom);
    g.lineTo(x, panel.bottom + 5);
    g.fillText((time / scale).toFixed(decimals), x, panel.bottom + 7);
    if (panel.top === TALL) g.fillText((time / scale).toFixed(decimals), x, 4);
  }
  g.stroke();
  let title = panel.data.unit === "s" ? `${panel.data.axis} in ${unit}` : panel.data.axis;
  const other = apart && panels[1 - panels.indexOf(panel)];
  if (other && other.data.unit === panel.data.unit)
    title += other.data.makespan > panel.data.makespan
      ? ` (on a scale of its own: the other is ${Math.round(other.span / panel.span)} times as long)`
      : " (on a scale of its own)";
  g.fillText(title, GUTTER + plotWidth(panel) / 2, panel.bottom + 23);
}

function drawGutter(g, panel, theme) {
  g.textAlign = "right";
  g.textBaseline = "middle";
  const roomy = panel.lines.length <= 8;
  for (const line of panel.lines) {
    const first = { compute: `rank ${line.rank}`, channel: "comm" };
    let seen = "";
    for (const band of line.bands) {
      if (band.name === seen) continue;
      seen = band.name;
      const main = band.name === "compute";
      if (!main && !roomy) continue;
      g.font = (main ? "600 12px" : "10px") + " system-ui, sans-serif";
      g.fillStyle = main ? theme.text : theme.muted;
      g.fillText(first[band.name], GUTTER - 8, band.y + band.height / 2);
    }
    g.font = "10px system-ui, sans-serif";
    g.fillStyle = theme.muted;
    const peak = digits(line.held.peak);
    if (folded) {
      const [band] = line.bands;
      g.textAlign = "left";
      if (g.measureText(peak).width < 28) g.fillText(peak, 2, band.y + band.height / 2 + 1);
      g.textAlign = "right";
      continue;
    }
    const words = ["held, max " + peak, "max " + peak, peak];
    const fits = words.find((word) => g.measureText(word).width <= GUTTER - 12) || peak;
    g.fillText(fits, GUTTER - 8,
      line.held.y + line.held.height / 2 + 1);
  }
}

function drawHover(g, panel, theme) {
  if (!hovered || hovered.panel !== panel) return;
  const { bar, band, line } = hovered;
  g.strokeStyle = theme.mark;
  g.lineWidth = 2;
  outline(g, panel, band, bar);
  const cause = findCause(panel, bar);
  if (cause) {
    g.setLineDash([4, 3]);
    outline(g, panel, cause.band, cause.bar);
    if (cause.line !== line) {
      g.beginPath();
      g.moveTo(toX(panel, bar[SINCE]), cause.band.y + cause.band.height / 2);
      g.lineTo(toX(panel, bar[START]), band.y + band.height / 2);
      g.stroke();
    }
    g.setLineDash([]);
  }
  g.lineWidth = 1;
}

function outline(g, panel, band, bar) {
  const x = toX(panel, bar[START]);
  g.strokeRect(x, band.y, Math.max(2, toX(panel, bar[END]) - x - 1), band.height);
}

function findCause(panel, bar) {
  const line = panel.lines[bar[WAIT_RANK]];
  if (!bar[WAIT] || !line) return null;
  for (const band of line.bands)
    for (const other of band.bars)
      if (label(other) === bar[WAIT]) return { line, band, bar: other };
  return null;
}
