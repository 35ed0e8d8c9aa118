/** Make public/preview.png and README's moving picture: npm run build, then this, with Pillow. A test says when that is due. */

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, openPreview, PREVIEWED, previewed, serve } from "./browser.mjs";

/** Characters per frame and milliseconds: as fast as the page writes. */
const FRAME = { characters: 3, pause: 120 };
const LAST = 3000;

/** Save the first file as a PNG, the others as a GIF, each with the text's SHA-256. */
const SAVE = `
import sys
from PIL import Image, PngImagePlugin
png, gif, text, still, *frames = sys.argv[1:]
source = PngImagePlugin.PngInfo()
source.add_text("Source", text)
Image.open(still).save(png, pnginfo=source, optimize=True)
images = [Image.open(frame).convert("RGB") for frame in frames]
colours = images[-1].quantize(256)
first, *others = [image.quantize(palette=colours, dither=0) for image in images]
pauses = [${FRAME.pause}] * len(others) + [${LAST}]
first.save(gif, save_all=True, append_images=others, duration=pauses, loop=0, optimize=True, comment=text)
`;

const [server, browser, folder] = [await serve(), await launch(), mkdtempSync(join(tmpdir(), "frames-"))];
const files = [];
let text;

async function take(written, options) {
  const page = await openPreview(browser, server.address, written, options);
  files.push(join(folder, `${files.length}.png`));
  await page.screenshot({ path: files.at(-1) });
  text = await previewed(page);
  await page.context().close();
}

await take();
const small = { viewport: { width: 1120, height: 532 } };
for (let n = FRAME.characters; n <= PREVIEWED; n += FRAME.characters) await take(n, small);
const [png, gif] = ["../public/preview.png", "../../docs/figures/playground.gif"].map((path) => fileURLToPath(new URL(path, import.meta.url)));
execFileSync("python", ["-c", SAVE, png, gif, text, ...files], { stdio: "inherit" });
rmSync(folder, { recursive: true });
await browser.close();
server.stop();
