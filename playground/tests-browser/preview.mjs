/** Make public/preview.png: npm run build, then this. A test says when that is due. */

import { writeFileSync } from "node:fs";
import { launch, openPreview, previewed, serve } from "./browser.mjs";

const HEADER = 33; // bytes: the signature, and the chunk that must be the first

const [server, browser] = [await serve(), await launch()];
const page = await openPreview(browser, server.address);
const picture = await page.screenshot();
const chunks = [picture.subarray(0, HEADER), await previewed(page), picture.subarray(HEADER)];
writeFileSync(new URL("../public/preview.png", import.meta.url), Buffer.concat(chunks));
await browser.close();
server.stop();
