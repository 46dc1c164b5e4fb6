// Folds the curves of memory away, so that many ranks fit on one screen: timeline.html and
// sweep.html. The drawing is in timeline.js; here its rows only get other places.

// A kind that has neither colour nor name yet must not leave the page empty.
for (const kind of DATA.kinds) {
  COLOURS[kind] ??= [348, 45];
  WORDS[kind] ??= "";
  NUMBERS[kind] ??= "microbatch";
}

// Of a sweep as many jobs as possible are to be seen at once; of one or two timelines the labels,
// and all of 32 ranks on one screen.
const tall = panels.some((panel) => panel.data.channel && panel.lines.length > 16);
const COMPACT = panels.length > 2 ? { bar: 15, channel: 5, gap: 4, axis: 22 }
  : tall ? { bar: 16, channel: 5, gap: 4, axis: AXIS } : { bar: 18, channel: 8, gap: 5, axis: AXIS };
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
  let y = panel.top;
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

const fold = document.getElementById("memory");

function setCompact(value) {
  folded = value;
  panels.forEach((panel, index) => arrange(
    panel, folded ? compactPlaces(panel, index === panels.length - 1) : roomy[index]));
  fold.textContent = folded ? "show memory over time" : "hide memory over time";
  fold.setAttribute("aria-expanded", String(!folded));
  redraw();
}

fold.addEventListener("click", () => setCompact(!folded));
setCompact(panels.reduce((sum, panel) => sum + panel.lines.length, 0) > 16);
