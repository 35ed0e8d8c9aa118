/** Every panel used by mouse and by keyboard, with the smallest model. */

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { AxeBuilder } from "@axe-core/playwright";
import { ALONE, analysed, figures, launch, move, NARROW, open, openOptions, openPreview, panel, previewed, readout, serve, show, texts, until, WIDE } from "./browser.mjs";

let server, browser, page;
const report = {};

before(async () => {
  server = await serve();
  browser = await launch();
  page = await open(browser, server.address, "model=astra_alpha&written=120");
});

after(async () => {
  await browser?.close();
  server?.stop();
  if (process.env.PLAYGROUND_REPORT) writeFileSync(process.env.PLAYGROUND_REPORT, JSON.stringify(report));
});

test("the two writers", async (t) => {
  const writers = panel(page, "writers");
  const [kept, lost] = await texts(page);

  await t.test("they continue the prompt, and differ", () => {
    for (const text of [kept, lost]) assert.match(text, /^ROMEO: [\s\S]{120}$/);
    assert.notEqual(kept, lost);
  });

  await t.test("one character more is written, and the bars follow", async () => {
    const h4 = writers.locator("h4");
    assert.match(await h4.last().textContent(), new RegExp(`^Remembers ${lost.at(-1).replace("\n", "↵").replace(" ", "␣")}, bets on$`));
    await writers.getByRole("button", { name: "One more character" }).click();
    await until(page, () => document.querySelector("#writers pre").textContent.length === 128);
    const next = (await writers.locator("pre").first().textContent()).at(-1).replace("\n", "↵").replace(" ", "␣");
    await until(page, (next) => document.querySelector("#writers h4 q").textContent.endsWith(next), next);
    assert.equal((await h4.first().textContent()).at(-"X, bets on".length), next);
    await move(page, "End"); // paused: the right one would now keep what it reads
    await until(page, () => document.querySelector("#writers .column:last-child h4").textContent.length > "Remembers X, bets on".length);
    await move(page, "Home");
  });

  await t.test("the code beside them resets the state as the slider does", async () => {
    const code = (label) => writers.getByRole("group", { name: label }).textContent();
    const shown = async (name) => [await code(`${name}: the state is carried on`), await code(`${name}: the state is reset in the loop`)];
    const all = async () => ({ torch: await shown("PyTorch"), jax: await shown("JAX") });
    report.code = { 1: await all() };
    report.unnamed = await code("PyTorch: the state is not kept");
    await move(page, "ArrowRight", 2);
    report.code[4] = await all();
    await move(page, "End");
    report.code.never = await all();
    await move(page, "Home");
  });

  await t.test("again writes the same again", async () => {
    await writers.getByLabel("Fast").check();
    await writers.getByRole("button", { name: "Start again" }).click();
    const again = await texts(page);
    assert.equal(again[0].length, 2007);
    assert(again[0].startsWith(kept) && again[1].startsWith(lost));
    const costs = await figures(page, "writers");
    report.written = again.map((text, side) => [text, costs[side]]);
    assert(costs[0] < 1.7 && costs[1] > costs[0] + 0.5, String(costs));
  });

  await t.test("never losing it, the right writes what the left writes", async () => {
    await move(page, "End");
    await writers.getByRole("button", { name: "Start again" }).press("Enter");
    const [left, right] = await texts(page);
    assert(left.startsWith(kept));
    assert.equal(right, left);
  });

  await t.test("the slider acts while they write, and a link shows the same", async () => {
    await writers.getByLabel("Fast").uncheck();
    await writers.getByRole("button", { name: "Start again" }).click();
    await until(page, () => Math.abs(document.querySelector("#writers pre").textContent.length - 50) < 30);
    await move(page, "Home");
    await until(page, () => document.querySelector("#writers pre").textContent.length > 80);
    await writers.getByRole("button", { name: "Pause" }).click();
    await until(page, () => {
      const written = new URLSearchParams(location.hash.slice(1)).get("written");
      return +written === document.querySelector("#writers pre").textContent.length - "ROMEO: ".length;
    });
    const [left, right] = await texts(page);
    const same = [...left].findIndex((character, i) => character !== right[i]);
    assert(same > 10 && kept.startsWith(left.slice(0, 60)), `${same}: ${right}`);
    assert.match(page.url(), /every=never%2C\d+%3A1&/);
    const moved = writers.locator("mark");
    assert.equal(await moved.getAttribute("data-move"), "before every character");
    const [, from] = /never%2C(\d+)/.exec(page.url());
    assert.equal(await moved.evaluate((mark) => mark.previousSibling.textContent.length), +from);
    await writers.getByText("surprise since the move").first().waitFor();
    report.since = { texts: [left, right], costs: await figures(page, "writers"), from: "ROMEO: ".length + +from };
    const copy = await open(browser, server.address, new URL(page.url()).hash.slice(1));
    assert.deepEqual(await texts(copy), [left, right]);
    assert.equal(await panel(copy, "writers").locator("mark").count(), 1);
    assert.deepEqual(copy.problems, []);
    await copy.context().close();
  });

  await t.test("temperature, top-k, seed and prompt start anew", async () => {
    await writers.getByLabel("Fast").check();
    await openOptions(page);
    await writers.getByLabel("Temperature").focus();
    await page.keyboard.press("Home");
    await writers.getByLabel("Top-k").selectOption("5");
    await writers.getByLabel("Seed").fill("7");
    await writers.getByLabel("Prompt").fill("JULIET: é");
    await until(page, () => document.querySelector("#writers pre").textContent.startsWith("JULIET: é"));
    await writers.getByText("left out here: “é”").waitFor();
    await until(page, () => /enough/.test(document.querySelector("#writers").textContent));
    const [greedy, stateless] = await texts(page);
    assert.match(stateless.slice(40), /(the ){8}/); // as the study shows
    assert.doesNotMatch(greedy.slice(0, 100), /(the ){3}/);
    await writers.getByLabel("Prompt").fill("");
    await writers.getByText("start from a line break").waitFor();
  });
});

test("a reset is marked where what is remembered begins", async () => {
  const page = await open(browser, server.address, "model=elman_alpha&every=8&written=100");
  await texts(page);
  const remembered = panel(page, "writers").locator("h4 q").last();
  await remembered.waitFor();
  const lines = panel(page, "writers").locator(".written i");
  const since = await lines.last().evaluate((line) => line.nextSibling.textContent);
  assert.equal(await remembered.textContent(), since.replaceAll(" ", "␣").replaceAll("\n", "↵"));
  assert.equal(await lines.count(), 13); // 1 + 12 · 8 = 97
  await page.getByText("A thin line in the text is a reset").waitFor();
  await page.context().close();
});

test("surprise", async (t) => {
  const surprise = panel(page, "surprise");
  await show(page, "surprise");
  const [kept, lost] = await figures(page, "surprise");
  await analysed(page);

  await t.test("its means are those of its curve", async () => {
    const label = await surprise.locator("svg").getAttribute("aria-label");
    const points = Object.fromEntries([...label.matchAll(/(\w+): (\d\.\d+)/g)].map(([, k, nats]) => [k, +nats]));
    assert(Math.abs(points[1] - lost) < 0.006 && Math.abs(points.never - kept) < 0.006);
    assert(lost > points.pairs && kept < points.pairs);
    report.text = await surprise.getByLabel("Text", { exact: true }).inputValue();
    report.means = { never: kept, 1: lost };
  });

  await t.test("on the right, the tint is what the reset adds", async () => {
    const tinted = () => surprise.locator(".letters canvas").last().evaluate((canvas) => {
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(canvas, 0, 0);
      const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
      const found = { red: 0, blue: 0 };
      for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] > 60 && Math.abs(data[i] - data[i + 2]) > 40) found[data[i] > data[i + 2] ? "red" : "blue"]++;
      }
      return found;
    });
    const { red, blue } = await tinted();
    assert(red > 3 * blue && blue > 1000, `${red} ${blue}`);
    await move(page, "End"); // never: nothing is added
    await until(page, () => [...document.querySelectorAll("#surprise .figure")].every((each, _, [first]) => each.textContent === first.textContent));
    assert.deepEqual(await tinted(), { red: 0, blue: 0 });
    await move(page, "Home");
  });

  await t.test("the slider moves along the curve", async () => {
    await move(page, "ArrowRight", 2);
    await surprise.getByRole("heading", { name: "Reset every 4 characters" }).waitFor();
    const [same, less] = await figures(page, "surprise");
    assert(same === kept && less < lost && less > kept);
    report.means[4] = less;
    assert.equal(await surprise.locator(".selected text").textContent(), less.toFixed(2));
    assert.equal(await page.locator(".ticks .here").textContent(), "4");
  });

  await t.test("a point of the curve moves the slider", async () => {
    await surprise.locator(".point .target").nth(5).click();
    await surprise.getByRole("heading", { name: "Reset every 32 characters" }).waitFor();
    assert.equal(await page.getByRole("slider", { name: "Reset the state" }).getAttribute("aria-valuetext"), "every 32 characters");
    await surprise.locator(".point .target").nth(2).click();
  });

  await t.test("each character has its number, by mouse and by keyboard", async () => {
    const letters = surprise.locator(".letters").first();
    await letters.hover({ position: { x: 30, y: 24 } });
    const pointed = await readout(surprise);
    assert.match(pointed, /^“[RO]” costs \d+\.\d\d nats \(.*\) with the state, \d+\.\d\d nats/);
    await letters.focus();
    await page.keyboard.press("Home");
    assert.match(await readout(surprise), /^“P” is the first character/);
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("ArrowRight");
    assert.match(await readout(surprise), /^“e” costs/); // "PROSPERO:\nBe collected"
    assert.equal(await letters.getAttribute("aria-valuenow"), "12");
    assert.equal(await letters.getAttribute("aria-valuetext"), await readout(surprise));
    await page.keyboard.press("End");
    assert.match(await readout(surprise), /^A line break costs/);
  });

  await t.test("the bars show what the model bet on, and mark the character that came", async () => {
    const letters = surprise.locator(".letters").first();
    await letters.focus();
    await page.keyboard.press("Home");
    await until(page, () => document.querySelectorAll("#surprise .glyph").length === 0); // nothing is before it
    for (let i = 0; i < 19; i++) await page.keyboard.press("ArrowRight"); // "PROSPERO:\nBe collec"
    await until(page, () => document.querySelector("#surprise h4").textContent === "Remembers …O:↵Be␣collec, bets on");
    assert.equal(await surprise.locator("h4").last().textContent(), "Remembers lec, bets on"); // reset after "Be col"
    report.bets = await surprise.locator(".bars").evaluateAll((both) =>
      both.map((each) => [...each.children].map((row) => [row.querySelector(".glyph").textContent, row.lastChild.textContent])));
    assert.deepEqual(await surprise.locator(".came .glyph").allTextContents(), ["t", "t"]);
  });

  await t.test("it says what it leaves out, and when there is nothing", async () => {
    const field = surprise.getByLabel("Text", { exact: true });
    const before = await field.inputValue();
    await field.fill("O Röméo 😀 1");
    await surprise.getByText("left out here: “ö” “é” “😀” “1”").waitFor();
    await field.fill("");
    await surprise.getByText("at least two characters").waitFor();
    await field.fill("😀");
    await surprise.getByText("at least two characters").waitFor();
    await field.fill(before);
    await analysed(page);
    assert.equal((await figures(page, "surprise"))[0], kept);
  });
});

test("inside", async (t) => {
  const inside = panel(page, "inside");
  await show(page, "inside");
  await inside.locator(".units input").first().waitFor();

  await t.test("at first, it is the one that follows something most closely", async () => {
    const correlations = (await inside.locator(".units small").allTextContents()).map((text) => +text.slice(1, -1).replace("−", "-"));
    const closest = correlations.map(Math.abs).reduce((a, b) => Math.max(a, b));
    assert.equal(await inside.locator(".units .chosen small").first().textContent(), `(−${closest.toFixed(2)})`);
  });

  await t.test("a unit is chosen from the list, by mouse, by keyboard, or by its number", async () => {
    const units = inside.locator(".units input");
    await units.nth(4).click();
    await page.keyboard.press("ArrowRight");
    const unit = units.nth(5);
    const number = (await inside.locator(".units label").nth(5).textContent()).split(" ")[0];
    assert.equal(await unit.isChecked(), true);
    assert.equal(await unit.evaluate((each) => each === document.activeElement), true);
    assert.equal(await inside.getByLabel("Unit, 0 to 127").inputValue(), number);
    await inside.getByLabel("Unit, 0 to 127").fill("100");
    assert.match(await readout(inside), /unit 100 is −?\d\.\d\d\.$/);
  });

  await t.test("the text shows the unit of the character that is looked at", async () => {
    const letters = inside.locator(".letters");
    await letters.focus();
    await page.keyboard.press("Home");
    const first = await readout(inside);
    assert.match(first, /^After “P”, unit 100 is/);
    await letters.hover({ position: { x: 50, y: 24 } });
    assert.notEqual(await readout(inside), first);
  });

  await t.test("one step of the cell is played", async () => {
    const letters = inside.locator(".letters");
    await letters.focus();
    await page.keyboard.press("Home");
    for (let i = 0; i < 2; i++) await page.keyboard.press("ArrowRight");
    await inside.getByText("One step of the cell", { exact: true }).click();
    await inside.getByText("The model reads “O”: unit 100 goes from").waitFor();
    const cell = inside.locator(".cell");
    const animated = () => cell.locator("li").last().evaluate((row) => getComputedStyle(row).animationName);
    assert.equal(await animated(), "none");
    await inside.getByRole("button", { name: "Read the next character" }).press("Enter");
    await inside.getByText("The model reads “S”: unit 100 goes from").waitFor();
    assert.equal(await animated(), "come");
    await page.emulateMedia({ reducedMotion: "reduce" });
    assert.equal(await animated(), "none");
    await page.emulateMedia({ reducedMotion: "no-preference" });
    report.cell = await cell.locator("b").allTextContents();
  });

  await t.test("the heat map shows the 20 slowest and the 20 quickest units at any character", async () => {
    const map = inside.getByRole("application");
    await inside.getByText("The state over time", { exact: true }).press("Enter");
    const shown = async () => +(/unit (\d+) is/.exec(await readout(inside))[1]);
    await map.click({ position: { x: 9, y: 1 } });
    assert.match(await readout(inside), /^After “O”/); // PRO
    const slowest = await shown();
    await map.focus();
    await page.keyboard.press("ArrowDown");
    const second = await shown();
    assert.notEqual(second, slowest);
    await page.keyboard.press("ArrowUp");
    await page.keyboard.press("ArrowUp");
    await page.keyboard.press("ArrowLeft");
    assert.equal(await shown(), slowest);
    assert.match(await readout(inside), /^After “R”/);
    await map.hover({ position: { x: 1, y: 12 } });
    assert.match(await inside.locator(".readout").last().textContent(), new RegExp(`^After “P”, unit ${second} is`));
    assert.equal(await shown(), slowest);
    const units = new Set([slowest]);
    for (let i = 0; i < 45; i++) {
      await page.keyboard.press("ArrowDown");
      units.add(await shown());
    }
    assert.equal(units.size, 40);
    const last = await shown();
    await map.click({ position: { x: 9, y: 326 } });
    assert.equal(await shown(), last);
  });
});

test("reach", async () => {
  const reach = panel(page, "reach");
  await show(page, "reach");
  const letters = reach.locator(".letters").first();
  await letters.focus();
  await page.keyboard.press("Home");
  await reach.getByText("nothing is before it").first().waitFor();
  for (let i = 0; i < 30; i++) await page.keyboard.press("ArrowRight");
  await until(page, () => /^“e” depends/.test(document.querySelector("#reach .readout").textContent));
  await move(page, "Home"); // the bar's slider: reset before every character
  await until(page, () => /last character\.$/.test([...document.querySelectorAll("#reach .readout")].at(-1).textContent));
  const [kept, lost] = await reach.locator(".readout").allTextContents();
  assert.match(kept, /^“e” depends most on a space, 4 characters before it; 90% .* last \d+ characters\.$/);
  assert.match(lost, /^“e” depends most on “r”, just before it/); // "No more"
  await letters.hover({ position: { x: 30, y: 24 } });
  await until(page, () => /^“[RO]” depends/.test(document.querySelector("#reach .readout").textContent));
});

test("the state is copied, and pasted back", async (t) => {
  const state = panel(page, "state");
  const [text, field] = [state.getByLabel("Text", { exact: true }), state.getByLabel(/^State/)];
  const continuation = state.getByRole("group", { name: "Text that follows" });
  await panel(page, "writers").getByLabel("Temperature").fill("0.8");
  await show(page, "state");

  await text.fill("JULIET:\nO Romeo");
  await state.getByRole("button", { name: "Copy the state" }).click();
  await state.getByText("in the clipboard").waitFor();
  for (const length of [115, 215]) {
    await state.getByRole("button", { name: "Write 100 characters" }).click();
    await until(page, (length) => document.querySelector("#state textarea").value.length === length, length);
  }
  const written = (await text.inputValue()).slice(15, 115);

  await t.test("by mouse", async () => {
    const more = (await text.inputValue()).slice(15);
    await text.fill("");
    await state.getByRole("button", { name: "Continue" }).click();
    assert.equal(await continuation.textContent(), written);
    await state.getByRole("button", { name: "Continue" }).click();
    await until(page, () => document.querySelector("#state pre").textContent.length === 200);
    assert.equal(await continuation.textContent(), more);
  });

  await t.test("by keyboard", async () => {
    await field.focus();
    await page.keyboard.press("ControlOrMeta+A");
    await page.keyboard.press("Delete");
    await continuation.waitFor({ state: "detached" });
    await page.keyboard.press("ControlOrMeta+V");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    assert.equal(await continuation.textContent(), written);
  });

  await t.test("what is no state is refused in a sentence", async () => {
    const packed = await field.inputValue();
    for (const [wrong, why] of [["ROMEO", "not a state"], [packed.slice(0, 50), "not all of it"], [packed.replace("A", "B"), "changed"]]) {
      await field.fill(wrong);
      await state.getByRole("button", { name: "Continue" }).click();
      await state.getByText(why).waitFor();
    }
    await field.fill(packed);
    await state.getByRole("button", { name: "Continue" }).click();
    assert.equal(await continuation.textContent(), written);
  });
});

test("Back returns to the panel before", async () => {
  const link = (name) => page.getByRole("navigation").getByRole("link", { name });
  const at = (name) => until(page, (name) => { // just below the bar
    const [panel, bar] = [`#${name}`, ".bar"].map((each) => document.querySelector(each).getBoundingClientRect());
    return panel.top >= bar.bottom && panel.top < bar.bottom + 12;
  }, name);
  await page.emulateMedia({ reducedMotion: "reduce" }); // it jumps
  await link("Surprise").click();
  await at("surprise");
  await link("Reach").click();
  await at("reach");
  await page.goBack();
  await at("surprise");
  await until(page, () => location.hash.includes("panel=surprise"));
  await page.goForward();
  await at("reach");
  await page.emulateMedia({ reducedMotion: "no-preference" });
  await show(page, "state");
});

test("the URL shows the same to somebody else", async () => {
  const shown = async (page) => ({
    texts: await texts(page),
    figures: [await figures(page, "writers"), await figures(page, "surprise")],
    readouts: await page.locator(".readout").allTextContents(),
    fields: await page.locator("input, select, textarea").evaluateAll((fields) => fields.map((each) => each.value)),
    continuation: await panel(page, "state").locator("pre").textContent(),
    panel: new URLSearchParams(new URL(page.url()).hash.slice(1)).get("panel"),
  });
  await until(page, () => {
    const view = new URLSearchParams(location.hash.slice(1)); // follows what is shown after half a second
    const state = document.querySelectorAll("#state textarea")[1].value;
    return view.get("panel") === "state" && view.get("state") === state && view.get("continued") === "100";
  });
  const before = await shown(page);
  const copy = await open(browser, server.address, new URL(page.url()).hash.slice(1));
  await until(copy, () => document.querySelector("#state").getBoundingClientRect().top < innerHeight / 2);
  await analysed(copy); // the panels above have grown
  assert.equal(await panel(copy, "state").evaluate((state) => state.getBoundingClientRect().top < innerHeight / 2), true);
  await show(copy, "inside"); // panels compute when they are near
  await until(copy, (last) => document.querySelector("#inside .readout")?.textContent === last, before.readouts[1]);
  await show(copy, "reach");
  await until(copy, (last) => document.querySelectorAll("#reach .readout")[1]?.textContent === last, before.readouts.at(-1));
  await show(copy, "state");
  await until(copy, (last) => document.querySelectorAll("#writers .figure")[1].textContent.startsWith(last), before.figures[0][1]);
  await panel(copy, "state").locator("pre").waitFor();
  await until(copy, () => location.hash.includes("panel=state"));
  assert.deepEqual(await shown(copy), before);
  assert.deepEqual(copy.problems, []);
  await copy.context().close();
});

test("a view is shared, and a link for a class shows what it says", async () => {
  const page = await open(browser, server.address, "model=elman_alpha&written=20&seed=3");
  await texts(page);
  const share = page.getByRole("button", { name: "Share" });
  const link = async () => {
    await page.getByText("Link copied").waitFor();
    const copied = await page.evaluate(() => navigator.clipboard.readText());
    assert.equal(copied, page.url());
    return new URL(copied).hash;
  };
  await share.press("Enter");
  assert.equal(await link(), "#model=elman_alpha&seed=3&written=20");
  await page.getByText("Link copied").waitFor({ state: "detached" });
  await show(page, "inside"); // far below: what is looked at stays in sight, and in the link
  const scrolled = await page.evaluate(() => scrollY);
  await share.click();
  assert.equal(await link(), "#panel=inside&model=elman_alpha&seed=3&written=20");
  assert.equal(await page.evaluate(() => scrollY), scrolled);
  assert.equal(await page.getByRole("link", { name: "Tutorial", exact: true }).getAttribute("href"), "../tutorials/gru_by_hand/");
  const alone = await open(browser, new URL(ALONE, server.address).href, "model=elman_alpha&written=20");
  await texts(alone);
  assert.deepEqual(await alone.locator("a[href]:not([href^='#'], [href='worksheet.html'])").count(), 0); // no site is around it
  await alone.context().close();
  const links = page.getByRole("region", { name: "Links for a class" }).getByRole("listitem").getByRole("link");
  await page.goto("about:blank");
  await page.goto(`${server.address}#tour=3&model=elman_alpha`); // a question sets the scene
  await page.getByRole("heading", { name: "Question 3 of 5" }).waitFor();
  assert.equal((await texts(page))[1].length, "ROMEO: ".length + 150);
  await links.nth(3).click(); // the state is kept after 150 characters
  await until(page, () => document.querySelector("#writers mark"));
  const [left, right] = await texts(page);
  assert.equal(left.length, "ROMEO: ".length + 350);
  assert.equal(right.length, left.length);
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

/** Wait until what begins with this text has the focus. */
const focused = (page, text) => until(page, (text) => document.activeElement.textContent.startsWith(text), text);

/** Wait until all of these can be seen whole: below the bar, and not behind the tour. */
const seen = (page, all) =>
  until(page, (all) => {
    const box = (each) => each.getBoundingClientRect();
    const [top, card] = [box(document.querySelector(".bar")).bottom, box(document.querySelector(".tour"))];
    const found = [...document.querySelectorAll(all)].map(box);
    return found.length && found.every((each) =>
      each.top >= top - 1 && each.bottom <= innerHeight && (each.right <= card.left || each.bottom <= card.top));
  }, all);

for (const [size, viewport] of Object.entries({ "a laptop": { width: 1280, height: 800 }, "a telephone": NARROW }))
test(`on ${size}, the tour asks for a prediction, and then shows`, async () => {
  const page = await open(browser, server.address, "model=elman_alpha", { viewport });
  await analysed(page);
  const tour = page.getByRole("complementary", { name: "Guided tour" });
  const [options, button] = [tour.getByRole("radio"), (name) => tour.getByRole("button", { name, exact: true })];
  await page.evaluate(() => {
    window.written = []; // characters that can be seen when an answer comes
    let answered = false;
    new MutationObserver(() => {
      const now = /You were right\.|It is “/.test(document.querySelector(".tour")?.textContent);
      if (now && !answered) window.written.push(document.querySelector("#writers pre").textContent.length - "ROMEO: ".length);
      answered = now;
    }).observe(document.body, { childList: true, characterData: true, subtree: true });
  });
  await page.getByRole("button", { name: "Take the tour" }).click();
  const answers = [0, 1, 0, 2, 1];
  const WRITERS = "#writers .written, #writers .controls button";
  for (const [i, answer] of answers.entries()) {
    const title = tour.getByRole("heading", { name: `Question ${i + 1} of 5` });
    await title.waitFor();
    await focused(page, `Question ${i + 1} of 5`);
    assert.equal(await button("Show me").count(), 0);
    if (i < 3) await seen(page, size === "a laptop" ? `${WRITERS}, #writers .bars` : WRITERS);
    await options.nth((answer + 1) % 3).click();
    await page.keyboard.press(["ArrowUp", "ArrowLeft"][i % 2]); // another one, until the answer shows
    assert.equal(await options.nth(answer).isChecked(), true);
    if (i === 0) {
      await move(page, "End");
      await tour.getByText("press “Start again”").waitFor(); // the slider alone does not show it
      await panel(page, "writers").getByRole("button", { name: "Start again" }).press("Enter"); // a click would scroll
    } else await button("Show me").press("Enter");
    await until(page, () => document.querySelectorAll(".tour :disabled").length >= 3); // now it holds
    if (i === 1) {
      await tour.getByRole("button", { name: /^Writing … [1-9]\d? of 100$/ }).press("Enter"); // does not start over
      await focused(page, "Writing … ");
    }
    await tour.getByText("You were right.").waitFor();
    await focused(page, i > 0 ? "You were right." : "Start again");
    await seen(page, [WRITERS, WRITERS, WRITERS, ".curve", "#code .code"][i]);
    await until(page, () => document.querySelector(".tour .foot").getBoundingClientRect().bottom <= innerHeight);
    if (i < 3) { // the writers stop, so that what the answer speaks of stays in sight
      const [{ length }] = await texts(page);
      assert(length - "ROMEO: ".length <= [120, 120, 270][i], String(length));
    }
    if (i === 2) {
      const right = panel(page, "writers").locator(".written").last();
      assert.equal(await right.locator("mark").evaluate((mark) => mark.previousSibling.textContent.length), 150);
    }
    if (i === 3) assert.match(await tour.textContent(), /saves (\d\.\d\d) nats .*, which is 9\d%/);
    if (i === 1) { // after the answer
      await page.keyboard.press("Tab");
      await page.keyboard.press("Tab");
      await focused(page, "Next");
    }
    if (i < 4) await button("Next").press("Enter");
  }
  const written = await page.evaluate(() => window.written);
  assert.equal(written.length, 5);
  assert(written[0] >= 100 && written[1] >= 100 && written[2] >= 250, String(written)); // of earlier texts, there were 2,000
  const { violations } = await new AxeBuilder({ page }).include(".tour").analyze();
  assert.deepEqual(violations.map(({ id }) => id), []);
  await until(page, () => location.hash.includes("tour=5"));
  await page.keyboard.press("Escape");
  await tour.waitFor({ state: "detached" });
  await focused(page, "Take the tour");
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test("the tour keeps its answers when one goes back", async () => {
  const page = await open(browser, server.address, "model=elman_alpha&tour=2");
  const tour = page.locator(".tour");
  const [option, button] = [(i) => tour.locator(".choices label").nth(i), (name) => tour.getByRole("button", { name, exact: true })];
  const right = panel(page, "writers").locator(".written").last();
  await option(0).click();
  await button("Show me").click();
  await tour.getByText("It is “Bits of words").waitFor();
  await texts(page);
  const first = await right.innerHTML();
  await button("Next").click();
  await tour.getByText("Predict first.").waitFor();
  assert.deepEqual(await tour.locator(".choices b").allTextContents(), []);
  await option(2).click();
  await button("Back").click();
  await tour.getByText("It is “Bits of words").waitFor();
  assert.deepEqual(await tour.locator(".choices b").allTextContents(), ["✗", "✓"]);
  assert.equal(await option(0).getByRole("radio").isChecked(), true);
  await until(page, (first) => document.querySelectorAll("#writers .written")[1].innerHTML === first, first); // it stops there, too
  await texts(page);
  await button("Next").click();
  assert.equal(await option(2).getByRole("radio").isChecked(), true);
  assert.equal(await button("Show me").count(), 1);
  await button("Close").click();
  await page.getByRole("button", { name: "Take the tour" }).click();
  await button("Next").click();
  await tour.getByText("Predict first.").waitFor();
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test("the tour goes on after a model could not be loaded", async () => {
  const gone = (route) => route.abort();
  const page = await open(browser, server.address, "model=elman_alpha&tour=3", { prepare: (page) => page.context().route("**/*.safetensors", gone) });
  const tour = page.locator(".tour");
  const [options, showMe] = [tour.getByRole("radio"), tour.getByRole("button", { name: "Show me" })];
  const failed = page.getByRole("alert").getByText("could not be loaded");
  await failed.waitFor();
  await options.first().click();
  await showMe.click();
  await failed.waitFor();
  await page.context().unroute("**/*.safetensors", gone);
  await showMe.click();
  await tour.getByText("You were right.").waitFor();
  assert.equal(await panel(page, "writers").locator("mark").evaluate((mark) => mark.previousSibling.textContent.length), 150);
  await page.context().route("**/*.safetensors", gone);
  await page.reload();
  await failed.waitFor();
  await tour.getByRole("button", { name: "Next" }).click();
  await options.last().click();
  await showMe.click();
  await seen(page, "[role=alert] p"); // and not the panel that it asks about, where nothing is
  await page.context().unroute("**/*.safetensors", gone);
  await showMe.click();
  await tour.getByText("You were right.").waitFor();
  await seen(page, ".curve");
  await page.context().close();
});

test("the tour shows the third answer after any text", async () => {
  const page = await open(browser, server.address, "model=elman_alpha&tour=3");
  const tour = page.locator(".tour");
  await texts(page);
  await tour.getByRole("radio").last().click();
  await move(page, "End");
  await panel(page, "writers").getByRole("button", { name: "Start again" }).click(); // and the babble is gone
  await until(page, () => document.querySelector("#writers pre").textContent.length > 20);
  await tour.getByRole("button", { name: "Show me" }).click();
  await tour.getByText("It is “Within a word or two”.").waitFor();
  const mark = panel(page, "writers").locator("mark");
  assert.equal(await mark.evaluate((mark) => mark.previousSibling.textContent.length), 150);
  assert.equal(await mark.getAttribute("data-move"), "never");
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

// The numbers are jaxgru's
for (const [text, said] of [
  ["zqxjkvbz".repeat(20), "In Shakespeare, it is “More than nine tenths”. On this text, the state does not help"],
  ["s divisa in partes tres, quarum unam incolunt Belgae, aliam Aquitani, tertiam qu", "On this text, it is less. Never reset, the model saves 0.38 nats per character (3.19 to 2.81); with a reset every 32, 0.30, which is 79%."],
  ["ESTION WHETHER TIS NOBLER IN THE MIND TO SUFFER THE SLINGS AND ARROWS OF OUTRAGE", "On this text, nothing is left. Never reset, the model saves 0.02 nats per character (3.66 to 3.64); with a reset every 32, it costs 3.67."],
  ["the cat sat on the mat", "You were right. Never reset, the model saves 0.26 nats per character (2.09 to 1.83); with a reset every 32, 0.26, which is 100%."],
])
test(`the tour's fourth answer is of the reader's text: ${text}`, async () => {
  const page = await open(browser, server.address, `model=elman_alpha&tour=4&text=${text}`);
  const tour = page.locator(".tour");
  await analysed(page);
  await tour.getByRole("radio").last().click();
  await tour.getByRole("button", { name: "Show me" }).click();
  await tour.getByText(said).waitFor();
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

for (const [size, [hash, viewport]] of Object.entries({ "a laptop": ["", WIDE], "a telephone": ["", NARROW], "a projector": ["&projector", { width: 1280, height: 800 }] }))
test(`on ${size}, a link to a character shows its bets`, async () => {
  const [link] = /panel=surprise&amp;every=1&amp;at=\d+/.exec(readFileSync(new URL("../../docs/guide/teaching.md", import.meta.url), "utf8"));
  const page = await open(browser, server.address, link.replaceAll("&amp;", "&") + hash, { viewport });
  await until(page, () => {
    const boxes = [...document.querySelectorAll("#surprise :is(.letters, .bars)")].map((each) => each.getBoundingClientRect());
    const bar = document.querySelector(".bar").getBoundingClientRect();
    return boxes.length === 4 && boxes.every(({ top, bottom }) => top >= bar.bottom && bottom <= innerHeight);
  });
  assert.equal(await panel(page, "surprise").locator(".bars:first-of-type .came .glyph").first().textContent(), "n");
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test("large type for a projector: question, answer and whole lines are in sight", async () => {
  const page = await open(browser, server.address, "projector&tour=1&model=elman_alpha", { viewport: { width: 1280, height: 800 } });
  const [tour, button] = [page.locator(".tour"), (name) => page.getByRole("button", { name, exact: true })];
  const size = (all) => page.locator(all).first().evaluate((each) => parseFloat(getComputedStyle(each).fontSize));
  for (const [i, wrong] of [1, 0, 2, 0, 0].entries()) { // their answers are the longest
    await tour.getByRole("heading", { name: `Question ${i + 1} of 5` }).waitFor();
    await tour.getByRole("radio").nth(wrong).click();
    if (i === 2 || i === 4) { // the babble, from its beginning
      await texts(page);
      await until(page, () => [...document.querySelectorAll("#writers .written")].every((each) => each.scrollHeight > each.clientHeight && !each.scrollTop));
    }
    assert.equal(await page.locator("#code").isVisible(), false); // nothing gives the last answer away …
    if (i === 4) await move(page, "End"); // … wherever the slider is
    await button("Show me").click();
    await tour.getByText("It is “").waitFor();
    if (i < 3) {
      await texts(page); // a little more
      const cut = await panel(page, "writers").locator(".written").evaluateAll((fields) => fields.flatMap((field) => {
        const top = field.getBoundingClientRect().top + field.clientTop;
        const text = document.createRange();
        text.selectNodeContents(field);
        return [...text.getClientRects()].filter((line) =>
          [top, top + field.clientHeight].some((edge) => line.top < edge - 1 && line.bottom > edge + 1));
      }));
      assert.deepEqual(cut, []);
    }
    if (i === 2) await until(page, () => { // two lines of babble above the mark, and no more
      const mark = document.querySelector("#writers mark");
      const [field, line] = [mark.parentElement, parseFloat(getComputedStyle(mark.parentElement).lineHeight)];
      return Math.floor((mark.getBoundingClientRect().top - field.getBoundingClientRect().top - field.clientTop) / line) === 2;
    });
    await seen(page, ["#writers .written, #writers .controls button", "#writers .written", "#writers mark", ".curve", "#code .code"][i]);
    assert(await tour.evaluate((card) => card.scrollHeight <= card.clientHeight && card.getBoundingClientRect().bottom <= innerHeight));
    if (i < 4) await button("Next").click();
  }
  assert((await size("#writers .written")) >= 24 && (await size(".tour p")) >= 22);
  await until(page, () => location.hash.includes("projector=true"));
  await button("Large type").click();
  assert((await size("#writers .written")) < 16);
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test("large type on a telephone: the slider's numbers stand apart", async () => {
  for (const width of [320, NARROW.width]) {
    const page = await open(browser, server.address, "projector&model=elman_alpha", { viewport: { width, height: 800 } });
    await page.locator(".ticks span").last().waitFor();
    const gaps = await page.locator(".ticks span").evaluateAll((ticks) => {
      const boxes = ticks.map((tick) => tick.getBoundingClientRect());
      return boxes.slice(1).map((box, i) => box.left - boxes[i].right);
    });
    assert(Math.min(...gaps) >= 2, `${width}: ${gaps}`);
    await page.context().close();
  }
});

test("the worksheet is printed on one sheet", async () => {
  await page.getByRole("link", { name: "the worksheet" }).waitFor();
  const worksheet = await page.context().newPage();
  await worksheet.goto(`${server.address}worksheet.html`);
  assert.equal(await worksheet.getByRole("table").getByRole("list").count(), 5); // a question's answers
  for (const format of ["A4", "Letter"]) {
    const file = await worksheet.pdf({ format, preferCSSPageSize: true });
    assert.equal(file.toString("latin1").match(/\/Type \/Page\b/g).length, 1);
  }
  await worksheet.close();
});

test("the preview of a link and README's pictures are of this page", async () => {
  const page = await openPreview(browser, server.address);
  for (const path of ["../public/preview.png", "../../docs/figures/playground.gif", "../../docs/figures/playground_dark.gif"]) {
    const made = readFileSync(new URL(path, import.meta.url));
    assert(made.includes(await previewed(page)), `run node tests-browser/preview.mjs, and look at ${path}`);
  }
  await page.context().close();
});

test("a broken link shows the default, and says so", async () => {
  const broken = await open(browser, server.address, "model=gpt&every=x&text=%FF%&written=12&=&at=9999");
  await broken.getByText("cannot use: “model=gpt”, “every=x”, “=”").waitFor();
  assert.match((await texts(broken))[0], /^ROMEO: [\s\S]{12}$/);
  assert.deepEqual(broken.problems, []);
  await broken.context().close();
});

test("all controls are reached by Tab, in the order of the page", async () => {
  // A group of radio buttons is one stop
  const controls = "a, button:enabled, input:not([type=radio]:not(:checked)), select, textarea, summary, [tabindex]";
  await panel(page, "inside").locator(".units input").first().check();
  const count = await page.locator(controls).count();
  await page.locator(controls).first().focus();
  for (let i = 1; i < count; i++) {
    await page.keyboard.press("Tab");
    const at = await page.evaluate((all) => [...document.querySelectorAll(all)].indexOf(document.activeElement), controls);
    assert.equal(at, i);
  }
});

test("axe finds nothing serious", async () => {
  const { violations } = await new AxeBuilder({ page }).analyze();
  const serious = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  assert.deepEqual(serious.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)]), []);
});

test("no error in the console, and no request to another host", () => assert.deepEqual(page.problems, []));
