/** What is sent to others: this view, or one for a class. */

import { signal } from "@preact/signals";
import { keepAddress, SITE } from "./address";
import { LINKS } from "./defaults";
import { projector } from "./view";

const done = signal("");

/** Milliseconds for which it says that the link was copied. */
const SAID = 3000;

async function share(): Promise<void> {
  keepAddress();
  const [url, title] = [location.href, document.title];
  if (matchMedia("(pointer: coarse)").matches && navigator.share) {
    await navigator.share({ url, title }).catch(() => undefined); // the reader changed their mind
    return;
  }
  try {
    await navigator.clipboard.writeText(url);
    done.value = "Link copied";
  } catch {
    done.value = "Copy the address";
  }
  setTimeout(() => (done.value = ""), SAID);
}

export function Share() {
  return (
    <>
      <button type="button" onClick={() => void share()}>Share</button>
      <span class="said" role="status">{done}</span>
    </>
  );
}

export function ForAClass() {
  return (
    <section class="panel" aria-labelledby="class-title">
      <h2 id="class-title">Links for a class</h2>
      <p>
        Each link opens the view it describes. “Share”, at the top, copies a link to what you see now: panel, model,
        slider, texts and all. Anyone who opens it reads the same texts, letter by letter.
        {SITE && <> <a href={`${SITE}guide/teaching/`}>A 20-minute lesson</a> is built on the tour.</>}
        {" "}Print <a href="worksheet.html">the worksheet</a> of the five questions for each pair of students.
      </p>
      <ul>{LINKS.map(([view, title]) => <li key={view}><a href={`#${projector.value ? "projector&" : ""}${view}`}>{title}</a></li>)}</ul>
    </section>
  );
}
