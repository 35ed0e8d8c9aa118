/** What the browser tests share: the built page on a server, a browser, and a page that is watched. */

import { createHash } from "node:crypto";
import { createReadStream, existsSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

/** The built page: `vite build` writes it here unless it is told otherwise. */
const DIST = process.env.PLAYGROUND_DIST ?? fileURLToPath(new URL("../dist", import.meta.url));
/** As in the site, not at the server's root; and alone: the page has to open from any folder. */
const PATH = "/docs/playground/";
export const ALONE = "/lesson/";
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css" };
const ARGUMENTS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];

export const WIDE = { width: 1280, height: 900 };
export const NARROW = { width: 390, height: 844 };

/** Serve the built page, and nothing else, on a free port; return its address and how to stop. */
export async function serve() {
  const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname)).replace(ALONE, PATH);
    const file = join(DIST, path.endsWith("/") ? `${path.slice(PATH.length - 1)}index.html` : path.slice(PATH.length));
    if (!path.startsWith(PATH) || !existsSync(file) || !statSync(file).isFile()) {
      response.writeHead(404).end();
      return;
    }
    response.writeHead(200, { "content-type": TYPES[extname(file)] ?? "application/octet-stream" });
    createReadStream(file).pipe(response);
  });
  await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
  return { address: `http://127.0.0.1:${server.address().port}${PATH}`, stop: () => server.close() };
}

export function launch() {
  return chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ARGUMENTS,
    headless: true,
  });
}

/**
 * Open the page in a context of its own. `page.problems` collects what must not happen: errors in the
 * console, and requests to another host. `prepare` gets the page before it opens.
 */
export async function open(browser, address, hash = "", { prepare, ...options } = {}) {
  const context = await browser.newContext({ viewport: WIDE, permissions: ["clipboard-read", "clipboard-write"], ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(60_000); // a loaded machine is slow
  page.problems = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) page.problems.push(message.text());
  });
  page.on("pageerror", (error) => page.problems.push(String(error)));
  context.on("request", (request) => {
    const { protocol, host } = new URL(request.url());
    if (!["data:", "blob:"].includes(protocol) && host !== new URL(address).host) page.problems.push(request.url());
  });
  await prepare?.(page);
  await page.goto(address + (hash && `#${hash}`));
  return page;
}

/** The panel of that name. */
export const panel = (page, name) => page.locator(`section#${name}`);

/** Scroll to a panel. */
export const show = (page, name) => panel(page, name).evaluate((each) => each.scrollIntoView({ behavior: "instant" }));

/** Wait until the writers have stopped or paused, and return both texts. */
export async function texts(page) {
  await panel(page, "writers").getByRole("button", { name: "Write", exact: true }).waitFor();
  return panel(page, "writers").locator(".written").allTextContents();
}

/** The nats per character that a panel shows, once all are there: [with the state, without]. */
export async function figures(page, name) {
  await page.waitForFunction(
    (name) => {
      const figures = [...document.querySelectorAll(`#${name}:not([aria-busy=true]) .figure`)];
      return figures.length === 2 && figures.every((each) => /^\d/.test(each.textContent));
    },
    name,
  );
  return (await panel(page, name).locator(".figure").allTextContents()).map(parseFloat);
}

/** Wait until the text is analysed. */
export const analysed = (page) =>
  page.waitForFunction(() => document.querySelectorAll("#surprise:not([aria-busy=true]) .point").length === 9);

/** Wait until a condition holds in the page. */
export const until = (page, condition, argument) => page.waitForFunction(condition, argument);

/** Open the settings of the writers. */
export const openOptions = (page) => panel(page, "writers").locator("summary").click();

/** Characters that are written where the page's pictures end. */
export const PREVIEWED = 237;

/** Open what public/preview.png shows, the picture of the page where somebody posts its address. */
export async function openPreview(browser, address, written = PREVIEWED, options = { viewport: { width: 1200, height: 630 } }) {
  const page = await open(browser, address, `written=${written}`, { colorScheme: "light", ...options });
  await texts(page);
  await figures(page, "writers");
  await panel(page, "writers").locator(".column .glyph").nth(11).waitFor();
  await panel(page, "writers").locator(".pair").first().evaluate((pair) => {
    scrollTo({ top: pair.getBoundingClientRect().top - document.querySelector(".bar").offsetHeight - 4, behavior: "instant" });
  });
  return page;
}

/** The SHA-256 of the text that the page shows there. Pixels would depend on the fonts. */
export async function previewed(page) {
  const text = await page.evaluate(() =>
    [document.querySelector(".bar"), document.querySelector("#writers .pair"), document.querySelector("#writers > .small").firstChild]
      .map((each) => each.textContent).join("\n"));
  return createHash("sha256").update(text).digest("hex");
}

/** Press a key on the slider of all panels. */
export async function move(page, key, times = 1) {
  await page.getByRole("slider", { name: "Reset the state", exact: true }).focus();
  for (let i = 0; i < times; i++) await page.keyboard.press(key);
}

/** What a panel says of the character that is looked at. */
export const readout = (panel) => panel.locator(".readout").first().textContent();
