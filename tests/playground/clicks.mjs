// Clicks through the playground in headless Chromium: `node clicks.mjs PLAN`. PLAN is JSON written by
// clicks.py: the address of the site, what mode=simulate says of each schedule, and where
// screenshots go. Prints one line per check; the first that fails ends it with exit code 1.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const plan = JSON.parse(readFileSync(process.argv[2], "utf8"));
const { chromium } = createRequire(plan.npm + "/")("playwright-core");

const WITHIN = { timeout: 240_000 };
const browser = await chromium.launch({ executablePath: plan.chromium, args: ["--no-sandbox"] });
const complaints = [];
let page;

async function open(hash = "", options = {}) {
  if (page) await page.context().close();
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  page = await context.newPage();
  page.on("console", (line) => { if (line.type() === "error") complaints.push(line.text()); });
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("dialog", (dialog) => { complaints.push(`dialog: ${dialog.message()}`); dialog.dismiss(); });
  page.on("request", (request) => {
    const url = new URL(request.url());
    if (url.protocol.startsWith("http") && url.origin !== plan.origin)
      complaints.push(`fetched from elsewhere: ${url}`);
  });
  const begin = Date.now();
  await page.goto(plan.origin + "/playground.html" + hash);
  return begin;
}

// What the page shows once it has answered exactly this question.
async function answered(words) {
  await page.waitForFunction(
    (want) => window.playgroundAnswer && want.every((word) => window.playgroundAnswer.words.includes(word)),
    words, WITHIN);
  return page.evaluate(() => window.playgroundAnswer.answer);
}

const field = (name) => page.locator(`#play [name="${name}"]`);
const picture = () => page.locator("#play iframe:not(.next)");
const frame = () => page.frameLocator("#play iframe:not(.next)");
const preset = (name) => page.locator("#play .presets button", { hasText: name }).click();
const error = () => page.locator("#play pre.error");
const shot = (name) => page.screenshot({ path: `${plan.pictures}/${name}.png`, fullPage: true });
const close = (a, b) => a === b || Math.abs(a - b) <= 1e-9 * Math.max(Math.abs(a), Math.abs(b));

function same(found, wanted, where) {
  if (typeof wanted === "number") assert.ok(close(found, wanted), `${where}: ${found}, not ${wanted}`);
  else if (wanted !== null && typeof wanted === "object") {
    assert.deepEqual(Object.keys(found), Object.keys(wanted), where);
    for (const key of Object.keys(wanted)) same(found[key], wanted[key], `${where}.${key}`);
  } else assert.equal(found, wanted, where);
}

const checks = {
  async "the first picture comes at once, and Python after it"() {
    const begin = await open();
    await picture().waitFor();
    const seen = Date.now() - begin;
    await page.locator("#play .status", { hasText: "Python is ready" }).waitFor(WITHIN);
    await shot("first");
    return `picture after ${seen} ms, Python after ${Date.now() - begin} ms`;
  },

  async "every schedule has the figures of mode=simulate"() {
    for (const [name, wanted] of Object.entries(plan.schedules)) {
      await field("schedule").selectOption(name);
      const { result } = await answered([`schedule=${name}`]);
      for (const key of plan.figures) same(result[key], wanted[key], `${name}: ${key}`);
      await frame().locator("h1", { hasText: new RegExp(`^${name} `) }).waitFor();
      await frame().locator(".figures", { hasText: wanted.shown }).waitFor();
    }
    return `${Object.keys(plan.schedules).length} schedules`;
  },

  async "costs that are typed move the picture, per stage as well"() {
    await preset("1F1B");
    await field("costs.forward").fill("[1,1,3,1]");
    const { result } = await answered(["costs.forward=[1,1,3,1]"]);
    assert.ok(result.makespan > 33, `makespan ${result.makespan}`);
    await shot("uneven");
  },

  async "a model on a machine has bytes per rank"() {
    await preset("Llama 2 7B");
    const { result } = await answered(["model=llama2_7b"]);
    same(result.makespan, plan.llama.makespan, "makespan");
    same(result.peak_memory_bytes, plan.llama.peak_memory_bytes, "memory");
    await frame().locator(".memory .row").nth(7).waitFor();
    await shot("llama");
  },

  async "a deadlock is shown with its grid"() {
    await preset("a deadlock");
    const answer = await answered(["schedule=custom"]);
    assert.match(answer.error, /never begins/);
    await error().filter({ hasText: "my.csv, line 1, column 2: 0B0 on rank 0 never begins" }).waitFor();
    await shot("deadlock");
    await field("csv").fill("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    await error().waitFor({ state: "hidden", ...WITHIN });
  },

  async "a hostile CSV is text"() {
    await preset("a deadlock");
    await field("csv").fill('0F0,<img src=x onerror=alert(1)>\n</textarea><script>alert(2)</script>');
    await error().filter({ hasText: "'<img src=x onerror=alert(1)>' is not an instruction" }).waitFor(WITHIN);
    assert.equal(await page.locator("#play img, #play script").count(), 0);
    await shot("hostile");
  },

  async "a CSV of a megabyte is refused by its size, and no link is made of it"() {
    await preset("a deadlock");
    await field("csv").fill("0F0,".repeat(250_000));
    await error().filter({ hasText: "has 250,000 forwards, and this page takes at most" }).waitFor(WITHIN);
    await page.locator("#play button", { hasText: "copy link" }).click();
    await page.locator("#play .status", { hasText: "A link with this CSV would have" }).waitFor();
  },

  async "a hostile link is text"() {
    const evil = "<img src=x onerror=alert(3)>";
    const pairs = { schedule: evil, pp: evil, "costs.forward": evil, more: `${evil} __proto__.x=1`, csv: evil };
    await open("#" + new URLSearchParams({ ...pairs, __proto__x: "1", constructor: "1" }));
    await error().filter({ hasText: "<img: expected key=value" }).waitFor(WITHIN);
    for (const more of ["schedule.path=os:system", "model=class model.path=os:system", "__proto__.x=1", "mode=train"]) {
      const hash = "#" + new URLSearchParams({ schedule: "1f1b", pp: "2", costs: "uniform", more });
      await page.evaluate((link) => { location.hash = link; }, hash);
      await page.waitForFunction((want) => window.playgroundAnswer.words.join(" ").endsWith(want), more, WITHIN);
      await error().filter({ hasText: /Leave mode out|runs no code|is not a key/ }).waitFor(WITHIN);
    }
    assert.equal(await page.locator("#play img").count(), 0);
  },

  async "an impossible number is refused in the project's words"() {
    await preset("zero bubble");
    await field("pp").fill("0");
    await error().filter({ hasText: "pp=0: expected a whole number, at least 1. Try pp=" }).waitFor(WITHIN);
    await field("pp").fill("1e99");
    await error().filter({ hasText: "pp=" }).waitFor(WITHIN);
    await field("pp").fill("4");
    await error().waitFor({ state: "hidden", ...WITHIN });
  },

  async "64 ranks x 512 microbatches: the limit is told and the page goes on"() {
    await field("schedule").selectOption("1f1b");
    await field("pp").fill("64");
    await field("num_microbatches").fill("512");
    await error().filter({ hasText: "32,768 forwards, and this page takes at most 16,384" }).waitFor(WITHIN);
    await shot("limit");
    await field("num_microbatches").fill("256");
    await page.locator("#play button", { hasText: "stop" }).waitFor(WITHIN);
    // The page's own thread is free while the worker compiles 16,384 forwards.
    const gap = await page.evaluate(() => new Promise((done) => {
      let last = performance.now(), worst = 0, frames = 0;
      const tick = (now) => {
        worst = Math.max(worst, now - last);
        last = now;
        if ((frames += 1) < 60) requestAnimationFrame(tick);
        else done(Math.round(worst));
      };
      requestAnimationFrame(tick);
    }));
    await page.locator("#play button", { hasText: "stop" }).click();
    await field("pp").fill("4");
    await field("num_microbatches").fill("8");
    const { result } = await answered(["schedule=1f1b", "pp=4", "num_microbatches=8"]);
    assert.equal(result.pp, 4);
    return `longest frame ${gap} ms while it compiled`;
  },

  async "a link restores the page, and commands are copied"() {
    await preset("Fold");
    await answered(["schedule=foldx_fifo", "costs.grad_reduce=6"]);
    await page.locator("#play button", { hasText: "copy link" }).click();
    const link = await page.evaluate(() => navigator.clipboard.readText());
    const before = await page.evaluate(() => window.playgroundAnswer.answer);
    await page.locator("#play .commands button").first().click();
    await page.locator("#play .commands button", { hasText: "copied" }).waitFor();
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), before.train);
    await open(new URL(link).hash);
    const after = await answered(["schedule=foldx_fifo", "costs.grad_reduce=6"]);
    same(after.result.makespan, before.result.makespan, "makespan");
    assert.equal(await field("costs.grad_reduce").inputValue(), "6");
    return before.train;
  },

  async "an order is edited as CSV, and restored by its link"() {
    await page.locator("#play button", { hasText: "edit as CSV" }).click();
    const { result } = await answered(["schedule=custom"]);
    assert.equal(result.num_microbatches, 8);
    const hash = await page.evaluate(() => location.hash);
    await open(hash.replace("pp=4", "pp=two"));
    await error().filter({ hasText: "pp=two: expected a whole number" }).waitFor(WITHIN);
    await open(hash);
    same((await answered(["schedule=custom"])).result.makespan, result.makespan, "makespan");
  },

  async "a phone's width has no sideways scrolling"() {
    await open("", { viewport: { width: 360, height: 740 }, isMobile: true, hasTouch: true });
    await picture().waitFor();
    await page.waitForTimeout(500);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    assert.ok(wide <= 0, `${wide} pixels too wide`);
    await shot("phone");
    await picture().scrollIntoViewIfNeeded();
    await page.waitForTimeout(500);
    await page.screenshot({ path: `${plan.pictures}/phone_picture.png` });
  },

  async "dark mode is dark, in the picture as well"() {
    await open("", { colorScheme: "dark" });
    await picture().waitFor();
    await page.waitForTimeout(500);
    const ground = await frame().locator("body").evaluate((body) => getComputedStyle(body).backgroundColor);
    assert.ok(ground.match(/\d+/g).every((part) => Number(part) < 60), ground);
    await shot("dark");
  },

  async "dark by the site's own switch on a light system"() {
    await open("", { colorScheme: "light" });
    await picture().waitFor();
    for (let click = 0; click < 3; click += 1) {
      if (await page.evaluate(() => document.body.dataset.mdColorScheme === "slate")) break;
      await page.locator("label[for^=__palette]:visible").click();
    }
    await page.waitForTimeout(500);
    const ground = await frame().locator("body").evaluate((body) => getComputedStyle(body).backgroundColor);
    assert.ok(ground.match(/\d+/g).every((part) => Number(part) < 60), ground);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  if (plan.only && !name.includes(plan.only)) continue;
  const begin = Date.now();
  try {
    if (!page) await open();
    const note = await check();
    assert.deepEqual(complaints, []);
    console.log(`ok    ${name} (${((Date.now() - begin) / 1000).toFixed(1)} s)${note ? ": " + note : ""}`);
  } catch (problem) {
    failed += 1;
    complaints.length = 0;
    console.log(`FAILED ${name}: ${String(problem.message).slice(0, 1500)}`);
    await shot("failed").catch(() => {});
  }
}
await browser.close();
process.exit(failed ? 1 : 0);
