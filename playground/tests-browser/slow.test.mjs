/** What takes longer: all models, without a network; long and odd texts; telephones; all schemes. */

import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { AxeBuilder } from "@axe-core/playwright";
import { analysed, figures, launch, move, NARROW, open, openOptions, panel, readout, serve, show, texts, until, WIDE } from "./browser.mjs";

const PANELS = ["writers", "surprise", "inside", "reach", "state"];
let server, browser;

before(async () => {
  server = await serve();
  browser = await launch();
});

after(async () => {
  await browser?.close();
  server?.stop();
});

test("all models, without a network", async (t) => {
  let models = 0;
  const page = await open(browser, server.address, "model=astra_alpha&written=60", {
    prepare: (page) => page.on("requestfinished", (request) => (models += request.url().endsWith(".safetensors"))),
  });
  while (models < 3) await page.waitForEvent("requestfinished");
  await page.context().setOffline(true);
  const report = { text: await panel(page, "surprise").getByLabel("Text", { exact: true }).inputValue(), means: {} };

  for (const model of ["elman_alpha", "astra_beta", "astra_alpha"]) {
    await t.test(model, async () => {
      await move(page, "Home");
      await page.getByLabel("Model").selectOption(model);
      await panel(page, "writers").getByLabel("Fast").check();
      await until(page, () => /enough/.test(document.querySelector("#writers").textContent));
      const [kept, lost] = await figures(page, "writers");
      assert(lost > kept + 0.5, `${kept} ${lost}`);
      await analysed(page);
      const means = (report.means[model] = {});
      for (const every of [1, 2, 4, 8, 16, 32, 64, 128, "never"]) {
        [means.never, means[every]] = await figures(page, "surprise");
        await move(page, "ArrowRight");
      }
      await show(page, "inside");
      await panel(page, "inside").locator(".units input").last().click();
      await until(page, () => /unit \d+ .*is −?\d\.\d\d\.$/.test(document.querySelector("#inside .readout").textContent));
      await show(page, "reach");
      await panel(page, "reach").locator(".letters").first().focus();
      await page.keyboard.press("End");
      await until(page, () => /^A line break depends most on/.test(document.querySelector("#reach .readout").textContent));
      await panel(page, "state").getByRole("button", { name: "Copy the state" }).click();
      await until(page, (name) => document.querySelectorAll("#state textarea")[1].value.startsWith(name), model);
      await panel(page, "state").getByRole("button", { name: "Continue" }).click();
      assert.equal((await panel(page, "state").locator("pre").textContent()).length, 100);
    });
  }
  if (process.env.PLAYGROUND_REPORT) writeFileSync(process.env.PLAYGROUND_REPORT, JSON.stringify(report));
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test("a megabyte is pasted", async () => {
  const page = await open(browser, server.address, "model=astra_alpha&written=60");
  const field = panel(page, "surprise").getByLabel("Text", { exact: true });
  await page.evaluate(() => navigator.clipboard.writeText("To be, or not to be: that is the question:\n".repeat(25000)));
  await field.focus();
  await page.keyboard.press("ControlOrMeta+A");
  await page.keyboard.press("ControlOrMeta+V");
  await page.getByText("takes 5,000 characters: of the 1,075,000 that were pasted, it keeps the first 5,000.").waitFor();
  assert.equal((await field.inputValue()).length, 5000);
  await analysed(page);
  await page.getByLabel("Model").selectOption("astra_beta");
  await analysed(page);
  for (const name of PANELS) await show(page, name);
  await page.getByLabel("Model").selectOption("astra_alpha");
  await until(page, () => location.hash.length > 5000 && location.hash.includes("model=astra_alpha"));
  const copy = await open(browser, server.address, new URL(page.url()).hash.slice(1));
  assert.deepEqual(await figures(copy, "surprise"), await figures(page, "surprise"));
  await field.focus(); // a full field takes no more
  await page.keyboard.press("ControlOrMeta+End");
  await page.evaluate(() => navigator.clipboard.writeText("x".repeat(20)));
  await page.keyboard.press("ControlOrMeta+V");
  await page.getByText("of the 20 that were pasted, it keeps the first 0.").waitFor();
  assert.deepEqual([...page.problems, ...copy.problems], []);
  await page.context().close();
  await copy.context().close();
});

test("a thousand emoji, and a text in another alphabet", async () => {
  const page = await open(browser, server.address, "model=astra_alpha&written=60");
  const field = panel(page, "surprise").getByLabel("Text", { exact: true });
  await field.fill("😀👩‍👩‍👧".repeat(900));
  await page.getByText("at least two characters").waitFor();
  await field.fill("Быть или не быть, вот в чём вопрос.");
  await page.getByText(/left out here: (“.” ){8}and \d+ more\./).waitFor();
  await panel(page, "writers").getByLabel("Prompt").fill("😀");
  await page.getByText("left out here: “😀”. Without a prompt").waitFor();
  await panel(page, "state").getByLabel("Text", { exact: true }).fill("😀");
  await panel(page, "state").getByRole("button", { name: "Write 100 characters" }).click();
  await until(page, () => document.querySelector("#state textarea").value.length === 102);
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test("a button that is pressed twice, and a text that is changed meanwhile", async () => {
  const page = await open(browser, server.address, "model=astra_alpha&written=60");
  const state = panel(page, "state");
  const [field, button] = [state.getByLabel("Text", { exact: true }), state.getByRole("button", { name: "Write 100 characters" })];
  await analysed(page);
  await field.fill("JULIET:");
  await button.click();
  await until(page, () => document.querySelector("#state textarea").value.length === 107);
  const once = await field.inputValue();
  await field.fill("JULIET:");
  await button.dblclick();
  await until(page, () => document.querySelector("#state textarea").value.length >= 107);
  await state.getByRole("button", { name: "Copy the state" }).click(); // answered after all that was asked before
  await state.getByText("in the clipboard").waitFor();
  assert.equal(await field.inputValue(), once);
  await button.evaluate((button) => {
    button.click();
    const field = document.querySelector("#state textarea");
    field.value = "ROMEO:";
    field.dispatchEvent(new Event("input", { bubbles: true }));
  });
  await state.getByText("was changed while the model wrote").waitFor();
  assert.equal(await field.inputValue(), "ROMEO:");
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test("fields say what they do not use, and show what is used", async () => {
  const page = await open(browser, server.address, "model=astra_alpha&written=60&temperature=1.85&seed=7&prompt=JULIET%3A%0AO%20Romeo%2C");
  const writers = panel(page, "writers");
  const [seed, prompt] = [writers.getByLabel("Seed"), writers.getByLabel("Prompt")];
  assert.equal(await prompt.inputValue(), "JULIET:\nO Romeo,");
  await openOptions(page);
  assert.equal(await writers.getByLabel("Temperature").inputValue(), "1.85");
  for (const wrong of ["", "-5", "1.5", "99999999999"]) {
    await seed.fill(wrong);
    await writers.getByText("takes an integer from 0 to 4294967295; 7 is used.").waitFor();
    await prompt.focus();
    assert.equal(await seed.inputValue(), "7");
    await writers.getByText("is used.").waitFor({ state: "detached" });
  }
  await prompt.fill("x".repeat(500));
  await writers.getByText("The field is full: it takes 500 characters.").waitFor();
  await prompt.fill("a\u202e\u200b\t\0\ufeff");
  await writers.getByText("left out here: U+202E U+200B U+0009 U+0000 U+FEFF.").waitFor();
  await panel(page, "inside").locator(".units input").first().waitFor(); // before it is in sight, for Tab
  await show(page, "inside");
  await panel(page, "inside").getByLabel("Unit, 0 to 127").fill("500");
  await panel(page, "inside").getByText("takes an integer from 0 to 127; 33 is used.").waitFor();
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test("the bar keeps its height, and nothing is cut off", async () => {
  for (const width of [320, 390, 800, 1280]) {
    const page = await open(browser, server.address, "model=astra_alpha&written=60", { viewport: { width, height: 844 } });
    const heights = new Set();
    for (let i = 0; i < 9; i++) {
      heights.add(await page.locator(".bar").evaluate((bar) => bar.offsetHeight));
      await move(page, "ArrowRight");
    }
    assert.equal(heights.size, 1, `${width}: ${[...heights]}`);
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), width);
    assert((await page.getByLabel("Model").evaluate((select) => select.getBoundingClientRect().right)) <= width);
    await page.context().close();
  }
});

for (const [size, viewport] of Object.entries({ wide: WIDE, narrow: NARROW })) {
  for (const colorScheme of ["light", "dark"]) {
    test(`${size} and ${colorScheme}: axe finds nothing serious, and nothing is cut off`, async () => {
      const options = { viewport, colorScheme, hasTouch: size === "narrow", isMobile: size === "narrow" };
      const page = await open(browser, server.address, "written=400&at=300&every=4", options);
      for (const name of PANELS) {
        await show(page, name);
        if (name === "state") {
          await panel(page, name).getByRole("button", { name: "Copy the state" }).click();
          await panel(page, name).getByRole("button", { name: "Continue" }).click();
          await panel(page, name).locator("pre").waitFor();
        }
        if (name === "surprise") await analysed(page);
        if (name === "inside") {
          for (const fold of await panel(page, name).locator("summary").all()) await fold.click();
          await panel(page, name).getByRole("application").waitFor();
        }
        if (name === "reach") await panel(page, name).getByText("depends most on").first().waitFor();
      }
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), viewport.width);
      if (process.env.PLAYGROUND_SCREENSHOTS) {
        await page.evaluate(() => scrollTo({ top: 0, behavior: "instant" }));
        await page.screenshot({ path: `${process.env.PLAYGROUND_SCREENSHOTS}/${size}_${colorScheme}_first.png` });
        await page.screenshot({ path: `${process.env.PLAYGROUND_SCREENSHOTS}/${size}_${colorScheme}.png`, fullPage: true });
      }
      const { violations } = await new AxeBuilder({ page }).analyze();
      const serious = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
      assert.deepEqual(serious.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)]), []);
      if (size === "narrow") {
        await show(page, "surprise");
        await panel(page, "surprise").locator(".letters").first().tap({ position: { x: 16, y: 30 } });
        assert.match(await readout(panel(page, "surprise")), /costs|given/);
      }
      assert.deepEqual(page.problems, []);
      await page.context().close();
    });
  }
}

test("the colours follow the button", async () => {
  const page = await open(browser, server.address, "model=astra_alpha&written=60", { colorScheme: "light" });
  const background = () => page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
  const light = await background();
  await page.getByRole("button", { name: "Dark" }).click();
  const night = await background();
  assert.notEqual(night, light);
  await page.reload();
  await page.getByRole("button", { name: "Light" }).waitFor(); // it remembers
  assert.equal(await background(), night);
  await page.emulateMedia({ colorScheme: "dark" });
  await page.getByRole("button", { name: "Light" }).click();
  assert.equal(await background(), light);
  await page.context().close();
});

test("nothing moves for readers who want that", async () => {
  const page = await open(browser, server.address, "model=astra_alpha", { reducedMotion: "reduce" });
  const [text] = await texts(page);
  assert.equal(text.length, 407);
  await page.evaluate(() => {
    window.lengths = new Set();
    const written = document.querySelector("#writers pre");
    const note = () => window.lengths.add(written.textContent.length);
    new MutationObserver(note).observe(written, { characterData: true, childList: true, subtree: true });
  });
  await page.getByLabel("Model").selectOption("elman_alpha");
  await until(page, () => window.lengths.has(407));
  assert.deepEqual(await page.evaluate(() => [...window.lengths].filter((length) => (length - 7) % 100)), []);
  await page.context().close();
});

test("a model that cannot be loaded is said in a sentence", async () => {
  const page = await open(browser, server.address, "model=astra_alpha&written=60", {
    prepare: (page) => page.context().route("**/astra_beta*.safetensors", (route) => route.fulfill({ status: 404 })),
  });
  await page.getByText("The model astra_beta could not be loaded: the server answered 404.").waitFor();
  await page.getByLabel("Model").selectOption("elman_alpha");
  await panel(page, "surprise").getByText(/^[\d.]+ nats per character/).first().waitFor();
  await page.context().close();
});

const MODEL = (name) => `**/${name}*.safetensors`;

for (const [name, viewport] of [["inside", WIDE], ["reach", NARROW]]) {
  test(`a link to ${name} stays there until the page is scrolled`, async () => {
    const page = await open(browser, server.address, `panel=${name}&unit=18&model=elman_alpha`, { viewport });
    await analysed(page);
    await page.locator(name === "inside" ? "#inside canvas" : "#reach .readout").first().waitFor();
    await until(page, () => new URLSearchParams(location.hash.slice(1)).has("written"));
    const top = await panel(page, name).evaluate((each) => each.getBoundingClientRect().top);
    assert(top >= 0 && top < viewport.height / 2, String(top));
    assert.match(page.url(), new RegExp(`#panel=${name}&`));
    await show(page, "surprise");
    await until(page, () => location.hash.includes("panel=surprise"));
    await page.context().close();
  });
}

test("after a failed first load, the page begins again, whole", async () => {
  for (const file of ["**/*.safetensors", "**/worker-*.js"]) {
    const page = await open(browser, server.address, "model=astra_alpha", {
      prepare: (page) => page.context().route(file, (route) => route.abort()),
    });
    const note = page.locator("[role=alert] .note");
    await note.getByText("could not be loaded").waitFor();
    await panel(page, "writers").getByRole("button", { name: "Write", exact: true }).click();
    await note.getByText("could not be loaded").waitFor();
    await page.context().unroute(file);
    await panel(page, "writers").getByRole("button", { name: "Start again" }).click();
    await analysed(page);
    assert.equal(await note.count(), 0);
    await until(page, () => document.querySelector("#writers pre").textContent.length > "ROMEO: ".length + 4);
    await page.context().close();
  }
});

test("one model that fails stops no other, and its note goes when it is there", async () => {
  let elman = false;
  const page = await open(browser, server.address, "model=astra_alpha&written=60", {
    prepare: async (page) => {
      page.on("requestfinished", (request) => (elman ||= /elman_alpha.*safetensors/.test(request.url())));
      await page.context().route(MODEL("astra_beta"), (route) => route.abort());
    },
  });
  const note = page.locator("[role=alert] .note");
  await note.waitFor();
  while (!elman) await page.waitForEvent("requestfinished");
  await page.context().unroute(MODEL("astra_beta"));
  await page.getByLabel("Model").selectOption("astra_beta");
  await analysed(page);
  assert.equal(await note.count(), 0);
  await page.context().close();
});

test("while a model loads, its name is shown, and what is chosen meanwhile holds", async () => {
  let release;
  const held = new Promise((done) => (release = done));
  const page = await open(browser, server.address, "model=astra_alpha", {
    prepare: (page) => page.context().route(MODEL("astra_alpha"), (route) => held.then(() => route.continue())),
  });
  const button = (name) => panel(page, "writers").getByRole("button", { name, exact: true });
  await page.getByText("Loading astra_alpha…").waitFor();
  await button("Pause").click();
  await button("Write").click();
  await page.getByLabel("Model").selectOption("elman_alpha");
  await page.getByText("Loading elman_alpha…").waitFor({ state: "detached" });
  await analysed(page);
  release();
  await until(page, () => document.querySelector("#writers pre").textContent.length > 60);
  await button("Pause").click();
  const [text] = await texts(page);
  const elman = await open(browser, server.address, "model=elman_alpha&written=50");
  assert.equal((await texts(elman))[0], text.slice(0, "ROMEO: ".length + 50));
  await elman.context().close();
  assert.equal(await page.locator("[role=alert] .note").count(), 0);
  await page.context().close();
});

test("pausing and writing while the first model loads", async () => {
  let release;
  const held = new Promise((done) => (release = done));
  const page = await open(browser, server.address, "model=astra_alpha", {
    prepare: (page) => page.context().route(MODEL("astra_alpha"), (route) => held.then(() => route.continue())),
  });
  await panel(page, "writers").getByRole("button", { name: "Pause" }).click();
  await panel(page, "writers").getByRole("button", { name: "Write", exact: true }).click();
  release();
  await until(page, () => document.querySelector("#writers pre").textContent.length > 20);
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test("a writer that the reader scrolled back stays there while it writes", async () => {
  const page = await open(browser, server.address, "model=elman_alpha&written=800");
  await texts(page);
  await panel(page, "writers").getByRole("button", { name: "Write", exact: true }).click();
  const written = panel(page, "writers").locator(".written");
  await until(page, () => document.querySelector("#writers pre").textContent.length > 820);
  await written.first().evaluate((each) => (each.scrollTop = 0));
  await until(page, () => document.querySelector("#writers pre").textContent.length > 850);
  assert.equal(await written.first().evaluate((each) => each.scrollTop), 0);
  assert(await written.last().evaluate((each) => each.scrollTop + each.clientHeight > each.scrollHeight - 2));
  await page.context().close();
});
