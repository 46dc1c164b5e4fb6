// The compact view of sweep.html: low rows without the curves of memory, so that many jobs fit on
// one screen. The drawing is in timeline.js; here its rows only get other places.

// A kind that has neither colour nor name yet must not leave the page empty.
for (const kind of DATA.kinds) {
  COLOURS[kind] ??= [348, 45];
  WORDS[kind] ??= "";
  NUMBERS[kind] ??= "microbatch";
}

const COMPACT = { bar: 15, channel: 5, gap: 4, axis: 22 };
const OUTSIDE = -100; // of the canvas: what stands there is neither seen nor hit

const roomy = panels.map((panel) => ({
  bottom: panel.bottom, height: panel.height,
  lines: panel.lines.map((line) => ({
    bands: line.bands.map(({ y, height }) => ({ y, height })),
    held: { y: line.held.y, height: line.held.height },
  })),
}));

function arrange(panel, places) {
  panel.lines.forEach((line, rank) => {
    line.bands.forEach((band, index) => Object.assign(band, places.lines[rank].bands[index]));
    Object.assign(line.held, places.lines[rank].held);
  });
  panel.bottom = places.bottom;
  panel.height = places.height;
  panel.canvas.style.height = panel.height + "px";
}

function compactPlaces(panel, last) {
  let y = TOP;
  const lines = panel.lines.map((line) => {
    const bands = line.bands.map((band) => {
      const lanes = line.bands.filter((other) => other.name === band.name).length;
      const whole = band.name === "compute" ? COMPACT.bar : COMPACT.channel;
      const height = Math.max(4, Math.floor(whole / lanes));
      const place = { y, height };
      y += height + 1;
      return place;
    });
    y += COMPACT.gap - 1;
    return { bands, held: { y: OUTSIDE, height: 0 } };
  });
  const bottom = y - COMPACT.gap + 3;
  return { lines, bottom, height: bottom + (last ? AXIS : COMPACT.axis) };
}

const button = document.getElementById("memory");
let compact = false;

function setCompact(value) {
  compact = value;
  panels.forEach((panel, index) => arrange(
    panel, compact ? compactPlaces(panel, index === panels.length - 1) : roomy[index]));
  button.textContent = compact ? "show memory over time" : "hide memory over time";
  redraw();
}

button.addEventListener("click", () => setCompact(!compact));
setCompact(panels.reduce((sum, panel) => sum + panel.lines.length, 0) > 16);
