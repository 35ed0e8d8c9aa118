/** Make public/preview.png, which is shown where somebody posts the page's address: npm run build, then this. */

import { fileURLToPath } from "node:url";
import { launch, open, panel, serve, texts } from "./browser.mjs";

const [server, browser] = [await serve(), await launch()];
const page = await open(browser, server.address, "written=300", { viewport: { width: 1200, height: 630 } });
await texts(page);
await panel(page, "writers").locator(".column .glyph").nth(11).waitFor();
await panel(page, "writers").locator(".pair").first().evaluate((pair) => {
  scrollTo({ top: pair.getBoundingClientRect().top - document.querySelector(".bar").offsetHeight - 4, behavior: "instant" });
});
await page.screenshot({ path: fileURLToPath(new URL("../public/preview.png", import.meta.url)) });
await browser.close();
server.stop();
