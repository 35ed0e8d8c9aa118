/** Make public/preview.png and README's moving pictures: npm run build, then this, with Pillow. A test says when that is due. */

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, openPreview, PREVIEWED, previewed, serve } from "./browser.mjs";

/** Characters per frame and milliseconds: as fast as the page writes. */
const FRAME = { characters: 6, pause: 240 };
const LAST = 3000;

/** Of a telephone's width, so that the letters can be read there; twice as sharp. */
const SMALL = { viewport: { width: 400, height: 420 }, deviceScaleFactor: 2 };

/** Save a screenshot as a PNG, with the text's SHA-256. */
const SAVE_STILL = `
import sys
from PIL import Image, PngImagePlugin
png, text, still = sys.argv[1:]
source = PngImagePlugin.PngInfo()
source.add_text("Source", text)
Image.open(still).save(png, pnginfo=source, optimize=True)
`;

/** Save screenshots as a GIF, with the text's SHA-256. */
const SAVE_MOVING = `
import sys
from PIL import Image
gif, text, *frames = sys.argv[1:]
images = [Image.open(frame).convert("RGB") for frame in frames]
colours = images[-1].quantize(64)
first, *others = [image.quantize(palette=colours, dither=0) for image in images]
pauses = [${FRAME.pause}] * len(others) + [${LAST}]
first.save(gif, save_all=True, append_images=others, duration=pauses, loop=0, optimize=True, comment=text)
`;

const [server, browser, folder] = [await serve(), await launch(), mkdtempSync(join(tmpdir(), "frames-"))];
let number = 0;

/** Return a screenshot of the page with so much written, and the SHA-256 of its text. */
async function take(written, options) {
  const page = await openPreview(browser, server.address, written, options);
  const file = join(folder, `${number++}.png`);
  await page.screenshot({ path: file });
  const text = await previewed(page);
  await page.context().close();
  return [file, text];
}

function save(program, path, text, files) {
  execFileSync("python", ["-c", program, fileURLToPath(new URL(path, import.meta.url)), text, ...files], { stdio: "inherit" });
}

const [still, text] = await take();
save(SAVE_STILL, "../public/preview.png", text, [still]);
for (const [colorScheme, name] of [["light", "playground"], ["dark", "playground_dark"]]) {
  const frames = [];
  for (let n = FRAME.characters; n < PREVIEWED; n += FRAME.characters) frames.push((await take(n, { ...SMALL, colorScheme }))[0]);
  frames.push((await take(PREVIEWED, { ...SMALL, colorScheme }))[0]);
  save(SAVE_MOVING, `../../docs/figures/${name}.gif`, text, frames);
}
rmSync(folder, { recursive: true });
await browser.close();
server.stop();
