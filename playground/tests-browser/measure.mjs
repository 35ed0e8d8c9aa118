/**
 * Print how fast the page is on this machine: node tests-browser/measure.mjs
 *
 * Tasks of the interface's thread are timed twice: on the clock, as a reader waits, and by the thread's own
 * processor time, which does not depend on what else the machine does.
 */

import { launch, move, open, panel, serve, show, texts, until } from "./browser.mjs";

const server = await serve();
const browser = await launch();
const categories = ["toplevel", "disabled-by-default-devtools.timeline", "blink.user_timing"];
const rows = [];

/** The longest task of the interface's thread: [milliseconds, milliseconds of processor time]. */
function longest(trace) {
  const { traceEvents } = JSON.parse(trace);
  const main = traceEvents.filter(({ name, args }) => name === "thread_name" && args.name === "CrRendererMain");
  const tasks = traceEvents.filter(
    ({ ph, name, pid, tid }) => ph === "X" && /RunTask/.test(name) && main.some((each) => each.pid === pid && each.tid === tid),
  );
  const most = (key) => Math.round(Math.max(0, ...tasks.map((task) => task[key] ?? 0)) / 1000);
  return `${most("dur")} (${most("tdur")})`;
}

for (const model of ["astra_alpha", "astra_beta", "elman_alpha"]) {
  const row = { model };
  const page = await open(browser, server.address, `model=${model}`, {
    prepare: async (page) => {
      await browser.startTracing(page, { categories });
      await page.addInitScript(() => {
        const timer = setInterval(() => {
          if ((document.querySelector("#writers pre")?.textContent.length ?? 0) <= "ROMEO: ".length) return;
          window.first = performance.now();
          clearInterval(timer);
        });
      });
    },
  });
  await until(page, () => window.first);
  row["first text, ms"] = Math.round(await page.evaluate(() => window.first));
  await until(page, () => document.querySelectorAll(".curve .point").length === 9);
  row["opening"] = longest(await browser.stopTracing());

  const timed = async (name, use) => {
    await browser.startTracing(page, { categories });
    await use();
    await page.waitForTimeout(500);
    row[name] = longest(await browser.stopTracing());
  };

  await timed("writing fast", async () => {
    await panel(page, "writers").getByLabel("Fast").check();
    await panel(page, "writers").getByRole("button", { name: "Start again" }).click();
    await page.waitForTimeout(300);
    await texts(page);
  });
  const rate = await panel(page, "writers").locator("> .small").textContent();
  row["characters/s, each side"] = +rate.match(/([\d,]+) per/)[1].replace(",", "");

  await timed("pasting 1 MB", async () => {
    await show(page, "surprise");
    await page.evaluate(() => navigator.clipboard.writeText("To be, or not to be: that is the question:\n".repeat(25000)));
    const field = panel(page, "surprise").getByLabel("Text", { exact: true });
    await field.focus();
    await page.keyboard.press("ControlOrMeta+A");
    const times = page.evaluate(
      () =>
        new Promise((done) => {
          const times = [];
          const began = performance.now();
          let stale = false;
          const timer = setInterval(() => {
            const busy = document.querySelector("#surprise").ariaBusy === "true";
            stale ||= busy;
            if (stale && !busy && !times.length) times.push(performance.now() - began);
            if (times.length && document.querySelectorAll(".curve .point").length === 9) {
              clearInterval(timer);
              done([...times, performance.now() - began].map(Math.round));
            }
          }, 2);
        }),
    );
    await page.keyboard.press("ControlOrMeta+V");
    [row["means, ms"], row["curve, ms"]] = await times;
  });
  await timed("the slider", async () => {
    await move(page, "Home");
    await move(page, "ArrowRight", 8);
  });
  await timed("inside", async () => {
    await show(page, "inside");
    for (const fold of await panel(page, "inside").locator("summary").all()) await fold.click();
    await panel(page, "inside").getByRole("application").waitFor();
    for (let i = 0; i < 5; i++) await panel(page, "inside").locator(".units input").nth(i).click();
    await panel(page, "inside").getByRole("application").hover({ position: { x: 300, y: 100 } });
  });
  await timed("reach", async () => {
    await show(page, "reach");
    await panel(page, "reach").locator(".letters").first().focus();
    await page.keyboard.press("End");
    for (let i = 0; i < 20; i++) await page.keyboard.press("ArrowLeft");
    await panel(page, "reach").locator(".letters").first().hover({ position: { x: 100, y: 100 } });
  });
  rows.push(row);
  await page.context().close();
}
console.log(`${browser.version()}\nThe longest task of each use: milliseconds, and in brackets those of processor time.`);
for (const name of Object.keys(rows[0])) console.log(name.padEnd(26), ...rows.map((row) => String(row[name]).padStart(14)));
await browser.close();
server.stop();
