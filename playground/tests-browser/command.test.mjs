/** The page as `jaxgru playground` serves it, used as somebody does who opens it for the first time. */

import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { figures, launch, open, texts, until } from "./browser.mjs";

let browser;

before(async () => (browser = await launch()));
after(async () => await browser?.close());

test("a question is answered, and a text is written", async () => {
  const page = await open(browser, process.env.PLAYGROUND_ADDRESS);
  await page.getByRole("button", { name: "Take the tour" }).click();
  const tour = page.getByRole("complementary", { name: "Guided tour" });
  await tour.getByRole("radio", { name: "The same text as the left one" }).check();
  await tour.getByRole("button", { name: "Show me", exact: true }).click();
  await tour.getByText("You were right.").waitFor();
  const [left, right] = await texts(page);
  assert.equal(left, right);
  await tour.getByRole("button", { name: "Close" }).click();
  await page.locator("#writers").getByLabel("Fast").check();
  await page.getByRole("slider", { name: "Reset the state", exact: true }).press("Home");
  await page.getByRole("button", { name: "Start again" }).click();
  await until(page, () => document.querySelector("#writers pre").textContent.length > 2000);
  const report = { model: await page.getByLabel("Model").inputValue(), texts: await texts(page), nats: await figures(page, "writers") };
  writeFileSync(process.env.PLAYGROUND_REPORT, JSON.stringify(report));
  assert.deepEqual(page.problems, []);
});
